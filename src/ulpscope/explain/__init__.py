# SPDX-License-Identifier: Apache-2.0
"""Judged calls become findings, in order of cause."""

from ulpscope.explain.causes import EXPLANATIONS, explain
from ulpscope.explain.circumstances import Circumstances
from ulpscope.explain.gaps import UNBLAMED, count_opaque, gaps_of

__all__ = ["EXPLANATIONS", "UNBLAMED", "Circumstances", "count_opaque", "explain", "gaps_of"]
