# SPDX-License-Identifier: Apache-2.0
"""A failing disk raises OSError, costs only the writes that it refused, and never spoils earlier ones."""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ulpscope.model import LedgerEntry, RunInfo
from ulpscope.store import DirectorySink, create_run, open_run
from ulpscope.testing.stores import example_record, example_tensor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return create_run(tmp_path / "run", RunInfo())


def write_order(sink: DirectorySink, step: int, order: int) -> None:
    """Write a tensor and the record that names it, as capture does: a tensor that cannot be kept is None."""
    tensor = example_tensor(100 * step + order, (40, 40))
    content = None
    with suppress(OSError):
        content = sink.keep(tensor.dtype, tensor.shape, tensor.buffer)
    record = example_record(order, step=step)
    slot = record.slots[0].__class__(slot=record.slots[0].slot, dtype=tensor.dtype, shape=tensor.shape, content=content)
    sink.write(example_record(order, step=step, slots=(slot,)))


def readable(path: Path, step: int) -> list[int]:
    """Return the orders that can be read, after checking every tensor they name."""
    run = open_run(path)
    orders = []
    for record in run.records(0, step):
        for slot in record.slots:
            if slot.content is not None:
                expected = example_tensor(100 * step + record.order, (40, 40)).buffer
                assert bytes(run.tensor(0, step, slot.content).buffer) == expected
        orders.append(record.order)
    return orders


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_real_limit_on_files_leaves_a_prefix(path: Path) -> None:
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    write_order(sink, 0, 0)
    sink.begin_step(1)
    with largest_file(2000):
        failures = 0
        for order in range(20):
            try:
                write_order(sink, 1, order)
            except OSError:
                failures += 1
        with pytest.raises(OSError, match="earlier failure"):
            sink.end_step()
    sink.begin_step(2)
    write_order(sink, 2, 0)
    sink.close()
    run = open_run(path)
    assert readable(path, 0) == [0]
    assert readable(path, 1) == list(range(20 - failures))
    assert 0 < failures < 20
    assert readable(path, 2) == [0]
    assert [run.is_complete(0, step) for step in range(3)] == [True, False, True]


def test_a_real_limit_on_shards_stops_tensors_and_not_records(path: Path) -> None:
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    with largest_file(80_000):
        for order in range(9):
            write_order(sink, 0, order)
        sink.end_step()
    sink.close()
    run = open_run(path)
    kept = [record.slots[0].content is not None for record in run.records(0, 0)]
    assert kept == [True, True] + [False] * 7
    assert readable(path, 0) == list(range(9))
    assert run.is_complete(0, 0)


@pytest.mark.parametrize("how", ["nothing", "half"])
def test_the_disk_may_fill_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    true_write = os.write
    failed_at_last = True
    for failing in range(1000):
        count = -1

        def failing_write(fd: int, data: bytes | memoryview, failing: int = failing) -> int:
            nonlocal count
            count += 1
            if count < failing or count > failing + 6:
                return true_write(fd, data)
            if count == failing and how == "half" and len(data) > 1:
                return true_write(fd, memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        path = create_run(tmp_path / f"run-at-{failing}", RunInfo())
        monkeypatch.setattr(os, "write", failing_write)
        sink = DirectorySink(path, 0)
        for step in range(2):
            with suppress(OSError):
                sink.begin_step(step)
            for order in range(3):
                with suppress(OSError):
                    write_order(sink, step, order)
                with suppress(OSError):
                    sink.note(LedgerEntry(what="w", why="y"))
        with suppress(OSError):
            sink.close()
        monkeypatch.undo()
        failed_at_last = count >= failing
        if not failed_at_last:
            break
        run = open_run(path)
        for step in run.steps(0):
            assert readable(path, step) == list(range(len(readable(path, step))))
            assert not run.is_complete(0, step) or readable(path, step) == [0, 1, 2]
        sink.close()
        assert sum(entry.count for entry in run.ledger(0) if entry.what == "w") == 6
    assert not failed_at_last
    assert failing > 10


def test_a_step_that_cannot_be_closed_does_not_stop_the_next(path: Path) -> None:
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    with largest_file(1):
        with suppress(OSError):
            sink.write(example_record())
        with pytest.raises(OSError):
            sink.begin_step(1)
    sink.begin_step(2)
    sink.write(example_record(step=2))
    sink.close()
    run = open_run(path)
    assert run.is_complete(0, 2)
    assert [(entry.what, entry.step) for entry in run.ledger(0)] == [("a step could not be completed", 0)]


def test_a_vanished_run_is_told_when_the_step_ends(path: Path) -> None:
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    sink.write(example_record())
    shutil.rmtree(path)
    with pytest.raises(FileNotFoundError, match="removed while it was being written"):
        sink.end_step()
    with pytest.raises(FileNotFoundError):
        sink.begin_step(1)
    with pytest.raises(OSError, match="earlier failure"):
        sink.write(example_record())
    with pytest.raises(OSError, match="earlier failure"):
        sink.keep("uint8", (1,), b"x")
    with pytest.raises(FileNotFoundError):
        sink.note(LedgerEntry(what="w", why="y"))
    assert not path.exists()


def test_a_ledger_entry_that_found_no_room_is_tried_again(path: Path) -> None:
    sink = DirectorySink(path, 0)
    (path / "rank00000" / "ledger.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        sink.note(LedgerEntry(what="w", why="y"))
    (path / "rank00000" / "ledger.jsonl").rmdir()
    sink.close()
    assert [entry.what for entry in open_run(path).ledger(0)] == ["w"]


def test_failing_again_and_again_costs_no_memory(path: Path) -> None:
    import tracemalloc

    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    record = example_record()
    with largest_file(1):
        tracemalloc.start()
        try:
            sizes = []
            for _ in range(2):
                for _ in range(1000):
                    with suppress(OSError):
                        sink.write(record)
                gc.collect()  # what waits for the collector is not kept
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    with suppress(OSError):
        sink.close()
    assert sizes[1] - sizes[0] < 20_000
