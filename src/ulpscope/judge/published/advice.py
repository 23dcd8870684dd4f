# SPDX-License-Identifier: Apache-2.0
"""The advisor of ptdbg and msprobe 1.x: the first row of a table that is not accurate, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Advice", "advise"]

_NOTHING_WRONG = "All data in comparison result meets the accuracy requirements."
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
    """Which row, and the text; `row` is None where every row is accurate."""

    row: int | None
    text: str


def advise(names: Sequence[str], words: Sequence[str]) -> Advice:
    """Advise on the first row whose word is No; `names` are the subject's names of all rows, as ptdbg spells them."""
    if "No" not in words:
        return Advice(None, _NOTHING_WRONG)
    first = words.index("No")
    return Advice(first, _text(names[first]))


def _text(name: str) -> str:
    if "Functional_batch_norm" in name and "forward_input.1" in name:
        return _BATCH_NORM
    kind = re.search(r"(forward|backward)_(input|output)", name)
    text = _ADVICE[kind[0] if kind else "forward_output"]
    if kind and kind[2] == "output" and _MAY_VARY.search(name):
        return f"{text} This API may give other results in each run: {_DETERMINISTIC}."
    return text
