# SPDX-License-Identifier: Apache-2.0
"""Operations that write to tensors without raising their version: the values recorded afterwards are the new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ulpscope import Capture, open_run
from ulpscope.capture.calls import writes_silently


def test_gradients_are_read_again_after_unscaling(tmp_path: Path) -> None:
    """torch's unscaling does not raise the version of the gradients that it divides."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Capture(tmp_path / "run", optimizer=optimizer, keep="statistics"):
        scaler.scale((weight * weight).sum()).backward()
        torch.linalg.vector_norm(weight.grad)
        scaler.unscale_(optimizer)
        torch.linalg.vector_norm(weight.grad)
        scaler.step(optimizer)
    run = open_run(tmp_path / "run")
    norms = [record for record in run.records(0, 0) if "vector_norm" in record.call.op and record.phase == "forward"]
    largest = [record.slots[0].summary.max for record in norms if record.slots[0].summary]
    assert largest == [256 * 6.0, 6.0]
    [step] = [record for record in run.records(0, 0) if record.phase == "optimizer"]
    [gradient] = [slot for slot in step.slots if slot.slot.role == "gradient"]
    assert gradient.summary is not None
    assert gradient.summary.max == 6.0


@pytest.mark.parametrize(
    ("op", "is_silent"),
    [
        ("torch._amp_foreach_non_finite_check_and_unscale_", True),
        ("torch._foreach_mul_", True),
        ("torch._foreach_mul", False),
        ("Tensor.mul_", False),
        ("Tensor.__iadd__", False),
    ],
)
def test_which_operations_those_are(op: str, is_silent: bool) -> None:
    assert writes_silently(op) is is_silent
