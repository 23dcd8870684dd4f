# SPDX-License-Identifier: Apache-2.0
"""Tensors on accelerators: summaries by plain torch, values that come later, records that wait for them.

No test machine has an accelerator, so the CPU and the emulated npu stand in for one; `on_cuda.py` does the same on a real one.
"""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.capture import tensor_cases
from tests.capture.recording import Recording, recording, slot_of
from ulpscope.capture.device import queue as devices_module
from ulpscope.capture.device.dumps import Ring
from ulpscope.capture.device.plain_torch import is_able, summary_row
from ulpscope.capture.device.queue import Devices
from ulpscope.capture.device.summaries import Pending, PendingSummaries, TorchSummaries
from ulpscope.capture.device.values import LOST, settle_rows
from ulpscope.capture.device.word_layouts import layout_of
from ulpscope.capture.intercept.naming import may_write
from ulpscope.capture.record import holding, recorder
from ulpscope.capture.record.tensor_reader import TensorReader
from ulpscope.capture.torch_internals import blind
from ulpscope.model import Slot


class LateSummaries(PendingSummaries):
    """Reads tensors of the CPU when it is told to and not before, as a device does."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.zeros(2).sin()  # what a device needs is made by operations too, which nobody may see
        self.fails = fails
        self.num_flushes = 0
        self._results: list[tuple[Pending, torch.Tensor]] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending or self._results)

    def _read(self, entries: list[Pending]) -> None:
        self.num_flushes += 1
        if self.fails:
            raise RuntimeError("the compiler of kernels is broken")
        self._results += [(entry, summary_row(entry.alias.detach(), entry.layout.dtype, statistics=True)) for entry in entries]

    def send(self) -> None:
        pass

    def collect(self, *, wait: bool = False) -> bool:
        results, self._results = self._results, []
        if results:
            entries = [entry for entry, _ in results]
            with blind():
                rows = torch.stack([row for _, row in results]).numpy()
            settle_rows(rows, [entry.numel for entry in entries], [entry.values for entry in entries], statistics=True)
        return bool(results)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateSummaries]:
    """Recordings treat the CPU as a device that reads late."""
    made: list[LateSummaries] = []

    def make(*_: Any, **__: Any) -> LateSummaries:
        made.append(LateSummaries())
        return made[-1]

    _defer(monkeypatch, make)
    return made


def _defer(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    monkeypatch.setattr(recorder, "Devices", functools.partial(Devices, make=make))
    real = TensorReader._new_form

    def form(self: TensorReader, tensor: torch.Tensor, strides: Any) -> Any:
        found = real(self, tensor, strides)
        found.is_on_host = False
        return found

    monkeypatch.setattr(TensorReader, "_new_form", form)


def read_by(make: Any, tensors: list[torch.Tensor], *, statistics: bool = True) -> list[Any]:
    devices = Devices(statistics=statistics, complain=lambda what, why: pytest.fail(f"{what}: {why}"), make=make)
    forms = TensorReader("statistics", lambda *_: None)
    found = [devices.take(tensor, forms._form(tensor)) for tensor in tensors]
    devices.send()
    devices.collect(wait=True)
    assert not devices.is_waiting
    return found


@pytest.mark.parametrize("name", tensor_cases.DTYPE_NAMES)
def test_plain_torch_gives_the_same_bits_as_the_host(name: str) -> None:
    tensors = [make(tensor_cases.block(name)) for make in tensor_cases.LAYOUTS.values()]
    for tensor, values in zip(
        tensors, read_by(lambda *_, **__: TorchSummaries(torch.device("cpu"), statistics=True), tensors), strict=True
    ):
        assert not tensor_cases.wrong(tensor, values.summary_object(), values.fingerprint)


def test_plain_torch_on_values_at_the_ends_of_their_range() -> None:
    tensors = list(tensor_cases.special())
    for tensor, values in zip(
        tensors, read_by(lambda *_, **__: TorchSummaries(torch.device("cpu"), statistics=True), tensors), strict=True
    ):
        assert not tensor_cases.wrong(tensor, values.summary_object(), values.fingerprint)


def test_plain_torch_composes_slices_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulpscope.capture.device.plain_torch._SLICE", 512)
    tensor = torch.randn(5, 3001)
    (values,) = read_by(lambda *_, **__: TorchSummaries(torch.device("cpu"), statistics=True), [tensor])
    assert not tensor_cases.wrong(tensor, values.summary_object(), values.fingerprint)


def test_only_fingerprints_where_only_those_are_kept() -> None:
    (values,) = read_by(lambda *_, **__: TorchSummaries(torch.device("cpu"), statistics=False), [torch.arange(5.0)], statistics=False)
    assert values.summary is None
    assert values.fingerprint == tensor_cases.expected(torch.arange(5.0))[1]


def test_the_host_reads_what_is_empty() -> None:
    assert read_by(lambda *_, **__: LateSummaries(), [torch.empty(0, 3)]) == [None]


def test_a_device_without_the_arithmetic_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_able(torch.device("cpu"))
    monkeypatch.setattr("ulpscope.capture.device.plain_torch._mixed", lambda words: words)
    assert not is_able(torch.device("cpu"))
    monkeypatch.setattr("ulpscope.capture.device.plain_torch._mixed", lambda words: words.no_such_method())
    assert not is_able(torch.device("cpu"))


def test_summaries_on_the_emulated_npu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "on_npu.py")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- layouts


def test_neighbouring_dimensions_become_one() -> None:
    layout = layout_of("bfloat16", (8, 16, 1024, 64), (1024 * 3072, 64, 3072, 1), 8)
    assert layout is not None
    assert layout.variant == (True, 0, 2, 128, 4)
    whole = layout_of("bfloat16", (8, 1024, 64), (65536, 64, 1), 8)
    assert whole is not None
    assert whole.variant == (True, 0, 2, 0, 0)
    chunk = layout_of("bfloat16", (8, 1024, 1024), (1024 * 3072, 3072, 1), 8)
    assert chunk is not None
    assert chunk.variant == (True, 0, 2, 128, 2)


def test_units_shrink_to_what_lies_together() -> None:
    units = [layout_of("float16", (6, 4), (1, 6), 8), layout_of("float16", (6, 4), (6, 1), 8), layout_of("float16", (8, 4), (5, 1), 8)]
    assert [layout.variant[3] for layout in units if layout] == [2, 4, 2]
    shifted = layout_of("float16", (9,), (1,), 2)
    assert shifted is not None
    assert shifted.variant[3] == 2


def test_more_than_five_dimensions_are_copied() -> None:
    strides = torch.empty(3, 3, 3, 3, 3, 3).permute(5, 3, 1, 4, 2, 0).stride()
    assert layout_of("float32", (3,) * 6, strides, 8) is None


# ---- values that come later


def test_values_come_when_they_are_collected(late: list[LateSummaries]) -> None:
    with recording(keep="statistics") as found:
        x = torch.arange(6.0)
        y = x.sin()
        assert [record for record in found.records if record.call.op == "Tensor.sin"] == []
        del y
    assert not tensor_cases.wrong(
        x, slot_of(found.one("Tensor.sin"), "input.0").summary, slot_of(found.one("Tensor.sin"), "input.0").fingerprint
    )


def _fingerprints(found: Recording) -> list[tuple[str, str, list[tuple[str, str | None, str]]]]:
    return [
        (str(record.call), record.phase, [(str(slot.slot), slot.fingerprint, slot.note) for slot in record.slots])
        for record in found.records
    ]


def _in_place() -> None:
    torch.manual_seed(1)
    x = torch.arange(12.0).reshape(3, 4)
    x.add_(1)
    x[1] = 7.0
    x += x.sin()
    torch.mul(x, 2.0, out=x)
    y = torch.nn.functional.relu(x, inplace=True)
    torch.nn.functional.dropout(y, 0.5, True, True)
    norm = torch.nn.BatchNorm1d(4)
    norm(y)
    torch._foreach_add_([x, y], 1.0)
    x.t_()
    x.data = torch.ones(2)
    x.exp()


def _train() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = model[0].weight
    weight.register_hook(lambda gradient: gradient.mul_(2.0))
    for _ in range(2):
        for _ in range(2):
            hidden = model(torch.randn(5, 4))
            (hidden * hidden + hidden).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _checkpointed() -> None:
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()


class _Doubled(torch.autograd.Function):
    """A Function that marks a tensor as written raises its version once more, after the write."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def _own_function() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, requires_grad=True)
    _Doubled.apply(x.sin()).sum().backward()  # type: ignore[no-untyped-call]


def _transformed() -> None:
    torch.manual_seed(1)
    outer = torch.randn(3)
    torch.func.grad(lambda x: (x * outer.sin()).sum())(torch.randn(3))


def _inferred() -> None:
    torch.manual_seed(1)
    with torch.inference_mode():
        x = torch.arange(4.0)
        x.mul_(2)
        x.sin()


@pytest.mark.parametrize("program", [_in_place, _train, _checkpointed, _own_function, _transformed, _inferred])
@pytest.mark.parametrize("level", ["api", "module", "both", "op"])
def test_what_is_read_late_is_what_it_was(program: Any, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(keep="statistics", level=level) as at_once:
        program()
    _defer(monkeypatch, lambda *_, **__: LateSummaries())
    with recording(keep="statistics", level=level) as later:
        program()
    assert later.ledger == at_once.ledger
    assert _fingerprints(later) == _fingerprints(at_once)


def test_what_was_written_to_unseen_is_told_to_be_lost(late: list[LateSummaries]) -> None:
    with recording(keep="statistics") as found:
        x = torch.arange(4.0)
        x.sin()
        with torch._C.DisableTorchFunction():
            x.add_(1)
    slot = slot_of(found.one("Tensor.sin"), "input.0")
    assert slot.note == LOST
    assert slot.fingerprint is None
    assert slot.summary is None
    assert found.ledger == []


def test_memory_that_was_given_back_is_not_read(late: list[LateSummaries]) -> None:
    with recording(keep="statistics") as found:
        x = torch.arange(4.0)
        x.sin()
        x.untyped_storage().resize_(0)
    assert slot_of(found.one("Tensor.sin"), "input.0").note == LOST


def test_few_flushes_and_no_storage_is_held_for_long(late: list[LateSummaries], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulpscope.capture.device.summaries.MOST_ROWS", 16)
    with recording(keep="statistics"):
        for _ in range(100):
            torch.ones(3).sin().cos()
        (device,) = late
        assert device.num_pending < 16
        assert device.num_flushes == 300 // 16
    assert device.num_pending == 0


def test_modules_are_read_many_at_a_time(late: list[LateSummaries]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(10)))
    with recording(keep="statistics", level="module") as found:
        model(torch.randn(2, 4)).sum().backward()
    (device,) = late
    assert len(found.calls("module.Linear")) == len(found.calls("module.Linear", "backward")) == 10
    assert device.num_flushes <= 3  # before the backward pass, after it, and at the end


def test_records_stay_in_order_and_steps_close_after_them(late: list[LateSummaries]) -> None:
    with recording(keep="statistics") as found:
        for _ in range(3):
            torch.ones(3).sin()
            found.session.step()
    assert [record.order for record in found.records] == [0, 1, 2] * 3
    assert [found.run.is_complete(0, step) for step in found.run.steps(0)] == [True] * 3


def test_at_most_so_many_records_wait(late: list[LateSummaries], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "_MOST_HELD", 10)
    with recording(keep="statistics") as found:
        for _ in range(50):
            torch.ones(3).sin()
        assert found.session._recorder._outbox.num_held <= 10
        assert len(found.records) > 80


def test_a_device_that_fails_is_read_by_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _defer(monkeypatch, lambda *_, **__: LateSummaries(fails=True))
    x = torch.arange(5.0)
    with recording(keep="statistics") as found:
        y = x.sin()
        y.add_(1)
        z = y.cos()
    assert [text.partition(":")[0] for text in found.ledger] == ["summarise tensors on cpu by our kernels"]
    for op, slot, tensor in (("Tensor.sin", "input.0", x), ("Tensor.cos", "output.0", z)):
        taken = slot_of(found.one(op), slot)
        assert not tensor_cases.wrong(tensor, taken.summary, taken.fingerprint)


def test_a_device_that_is_not_able_is_read_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    monkeypatch.setattr(devices_module.summaries_for.__module__ + ".is_able", lambda device: False)
    devices = Devices(statistics=True, complain=lambda what, why: complaints.append(what))
    assert devices.take(torch.ones(2), TensorReader("statistics", lambda *_: None)._form(torch.ones(2))) is None
    assert complaints == ["summarise tensors on cpu there"]


# ---- who writes


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        ("functional.linear", (), {}, False),
        ("functional.layer_norm", (), {}, False),
        ("functional.scaled_dot_product_attention", (), {}, False),
        ("Tensor.view", (), {}, False),
        ("torch.add", (), {}, False),
        ("torch.add", (), {"out": 1}, True),
        ("Tensor.add_", (), {}, True),
        ("Tensor.__iadd__", (), {}, True),
        ("Tensor.__setitem__", (), {}, True),
        ("functional.relu", (0, True), {}, True),
        ("functional.relu", (0, False), {}, False),
        ("functional.relu", (0,), {"inplace": True}, True),
        ("functional.dropout", (0, 0.5, True), {}, False),
        ("functional.embedding", (0, 0, None, 1.0), {}, True),
        ("functional.embedding", (0, 0), {}, False),
        ("functional.batch_norm", (), {}, True),
        ("torch._foreach_add_", (), {}, True),
        ("torch._foreach_norm", (), {}, True),
        ("distributed.all_reduce", (), {}, True),
        ("ops.mine.unknown", (), {}, True),
        ("Function.Mine", (), {}, True),
    ],
)
def test_what_may_write(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool) -> None:
    assert may_write(op, args, kwargs) is expected


def test_a_summary_has_its_slot() -> None:
    values = TensorReader("statistics", lambda *_: None).take(Slot("output", (1,)), torch.ones(2))
    assert (values.slot, values.form.shape, values.requires_grad) == (Slot("output", (1,)), (2,), False)


# ---- the ring of pinned memory


def test_a_ring_gives_out_parts_that_do_not_touch() -> None:
    ring = Ring(10 * 4096)
    first, second, third = ring.take(4096), ring.take(8000), ring.take(3 * 4096)
    assert (first, second, third) == (0, 4096, 3 * 4096)
    ring.give_back(second)
    ring.give_back(first)
    assert ring.take(4 * 4096) == 6 * 4096
    assert ring.take(3 * 4096) == 0  # it begins again where the first two were


def test_a_ring_makes_the_next_one_wait_until_there_is_room() -> None:
    ring = Ring(4 * 4096)
    first = ring.take(3 * 4096)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(ring.take(2 * 4096)))
    waiting.start()
    waiting.join(0.05)
    assert got == []
    assert waiting.is_alive()
    ring.give_back(first)
    waiting.join(10)
    assert got == [0]


def test_a_ring_refuses_what_never_fits() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Ring(4096).take(4097)


@given(st.lists(st.integers(1, 5 * 4096), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_parts_of_a_ring_never_overlap(sizes: list[int], chance: random.Random) -> None:
    ring = Ring(12 * 4096)
    taken: dict[int, int] = {}
    for size in sizes:
        while _would_wait(ring, size):
            place = chance.choice(list(taken))
            ring.give_back(place)
            del taken[place]
        place = ring.take(size)
        assert place + size <= ring.size
        assert all(place + size <= other or other + length <= place for other, length in taken.items())
        taken[place] = size


def _would_wait(ring: Ring, size: int) -> bool:
    size = -(-size // 4096) * 4096
    skipped = ring.size - ring._end % ring.size if ring._end % ring.size + size > ring.size else 0
    return ring._end + skipped + size - ring._begin > ring.size
