# SPDX-License-Identifier: Apache-2.0
"""Native runs whose bytes were cut, flipped or invented: one sentence or the part that is whole, never anything else."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.errors import DamagedRunError, InputError, NewerFormatError
from ulpscope.model import CallRecord, RunInfo
from ulpscope.store import DirectoryRun, DirectorySink, create_run, open_run
from ulpscope.testing.stores import example_record, example_tensor

STEP = Path("rank00000/step00000")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a complete step of three records, each with a tensor."""
    path = create_run(tmp_path / "run", RunInfo())
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    for order in range(3):
        tensor = example_tensor(order, (5, order))
        slot = replace(example_record().slots[0], shape=(5, order), content=sink.keep("float32", (5, order), tensor.buffer))
        sink.write(example_record(order, slots=(slot,)))
    sink.end_step()
    return path


def orders(path: Path) -> list[int]:
    return [record.order for record in open_run(path).records(0, 0)]


def tensors(path: Path, records: list[CallRecord]) -> list[bytes]:
    run = DirectoryRun(path)
    return [bytes(run.tensor(0, 0, str(record.slots[0].content)).buffer) for record in records]


def frame(*body: Any) -> bytes:
    data = msgspec.msgpack.encode(body)
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


# ---- cut and flipped


def test_records_cut_anywhere_give_what_is_whole(path: Path) -> None:
    file = path / STEP / "records.msgpack"
    whole = file.read_bytes()
    seen = set()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        read = orders(path)
        assert read == list(range(len(read)))
        assert not open_run(path).is_complete(0, 0)
        seen.add(len(read))
    assert seen == {0, 1, 2, 3}


def test_a_flipped_byte_in_a_complete_step_is_named_with_file_and_place(path: Path) -> None:
    file = path / STEP / "records.msgpack"
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        if position < len(whole) - 20:
            with pytest.raises(DamagedRunError, match=rf"{re.escape(str(file))} is damaged at byte \d+: "):
                orders(path)
        else:  # the end frame itself: the step is then one that was never closed
            assert orders(path) == [0, 1, 2]
            assert not open_run(path).is_complete(0, 0)


def test_a_flipped_byte_in_an_unfinished_step_ends_it_there(path: Path) -> None:
    file = path / STEP / "records.msgpack"
    whole = file.read_bytes()[:-20]
    for position in range(0, len(whole), 3):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        read = orders(path)
        assert read == list(range(len(read)))
        assert len(read) < 3


@pytest.mark.parametrize("name", ["tensors.journal", "tensors-0000.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_tensors_are_true_or_refused(path: Path, name: str, damage: str) -> None:
    records = list(open_run(path).records(0, 0))
    expected = tensors(path, records)
    file = path / STEP / name
    whole = file.read_bytes()
    refused = 0
    first = 65_500 if name.startswith("tensors-") else 0
    for position in range(first, len(whole)):
        flipped = bytes([whole[position] ^ 0x55]) + whole[position + 1 :]
        file.write_bytes(whole[:position] + (flipped if damage == "flip" else b""))
        problem = ""
        try:
            assert tensors(path, records) == expected
        except DamagedRunError as error:
            problem = str(error)
        refused += bool(problem)
        assert not problem or str(path / STEP) in problem
        assert orders(path) == [0, 1, 2]
    assert refused > 50


@pytest.mark.parametrize("name", ["tensors.journal", "tensors-0000.safetensors"])
def test_a_missing_file_is_named(path: Path, name: str) -> None:
    records = list(open_run(path).records(0, 0))
    (path / STEP / name).unlink()
    with pytest.raises(DamagedRunError, match=rf"{name} is missing"):
        tensors(path, records)


# ---- invented


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, (64 << 20) + 1, 1 << 20])
def test_a_lying_length_costs_no_memory(path: Path, length: int) -> None:
    file = path / STEP / "records.msgpack"
    file.write_bytes(file.read_bytes()[:-20] + struct.pack("<II", length, 0) + b"x" * 50)
    tracemalloc.start()
    try:
        assert orders(path) == [0, 1, 2]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


CALL = (2, 0, "mul", 0, "forward", "api", "", "", None, None, [], None, False)


def with_field(number: int, value: Any) -> bytes:
    return frame(*CALL[:number], value, *CALL[number + 1 :])


SLOT = (("input", (0,)), "float32", (2,))
BAD_FRAMES = {
    "an unknown phase": with_field(4, "sideways"),
    "a negative count": with_field(3, -1),
    "an empty operation": with_field(2, ""),
    "text for a number": with_field(1, "one"),
    "an untold stack": with_field(11, 5),
    "a record too short": frame(*CALL[:5]),
    "a negative shape": with_field(10, [(("input", (0,)), "float32", (-2,))]),
    "an unknown role": with_field(10, [(("outlet", ()), "float32", (2,))]),
    "a huge integer": with_field(10, [(*SLOT, None, "", False, (-5,))]),
    "no array": struct.pack("<II", 1, zlib.crc32(b"\x01")) + b"\x01",
    "an empty body": struct.pack("<II", 0, 0),
    "an empty array": frame(),
    "broken MessagePack": struct.pack("<II", 2, zlib.crc32(b"\x92\xc1")) + b"\x92\xc1",
    "bad UTF-8": struct.pack("<II", 4, zlib.crc32(b"\x92\x01\xa1\xff")) + b"\x92\x01\xa1\xff",
    "bad UTF-8 in a stack": struct.pack("<II", 10, zlib.crc32(b"\x93\x01\x00\x91\x94\xa1\xff\x01\xa0\xa0"))
    + b"\x93\x01\x00\x91\x94\xa1\xff\x01\xa0\xa0",
    "an array that claims four billion": struct.pack("<II", 5, zlib.crc32(b"\xdd\xff\xff\xff\xff")) + b"\xdd\xff\xff\xff\xff",
    "bottomless nesting": struct.pack("<II", 200_000, zlib.crc32(b"\x91" * 200_000)) + b"\x91" * 200_000,
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_frame_that_makes_no_sense_is_damage(path: Path, what: str) -> None:
    file = path / STEP / "records.msgpack"
    file.write_bytes(file.read_bytes()[:-20] + BAD_FRAMES[what])
    with pytest.raises(DamagedRunError, match=r"records\.msgpack is damaged at byte \d+"):
        orders(path)


@given(st.binary(max_size=60))
def test_any_body_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    path = create_run(tmp_path_factory.mktemp("any") / "run", RunInfo())
    (path / STEP).mkdir(parents=True)
    (path / STEP / "records.msgpack").write_bytes(frame(0, 1, 0, 0) + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    with suppress(InputError):
        assert len(orders(path)) <= 1


def test_an_end_that_counts_wrongly_is_damage(path: Path) -> None:
    file = path / STEP / "records.msgpack"
    body = struct.pack(">BBBIBI", 0x93, 3, 0xCE, 9, 0xCE, 0)
    file.write_bytes(file.read_bytes()[:-20] + struct.pack("<II", 12, zlib.crc32(body)) + body)
    with pytest.raises(DamagedRunError, match="should hold 9 records but holds 3"):
        orders(path)


def test_a_newer_file_in_an_older_run_is_refused(path: Path) -> None:
    (path / STEP / "records.msgpack").write_bytes(frame(0, 2, 0, 0))
    with pytest.raises(NewerFormatError, match="format version 2"):
        orders(path)


HASH = "d11372a3f8d4096998cd4bf727a9d2ae"
BAD_PLACES = {
    "behind the end": (HASH, "float32", [2], 0, 1 << 40, 8),
    "longer than the file": (HASH, "float32", [1 << 40], 0, 65536, 1 << 42),
    "in no shard": (HASH, "float32", [2], 10**18, 65536, 8),
    "of another size": (HASH, "float32", [2], 0, 65536, 9),
    "with other bytes": (HASH, "float32", [2], 0, 65540, 8),
    "before the beginning": (HASH, "float32", [2], 0, -8, 8),
    "under a name": (HASH, "float32", [2], "../../../etc/passwd", 0, 8),
}


@pytest.mark.parametrize("what", BAD_PLACES)
def test_a_tensor_listed_where_it_is_not(path: Path, what: str) -> None:
    place = BAD_PLACES[what]
    (path / STEP / "tensors.journal").write_bytes(frame(0, 1, 0, 0) + frame(4, *place))
    shape = "1099511627776" if what == "longer than the file" else "2"
    with pytest.raises(DamagedRunError):
        open_run(path).tensor(0, 0, f"{HASH}:float32:{shape}")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "../../etc/passwd",
        HASH,
        f"{HASH}:float32:2/../..",
        f"{HASH}:float32:-2",
        f"{HASH}:float32:2\n",
        f"{HASH}:float32:" + "9" * 400,
        "x" * 10**6,
    ],
)
def test_a_key_that_is_none(path: Path, content: str) -> None:
    with pytest.raises(InputError, match="is not the key of a kept tensor") as caught:
        open_run(path).tensor(0, 0, content)
    assert len(str(caught.value)) < 300


def test_a_dtype_that_does_not_exist(path: Path) -> None:
    (path / STEP / "tensors.journal").write_bytes(frame(0, 1, 0, 0) + frame(4, HASH, "float7", [2], 0, 65536, 8))
    with pytest.raises(DamagedRunError, match="'float7', which is none that we know"):
        open_run(path).tensor(0, 0, f"{HASH}:float7:2")


# ---- run.json and names


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"3",
        b"[" * 100_000,
        b'{"format": "ulpscope", "world_size": "many"}',
        b'{"format": "ulpscope", "command": 3}',
        b'{"format_version": null}',
    ],
)
def test_a_description_that_is_none(path: Path, text: bytes) -> None:
    (path / "run.json").write_bytes(text)
    with pytest.raises(InputError, match=r"run\.json"):
        open_run(path)


def test_unknown_fields_of_a_description_are_passed_over(path: Path) -> None:
    values = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(values | {"weather": "fine"}))
    assert open_run(path).info == RunInfo()


def test_folders_that_only_look_like_ranks_are_passed_over(path: Path) -> None:
    for name in ("rank1", "rank000001", "rank0000x", "rank00001.bak", "rank٠٠٠٠١", "rank-0001", "rank00002 "):
        (path / name / "step00000").mkdir(parents=True)
    (path / "rank00007").touch()
    (path / "rank00000" / "step1").mkdir()
    (path / "rank00000" / "step00009").mkdir()
    assert open_run(path).ranks() == (0,)
    assert open_run(path).steps(0) == (0,)


def fifo(file: Path) -> None:
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize("make", [fifo, folder])
@pytest.mark.parametrize("name", ["records.msgpack", "tensors.journal", "tensors-0000.safetensors"])
def test_what_is_no_file_is_not_waited_for(path: Path, name: str, make: Callable[[Path], None]) -> None:
    records = list(open_run(path).records(0, 0))
    (path / STEP / name).unlink()
    make(path / STEP / name)
    with pytest.raises(DamagedRunError, match=f"{name} should be a file"):
        _ = orders(path), tensors(path, records)


def test_a_pipe_for_a_description_is_not_waited_for(path: Path) -> None:
    (path / "run.json").unlink()
    os.mkfifo(path / "run.json")
    with pytest.raises(InputError):
        open_run(path)
