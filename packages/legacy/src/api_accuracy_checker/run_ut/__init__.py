# SPDX-License-Identifier: Apache-2.0
"""Hold the old paths of the checker's commands; see ulpscope.compat.checker."""
