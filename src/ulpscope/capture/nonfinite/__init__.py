# SPDX-License-Identifier: Apache-2.0
"""Hunt for inf and NaN while a program runs: which call made the first one."""
