# SPDX-License-Identifier: Apache-2.0
"""List findings that are true: torch itself errs there, by a mechanism named here, so an alarm is right and its absence would be news.

An entry names one program, one question and the calls that may be found; any other finding there is still a complaint. A finding that no
longer appears is a complaint too: its entry can go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KNOWN", "Known", "gone", "is_known"]


@dataclass(frozen=True, slots=True)
class Known:
    """`finding` is a pattern that the whole beginning of the text has to match; `question` is "check" or the name of a comparison."""

    program: str
    question: str
    finding: str
    reason: str

    def covers(self, program: str, question: str, text: str) -> bool:
        return (self.program, self.question) == (program, question) and re.match(self.finding, text) is not None


_LAYER_NORM = (
    "torch 2.13's CPU layer norm adds up the gradients of weight and bias row by row in the dtype of its input: of 512 rows in bfloat16 "
    "whose gradients are 1, the bias gets 256, where 1 is half a unit in the last place"
)

_ONE_ELEMENT = (
    "torch's CPU layer norm computes x * rstd - mean * rstd: over one element x is its mean, the exact result is 0, and the rest is "
    "the rounding of two products of the size of x / sqrt(eps) (pytorch#188375)"
)

KNOWN: tuple[Known, ...] = (
    Known("operator/native_layer_norm/float32", "check", r"torch\.native_layer_norm\.\d+ \(backward\): output\.2: ", _ONE_ELEMENT),
    Known("operator/nn.functional.layer_norm/float32", "check", r"functional\.layer_norm\.\d+ \(backward\): output\.0: ", _ONE_ELEMENT),
    Known("architecture/swin/bfloat16", "check", r"functional\.layer_norm\.\d+ \(backward\): output\.(bias|weight): ", _LAYER_NORM),
    Known(
        "architecture/swin/float32",
        "bfloat16 against float32",
        r"first contributed error: swin\.[\w.]+  layer_norm \(call \d+, backward, output (bias|weight)\)",
        _LAYER_NORM,
    ),
)


def is_known(program: str, question: str, text: str) -> bool:
    """Tell whether a finding is true and listed."""
    return any(one.covers(program, question, text) for one in KNOWN)


def gone(program: str, answers: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Name the listed findings that were not found, of the questions that were asked: texts by question."""
    return [
        f"{one.question}: a known finding is gone, its entry in bench/programs/known.py can go ({one.reason})"
        for one in KNOWN
        if one.program == program
        and one.question in answers
        and not any(one.covers(program, one.question, text) for text in answers[one.question])
    ]
