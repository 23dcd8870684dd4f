# SPDX-License-Identifier: Apache-2.0
"""Views of kept memory are kept as views: their bytes are stored once, and read back as they were."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from tests.capture.recording import Recording, recording, slot_of
from ulpscope.errors import DamagedRunError, InputError
from ulpscope.format.content import parse_content
from ulpscope.model import view_content
from ulpscope.store import MemoryRun

VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "part": lambda x: x.chunk(3, dim=-1)[1],
    "rows": lambda x: x[2:5],
    "every other": lambda x: x[:, ::2],
    "reshaped": lambda x: x.view(4, 3, 12),
    "heads": lambda x: x.view(6, 4, 2, 3).transpose(1, 2),
    "diagonal": lambda x: x.view(6, 24).diagonal(),
}


def num_kept(run: MemoryRun) -> int:
    return sum(len(step.tensors) for step in run._ranks[0].values())


def kept(found: Recording, op: str, slot: str) -> torch.Tensor:
    return found.array(found.one(op), slot)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_a_view_is_read_back_and_stored_once(name: str, dtype: torch.dtype) -> None:
    x = (torch.arange(144) % 7).view(6, 24).to(dtype)
    with recording() as found:
        x.clone()
        view = VIEWS[name](x)
        view.sum()
    assert torch.equal(kept(found, "Tensor.sum", "input.0"), view)
    contents = {parse_content(slot.content).hash for record in found.records for slot in record.slots if slot.content}
    assert num_kept(found.run) == len(contents) == 2


def test_memory_in_another_order_is_kept_as_it_lies() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with recording() as found:
        x.sin()
        x.permute(0, 2, 3, 1).cos()
    first, second = slot_of(found.one("Tensor.sin"), "input.0"), slot_of(found.one("Tensor.cos"), "input.0")
    assert first.content is not None
    assert second.content is not None
    assert first.content.split(":")[0] == second.content.split(":")[0]
    assert second.content.count(":") == 2  # it consists of these bytes
    assert torch.equal(kept(found, "Tensor.sin", "input.0"), x)
    assert torch.equal(kept(found, "Tensor.cos", "input.0"), x.permute(0, 2, 3, 1))


def test_what_was_written_to_is_kept_anew() -> None:
    x = torch.zeros(3, 4)
    with recording() as found:
        x.sin()
        before = x.t().clone()
        x.add_(1)
        x.t().cos()
    (late,) = found.calls("Tensor.cos")
    assert torch.equal(found.array(late, "input.0"), x.t())
    assert torch.equal(found.array(found.calls("Tensor.clone")[0], "input.0"), before)


def test_a_view_with_more_elements_than_its_memory_is_kept_in_full() -> None:
    x = torch.arange(3.0)
    with recording() as found:
        x.sin()
        x.expand(4, 3).cos()
    assert slot_of(found.one("Tensor.cos"), "input.0").content.count(":") == 2  # type: ignore[union-attr]
    assert torch.equal(kept(found, "Tensor.cos", "input.0"), x.expand(4, 3))


def test_conjugates_are_not_views_of_what_lies_there() -> None:
    x = torch.complex(torch.arange(3.0), torch.ones(3))
    with recording() as found:
        x.sin()
        x.conj().cos()
        x.conj().imag.tan()
    assert torch.equal(kept(found, "Tensor.cos", "input.0"), x.conj().resolve_conj())
    assert torch.equal(kept(found, "Tensor.tan", "input.0"), x.conj().imag.resolve_neg())


def test_views_in_a_run_on_disk(tmp_path: Path) -> None:
    x = torch.randn(30, 40)
    with ulpscope.Capture(tmp_path / "run", keep="tensors"):
        x.sin()
        x.t().cos()
    run = ulpscope.open_run(tmp_path / "run")
    (record,) = [record for record in run.records(0, 0) if record.call.op == "Tensor.cos"]
    slot = slot_of(record, "input.0")
    assert slot.content is not None
    data = run.tensor(0, 0, slot.content)
    assert torch.equal(torch.frombuffer(bytearray(data.buffer), dtype=torch.float32).view(data.shape), x.t())


@pytest.mark.parametrize(
    "view",
    [
        ("float32", (4, 3), (1, 4), 1),  # beyond the end
        ("float32", (10**9, 10**9), (0, 0), 0),  # more elements than there are bytes
        ("float32", (13,), (0,), 0),
        ("float32", (4, 3), (1,), 0),  # dimensions without a stride
        ("float32", (0, 3), (1, 4), 0),
        ("float64", (4, 3), (1, 4), 0),
        ("no_dtype", (4, 3), (1, 4), 0),
    ],
)
def test_views_that_cannot_be_are_refused(tmp_path: Path, view: tuple[str, tuple[int, ...], tuple[int, ...], int]) -> None:
    with ulpscope.Capture(tmp_path / "run", keep="tensors"):
        torch.arange(12.0).sin()
    run = ulpscope.open_run(tmp_path / "run")
    (record,) = [record for record in run.records(0, 0) if record.call.op == "Tensor.sin"]
    content = slot_of(record, "input.0").content
    assert content is not None
    with pytest.raises(DamagedRunError):
        run.tensor(0, 0, view_content(content, *view))


@pytest.mark.parametrize("tail", [":1x2", ":1x2:", ":1x2:-1", ":1x2:0:0", ":-1:0", ":1xx2:0"])
def test_keys_that_are_none(tail: str) -> None:
    with pytest.raises(InputError, match=re.escape("is not the key of a kept tensor")):
        parse_content("0" * 32 + ":float32:2x3" + tail)


def test_the_reader_in_the_documentation_reads_views(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "store-format.md").read_text(encoding="utf-8")
    reader: dict[str, Any] = {}
    exec(text.rpartition("```python")[2].partition("```")[0], reader)
    x = torch.arange(24.0).view(4, 6)
    with ulpscope.Capture(tmp_path / "run", keep="tensors"):
        x.sin()
        view = x[1:, ::2].t()
        view.cos()
    folder = tmp_path / "run" / "rank00000" / "step00000"
    (frame,) = [frame for frame, _ in reader["calls"](folder) if frame[2] == "Tensor.cos" and frame[4] == "forward"]
    dtype, shape, data = reader["tensor"](folder, frame[10][0][8])
    assert (dtype, shape) == ("float32", (3, 3))
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape), view)
