# SPDX-License-Identifier: Apache-2.0
"""Make the result files of ptdbg's compare, and parse its dumps."""
