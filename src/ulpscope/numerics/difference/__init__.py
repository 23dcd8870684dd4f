# SPDX-License-Identifier: Apache-2.0
"""Compare two tensors in one pass: by the compiled kernel, or by NumPy with the same result."""
