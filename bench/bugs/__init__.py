# SPDX-License-Identifier: Apache-2.0
"""Score comparisons on a corpus of faults with known culprits and of clean pairs."""
