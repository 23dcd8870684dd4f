# SPDX-License-Identifier: Apache-2.0
"""Make the result files of msprobe's compare."""
