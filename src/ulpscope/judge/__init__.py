# SPDX-License-Identifier: Apache-2.0
"""Measurements become verdicts: by the arithmetic (`derived`) or by rules that people know from elsewhere."""

from ulpscope.judge.calls import RULES, judge_call, rules_named
from ulpscope.judge.precision import operand_format
from ulpscope.judge.thresholds import THRESHOLDS, Threshold, threshold
from ulpscope.judge.trail import Trail

__all__ = ["RULES", "THRESHOLDS", "Threshold", "Trail", "judge_call", "operand_format", "rules_named", "threshold"]
