# SPDX-License-Identifier: Apache-2.0
"""Summarise one tensor in one pass: statistics and fingerprint, by the compiled kernel or by NumPy."""
