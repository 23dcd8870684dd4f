# SPDX-License-Identifier: Apache-2.0
"""Dump and check for overflow as ptdbg_ascend did."""
