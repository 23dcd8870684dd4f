# SPDX-License-Identifier: Apache-2.0
"""Test details of values made from statistics that tests/check cannot see from outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ulpscope.model import CallName, CallRecord, Slot, Summary, TensorRecord
from ulpscope.replay.calls.generating import Generated, Planted


def test_an_input_and_the_gradient_at_the_same_place_are_two_tensors() -> None:
    forward = CallRecord(
        rank=0,
        step=0,
        order=0,
        call=CallName("torch.rsqrt", 0),
        phase="forward",
        slots=(TensorRecord(slot=Slot("input", (0,)), dtype="float32", shape=(4,), summary=Summary(4, 2.0, 3.0)),),
    )
    gradient = replace(forward.slots[0], summary=Summary(4, 10.0, 11.0))
    made = Generated(seed=0)
    given = made.record(forward).slots[0].content
    arriving = made.record(replace(forward, phase="backward", slots=(gradient,))).slots[0].content
    assert given is not None
    assert arriving is not None
    low, high = (np.frombuffer(made.read(content).buffer, np.float32) for content in (given, arriving))
    assert low.max() <= 3.0 < 10.0 <= high.min()


def _call(*shape: int, low: float = 2.0, fingerprint: str = "f") -> CallRecord:
    slot = TensorRecord(slot=Slot("input", (0,)), dtype="float32", shape=shape, summary=Summary(4, low, 3.0), fingerprint=fingerprint)
    return CallRecord(rank=0, step=0, order=0, call=CallName("torch.rsqrt", 0), phase="forward", slots=(slot,))


def _bytes(call: CallRecord, planted: Planted | None) -> bytes:
    made = Generated(0, planted)
    return bytes(made.read(str(made.record(call).slots[0].content)).buffer)


def test_values_that_were_made_lately_are_those_that_would_be_made() -> None:
    planted = Planted()
    first, again = (_bytes(_call(4, 5), planted) for _ in range(2))
    assert first == again == _bytes(_call(4, 5), None)
    assert len(planted._values) == 1


def test_a_tensor_of_other_statistics_is_made_anew() -> None:
    planted = Planted()
    assert _bytes(_call(4, 5), planted) != _bytes(_call(4, 5, low=2.5), planted) == _bytes(_call(4, 5, low=2.5), None)


def test_only_so_many_values_are_kept() -> None:
    planted = Planted(most_bytes=4096)
    for number in range(20):
        _bytes(_call(500, fingerprint=str(number)), planted)
    assert len(planted._values) == 2
    _bytes(_call(5000), planted)
    assert len(planted._values) == 2
