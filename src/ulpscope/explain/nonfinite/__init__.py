# SPDX-License-Identifier: Apache-2.0
"""Explain where inf and NaN began, why, and what nearly overflowed."""
