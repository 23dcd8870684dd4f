# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ulpscope.errors import DamagedRunError, NewerFormatError
from ulpscope.format import call_groups, frames, reading
from ulpscope.model import Arguments, CallRecord, RunInfo, Slot, Summary, TensorRecord
from ulpscope.store import DirectorySink, create_run, open_run
from ulpscope.store.native import parquet
from ulpscope.testing.stores import call_records, example_record, looks_alike

pa = pytest.importorskip("pyarrow")
import pyarrow.compute as pc  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402


def written(tmp_path: Path, *summaries: Summary | None) -> Path:
    """Write a run with one record for each summary, and return its Parquet copy."""
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 0)
    sink.begin_step(0)
    for order, summary in enumerate(summaries):
        slot = replace(example_record().slots[0], summary=summary)
        sink.write(example_record(order, slots=(slot,)))
    sink.close()
    return tmp_path / "run" / "rank00000" / "step00000" / "records.parquet"


def test_one_row_for_each_slot(tmp_path: Path) -> None:
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 3)
    sink.begin_step(5)
    sink.write(example_record(0))
    sink.write(example_record(1, slots=(), stack=(), arguments=None))
    sink.close()
    rows = pq.read_table(tmp_path / "run/rank00003/step00005/records.parquet").to_pylist()
    assert [(row["rank"], row["step"], row["order"], row["slot"]) for row in rows] == [
        (3, 5, 0, "input.0.mask.1"),
        (3, 5, 0, "parameter.fc%2Eweight"),
        (3, 5, 1, None),
    ]
    first, _, last = rows
    assert (first["op"], first["phase"], first["module"], first["dtype"]) == ("functional.gelu", "backward", "layers.1.mlp", "float32")
    assert (first["shape"], first["strides"], first["num_neginf"], first["min"]) == ([3, 4], [1, 3], 2, -math.inf)
    assert (first["file"], first["line"], first["function"]) == ("train.py", 48, "forward")
    assert "NaN" in first["arguments"]
    assert (last["file"], last["arguments"], last["numel"]) == (None, None, None)


def test_nan_survives_and_no_filter_loses_it(tmp_path: Path) -> None:
    nan = math.nan
    table = written(
        tmp_path, Summary(4, 1.0, 2.0, 1.5, 1.6, 0), Summary(4, nan, nan, nan, nan, 4), Summary(4, -1.0, 9.0, nan, 1.0, 1), None
    )
    read = pq.read_table(table)
    assert [math.isnan(value) if value is not None else None for value in read["mean"].to_pylist()] == [False, True, True, None]
    dataset = ds.dataset(table)
    assert dataset.to_table(filter=pc.is_nan(ds.field("mean")))["order"].to_pylist() == [1, 2]
    assert dataset.to_table(filter=~(ds.field("max") <= 5.0))["order"].to_pylist() == [1, 2]
    assert dataset.to_table(filter=ds.field("num_nan") > 0)["order"].to_pylist() == [1, 2]


def test_there_are_no_statistics_to_prune_by(tmp_path: Path) -> None:
    metadata = pq.ParquetFile(written(tmp_path, Summary(4, 1.0, 2.0))).metadata
    columns = [metadata.row_group(0).column(number) for number in range(metadata.num_columns)]
    assert [column.path_in_schema for column in columns if column.is_stats_set] == []


def test_large_steps_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_groups, "RECORDS_IN_GROUP", 4)
    file = pq.ParquetFile(written(tmp_path, *[None] * 10))
    assert file.metadata.num_row_groups == 3
    assert file.read()["order"].to_pylist() == list(range(10))


def test_without_pyarrow_there_is_no_copy_and_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not written(tmp_path, None).exists()
    assert open_run(tmp_path / "run").ledger(0) == ()


def test_a_copy_that_fails_is_noted_and_the_record_stays(tmp_path: Path) -> None:
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 0)
    sink.begin_step(0)
    sink.write(example_record(2**63, arguments=Arguments()))
    sink.close()
    run = open_run(tmp_path / "run")
    assert [record.order for record in run.records(0, 0)] == [2**63]
    assert [entry.what for entry in run.ledger(0)] == ["a Parquet copy was not written"]
    assert sorted(entry.name for entry in (tmp_path / "run/rank00000/step00000").iterdir()) == ["records.msgpack", "tensors.journal"]


# ---- the table against what was recorded


def expected_rows(records: Iterable[CallRecord], rank: int = 3, step: int = 5) -> list[dict[str, Any]]:
    return [row_of(record, slot, rank, step) for record in records for slot in record.slots or (None,)]


def row_of(record: CallRecord, slot: TensorRecord | None, rank: int, step: int) -> dict[str, Any]:
    arguments, source = record.arguments, record.source
    row: dict[str, Any] = {"rank": rank, "step": step, "order": record.order, "op": record.call.op, "index": record.call.index}
    row |= {"phase": record.phase, "level": record.level, "module": record.module, "parent": record.parent, "recompute": record.recompute}
    row["arguments"] = None if arguments is None else json.dumps([arguments.args, arguments.kwargs or {}])
    row |= {name: None if source is None else getattr(source, name) for name in ("file", "line", "function")}
    row["slot"] = None if slot is None else str(slot.slot)
    for name in ("dtype", "shape", "strides", "device", "requires_grad"):
        value = None if slot is None else getattr(slot, name)
        row[name] = list(value) if isinstance(value, tuple) else value
    summary = None if slot is None else slot.summary
    row |= {name: None if summary is None else getattr(summary, name) for name in Summary.__slots__}
    return row | {name: None if slot is None else getattr(slot, name) for name in ("fingerprint", "content", "note")}


def frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def encoded(records: Sequence[CallRecord]) -> list[bytes]:
    """Encode the frames of a step without its end, with a stack in front of each call that has one."""
    found = [frames.encode_start(3, 5)]
    for number, record in enumerate(records):
        if record.stack:
            found.append(frames.encode_stack(number, tuple((line.file, line.line, line.function, line.code) for line in record.stack)))
        found.append(frames.encode_call(record, number if record.stack else None))
    return found


def table_of(tmp_path: Path, *pieces: bytes) -> list[dict[str, Any]]:
    (tmp_path / "records.msgpack").write_bytes(b"".join(pieces))
    assert parquet.write_parquet(tmp_path / "records.msgpack", tmp_path / "records.parquet")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["records.msgpack", "records.parquet"]
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "records.parquet").to_pylist()
    return rows


def written_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect, for each group that had to be encoded again, its number of calls."""
    seen: list[int] = []
    again = call_groups._encoded_again
    monkeypatch.setattr(call_groups, "_encoded_again", lambda calls: (seen.append(len(calls)), again(calls))[1])
    return seen


def tensor(path: tuple[int | str, ...] = (0,), **changes: Any) -> TensorRecord:
    values: dict[str, Any] = {"slot": Slot("input", path), "dtype": "float32", "shape": (2, 3), "strides": (3, 1), "device": "cpu"}
    values |= {"summary": Summary(6, -1.5, 2.0, 0.25, 1.0, 0, 0, 0, 1, 0), "fingerprint": "u1:" + "0a" * 16}
    return TensorRecord(**(values | changes))


@given(st.lists(call_records(), max_size=6))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_table_holds_what_was_recorded(tmp_path: Path, records: list[CallRecord]) -> None:
    assert looks_alike(table_of(tmp_path, *encoded(records)), expected_rows(records))


_integers = st.none() | st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1]) | st.integers(0, 2**63 - 1)
_signed = _integers | st.sampled_from([-1, -32, -33, -128, -129, -32_768, -32_769, -(2**31), -(2**31) - 1, -(2**63)])
_floats = st.none() | st.floats()
_summaries = st.builds(Summary, _integers.map(lambda n: n or 0), *[_floats] * 4, *[_signed] * 5)
_long_text = st.sampled_from([0, 1, 31, 32, 255, 256, 65_535, 65_536]).map(lambda size: "ü" * (size // 2) + "x" * (size % 2))


@given(st.lists(st.none() | _summaries, min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbers_of_every_width_arrive(tmp_path: Path, summaries: list[Summary | None], random: Any) -> None:
    """Widths mixed among the slots of a step and from step to step, so that nothing lies where it lay before."""
    slots = [tensor((k,), summary=summary) for k, summary in enumerate(summaries)]
    for _ in range(2):
        random.shuffle(slots)
        records = [example_record(order, slots=tuple(slots[order:])) for order in (0, 1)]
        assert looks_alike(table_of(tmp_path, *encoded(records)), expected_rows(records))


@given(st.lists(st.tuples(_long_text, _long_text, st.none() | _long_text), min_size=1, max_size=4))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_of_every_length_arrives(tmp_path: Path, texts: list[tuple[str, str, str | None]]) -> None:
    records = [
        example_record(order, module=name, slots=(tensor((name, note), device=note, note=note, content=content, fingerprint=content),))
        for order, (name, note, content) in enumerate(texts)
    ]
    assert looks_alike(table_of(tmp_path, *encoded(records)), expected_rows(records))


@pytest.mark.parametrize("num_slots", [0, 1, 15, 16, 300])
def test_any_number_of_slots(tmp_path: Path, num_slots: int) -> None:
    records = [example_record(0, slots=(tensor(),) * num_slots), example_record(1, slots=()), example_record(2)]
    assert table_of(tmp_path, *encoded(records))[:: max(1, num_slots // 3)] == expected_rows(records)[:: max(1, num_slots // 3)]


@pytest.mark.parametrize("shape", [(), (0,), (1,) * 15, (1,) * 16, (2**31, 2**40), (3,) * 70_000])
def test_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    records = [example_record(0, slots=(tensor(shape=shape, strides=None), tensor(shape=(2,), strides=shape)))]
    assert table_of(tmp_path, *encoded(records)) == expected_rows(records)


def test_a_step_like_ours_is_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = written_again(monkeypatch)
    records = [example_record(order, slots=(tensor(), tensor((1,), summary=None))) for order in range(20)] + [example_record(20, slots=())]
    assert looks_alike(table_of(tmp_path, *encoded(records), frames.encode_end(21, 0)), expected_rows(records))
    assert seen == []


def test_calls_with_a_name_of_their_own_framework_are_in_the_table_too(tmp_path: Path) -> None:
    records = [example_record(0), example_record(1, recorded_as="mint.add"), example_record(2, slots=(), recorded_as="é" * 300)]
    assert table_of(tmp_path, *encoded(records)) == expected_rows(records)


def test_steps_that_resemble_each_other_keep_their_own_values(tmp_path: Path) -> None:
    """Columns of the last step are used again only where the bytes of this one are the same."""
    calm = [example_record(order, slots=(tensor(), tensor((1,)))) for order in range(4)]
    loud = [
        replace(record, slots=tuple(replace(slot, summary=Summary(6, 7.0, num_zero=300), note="") for slot in record.slots))
        for record in calm
    ]
    other_shape = [replace(calm[0], slots=(tensor(shape=(3, 2)), tensor((1,)))), *calm[1:]]
    other_module = [*calm[:3], replace(calm[3], module="other")]
    other_counts = [replace(calm[0], slots=calm[0].slots[:1]), replace(calm[1], slots=(*calm[1].slots, tensor((2,)))), *calm[2:]]
    other_stack = [replace(calm[0], stack=()), *calm[1:]]
    other_line = [replace(record, stack=(replace(record.stack[0], line=999),)) for record in calm]
    for records in (calm, loud, calm, other_shape, other_module, other_counts, other_stack, other_line, calm[:2], calm):
        assert looks_alike(table_of(tmp_path, *encoded(records)), expected_rows(records))


def test_what_looks_like_a_slot_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = written_again(monkeypatch)
    (deceiving,) = struct.unpack(">d", b"\x40\x9a\x92\xa5iiii")
    listed = Arguments(args=([["input", 1], *range(9)], 2))
    for record in (example_record(slots=(tensor(summary=Summary(6, deceiving)), tensor())), example_record(arguments=listed)):
        assert looks_alike(table_of(tmp_path, *encoded([record])), expected_rows([record]))
    assert seen == [1, 1]


def call_body(record: CallRecord) -> list[Any]:
    body: list[Any] = msgspec.msgpack.decode(frames.encode_call(record, None)[8:])
    return body


def with_more_elements(body: list[Any]) -> list[Any]:
    slots = [[*slot[:6], [*slot[6], "more"], *slot[7:], "and more"] for slot in body[10]]
    return [*body[:10], slots, *body[11:], "an addition"]


def with_fewer_elements(body: list[Any]) -> list[Any]:
    return [*body[:10], [slot[:6] for slot in body[10]], *body[11:]]


def with_integers_for_reals(body: list[Any]) -> list[Any]:
    return [*body[:10], [[*slot[:6], [6, -1, 2, 0, 1, 0, 0, 0, 1, 0], *slot[7:]] for slot in body[10]], *body[11:]]


@pytest.mark.parametrize(
    ("change", "slot"),
    [
        (with_more_elements, tensor()),
        (with_fewer_elements, TensorRecord(slot=Slot("input", (0,)), dtype="float32", shape=(2, 3), strides=(3, 1), device="cpu")),
        (with_integers_for_reals, tensor(summary=Summary(6, -1.0, 2.0, 0.0, 1.0, 0, 0, 0, 1, 0))),
    ],
)
def test_what_another_writer_may_write_is_read_all_the_same(tmp_path: Path, change: Any, slot: TensorRecord) -> None:
    record = example_record(slots=(tensor(), tensor()), stack=())
    rows = table_of(tmp_path, frames.encode_start(3, 5), frame(change(call_body(record))), frame([77, "an addition"]))
    assert looks_alike(rows, expected_rows([replace(record, slots=(slot, slot))]))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 40, 200])
def test_the_table_ends_where_the_good_frames_end(tmp_path: Path, size: int) -> None:
    *good, last = encoded([example_record(order, stack=()) for order in range(3)])
    expected = expected_rows([example_record(order, stack=()) for order in range(2)])
    assert looks_alike(table_of(tmp_path, *good, last[:size]), expected)
    broken = bytearray(last)
    broken[size] ^= 1
    assert looks_alike(table_of(tmp_path, *good, bytes(broken), last), expected)
    assert looks_alike(table_of(tmp_path, *good, struct.pack("<II", 2**32 - 1, 0), last), expected)


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [example_record(order) for order in range(9)]
    for size in (100, 777, 1 << 20):
        monkeypatch.setattr(call_groups, "BYTES_IN_GROUP", size)
        assert looks_alike(table_of(tmp_path, *encoded(records)), expected_rows(records))
        assert looks_alike(table_of(tmp_path, *encoded(records), frame([77])), expected_rows(records))


def test_more_text_than_a_dictionary_holds(tmp_path: Path) -> None:
    records = [example_record(order, module=f"{order:01000}", slots=(tensor(fingerprint=f"{order:0800}"),) * 2) for order in range(1500)]
    assert table_of(tmp_path, *encoded(records))[::97] == expected_rows(records)[::97]


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_frame_makes_it_read_elsewhere(tmp_path: Path, data: st.DataObject) -> None:
    """A frame with a right checksum and wrong bytes gives a table or an error of ours, and has no effect on the next."""
    record = example_record(slots=(tensor(), tensor((1,), note="n", content="c")), stack=())
    start, good = encoded([record])
    body = bytearray(good[8:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    bad = struct.pack("<II", len(body), zlib.crc32(body)) + body
    try:
        rows = table_of(tmp_path, start, good, bad)
        read = [one for one in reading.FrameReader(tmp_path / "records.msgpack") if isinstance(one, frames.CallFrame)]
        assert looks_alike(rows, expected_rows(frames.call_record(one, 3, 5, ()) for one in read))
    except (DamagedRunError, NewerFormatError, OverflowError, ValueError):
        (tmp_path / "records.parquet").unlink(missing_ok=True)
    assert looks_alike(table_of(tmp_path, start, good), expected_rows([record]))


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], DamagedRunError),
        ([frames.encode_end(0, 0)], DamagedRunError),
        ([frame([0, 999, 0, 0])], NewerFormatError),
        ([frames.encode_start(3, 5), frame([2, "order"])], DamagedRunError),
    ],
)
def test_what_is_no_step_is_refused_and_leaves_nothing(tmp_path: Path, pieces: list[bytes], error: type[Exception]) -> None:
    (tmp_path / "records.msgpack").write_bytes(b"".join(pieces))
    with pytest.raises(error):
        parquet.write_parquet(tmp_path / "records.msgpack", tmp_path / "records.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["records.msgpack"]


@pytest.mark.parametrize("text", [b"u1:0a0a", b"layers.1.mlp", b"cpu", b"functional.gelu"])
def test_text_that_is_no_text_is_refused(tmp_path: Path, text: bytes) -> None:
    start, good = encoded([example_record(slots=(tensor(), tensor()), stack=())])
    body = good[8:].replace(text, b"\xff" * len(text))
    assert body != good[8:]
    (tmp_path / "records.msgpack").write_bytes(start + struct.pack("<II", len(body), zlib.crc32(body)) + body)
    with pytest.raises(DamagedRunError):
        parquet.write_parquet(tmp_path / "records.msgpack", tmp_path / "records.parquet")


def test_a_step_without_calls_is_a_table_without_rows(tmp_path: Path) -> None:
    assert table_of(tmp_path, frames.encode_start(3, 5), frames.encode_end(0, 0)) == []


def test_readers_see_plain_types(tmp_path: Path) -> None:
    table_of(tmp_path, *encoded([example_record()]))
    schema = pq.read_schema(tmp_path / "records.parquet")
    kinds = {"order": pa.int64(), "op": pa.string(), "shape": pa.list_(pa.int64()), "mean": pa.float64(), "num_nan": pa.int64()}
    kinds |= {"requires_grad": pa.bool_(), "fingerprint": pa.string(), "note": pa.string(), "arguments": pa.string(), "line": pa.int64()}
    assert {name: schema.field(name).type for name in kinds} == kinds
    assert all(field.nullable for field in schema)
    assert len(schema) == 33


def test_pandas_stays_unimported(tmp_path: Path) -> None:
    """Importing it costs more than the table; pyarrow would, to look at a list."""
    (tmp_path / "step").mkdir()
    records = [example_record(0), example_record(1, slots=()), example_record(2, slots=(tensor(),))]
    (tmp_path / "step" / "records.msgpack").write_bytes(b"".join(encoded(records)))
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text("import os\nos._exit(77)\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from ulpscope.store.native.parquet import write_parquet\n"
        "folder = Path(sys.argv[1], 'step')\n"
        "sys.exit(0 if write_parquet(folder / 'records.msgpack', folder / 'records.parquet') else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 0
    assert looks_alike(pq.read_table(tmp_path / "step" / "records.parquet").to_pylist(), expected_rows(records))
