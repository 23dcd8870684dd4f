# SPDX-License-Identifier: Apache-2.0
"""Show a watched training, or where two of them part."""
