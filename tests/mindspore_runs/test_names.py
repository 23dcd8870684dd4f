# SPDX-License-Identifier: Apache-2.0
"""The table of names held against torch: MindSpore ran each row, and torch replays what was recorded under its own name.

`tests/mindspore_live/record_names.py` made the run, with MindSpore. Nothing here needs MindSpore.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import ulpscope
from ulpscope.model import CallRecord
from ulpscope.model.check.checks import Check
from ulpscope.model.operations.mindspore_names import canonical_call, name_rows

NAMES = Path(__file__).parent / "recorded" / "names"

MISSING = json.loads((NAMES / "missing.json").read_text(encoding="utf-8"))
"""Rows whose kernel MindSpore's CPU has not, with its reason: they are not tested."""

DIFFERENT = {
    ("ops.selu", "backward"): "errs",  # MindSpore 2.10's CPU kernel takes the gradient of SeLU otherwise, as ms.grad alone shows
    ("ops.full", "forward"): "differ",  # without a dtype MindSpore fills with integers
}
"""Where MindSpore itself computes something else."""

NOT_REPLAYED = {
    ("nn.CrossEntropyLoss", "forward"): "Long",  # MindSpore wants labels of 32 bits, torch of 64
    ("nn.CrossEntropyLoss", "backward"): "Long",
    ("ops.zeros_like", "backward"): "none of its results depends on its inputs",
    ("ops.ones_like", "backward"): "none of its results depends on its inputs",
    ("Tensor.__floordiv__", "backward"): "not implemented",  # MindSpore has a gradient there, which is zero
    ("Tensor.__setitem__", "forward"): "its result is no plain tensor",
    ("Tensor.__setitem__", "backward"): "none of its results depends on its inputs",
}


@cache
def records() -> list[CallRecord]:
    return [record for record in ulpscope.open_run(NAMES / "run").records(0, 0) if record.level == "api"]


@cache
def check() -> Check:
    return ulpscope.check_run(NAMES / "run")


def by_row() -> dict[str, list[CallRecord]]:
    """The forward records of each row's example: the file that they were called from bears the name of the row."""
    found: defaultdict[str, list[CallRecord]] = defaultdict(list)
    for record in records():
        if record.phase == "forward":
            found[next(frame.file for frame in record.stack if frame.file.startswith("<")).strip("<>")].append(record)
    return found


def test_every_row_was_run_or_is_marked() -> None:
    ran = set(by_row())
    assert ran & set(MISSING) == set()
    assert ran | {name for name in MISSING if "(" not in name} == set(name_rows())
    assert (len(name_rows()), len(ran), len(name_rows()) - len(ran)) == (351, 292, 59)


@pytest.mark.parametrize("name", sorted(by_row()))
def test_a_row_is_recorded_under_torchs_name(name: str) -> None:
    """One function may stand under several names (`ops.tanh` is `mint.tanh`), and is recorded under the first of them."""
    own = [record for record in by_row()[name] if record.call.op in {row.canonical for row in name_rows()[name]}]
    if not own:
        assert name.startswith("ops.")
    assert own or by_row()[name][-1].recorded_as in name_rows()


def test_torch_computes_the_same_from_the_same_inputs() -> None:
    names = {(record.call, record.phase): record.recorded_as or record.call.op for record in records()}
    others = {(names[call.call, call.phase], call.phase): call for call in check().calls if call.status != "passed"}
    told = {key: " ".join([call.reason, *(slot.reason for slot in call.slots)]) for key, call in others.items()}
    assert {key for key, call in others.items() if call.status == "failed"} == set(DIFFERENT)
    assert {key for key, call in others.items() if call.status == "skipped"} == set(NOT_REPLAYED)
    for key, words in (DIFFERENT | NOT_REPLAYED).items():
        assert words in told[key]
    assert sum(call.status == "passed" for call in check().calls) > 550


def test_gradients_were_compared_too() -> None:
    backward = {call.call for call in check().calls if call.phase == "backward" and call.status == "passed"}
    assert len(backward) > 230


def test_rows_fit_what_they_are_given() -> None:
    rows = name_rows()
    assert canonical_call(rows["Tensor.transpose"], ("x", 1, 2), {}) == ("Tensor.transpose", ("x", 1, 2), {})
    assert canonical_call(rows["Tensor.transpose"], ("x", 1, 2, 0), {}) == ("Tensor.permute", ("x", 1, 2, 0), {})
    assert canonical_call(rows["Tensor.mean"], ("x",), {"axis": 1}) == ("Tensor.mean", ("x",), {"dim": 1})
    assert canonical_call(rows["Tensor.mean"], ("x",), {"dim": 1}) == ("Tensor.mean", ("x",), {"dim": 1})
    assert canonical_call(rows["ops.leaky_relu"], ("x",), {}) == ("functional.leaky_relu", ("x",), {"negative_slope": 0.2})
    assert canonical_call(rows["ops.conv2d"], ("x", "w"), {"pad_mode": "same"}) is None
    assert canonical_call(rows["ops.tanh"], ("x", "surplus"), {}) is None
    assert canonical_call((), ("x",), {}) is None
