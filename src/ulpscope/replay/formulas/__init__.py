# SPDX-License-Identifier: Apache-2.0
"""Compute by written-out formulas what no kernel of the CPU computes."""
