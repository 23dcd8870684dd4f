# SPDX-License-Identifier: Apache-2.0
"""Re-export ulpscope.compat.checker.checker_dump under the old import name."""

from ulpscope.compat.checker.checker_dump import set_dump_switch as set_dump_switch
