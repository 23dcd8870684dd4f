# SPDX-License-Identifier: Apache-2.0
"""Measure how far honest implementations of the same operations are from exact: a verdict has to allow that much."""
