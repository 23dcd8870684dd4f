# SPDX-License-Identifier: Apache-2.0
"""Run one recorded call again on its own inputs: compute what an honest kernel would have given, and how far off it may be."""

from ulpscope.replay.calls.evaluate import backward_program, forward_program, is_random, recorded_results
from ulpscope.replay.calls.optimizers import optimizer_program, stepped_parameters
from ulpscope.replay.program import NotReplayable, Program, Reader
from ulpscope.replay.yardstick.gauges import has_free_signs, with_signs_of
from ulpscope.replay.yardstick.operands import effective_operands
from ulpscope.replay.yardstick.yardstick import Yardstick

__all__ = [
    "NotReplayable",
    "Program",
    "Reader",
    "Yardstick",
    "backward_program",
    "effective_operands",
    "forward_program",
    "has_free_signs",
    "is_random",
    "optimizer_program",
    "recorded_results",
    "stepped_parameters",
    "with_signs_of",
]
