# SPDX-License-Identifier: Apache-2.0
"""The old import name; see ulpscope.compat.checker.dumping."""

from ulpscope.compat.checker.dumping import set_dump_switch as set_dump_switch
