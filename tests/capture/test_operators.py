# SPDX-License-Identifier: Apache-2.0
"""Operators under the names that Python has for them, a sink of one's own, and pausing."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ulpscope import Capture
from ulpscope.model import CallRecord, LedgerEntry


class ListSink:
    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.events: list[str] = []

    def begin_step(self, step: int) -> None:
        self.events.append(f"begin {step}")

    def write(self, record: CallRecord) -> None:
        self.records.append(record)

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        return f"{dtype}{shape}{bytes(buffer).hex()}"

    def note(self, entry: LedgerEntry) -> None:
        self.events.append(f"note {entry.what}: {entry.why}")

    def end_step(self) -> None:
        self.events.append("end")

    def close(self, *, complete: bool = True) -> None:
        self.events.append("close")

    def calls(self, phase: str = "forward") -> list[str]:
        return [str(record.call) for record in self.records if record.phase == phase]


@pytest.fixture
def sink() -> Iterator[ListSink]:
    before = dict(vars(torch.Tensor))
    yield ListSink()
    assert dict(vars(torch.Tensor)) == before
    assert all(vars(torch.Tensor)[name] is found for name, found in before.items())


def test_operators_keep_their_own_names_and_counts(sink: ListSink) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    with Capture.into_sink(lambda rank: sink, operators=True):
        c = a + b
        d = a.add(b)
        e = 1 - (c @ d)
        f = -e * 2.0
        f += 1
        g = c[0] / torch.mul(d, d)[1]
        (f + g).backward()
        assert bool((a == b).any()) is False
    assert sink.calls() == [
        "Tensor.__add__.0", "Tensor.add.0", "Tensor.__matmul__.0", "Tensor.__rsub__.0", "Tensor.__neg__.0", "Tensor.__mul__.0",
        "Tensor.__iadd__.0", "Tensor.__getitem__.0", "torch.mul.0", "Tensor.__getitem__.1", "Tensor.__truediv__.0", "Tensor.__add__.1",
        "Tensor.__eq__.0", "Tensor.any.0",
    ]  # fmt: skip
    assert sink.calls("backward")[0] == "Tensor.__add__.1"
    assert sink.records[1].source is None or "test_operators" in sink.records[1].source.file
    assert sink.events[-2:] == ["end", "close"]


def test_without_the_option_operators_are_functions(sink: ListSink) -> None:
    with Capture.into_sink(lambda rank: sink):
        torch.ones(2) + torch.ones(2)
    assert sink.calls()[-1] == "Tensor.add.0"


LATER = """
import torch
from torch.overrides import is_tensor_method_or_property
from tests.capture.test_operators import ListSink
from ulpscope import Capture

for names_operators in (True, False):
    sink, x = ListSink(), torch.ones(3)
    with Capture.into_sink(lambda rank: sink, operators=names_operators):
        1 - x, 2 / x, x**2, 2**x, 5 // x, 3 % x, x[0], x == 1, ~(x > 1)
        x[0] = 2
print(*(call.rpartition(".")[0] for call in sink.calls()))
print(all(map(is_tensor_method_or_property, (torch.Tensor.__rsub__, torch.Tensor.__getitem__, torch.Tensor.add))))
"""


def test_names_stay_right_after_operators_had_their_own() -> None:
    """torch lists its functions once in a process, on the first question: our replacements must not be what it finds then."""
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=True)
    names, is_known = done.stdout.splitlines()
    operators = "__rsub__ __rtruediv__ __pow__ __rpow__ __rfloordiv__ __rmod__ __getitem__ __eq__ gt __invert__ __setitem__"
    assert names.split() == [f"Tensor.{name}" for name in operators.split()]
    assert is_known == "True"


def test_a_recording_that_has_ended_is_let_go() -> None:
    """Indexing shows our replacement to the mode, and names are cached by function."""
    sinks = [ListSink()]
    gone = weakref.ref(sinks[0])
    with Capture.into_sink(lambda rank: sinks[0], operators=True):
        x = torch.ones(3)
        x[0] = x[1] + 1
    assert sinks[0].calls()[1:] == ["Tensor.__getitem__.0", "Tensor.__add__.0", "Tensor.__setitem__.0"]
    sinks.clear()
    gc.collect()
    assert gone() is None


def test_an_optimizer_under_patched_operators_stays_one_record(sink: ListSink) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1, foreach=False, amsgrad=True)
    with Capture.into_sink(lambda rank: sink, operators=True):
        (weight * weight).sum().backward()
        optimizer.step()
    assert sink.calls() == ["Tensor.__mul__.0", "Tensor.sum.0"]
    assert sink.calls("optimizer") == ["optimizer.Adam.0"]


def test_paused_calls_are_not_recorded_and_numbers_go_on(sink: ListSink) -> None:
    capture = Capture.into_sink(lambda rank: sink, operators=True)
    x = torch.ones(2)
    with capture:
        x + x
        capture.pause()
        x + x
        x * x
        capture.resume()
        x + x
        capture.step()
        capture.pause()
        capture.step()
        x + x
        capture.resume()
        x - x
    assert sink.calls() == ["Tensor.__add__.0", "Tensor.__add__.1", "Tensor.__sub__.0"]
    assert [event for event in sink.events if not event.startswith("note")] == ["begin 0", "end", "begin 2", "end", "close"]


def test_a_sink_that_cannot_open_costs_the_recording_only() -> None:
    def refuse(rank: int) -> ListSink:
        raise PermissionError(13, "not allowed", "/dumps")

    with pytest.warns(match=r"cannot record into '/dumps'"), Capture.into_sink(refuse):
        assert (torch.ones(2) + 1).sum() == 4
