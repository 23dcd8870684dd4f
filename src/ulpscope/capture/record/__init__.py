# SPDX-License-Identifier: Apache-2.0
"""Turn a live call into its record: tensors, arguments, state, and the backward side."""
