# SPDX-License-Identifier: Apache-2.0
"""The reader printed in docs/store-format.md reads what we write, and agrees with our own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ulpscope.format.fingerprint import fingerprint_blocks
from ulpscope.model import Arguments, CallRecord, Frame, RunInfo, TensorRecord
from ulpscope.store import DirectorySink, create_run, open_run
from ulpscope.testing.stores import example_record, example_tensor, looks_alike

PAGE = Path(__file__).parents[2] / "docs" / "store-format.md"


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    return names


def listed(value: Any) -> Any:
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def slot_elements(slot: TensorRecord) -> list[Any]:
    summary = slot.summary and [getattr(slot.summary, name) for name in slot.summary.__slots__]
    name = [slot.slot.role, slot.slot.path]
    return listed(
        [name, slot.dtype, slot.shape, slot.strides, slot.device, slot.requires_grad, summary, slot.fingerprint, slot.content, slot.note]
    )


def call_elements(record: CallRecord) -> list[Any]:
    arguments = record.arguments and [record.arguments.args, record.arguments.kwargs]
    modes = record.modes and [getattr(record.modes, name) for name in record.modes.__slots__]
    head = [2, record.order, record.call.op, record.call.index, record.phase, record.level, record.module, record.parent]
    return listed([*head, arguments, modes, [slot_elements(slot) for slot in record.slots]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = create_run(tmp_path / "run", RunInfo())
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    for order in range(300):
        tensor = example_tensor(order, (order % 7, 3), "bfloat16")
        content = sink.keep(tensor.dtype, tensor.shape, tensor.buffer)
        slot = replace(example_record().slots[0], dtype=tensor.dtype, shape=tensor.shape, content=content)
        args = (order, -order, order**7, "é" * order, list(range(order % 40)), {str(key): None for key in range(order % 40)}, b"x" * order)
        stack = (Frame("a.py", order % 5, "f", "code"),) if order % 3 else ()
        other = {"recorded_as": "mint.add"} if order % 4 == 0 else {}
        sink.write(example_record(order, slots=(slot,) * (order % 3), arguments=Arguments(args=args), stack=stack, **other))
    sink.close()
    return path


def test_the_printed_reader_reads_every_record(path: Path, printed: dict[str, Any]) -> None:
    records = list(open_run(path).records(0, 0))
    frames = list(printed["calls"](path / "rank00000/step00000"))
    assert len(frames) == 300
    for record, (frame, stack) in zip(records, frames, strict=True):
        assert looks_alike(frame[:11], call_elements(record))
        assert frame[12] == record.recompute
        assert frame[13:] == (["mint.add"] if record.order % 4 == 0 else [])
        assert record.recorded_as == (frame[13] if frame[13:] else "")
        assert [tuple(line) for line in stack] == [(line.file, line.line, line.function, line.code) for line in record.stack]


def test_the_printed_reader_reads_every_tensor(path: Path, printed: dict[str, Any]) -> None:
    run = open_run(path)
    contents = {slot.content for record in run.records(0, 0) for slot in record.slots}
    assert len(contents) > 50
    for content in contents:
        ours = run.tensor(0, 0, str(content))
        assert printed["tensor"](path / "rank00000/step00000", content) == (ours.dtype, ours.shape, bytes(ours.buffer))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 70_001])
def test_the_printed_fingerprint_is_ours(printed: dict[str, Any], size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert printed["fingerprint"](data.tobytes()) == fingerprint_blocks(data)


def test_the_page_names_every_kind_and_element() -> None:
    from ulpscope.format.frames import CallFrame, SlotRow, SummaryRow

    text = PAGE.read_text(encoding="utf-8")
    for name in ("order", "index", "phase", "level", "module", "parent", "arguments", "modes", "slots", "stack", "recompute"):
        assert name in CallFrame.__struct_fields__
        assert re.search(rf"^\| \d+ {name} \|", text, re.MULTILINE)
    for name in SlotRow.__struct_fields__[1:]:
        assert re.search(rf"^\| \d+ {name} \|", text, re.MULTILINE)
    assert ", ".join(SummaryRow.__struct_fields__) in text
