# SPDX-License-Identifier: Apache-2.0
"""Show where inf and NaN began."""
