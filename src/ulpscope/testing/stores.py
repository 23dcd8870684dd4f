# SPDX-License-Identifier: Apache-2.0
"""Test the promises of every store, with test classes to inherit.

A reader of a foreign format subclasses RunContract and opens an example; a store that is also written subclasses StoreContract. Needs
pytest and hypothesis.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ulpscope.errors import InputError
from ulpscope.model import (
    DTYPES,
    ROLES,
    Arguments,
    CallName,
    CallRecord,
    Frame,
    LedgerEntry,
    Modes,
    Run,
    RunInfo,
    Sink,
    Slot,
    Summary,
    TensorData,
    TensorRecord,
)

__all__ = ["RunContract", "StoreContract", "call_records", "example_record", "example_tensor", "looks_alike"]


def looks_alike(left: Any, right: Any) -> bool:
    """Tell whether two values are equal, where NaN equals NaN and 0.0 is not -0.0."""
    return repr(left) == repr(right)


def example_tensor(seed: int, shape: tuple[int, ...] = (3, 4), dtype: str = "float32") -> TensorData:
    data = np.random.default_rng(seed).bytes(prod(shape) * DTYPES[dtype].size_bytes)
    return TensorData(dtype, shape, data)


def example_record(order: int = 0, **changes: Any) -> CallRecord:
    """Return a record with something in every field."""
    summary = Summary(12, float("-inf"), 2.5, 0.1, 1.25, 1, 0, 2, 3, 0)
    weight = TensorRecord(slot=Slot("parameter", ("fc.weight",)), dtype="bfloat16", shape=(), note="not seen")
    x = TensorRecord(
        slot=Slot("input", (0, "mask", 1)),
        dtype="float32",
        shape=(3, 4),
        strides=(1, 3),
        device="npu:0",
        requires_grad=True,
        summary=summary,
        fingerprint="u1:" + "0f" * 16,
    )
    record = CallRecord(
        rank=0,
        step=0,
        order=order,
        call=CallName("functional.gelu", order),
        phase="backward",
        level="module",
        module="layers.1.mlp",
        parent="layers.1",
        arguments=Arguments(args=({"$tensor": "input.0"}, 1, -0.0, float("nan"), None), kwargs={"eps": 1e-5, "dims": [1, [True]]}),
        modes=Modes(autocast="bfloat16", grad=False, inference=True, training=True, deterministic=True),
        slots=(x, weight),
        stack=(Frame("train.py", 48, "forward", "return self.fc2(F.gelu(x))"), Frame("train.py", 9, "<module>")),
        recompute=True,
    )
    return replace(record, **changes)


_counts = st.integers(0, 2**62)
_names = st.text(max_size=12)
_sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
_maybe_real = st.none() | st.floats()
_maybe_count = st.none() | _counts
_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=8,
)
_summaries = st.builds(Summary, _counts, *[_maybe_real] * 4, *[_maybe_count] * 5)
_slots = st.builds(Slot, st.sampled_from(ROLES), st.lists(st.integers(0, 99) | _names, max_size=3).map(tuple))
_tensors = st.builds(
    TensorRecord,
    slot=_slots,
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=_sizes,
    strides=st.none() | _sizes,
    device=_names,
    requires_grad=st.booleans(),
    summary=st.none() | _summaries,
    fingerprint=st.none() | _names,
    content=st.none() | _names,
    note=_names,
)
_arguments = st.builds(
    Arguments, args=st.lists(_plain, max_size=3).map(tuple), kwargs=st.none() | st.dictionaries(_names, _plain, max_size=3)
)
_frames = st.builds(Frame, _names, st.integers(0, 2**31), _names, _names)


def call_records() -> st.SearchStrategy[CallRecord]:
    """Generate records as capture may write them: any text, any number, NaN and infinities anywhere."""
    return st.builds(
        CallRecord,
        rank=st.just(0),
        step=st.just(0),
        order=_counts,
        call=st.builds(CallName, st.text(min_size=1, max_size=12), _counts),
        phase=st.sampled_from(["start", "forward", "backward", "optimizer", "end"]),
        level=st.sampled_from(["api", "module", "op", "state"]),
        module=_names,
        parent=_names,
        arguments=st.none() | _arguments,
        modes=st.none() | st.builds(Modes, autocast=st.none() | _names, grad=st.booleans(), training=st.none() | st.booleans()),
        slots=st.lists(_tensors, max_size=3).map(tuple),
        stack=st.lists(_frames, max_size=3).map(tuple),
        recompute=st.booleans(),
    )


class RunContract:
    """Tests for a reader: override `open_example` to return a run that has at least one record."""

    def open_example(self, folder: Path) -> Run:
        raise NotImplementedError

    def test_ranks_and_steps_ascend_and_are_not_empty(self, tmp_path: Path) -> None:
        run = self.open_example(tmp_path)
        assert run.ranks()
        assert list(run.ranks()) == sorted(set(run.ranks()))
        for rank in run.ranks():
            assert run.steps(rank)
            assert list(run.steps(rank)) == sorted(set(run.steps(rank)))

    def test_records_know_their_place_and_read_the_same_twice(self, tmp_path: Path) -> None:
        run = self.open_example(tmp_path)
        for rank in run.ranks():
            for step in run.steps(rank):
                records = list(run.records(rank, step))
                assert {(record.rank, record.step) for record in records} <= {(rank, step)}
                assert looks_alike(records, list(run.records(rank, step)))
                assert isinstance(run.is_complete(rank, step), bool)

    def test_kept_tensors_are_as_large_as_their_records_say(self, tmp_path: Path) -> None:
        run = self.open_example(tmp_path)
        for rank in run.ranks():
            for step in run.steps(rank):
                for record in run.records(rank, step):
                    for slot in record.slots:
                        if slot.content is not None:
                            data = run.tensor(rank, step, slot.content)
                            assert (data.dtype, data.shape) == (slot.dtype, slot.shape)
                            assert memoryview(data.buffer).nbytes == prod(slot.shape) * DTYPES[slot.dtype].size_bytes

    def test_what_is_not_there_is_an_input_error(self, tmp_path: Path) -> None:
        run = self.open_example(tmp_path)
        rank = run.ranks()[0]
        with pytest.raises(InputError, match="99"):
            list(run.records(99, 0))
        with pytest.raises(InputError, match="9876"):
            list(run.records(rank, 9876))
        with pytest.raises(InputError):
            run.tensor(rank, run.steps(rank)[0], "../../etc/passwd")

    def test_it_knows_its_path_its_maker_and_its_ledger(self, tmp_path: Path) -> None:
        run = self.open_example(tmp_path)
        assert isinstance(run.path, Path)
        assert isinstance(run.info, RunInfo)
        assert isinstance(run.ledger(run.ranks()[0]), tuple)


class StoreContract(RunContract):
    """Tests for a reader and its writer: override `create` to return a maker of a rank's sink and an opener of the run."""

    def create(self, folder: Path) -> tuple[Callable[[int], Sink], Callable[[], Run]]:
        raise NotImplementedError

    def open_example(self, folder: Path) -> Run:
        new_sink, open_run = self.create(folder)
        for rank in (0, 1):
            sink = new_sink(rank)
            for step in (0, 3):
                sink.begin_step(step)
                tensor = example_tensor(step, shape=(3, 4))
                content = sink.keep(tensor.dtype, tensor.shape, tensor.buffer)
                record = example_record(rank=rank, step=step)
                sink.write(replace(record, slots=(replace(record.slots[0], content=content),)))
            sink.close()
        return open_run()

    def write_step(self, folder: Path, records: Sequence[CallRecord]) -> Run:
        new_sink, open_run = self.create(folder)
        sink = new_sink(0)
        sink.begin_step(0)
        for record in records:
            sink.write(record)
        sink.close()
        return open_run()

    @given(st.lists(call_records(), max_size=4))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
    def test_any_record_comes_back(self, records: list[CallRecord]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = self.write_step(Path(folder), records)
            assert looks_alike(list(run.records(0, 0)), records)

    @pytest.mark.parametrize("dtype", sorted(DTYPES))
    @pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (7, 129, 11)])
    def test_any_tensor_comes_back(self, tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        new_sink, open_run = self.create(tmp_path)
        tensor = example_tensor(1, shape, dtype)
        sink = new_sink(0)
        sink.begin_step(0)
        content = sink.keep(dtype, shape, tensor.buffer)
        assert content is not None
        back = open_run().tensor(0, 0, content)
        sink.close()
        assert (back.dtype, back.shape, bytes(back.buffer)) == (dtype, shape, tensor.buffer)
        assert memoryview(back.buffer).readonly

    def test_the_buffer_may_change_after_keep(self, tmp_path: Path) -> None:
        new_sink, open_run = self.create(tmp_path)
        sink = new_sink(0)
        sink.begin_step(0)
        values = np.arange(10_000, dtype=np.int64)
        content = sink.keep("int64", (10_000,), values)
        assert content is not None
        before = values.tobytes()
        values[:] = 0
        sink.close()
        assert bytes(open_run().tensor(0, 0, content).buffer) == before

    def test_equal_bytes_read_as_each_wants_them(self, tmp_path: Path) -> None:
        new_sink, open_run = self.create(tmp_path)
        sink = new_sink(0)
        sink.begin_step(0)
        zeros = bytes(24)
        wanted: list[tuple[str, tuple[int, ...]]] = [("float32", (2, 3)), ("float32", (6,)), ("int64", (3,))]
        contents = [sink.keep(dtype, shape, zeros) for dtype, shape in wanted]
        sink.close()
        assert None not in contents
        read = [open_run().tensor(0, 0, str(content)) for content in contents]
        assert [(data.dtype, data.shape) for data in read] == wanted

    def test_a_tensor_of_the_wrong_size_is_refused(self, tmp_path: Path) -> None:
        new_sink, _ = self.create(tmp_path)
        sink = new_sink(0)
        sink.begin_step(0)
        with pytest.raises(ValueError, match="12 bytes"):
            sink.keep("float32", (4,), bytes(12))
        sink.close()

    def test_a_run_can_be_read_while_it_is_written(self, tmp_path: Path) -> None:
        new_sink, open_run = self.create(tmp_path)
        sink = new_sink(0)
        sink.begin_step(0)
        run = open_run()
        for order in range(3):
            sink.write(example_record(order))
            content = sink.keep("uint8", (3,), bytes([order] * 3))
            assert [record.order for record in run.records(0, 0)] == list(range(order + 1))
            assert content is not None
            assert bytes(run.tensor(0, 0, content).buffer) == bytes([order] * 3)
        assert not run.is_complete(0, 0)
        sink.end_step()
        assert run.is_complete(0, 0)

    def test_beginning_a_step_closes_the_one_before(self, tmp_path: Path) -> None:
        new_sink, open_run = self.create(tmp_path)
        sink = new_sink(0)
        sink.begin_step(0)
        sink.begin_step(7)
        assert open_run().steps(0) == (0, 7)
        assert (open_run().is_complete(0, 0), open_run().is_complete(0, 7)) == (True, False)
        sink.close()
        sink.close()
        assert open_run().is_complete(0, 7)

    def test_a_step_is_never_written_over(self, tmp_path: Path) -> None:
        new_sink, open_run = self.create(tmp_path)
        sink = new_sink(0)
        sink.begin_step(0)
        sink.write(example_record())
        with pytest.raises(OSError):
            sink.begin_step(0)
        sink.close()
        assert len(list(open_run().records(0, 0))) == 1

    def test_equal_ledger_entries_are_counted(self, tmp_path: Path) -> None:
        new_sink, open_run = self.create(tmp_path)
        sink = new_sink(0)
        for step in range(5):
            sink.note(LedgerEntry(what="a call was not recorded", why="no reason", step=step, call="mul.0"))
        sink.note(LedgerEntry(what="another", why="disk", count=2))
        sink.close()
        assert open_run().ledger(0) == (
            LedgerEntry(what="a call was not recorded", why="no reason", step=0, call="mul.0", count=5),
            LedgerEntry(what="another", why="disk", count=2),
        )

    def test_equal_stacks_come_back_for_each_record(self, tmp_path: Path) -> None:
        records = [example_record(order, stack=(Frame("a.py", order % 2, "f"),)) for order in range(6)]
        assert [record.stack for record in self.write_step(tmp_path, records).records(0, 0)] == [record.stack for record in records]
