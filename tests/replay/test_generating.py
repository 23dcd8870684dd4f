# SPDX-License-Identifier: Apache-2.0
"""Values made up from statistics: what tests/check does not see from outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ulpscope.model import CallName, CallRecord, Slot, Summary, TensorRecord
from ulpscope.replay.generating import Generated


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
