# SPDX-License-Identifier: Apache-2.0
"""Re-export ulpscope.compat under the old import name."""
