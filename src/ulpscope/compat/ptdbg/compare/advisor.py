# SPDX-License-Identifier: Apache-2.0
"""The advisor: the first row of a result that is not accurate, and what to look at. Its three entries are what old users search for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ulpscope.compat.ptdbg.screen import print_info, print_warning
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing

__all__ = ["Advice", "advise", "write_advice"]

_NOTHING_WRONG = "All data in comparison result meets the accuracy requirements."
_MOST_WARNINGS = 20
_MAY_VARY = re.compile("conv2d|conv3d|matmul|nll_loss|layer_norm|lstm")
_DETERMINISTIC = "call seed_all(mode=True) in both programs, dump both again, and see whether the difference stays"

_ADVICE = {
    "forward_input": (
        "The data that enters this API differs already. 1. Find the API that made this input and look at its output. "
        "2. See whether an in-place call changed the tensor after it was made. "
        "3. If neither explains it, suspect that the memory of the tensor was overwritten."
    ),
    "forward_output": "The inputs of this API agree and its output does not: its forward computation is wrong.",
    "backward_input": "The gradient that enters this API differs: see first whether the result of the forward pass is affected.",
    "backward_output": "The gradient that enters this API agrees and the one that leaves it does not: its backward computation is wrong.",
}
_BATCH_NORM = (
    f"The weight of this batch norm differs. Try it with training=False, then with affine=False; if the difference stays, {_DETERMINISTIC}."
)


@dataclass(frozen=True, slots=True)
class Advice:
    """The three entries; `line` counts the header of the csv file as line 1."""

    line: str
    node: str
    text: str

    def entries(self) -> tuple[str, str, str]:
        return f"Line: {self.line}", f"Suspect Nodes: {visible(self.node)}", f"Expert Advice: {self.text}"


def advise(names: Sequence[str], verdicts: Sequence[str]) -> Advice:
    """Advice on the first row that says No; `names` are the NPU names of all rows."""
    unmatched = [name for name, verdict in zip(names, verdicts, strict=True) if verdict == "Unmatched"]
    for name in unmatched[:_MOST_WARNINGS]:
        print_warning(f"{name} is unmatched: its shape differs from the bench's, so it was not compared.")
    if len(unmatched) > _MOST_WARNINGS:
        print_warning(f"{len(unmatched) - _MOST_WARNINGS} more rows are unmatched.")
    if "No" not in verdicts:
        return Advice("NA", "NA", _NOTHING_WRONG)
    first = verdicts.index("No")
    return Advice(str(first + 2), names[first], _text(names[first]))


def _text(name: str) -> str:
    if "Functional_batch_norm" in name and "forward_input.1" in name:
        return _BATCH_NORM
    kind = re.search(r"(forward|backward)_(input|output)", name)
    text = _ADVICE[kind[0] if kind else "forward_output"]
    if kind and kind[2] == "output" and _MAY_VARY.search(name):
        return f"{text} This API may give other results in each run: {_DETERMINISTIC}."
    return text


def write_advice(advice: Advice, path: Path) -> None:
    """The entries in a file and on the screen."""
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{entry}\n" for entry in advice.entries()), encoding="utf-8")
        temporary.chmod(0o640)
    print_info("By the rule of ptdbg_ascend, which looks at cosine and largest error alone:")
    for entry in advice.entries():
        print_info(entry)
    print_info(f"The advice is in {path}")
