# SPDX-License-Identifier: Apache-2.0
"""The kernel alone reads kept tensors where it can, and the usual way serves the rest: the results are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ulpscope.errors import DamagedRunError
from ulpscope.model import CallName, CallRecord, Comparison, JudgedCall, RunInfo, Slot, TensorRecord
from ulpscope.numerics.difference import kept_pairs
from ulpscope.numerics.summary.summary import summarize
from ulpscope.store import DirectoryRun, DirectorySink, create_run
from ulpscope.workflows.compare.comparing import compare_runs

BASE = 6000


def record_run(folder: Path, noise: float, steps: int = 2) -> Path:
    """Record calls on tensors of all sizes, on views of one, and on some that two calls share."""
    path = create_run(folder, RunInfo())
    sink = DirectorySink(path, rank=0)
    for step in range(steps):
        random = np.random.default_rng(step)
        sink.begin_step(step)
        for order, numel in enumerate((1, 3, 70, BASE, 200_000)):
            values = (random.normal(size=numel) * (1 + noise * random.normal(size=numel))).astype("<f4")
            slots = [kept(sink, Slot("input", (0,)), values)]
            slots += views(slots[0], values) if numel == BASE else []
            sink.write(CallRecord(rank=0, step=step, order=order, call=CallName("torch.tanh", order), phase="forward", slots=tuple(slots)))
        sink.end_step()
    sink.close()
    return path


def kept(sink: DirectorySink, slot: Slot, values: np.ndarray) -> TensorRecord:
    summary, fingerprint = summarize("float32", values.view(np.uint8))
    content = sink.keep("float32", values.shape, values.tobytes())
    return TensorRecord(slot=slot, dtype="float32", shape=values.shape, summary=summary, fingerprint=fingerprint, content=content)


def views(base: TensorRecord, values: np.ndarray) -> list[TensorRecord]:
    """Return the transpose of it, and every third of its numbers."""
    assert base.content is not None
    hash = base.content.partition(":")[0]
    found = []
    for at, (shape, strides, first) in enumerate((((100, 60), (1, 100), 0), ((1999,), (3,), 2))):
        seen = np.lib.stride_tricks.as_strided(values[first:], shape, [4 * stride for stride in strides])
        summary, fingerprint = summarize("float32", np.ascontiguousarray(seen).reshape(-1).view(np.uint8))
        content = f"{hash}:float32:{'x'.join(map(str, shape))}:{'x'.join(map(str, strides))}:{first}"
        found.append(replace(base, slot=Slot("output", (at,)), shape=shape, summary=summary, fingerprint=fingerprint, content=content))
    return found


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return record_run(tmp_path / "subject", 1e-6), record_run(tmp_path / "reference", 0.0)


def compare(runs: tuple[Path, Path]) -> Comparison:
    return replace(compare_runs(*runs, replay="none"), elapsed_s=0.0)


def test_both_ways_give_the_same_comparison(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(runs)
    monkeypatch.setattr(kept_pairs.KeptPairs, "add", lambda *_: None)
    assert repr(compare(runs)) == repr(found)
    monkeypatch.undo()
    monkeypatch.setattr(kept_pairs.KeptPairs, "compared", lambda *_: None)
    assert repr(compare(runs)) == repr(found)


@pytest.mark.compiled("kernel")
def test_the_kernel_reads_what_is_not_tiny(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if kept_pairs.KERNEL is not None and not hasattr(kept_pairs.KERNEL, "ulpscope_compare_kept"):
        pytest.skip("the kernel reads no files here")
    usual: list[str] = []
    read = DirectoryRun.tensor
    monkeypatch.setattr(DirectoryRun, "tensor", lambda run, rank, step, content: usual.append(content) or read(run, rank, step, content))
    compare(runs)
    assert {content.rpartition(":")[2] for content in usual} == {"1", "3"}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damage_is_told_as_ever(side: int, damage: str, runs: tuple[Path, Path]) -> None:
    shard = runs[side] / "rank00000" / "step00001" / "tensors-0000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(data if damage == "flipped" else data[:-1000])
    with pytest.raises(DamagedRunError, match=r"step00001.tensors-0000\.safetensors"):
        compare(runs)


def test_calls_are_told_as_they_are_judged(runs: tuple[Path, Path]) -> None:
    told: list[JudgedCall] = []
    comparison = compare_runs(*runs, replay="none", judged=told.append)
    assert [call.slots for call in told] == [call.slots for call in comparison.calls]


def test_where_a_tensor_lies(runs: tuple[Path, Path]) -> None:
    run = DirectoryRun(runs[0])
    slots = [slot for record in run.records(0, 0) for slot in record.slots]
    for slot in slots:
        assert slot.content is not None
        found = run.kept(0, 0, slot.content)
        assert found is not None
        assert (found.dtype, found.shape) == (slot.dtype, slot.shape)
        assert found.length >= run.tensor(0, 0, slot.content).buffer.nbytes
    assert run.kept(0, 0, "nonsense") is None
    assert run.kept(0, 0, f"{'0' * 32}:float32:5") is None
    assert run.kept(0, 0, f"{slots[0].content}:1:99") is None
