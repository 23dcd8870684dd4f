# SPDX-License-Identifier: Apache-2.0
"""Measurements become verdicts: by the arithmetic (`derived`) or by rules that people know from elsewhere."""

from ulpscope.judge.allowance.conditioning import product_family
from ulpscope.judge.allowance.trail import Trail
from ulpscope.judge.bands import bands_of
from ulpscope.judge.calls import RULES, foresee_call, judge_call, learn_call, rules_named
from ulpscope.judge.differences import argument_differences
from ulpscope.judge.limits import with_own_limits
from ulpscope.judge.precision import likely_format, operand_format
from ulpscope.judge.replayed import errs, is_beyond_doubt, multiple_of, replay_limits
from ulpscope.judge.thresholds import THRESHOLDS, Threshold, threshold

__all__ = [
    "RULES",
    "THRESHOLDS",
    "Threshold",
    "Trail",
    "argument_differences",
    "bands_of",
    "errs",
    "foresee_call",
    "is_beyond_doubt",
    "judge_call",
    "learn_call",
    "likely_format",
    "multiple_of",
    "operand_format",
    "product_family",
    "replay_limits",
    "rules_named",
    "threshold",
    "with_own_limits",
]
