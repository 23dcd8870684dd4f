# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ulpscope.errors import InputError, NewerFormatError
from ulpscope.model import (
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
    TensorRecord,
)
from ulpscope.store import DirectoryRun, DirectorySink, create_run, open_run
from ulpscope.store.native import shards
from ulpscope.testing.stores import StoreContract, example_record, example_tensor, looks_alike


class TestDirectory(StoreContract):
    def create(self, folder: Path) -> tuple[Callable[[int], Sink], Callable[[], Run]]:
        path = create_run(folder / "run", RunInfo(tool="test"))
        return lambda rank: DirectorySink(path, rank), lambda: open_run(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return create_run(tmp_path / "run", RunInfo())


def one_step(path: Path, *orders: int) -> DirectorySink:
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    for order in orders:
        sink.write(example_record(order))
    return sink


# ---- folders


def test_what_made_a_run_comes_back(tmp_path: Path) -> None:
    info = RunInfo(tool="ulpscope 1", command=("train.py", "--lr", "1"), versions={"torch": "2"}, devices=("cpu",), world_size=2, seed=3)
    assert open_run(create_run(tmp_path / "a", info)).info == info


def test_odd_options_and_names_do_not_stop_a_run(tmp_path: Path) -> None:
    info = RunInfo(command=("caf\udce9.py",), options={"select": {Path("x")}, "depth": object, "limit": 1e400})
    read = open_run(create_run(tmp_path / "a", info)).info
    assert read.command == ("caf\\udce9.py",)
    assert read.options["select"] == ["x"]


def test_a_folder_with_a_run_is_left_alone(tmp_path: Path) -> None:
    made = [create_run(tmp_path / "deep" / "run", RunInfo(seed=seed)) for seed in range(3)]
    assert [path.name for path in made] == ["run", "run-2", "run-3"]
    assert [open_run(path).info.seed for path in made] == [0, 1, 2]
    assert sorted(entry.name for entry in made[0].iterdir()) == ["run.json"]


@pytest.mark.parametrize("name", ["rank00000", "step0", "dump.json", "run.json"])
def test_somebody_elses_dump_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).touch()
    assert create_run(tmp_path / "run", RunInfo()).name == "run-2"


def test_a_folder_without_a_run_is_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert create_run(tmp_path, RunInfo()) == tmp_path


def test_a_file_in_the_way_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(NotADirectoryError, match="a file of that name is in the way"):
        create_run(tmp_path / "run", RunInfo())


def test_the_folder_one_stands_in_can_be_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert create_run(".", RunInfo()).resolve() == tmp_path / "here"
    assert create_run(".", RunInfo()).resolve() == tmp_path / "here-2"


def test_the_processes_of_one_launch_share_a_folder(tmp_path: Path) -> None:
    first = create_run(tmp_path / "run", RunInfo(seed=1), launch="a")
    DirectorySink(first, 0)
    assert create_run(tmp_path / "run", RunInfo(seed=2), launch="a") == first
    assert create_run(tmp_path / "run", RunInfo(seed=3), launch="b").name == "run-2"
    assert create_run(tmp_path / "run", RunInfo(seed=4), launch="b").name == "run-2"
    assert create_run(tmp_path / "run", RunInfo(seed=5)).name == "run-3"
    assert [open_run(tmp_path / name).info.seed for name in ("run", "run-2", "run-3")] == [1, 3, 5]


@pytest.mark.parametrize(("launch", "num_folders"), [(None, 8), ("a", 1)])
def test_processes_that_start_at_once_do_not_disturb_each_other(tmp_path: Path, launch: str | None, num_folders: int) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(create_run(tmp_path / "run", RunInfo(), launch=launch))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == num_folders
    assert all(open_run(path).info.tool == "" for path in made)
    assert not list(tmp_path.rglob(".run.json*"))


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert [create_run(tmp_path / "run", RunInfo(seed=seed)).name for seed in range(2)] == ["run", "run-2"]
    assert open_run(tmp_path / "run").info.seed == 0


def test_files_are_closed_to_strangers(path: Path) -> None:
    umask = os.umask(0o022)
    try:
        sink = one_step(create_run(path, RunInfo()), 0)
        sink.keep("uint8", (1,), b"x")
        sink.note(LedgerEntry(what="w", why="y"))
        sink.close()
    finally:
        os.umask(umask)
    root = path.with_name("run-2")
    modes = {entry.relative_to(root).as_posix(): stat.S_IMODE(entry.stat().st_mode) for entry in [root, *root.rglob("*")]}
    assert {name for name, mode in modes.items() if mode not in (0o640, 0o750)} == set()
    assert len(modes) == 9


# ---- records


def test_exact_bytes_of_a_tiny_step(path: Path) -> None:
    sink = DirectorySink(path, 2)
    sink.begin_step(7)
    content = sink.keep("float32", (2,), np.array([1.0, -2.0], np.float32))
    slot = TensorRecord(
        slot=Slot("input", (0,)),
        dtype="float32",
        shape=(2,),
        strides=(1,),
        device="cpu",
        summary=Summary(2, -2.0, 1.0, -0.5, 1.5, 0, 0, 0, 0, 0),
        fingerprint="u1:00",
        content=content,
    )
    record = CallRecord(
        rank=2,
        step=7,
        order=4,
        call=CallName("mul", 1),
        phase="forward",
        module="m",
        arguments=Arguments(args=({"$tensor": "input.0"}, 2)),
        modes=Modes(training=True),
        slots=(slot,),
        stack=(Frame("t.py", 3, "f", "x"),),
    )
    sink.write(record)
    sink.close()
    step = path / "rank00002" / "step00007"
    hash = b"d11372a3f8d4096998cd4bf727a9d2ae"
    start = bytes.fromhex("05000000dbeb344f") + b"\x94\x00\x01\x02\x07"
    assert (step / "records.msgpack").read_bytes() == b"".join(
        [
            start,
            bytes.fromhex("0f00000009a85af9") + b"\x93\x01\x00\x91\x94\xa4t.py\x03\xa1f\xa1x",
            bytes.fromhex("ae0000006fdf253c") + b"\x9d\x02\x04\xa3mul\x01\xa7forward\xa3api\xa1m\xa0",
            b"\x92\x92\x81\xa7$tensor\xa7input.0\x02\xc0" + b"\x95\xc0\xc3\xc2\xc3\xc2",
            b"\x91\x9a\x92\xa5input\x91\x00\xa7float32\x91\x02\x91\x01\xa3cpu\xc2",
            b"\x9a\x02" + b"".join(b"\xcb" + struct.pack(">d", value) for value in (-2.0, 1.0, -0.5, 1.5)) + bytes(5),
            b"\xa5u1:00\xd9*" + hash + b":float32:2\xa0" + b"\x00\xc2",
            bytes.fromhex("0c000000197b7e75") + b"\x93\x03\xce\x00\x00\x00\x01\xce\x00\x00\x00\x01",
        ]
    )
    assert (step / "tensors.journal").read_bytes() == b"".join(
        [start, bytes.fromhex("35000000501b7406"), b"\x97\x04\xd9 " + hash + b"\xa7float32\x91\x02\x00\xce\x00\x01\x00\x00\x08"]
    )
    header = b'{"__metadata__":{"format":"ulpscope"},"' + hash + b'":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert (step / "tensors-0000.safetensors").read_bytes() == struct.pack("<Q", 65528) + header.ljust(65528) + struct.pack("<2f", 1, -2)


def test_rare_values_are_written_all_the_same(path: Path) -> None:
    deep: list[object] = []
    deep.append(deep)
    sink = one_step(path)
    for args in ((10**30, -(2**63) - 1, True), ("\ud800 lone",), (deep,), (object,), ({1: 2},)):
        sink.write(example_record(arguments=Arguments(args=args)))
    sink.close()
    read = [record.arguments.args for record in open_run(path).records(0, 0) if record.arguments]
    assert read[0] == ({"$int": str(10**30)}, {"$int": str(-(2**63) - 1)}, True)
    assert read[1] == ("\\ud800 lone",)
    assert read[3][0]["$object"] == "builtins.type"
    assert read[4] == ({1: 2},)


def test_a_stack_is_told_once(path: Path) -> None:
    sink = one_step(path)
    for order in range(50):
        sink.write(example_record(order, stack=(Frame("once.py", 1, "f", "a rather particular line"),)))
    sink.close()
    assert (path / "rank00000/step00000/records.msgpack").read_bytes().count(b"a rather particular line") == 1
    assert {record.stack[0].file for record in open_run(path).records(0, 0)} == {"once.py"}


def test_a_run_without_its_description_still_reads(path: Path) -> None:
    one_step(path, 0, 1).close()
    (path / "run.json").unlink()
    run = open_run(path)
    assert run.info == RunInfo()
    assert len(list(run.records(0, 0))) == 2


def test_a_copied_rank_takes_the_number_of_its_folder(path: Path) -> None:
    one_step(path, 0).close()
    (path / "rank00000").rename(path / "rank00004")
    assert [record.rank for record in open_run(path).records(4, 0)] == [4]


def test_frames_of_a_later_writer_are_passed_over(path: Path) -> None:
    from ulpscope.format import frames

    sink = one_step(path, 0)
    assert sink._step is not None
    sink._step._records.append(frames._frame(frames._encode((77, "an addition"))))
    sink.write(example_record(1))
    sink.close()
    assert [record.order for record in open_run(path).records(0, 0)] == [0, 1]


def test_a_newer_format_is_refused(path: Path) -> None:
    values = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(values | {"format_version": 2, "seed": {"new": "shape"}}))
    with pytest.raises(NewerFormatError, match=r"has format version 2; this ulpscope reads up to 1: pip install -U ulpscope"):
        open_run(path)


def test_files_of_somebody_else_are_said_to_be_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_step(path, 0).close()

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    run = open_run(path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="open to their owner and group only"):
        list(run.records(0, 0))


# ---- tensors


def test_shards_are_plain_safetensors_files(path: Path) -> None:
    sink = one_step(path)
    arrays = {name: np.arange(5).astype(name) for name in ("float64", "float32", "float16", "int32", "uint8", "bool")}
    keys = {name: sink.keep(name, (5,), array) for name, array in arrays.items()}
    complex_key = sink.keep("complex64", (2,), np.array([1j, 2], np.complex64))
    sink.close()
    loaded = load_file(path / "rank00000/step00000/tensors-0000.safetensors")
    for name, key in keys.items():
        np.testing.assert_array_equal(loaded[str(key).partition(":")[0]], arrays[name])
    assert loaded[str(complex_key).partition(":")[0]].dtype == np.uint8


def test_tensors_lie_aligned(path: Path) -> None:
    sink = one_step(path)
    keys = [sink.keep("uint8", (200_000 + size,), bytes([size]) * (200_000 + size)) for size in range(9)]
    run = open_run(path)
    for key in keys:
        array = np.frombuffer(run.tensor(0, 0, str(key)).buffer, np.uint8)
        assert array.ctypes.data % 8 == 0


def test_equal_tensors_of_a_step_are_stored_once(path: Path) -> None:
    sink = one_step(path)
    data = example_tensor(0, (1000, 1000))
    sink.keep(data.dtype, data.shape, data.buffer)
    once = sink.num_bytes
    for _ in range(5):
        sink.keep(data.dtype, data.shape, data.buffer)
    assert sink.num_bytes == once
    sink.begin_step(1)
    key = sink.keep(data.dtype, data.shape, data.buffer)
    sink.close()
    assert bytes(open_run(path).tensor(0, 1, str(key)).buffer) == data.buffer


def test_a_shard_is_rotated_before_its_header_fills(path: Path) -> None:
    sink = one_step(path)
    keys = [sink.keep("int32", (1,), order.to_bytes(4, "little")) for order in range(2000)]
    sink.close()
    files = sorted((path / "rank00000/step00000").glob("*.safetensors"))
    assert len(files) > 2
    assert sum(1 for file in files for name in load_file(file) if not name.startswith("padding")) == 2000
    run = open_run(path)
    assert [int.from_bytes(run.tensor(0, 0, str(key)).buffer, "little") for key in keys] == list(range(2000))


def test_a_shard_is_rotated_when_it_is_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_SIZE", 1 << 20)
    sink = one_step(path)
    keys = [sink.keep("uint8", (400_000,), bytes([order]) * 400_000) for order in range(7)]
    sink.close()
    files = sorted((path / "rank00000/step00000").glob("*.safetensors"))
    assert [len(load_file(file)) for file in files] == [3, 3, 1]
    assert [open_run(path).tensor(0, 0, str(key)).buffer[0] for key in keys] == list(range(7))


def test_the_size_limit_stops_tensors_and_nothing_else(path: Path) -> None:
    sink = DirectorySink(path, 0, max_bytes=200_000)
    kept = []
    for step in range(3):
        sink.begin_step(step)
        for seed in range(4):
            kept.append(sink.keep("uint8", (60_000,), example_tensor(10 * step + seed, (60_000,), "uint8").buffer))
            sink.write(example_record(seed, step=step))
    sink.close()
    run = open_run(path)
    assert [key is not None for key in kept] == [True, True] + [False] * 10
    assert [len(list(run.records(0, step))) for step in range(3)] == [4, 4, 4]
    assert [(entry.what, entry.step, entry.count) for entry in run.ledger(0)] == [("tensors were no longer kept", 0, 1)]
    assert "max_bytes=200000" in run.ledger(0)[0].why


def test_a_tensor_stored_before_the_limit_is_still_named(path: Path) -> None:
    sink = DirectorySink(path, 0, max_bytes=70_000)
    sink.begin_step(0)
    first = sink.keep("uint8", (3,), b"abc")
    assert sink.keep("uint8", (9_000,), bytes(9_000)) is None
    assert sink.keep("uint8", (3,), b"abc") == first
    sink.close()


def test_views_outlive_the_run_and_hold_no_mapping_once_dropped(path: Path) -> None:
    sink = one_step(path)
    key = sink.keep("uint8", (8 << 20,), b"\x07" * (8 << 20))
    sink.close()
    run = DirectoryRun(path)
    view = run.tensor(0, 0, str(key)).buffer
    del run
    assert view[5] == 7
    if Path("/proc/self/maps").exists():
        mapped = lambda: "tensors-0000" in Path("/proc/self/maps").read_text()  # noqa: E731
        assert mapped()
        del view
        assert not mapped()


def test_what_is_held_stays_as_it_was_read(path: Path) -> None:
    """Tensors of medium size are read into memory that is used again, but not while somebody holds a view of it."""
    sink = one_step(path)
    keys = [str(sink.keep("uint8", (1 << 20,), bytes([number]) * (1 << 20))) for number in range(40)]
    sink.close()
    run = DirectoryRun(path)
    held = [run.tensor(0, 0, key).buffer for key in keys[:20]]
    for key in keys[20:]:
        run.tensor(0, 0, key)
    assert [view[0] for view in held] == [view[-1] for view in held] == list(range(20))


def test_writing_costs_no_memory_that_grows(path: Path) -> None:
    import tracemalloc

    sink = DirectorySink(path, 0)

    def steps(numbers: range) -> int:
        for step in numbers:
            sink.begin_step(step)
            for order in range(30):
                sink.keep("int64", (1,), (step * 100 + order).to_bytes(8, "little"))
                sink.write(example_record(order, stack=(Frame(f"{step}.py", order, "f"),)))
                sink.note(LedgerEntry(what="w", why="y", step=step))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = steps(range(140))  # 64 copies are put off; what they need is there by then
        after = steps(range(140, 200))
    finally:
        tracemalloc.stop()
    sink.end_step()
    assert after - before < 20_000


# ---- ledger


def test_a_flood_of_different_entries_stays_small(path: Path) -> None:
    sink = DirectorySink(path, 0)
    for number in range(3000):
        sink.note(LedgerEntry(what="w", why=f"reason {number}"))
    sink.note(LedgerEntry(what="w" * 10_000, why="reason 1\ud800"))
    sink.close()
    entries = open_run(path).ledger(0)
    assert len(entries) == 1001
    assert (entries[-1].what, entries[-1].count) == ("more things than the ledger lists", 2001)


def test_a_torn_ledger_line_is_passed_over(path: Path) -> None:
    sink = DirectorySink(path, 0)
    sink.note(LedgerEntry(what="first", why="y"))
    ledger = path / "rank00000" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"what":"torn\n\xff\n[1]\n')
    sink.note(LedgerEntry(what="second", why="y"))
    assert [entry.what for entry in open_run(path).ledger(0)] == ["first", "second"]


def test_write_before_begin_step_is_a_mistake_of_the_caller(path: Path) -> None:
    with pytest.raises(RuntimeError, match="before begin_step"):
        DirectorySink(path, 0).write(example_record())


def test_a_record_larger_than_a_frame_is_refused_and_the_rest_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ulpscope.format import frames

    monkeypatch.setattr(frames, "MAX_BODY", 2000)
    sink = one_step(path, 0)
    with pytest.raises(OSError, match="larger than the store takes"):
        sink.write(example_record(1, module="x" * 3000, stack=(Frame("new.py", 1, "f"),)))
    sink.write(example_record(2, stack=(Frame("new.py", 1, "f"),)))
    sink.close()
    assert looks_alike([record.order for record in open_run(path).records(0, 0)], [0, 2])
