# SPDX-License-Identifier: Apache-2.0
"""Small real runs on disk: a linear, a gelu and a linear, forward, two steps; the subject's gelu can be broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.sample import sample_run_info
from ulpscope.model import Arguments, CallName, CallRecord, Frame, Modes, Slot, TensorRecord
from ulpscope.numerics.summary.summary import summarize
from ulpscope.store import DirectorySink, create_run

Array = np.ndarray[Any, np.dtype[np.float32]]
MakeRun = Callable[..., Path]


def _tensor(sink: DirectorySink, slot: str, values: Array, keep: str = "tensors") -> TensorRecord:
    summary, fingerprint = summarize("float32", np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    return TensorRecord(
        slot=Slot.parse(slot),
        dtype="float32",
        shape=values.shape,
        device="cpu",
        summary=summary if keep != "fingerprint" else None,
        fingerprint=fingerprint,
        content=sink.keep("float32", values.shape, np.ascontiguousarray(values)) if keep == "tensors" else None,
    )


def _gelu(values: Array) -> Array:
    return (0.5 * values * (1 + np.vectorize(math.erf)(values / math.sqrt(2)))).astype(np.float32)


def write_run(path: Path, *, scale: float = 1.0, steps: tuple[int, ...] = (0, 1), is_whole: bool = True, keep: str = "tensors") -> Path:
    """Write a run at `path` whose gelu returns `scale` times its value."""
    path = create_run(path, sample_run_info("cpu"))
    sink = DirectorySink(path, 0)
    for step in steps:
        sink.begin_step(step)
        _write_step(sink, step, scale, keep)
        if is_whole or step != steps[-1]:
            sink.end_step()
    if is_whole:
        sink.close()
    return path


def _write_step(sink: DirectorySink, step: int, scale: float, keep: str) -> None:
    chance = np.random.default_rng(step)
    value: Array = chance.standard_normal((16, 32), dtype=np.float32)
    counts: dict[str, int] = {}
    for order, (module, op) in enumerate([("mlp.fc1", "functional.linear"), ("mlp", "functional.gelu"), ("mlp.fc2", "functional.linear")]):
        weight = chance.standard_normal((32, 32), dtype=np.float32)
        inputs = [value, weight] if op == "functional.linear" else [value]
        value = value @ weight.T if op == "functional.linear" else _gelu(value) * np.float32(scale)
        slots = [_tensor(sink, f"input.{place}", tensor, keep) for place, tensor in enumerate(inputs)]
        sink.write(
            CallRecord(
                rank=0,
                step=step,
                order=order,
                call=CallName(op, counts.get(op, 0)),
                phase="forward",
                module=module,
                parent="",
                arguments=Arguments(args=tuple({"$tensor": str(slot.slot)} for slot in slots), kwargs={}),
                modes=Modes(training=True),
                slots=(*slots, _tensor(sink, "output.0", value, keep)),
                stack=(Frame("train.py", 40 + order, "forward", f"x = {op}(x)"), Frame("train.py", 88, "main", "loss = model(x)")),
            )
        )
        counts[op] = counts.get(op, 0) + 1


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `good`, `same` (a second recording of it) and `bad` into a folder."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "good")
    write_run(folder / "same")
    write_run(folder / "bad", scale=1.01)
    return folder
