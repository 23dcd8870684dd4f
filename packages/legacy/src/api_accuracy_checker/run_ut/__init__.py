# SPDX-License-Identifier: Apache-2.0
"""The old import name; see ulpscope.compat.checker."""
