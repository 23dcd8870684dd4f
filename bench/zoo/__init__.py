# SPDX-License-Identifier: Apache-2.0
"""Honest implementations of the same operations: how far from exact they are is what a verdict has to allow."""
