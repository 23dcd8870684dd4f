# SPDX-License-Identifier: Apache-2.0
"""Check a vendor's operations far from its devices: the formula judges the recorded results; without one there is nothing to judge."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope.model import Arguments, CallName, CallRecord, RunInfo, Slot, Summary, TensorRecord
from ulpscope.model.check.checks import CheckedCall
from ulpscope.store import DirectorySink, create_run
from ulpscope.workflows.check.checking import check_run


def _tensor(sink: DirectorySink, slot: str, value: Tensor, keep: bool) -> TensorRecord:
    summary = Summary(numel=value.numel(), min=float(value.min()), max=float(value.max()))
    content = sink.keep("float32", tuple(value.shape), value.numpy()) if keep else None
    return TensorRecord(slot=Slot.parse(slot), dtype="float32", shape=tuple(value.shape), device="npu:0", summary=summary, content=content)


def _checked(folder: Path, result: Tensor, given: Tensor, *, keep: bool = True) -> CheckedCall:
    path = create_run(folder, RunInfo())
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    slots = (_tensor(sink, "input.0", given, keep), _tensor(sink, "output.0", result, keep))
    arguments = Arguments(args=({"$tensor": "input.0"},))
    sink.write(
        CallRecord(rank=0, step=0, order=0, call=CallName("torch_npu.npu_swiglu", 0), phase="forward", arguments=arguments, slots=slots)
    )
    sink.end_step()
    sink.close()
    return check_run(path, isolated=False).calls[0]


def _swiglu(given: Tensor) -> Tensor:
    gate, value = given.chunk(2, -1)
    return F.silu(gate) * value


def test_what_was_recorded_is_judged_by_the_formula(tmp_path: Path) -> None:
    given = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    assert _checked(tmp_path / "sound", _swiglu(given), given).status == "passed"
    wrong = _checked(tmp_path / "wrong", _swiglu(given) * 1.0001, given)
    assert wrong.status == "failed"
    assert wrong.worst is not None
    assert wrong.worst.blamed == "recorded"


def test_without_device_and_result_it_is_skipped(tmp_path: Path) -> None:
    given = torch.randn(16, 32)
    found = _checked(tmp_path / "run", _swiglu(given), given, keep=False)
    assert (found.status, found.reason) == ("skipped", "its kernel is a vendor's and not here, and no result of it was kept")
