# SPDX-License-Identifier: Apache-2.0
"""Tables that are made from an earlier step's: they hold what was recorded, and whatever does not fit is left to who reads all of it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.test_parquet import _signed, call_body, encoded, expected_rows, frame, tensor
from ulpscope.errors import UlpscopeError
from ulpscope.model import Arguments, CallRecord, RunInfo, Summary, TensorRecord
from ulpscope.store import DirectorySink, create_run
from ulpscope.store.native import frames, parquet, refilling
from ulpscope.testing.stores import example_record, looks_alike

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(refilling.KERNEL, "ulpscope_refill"), reason="the kernel is not built")

Records = Sequence[CallRecord]


@pytest.fixture
def molds(monkeypatch: pytest.MonkeyPatch) -> refilling.Molds:
    return fresh(monkeypatch)


def fresh(monkeypatch: pytest.MonkeyPatch) -> refilling.Molds:
    molds = refilling.Molds()
    monkeypatch.setattr(parquet, "_molds", molds)
    monkeypatch.setattr(parquet, "_last", {})
    return molds


@pytest.fixture
def read_whole(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Filled with the files whose columns were made one by one."""
    seen: list[Path] = []
    write = parquet._write_columns
    monkeypatch.setattr(parquet, "_write_columns", lambda pa, pq, records, draft: (seen.append(records), write(pa, pq, records, draft))[1])
    return seen


def journal(records: Records, step: int = 5) -> bytes:
    _, *calls = encoded(records)
    return b"".join([frames.encode_start(3, step), *calls, frames.encode_end(len(records), 0)])


def copied(folder: Path, data: bytes) -> list[dict[str, Any]]:
    (folder / "records.msgpack").write_bytes(data)
    assert parquet.write_parquet(folder / "records.msgpack", folder / "records.parquet")
    rows: list[dict[str, Any]] = pq.read_table(folder / "records.parquet").to_pylist()
    return rows


def step_of(numbers: Iterator[int] | None = None, **changes: Any) -> list[CallRecord]:
    """Calls with all that a mold has to look after: with and without slots, summaries, fingerprints, arguments of their own."""
    number = numbers or iter(range(10**6))
    slots: list[TensorRecord] = []
    for path in range(3):
        k = next(number)
        summary = Summary(6, -k / 7, k / 3, k * 1e-300, float("nan"), 0, 0, 0, k * 37, None if path else k)
        slots.append(tensor((path,), summary=summary, fingerprint=f"u1:{k:032x}"))
    slots.append(tensor((3,), summary=None, fingerprint=None, note="not seen"))
    shared = Arguments(args=(1, "x"))
    return [
        example_record(0, slots=(), arguments=Arguments(kwargs={"torch": f"{next(number):032x}"})),
        example_record(1, slots=tuple(slots), arguments=shared),
        example_record(2, slots=tuple(slots[::-1]), arguments=shared),
        example_record(3, slots=tuple(slots[:1]), arguments=None),
        example_record(4, slots=tuple(slots) * 5, arguments=Arguments(args=({"lr": 1 / (1 + next(number))},))),
    ]


def filled(folder: Path) -> None:
    """Two steps that resemble each other: the second is a mold from here on."""
    for step in range(2):
        copied(folder, journal(step_of(iter(range(100 * step, 10**6))), step))


def test_a_step_with_other_numbers_is_made_from_the_last(tmp_path: Path, molds: refilling.Molds, read_whole: list[Path]) -> None:
    for step in (0, 1, 2, 127, 128, 70_000, 3):
        records = step_of(iter(range(977 * step, 10**9)))
        assert looks_alike(copied(tmp_path, journal(records, step)), expected_rows(records, step=step))
    assert len(read_whole) == 2


def test_it_is_the_file_that_pyarrow_writes(tmp_path: Path, molds: refilling.Molds, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the words of one call, which may be followed by fewer spaces."""
    filled(tmp_path)
    records = [
        replace(record, arguments=Arguments(args=(1,))) if not record.slots else record for record in step_of(iter(range(500, 10**6)))
    ]
    made = [tmp_path / "records.parquet", tmp_path / "whole.parquet"]
    copied(tmp_path, journal(records, 9))
    made[0].rename(made[1])
    fresh(monkeypatch)
    copied(tmp_path, journal(records, 9))
    ours, theirs = (pq.read_metadata(path).row_group(0) for path in made)
    assert pq.read_table(made[0]).equals(pq.read_table(made[1])) or looks_alike(*(pq.read_table(path).to_pylist() for path in made))
    for k in range(ours.num_columns):
        one, other = ours.column(k).to_dict(), theirs.column(k).to_dict()
        assert (one["path_in_schema"], one["compression"], one["encodings"]) == (
            other["path_in_schema"],
            other["compression"],
            other["encodings"],
        )
        assert not one["is_stats_set"]


_reals = st.floats(allow_nan=True, width=64)
_some_counts = _signed.map(lambda number: number or 0)


@given(
    st.lists(
        st.tuples(_reals, _reals, _reals, _reals, _some_counts, _some_counts, st.binary(min_size=16, max_size=16)), min_size=6, max_size=6
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_number_of_any_width(tmp_path: Path, told: list[tuple[Any, ...]]) -> None:
    """Whether a mold fits or not; steps alternate between those that one fits and those of other widths."""
    with pytest.MonkeyPatch.context() as patch:
        fresh(patch)
        filled(tmp_path)
        base = step_of()
        for _ in range(2):
            made = iter(told * 20)
            records = [replace(record, slots=tuple(with_numbers(slot, next(made)) for slot in record.slots)) for record in base]
            assert looks_alike(copied(tmp_path, journal(records, 8)), expected_rows(records, step=8))


def with_numbers(slot: TensorRecord, told: tuple[Any, ...]) -> TensorRecord:
    if slot.summary is None:
        return slot
    *reals, zero, subnormal, fingerprint = told
    summary = Summary(6, *reals, 0, 0, 0, zero, None if slot.summary.num_subnormal is None else subnormal)
    return replace(slot, summary=summary, fingerprint=f"u1:{fingerprint.hex()}")


def one_slot(records: list[CallRecord], **changes: Any) -> list[CallRecord]:
    first, second, *others = records
    return [first, replace(second, slots=(replace(second.slots[0], **changes), *second.slots[1:])), *others]


def one_call(records: list[CallRecord], number: int, **changes: Any) -> list[CallRecord]:
    return [replace(record, **changes) if record.order == number else record for record in records]


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(step_of()[:-1], id="fewer calls"),
        pytest.param([*step_of(), example_record(5)], id="more calls"),
        pytest.param(one_slot(step_of(), shape=(3, 2)), id="another shape"),
        pytest.param(one_slot(step_of(), summary=None), id="no summary"),
        pytest.param(one_slot(step_of(), summary=Summary(6, None, 1.0, 2.0, 3.0, 0, 0, 0, 1, 1)), id="no minimum"),
        pytest.param(one_slot(step_of(), summary=Summary(6, 0.0, 1.0, 2.0, 3.0, 0, 0, 0, -1, 1)), id="a negative count"),
        pytest.param(one_slot(step_of(), summary=Summary(6, 0.0, 1.0, 2.0, 3.0, 1, 0, 0, 1, 1)), id="not a number"),
        pytest.param(one_slot(step_of(), fingerprint=None), id="no fingerprint"),
        pytest.param(one_slot(step_of(), fingerprint="u1:00"), id="a short fingerprint"),
        pytest.param(one_slot(step_of(), fingerprint="ü" * 17 + "x"), id="a fingerprint that is not ASCII"),
        pytest.param(one_slot(step_of(), content="0f" * 16), id="content"),
        pytest.param(one_slot(step_of(), note="n"), id="a note"),
        pytest.param(one_call(step_of(), 1, arguments=Arguments(args=(2,))), id="arguments that were shared"),
        pytest.param(one_call(step_of(), 3, arguments=Arguments(args=(2,))), id="arguments where there were none"),
        pytest.param(one_call(step_of(), 4, arguments=None), id="no arguments where there were some"),
        pytest.param(one_call(step_of(), 4, arguments=Arguments(args=("x" * 2000,))), id="longer arguments than there is room for"),
        pytest.param(one_call(step_of(), 2, stack=()), id="another stack"),
        pytest.param(one_call(step_of(), 2, recompute=False), id="no recompute"),
        pytest.param(one_call(step_of(), 2, module="other"), id="another module"),
    ],
)
def test_what_differs_otherwise_is_read_whole(
    tmp_path: Path, molds: refilling.Molds, read_whole: list[Path], records: list[CallRecord]
) -> None:
    filled(tmp_path)
    del read_whole[:]
    assert looks_alike(copied(tmp_path, journal(records)), expected_rows(records))
    assert len(read_whole) == 1
    after = step_of(iter(range(50, 10**6)))
    assert looks_alike(copied(tmp_path, journal(after)), expected_rows(after))


@pytest.mark.parametrize(
    "arguments",
    [
        Arguments(),
        Arguments(args=("x" * 400,)),
        Arguments(args=(1, "x")),
        Arguments(
            args=("ü", {"$tuple": [1, [{}, [None, True, -1, -1000, 2**40, 0.5]]]}),
            kwargs={str(k): [0] * (16 if k == 9 else 1) for k in range(17)},
        ),
        Arguments(args=("a" * 31, "b" * 32, "c" * 256, b"\x00" * 3)),
    ],
)
def test_arguments_of_one_call_may_be_others(tmp_path: Path, molds: refilling.Molds, read_whole: list[Path], arguments: Arguments) -> None:
    """And go back to what they were."""
    filled(tmp_path)
    del read_whole[:]
    for given_ in (arguments, step_of()[4].arguments, arguments):
        records = one_call(one_call(step_of(), 4, arguments=given_, modes=None), 0, arguments=given_)
        if any(isinstance(value, bytes) for value in arguments.args):
            read = msgspec.msgpack.decode(frames.encode_call(records[4], None)[8:])[8]
            assert copied(tmp_path, journal(records))[-1]["arguments"] == parquet._json([read[0], read[1] or {}])
        else:
            assert looks_alike(copied(tmp_path, journal(records)), expected_rows(records))
    assert read_whole == []


def outcome(folder: Path, data: bytes) -> Any:
    """The rows, or which error."""
    try:
        return copied(folder, data)
    except (UlpscopeError, OverflowError, ValueError) as error:
        return type(error)


def with_right_checksums(data: bytearray) -> bytes:
    """Frames as far as they go."""
    at = 0
    while at + 8 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        if at + 8 + length > len(data):
            break
        struct.pack_into("<I", data, at + 4, zlib.crc32(data[at + 8 : at + 8 + length]))
        at += 8 + length
    return bytes(data)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_bytes_that_are_others_give_what_reading_whole_gives(tmp_path: Path, data: st.DataObject) -> None:
    good = journal(step_of(iter(range(7000, 10**6))), 7)
    bad = bytearray(good[: data.draw(st.sampled_from([len(good)] * 3 + [len(good) // 2]) | st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if bad:
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(
                st.sampled_from([0, 0x7F, 0x80, 0x9F, 0xC1, 0xCB, 0xCF, 0xDF, 0xFF]) | st.integers(0, 255)
            )
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(bad)))
        bad[at:at] = data.draw(st.binary(max_size=20))
    read = with_right_checksums(bad) if data.draw(st.booleans()) else bytes(bad)
    with pytest.MonkeyPatch.context() as patch:
        fresh(patch)
        filled(tmp_path)
        ours = outcome(tmp_path, read)
        fresh(patch)
        patch.setattr(refilling, "KERNEL", None)
        assert looks_alike(ours, outcome(tmp_path, read))


def test_every_length_of_a_truncated_file(tmp_path: Path, molds: refilling.Molds) -> None:
    filled(tmp_path)
    (mold,) = [molds._newest]
    assert mold is not None
    data = journal(step_of(), 7)
    assert mold.table_of(data) is not None
    assert [size for size in range(len(data)) if mold.table_of(data[:size]) is not None] == []
    assert mold.table_of(data + b"\x00") is None


def test_every_bit_is_guarded_by_the_checksums(tmp_path: Path, molds: refilling.Molds) -> None:
    filled(tmp_path)
    mold = molds._newest
    assert mold is not None
    data = journal(step_of(), 7)
    for at in range(0, len(data), 3):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        assert mold.table_of(bytes(broken)) is None


@pytest.mark.parametrize("size", [*range(40), 255, 256, 1000])
def test_checksums_of_every_length(tmp_path: Path, molds: refilling.Molds, size: int) -> None:
    for step in range(2):
        copied(tmp_path, journal(one_call(step_of(), 3, module="x" * size), step))
    assert molds._newest is not None
    assert molds._newest.table_of(journal(one_call(step_of(iter(range(9, 10**6))), 3, module="x" * size), 7)) is not None


def test_further_elements_are_no_mold(tmp_path: Path, molds: refilling.Molds) -> None:
    body = [*call_body(example_record(stack=())), "an addition"]
    for _ in range(3):
        copied(tmp_path, frames.encode_start(3, 5) + frame(body))
    assert molds._newest is None


def test_places_that_are_none_are_refused() -> None:
    at = np.array([0])
    for holes in (
        refilling.Holes(refilling.Kind.COUNT, at, at + 1, at + 9),
        refilling.Holes(refilling.Kind.COUNT, at, at + 1, at - 1),
        refilling.Holes(refilling.Kind.COUNT, at, at + 99, at),
        refilling.Holes(refilling.Kind.TEXT, at + 2, at, at),
        refilling.Holes(refilling.Kind.VALUES, at, at + 1, at + 1),
    ):
        mold = refilling.Mold(b"12345678", b"x" * 16, [holes], [b""], 16, lambda values: None)
        assert not mold.proves_itself()


def test_a_mold_in_use_elsewhere_is_not_waited_for(tmp_path: Path, molds: refilling.Molds, read_whole: list[Path]) -> None:
    filled(tmp_path)
    records = step_of(iter(range(70, 10**6)))
    with molds._in_use:
        assert looks_alike(copied(tmp_path, journal(records)), expected_rows(records))
    assert len(read_whole) == 3


def test_molds_that_are_of_no_use_are_made_seldom(tmp_path: Path, molds: refilling.Molds, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[refilling.Mold] = []
    monkeypatch.setattr(molds, "keep", lambda mold: (made.append(mold), refilling.Molds.keep(molds, mold))[1])
    for step in range(40):
        copied(tmp_path, journal(one_call(step_of(), 2, module=f"{step}"), step))
    assert len(made) == 6


def test_steps_of_a_few_kinds_may_alternate(tmp_path: Path, molds: refilling.Molds, read_whole: list[Path]) -> None:
    kinds = [step_of(), step_of()[1:], step_of()[:-1]]
    for records in kinds:
        for step in range(3):
            copied(tmp_path, journal(records, step))
    del read_whole[:]
    for step in range(9):
        records = kinds[step % 3]
        assert looks_alike(copied(tmp_path, journal(records, step)), expected_rows(records, step=step))
    assert read_whole == []


def test_molds_take_so_much_memory_and_no_more(tmp_path: Path, molds: refilling.Molds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refilling, "BYTES_OF_MOLDS", 1)
    for records in (step_of(), step_of()[1:], step_of()):
        for step in range(3):
            copied(tmp_path, journal(records, step))
        assert len(molds._molds) == 1
    assert molds._newest is None


def test_without_the_kernel_the_table_is_the_same(tmp_path: Path, molds: refilling.Molds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refilling, "KERNEL", None)
    for step in range(4):
        records = step_of(iter(range(100 * step, 10**6)))
        assert looks_alike(copied(tmp_path, journal(records, step)), expected_rows(records, step=step))
    assert molds._newest is None


def test_copies_of_a_run(tmp_path: Path, molds: refilling.Molds, read_whole: list[Path]) -> None:
    """Those of closed steps can be had before the run closes, which then has only the rest to make."""
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 3)
    tables = []
    for step in range(6):
        sink.begin_step(step)
        for record in step_of(iter(range(100 * step, 10**6))):
            sink.write(record)
        tables.append(tmp_path / "run" / "rank00003" / f"step{step:05d}" / "records.parquet")
    assert [table.exists() for table in tables] == [False] * 6
    sink.copy_closed_steps()
    assert [table.exists() for table in tables] == [True] * 5 + [False]
    sink.copy_closed_steps()
    sink.close()
    assert len(read_whole) == 2
    for step, table in enumerate(tables):
        assert looks_alike(pq.read_table(table).to_pylist(), expected_rows(step_of(iter(range(100 * step, 10**6))), step=step))
        assert table.stat().st_mode & 0o777 == frames.FILE_MODE & ~_umask()
        assert sorted(entry.name for entry in table.parent.iterdir()) == ["records.msgpack", "records.parquet", "tensors.journal"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failing_disk_leaves_no_half_table(tmp_path: Path, molds: refilling.Molds, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    (tmp_path / "records.parquet").unlink()

    def fail(fd: int, data: Any) -> None:
        os.write(fd, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_all", fail)
    with pytest.raises(OSError, match="No space"):
        copied(tmp_path, journal(step_of(), 7))
    assert [entry.name for entry in tmp_path.iterdir()] == ["records.msgpack"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_forked_in_the_middle_does_not_hang(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ulpscope.store import parquet\n"
        "from tests.store.test_parquet_refilling import copied, filled, journal, step_of\n"
        "folder = Path(sys.argv[1])\n"
        "filled(folder)\n"
        "parquet._molds._in_use.acquire()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    (folder / 'child').mkdir()\n"
        "    os._exit(0 if len(copied(folder / 'child', journal(step_of(), 7))) == 30 else 1)\n"
        "parquet._molds._in_use.release()\n"
        "assert len(copied(folder, journal(step_of(), 7))) == 30\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=root, timeout=60)
