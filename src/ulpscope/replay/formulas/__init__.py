# SPDX-License-Identifier: Apache-2.0
"""Compute operations without a CPU kernel by written-out formulas."""
