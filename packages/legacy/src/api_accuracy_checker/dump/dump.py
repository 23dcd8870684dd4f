# SPDX-License-Identifier: Apache-2.0
"""The old import name; see ulpscope.compat.checker.checker_dump."""

from ulpscope.compat.checker.checker_dump import set_dump_switch as set_dump_switch
