# SPDX-License-Identifier: Apache-2.0
"""Judged calls become findings, in order of cause."""

from ulpscope.explain.causes import EXPLANATIONS, explain
from ulpscope.explain.coverage import Coverage

__all__ = ["EXPLANATIONS", "Coverage", "explain"]
