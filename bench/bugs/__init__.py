# SPDX-License-Identifier: Apache-2.0
"""A corpus of faults with known culprits and of clean pairs, and the score that a comparison reaches on it."""
