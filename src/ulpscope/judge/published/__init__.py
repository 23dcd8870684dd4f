# SPDX-License-Identifier: Apache-2.0
"""Judge by the published standards."""
