# SPDX-License-Identifier: Apache-2.0
"""Folders of Ascend's dump files as runs. They are synthetic: no real dump is at hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.store import acl_writer as writer
from tests.store.acl_writer import described
from ulpscope.cli import cli
from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import CallRecord, Summary
from ulpscope.numerics.casting import as_array
from ulpscope.store import open_run
from ulpscope.store.acl.folder import open_dump, recognize
from ulpscope.store.acl.statistics import read_statistics

TIME = 1675157077183551
PLACE = "20230131172437/1/model/5/2"
X = np.linspace(-1, 1, 48, dtype="f4").reshape(2, 24)
W = np.linspace(0, 1, 24 * 20, dtype="f4").reshape(24, 20)


def write(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def write_net(folder: Path, wrong: float = 0.0) -> None:
    """Write a product in FRACTAL_NZ and a sum that reads it; the later file has the name that sorts first."""
    product = X @ W + np.float32(wrong)
    total = product + np.float32(1)
    inputs = [described(writer.fractal_nz(array), format="FRACTAL_NZ", original_shape=array.shape) for array in (X, W)]
    output = described(writer.fractal_nz(product), format="FRACTAL_NZ", original_shape=product.shape)
    write(folder, f"MatMul.block_MatMul.7.3.{TIME}", writer.dump_bytes(inputs, [output], op_name="block/MatMul", spaces=[b"scratch"]))
    write(folder, f"Add.block_Add.8.3.{TIME + 5}", writer.dump_bytes([described(product)], [described(total)], op_name="block/Add"))


def records_of(path: Path, rank: int = 1, step: int = 2) -> list[CallRecord]:
    return list(open_run(path).records(rank, step))


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    write_net(tmp_path / "dump" / PLACE)
    return tmp_path / "dump"


@pytest.mark.parametrize("below", [".", "20230131172437", "20230131172437/1", "20230131172437/1/model", "20230131172437/1/model/5", PLACE])
def test_any_level_of_the_tree_opens(dump: Path, below: str) -> None:
    run = open_run(dump / below)
    assert (run.info.format, run.ranks(), run.steps(1), run.ledger(1), run.is_complete(1, 2)) == ("acl", (1,), (2,), (), True)


@pytest.mark.parametrize(
    ("place", "rank", "step"),
    [
        ("20230131172437/3/7", 3, 0),
        ("20230131172437/3", 3, 0),
        ("20230131172437/3/7/4", 3, 4),
        ("20230131172437/3/net/7", 3, 0),
        (".", 0, 0),
        ("6", 6, 0),
    ],
)
def test_there_may_be_fewer_levels(tmp_path: Path, place: str, rank: int, step: int) -> None:
    write_net(tmp_path / "d" / place)
    run = open_run(tmp_path / "d")
    assert (run.ranks(), run.steps(rank)) == ((rank,), (step,))


def test_calls_come_in_the_order_of_time_with_their_true_names(dump: Path) -> None:
    records = records_of(dump)
    assert [(str(record.call), record.module, record.order, record.level) for record in records] == [
        ("acl.MatMul.0", "block/MatMul", 0, "op"),
        ("acl.Add.0", "block/Add", 1, "op"),
    ]
    assert [str(slot.slot) for slot in records[0].slots] == ["input.0", "input.1", "output.0"]


def test_tensors_have_their_original_shape_and_statistics_without_padding(dump: Path) -> None:
    run = open_run(dump)
    product = next(iter(run.records(1, 2))).slots[2]
    assert (product.dtype, product.shape, product.note) == ("float32", (2, 20), "")
    assert product.summary is not None
    assert product.summary.numel == 40
    assert product.content is not None
    np.testing.assert_array_equal(as_array(run.tensor(1, 2, product.content)), X @ W)


def test_a_slot_that_is_equal_to_another_has_its_fingerprint(dump: Path) -> None:
    product, total = records_of(dump)
    assert product.slots[2].fingerprint == total.slots[0].fingerprint != total.slots[1].fingerprint


def test_several_devices_are_ranks(tmp_path: Path) -> None:
    write_net(tmp_path / "d" / "20230131172437" / "0")
    write_net(tmp_path / "d" / "20230131172438" / "1")
    run = open_run(tmp_path / "d")
    assert run.ranks() == (0, 1)
    assert run.info.world_size == 2


def test_two_dumps_of_one_device_have_to_be_told_apart(tmp_path: Path) -> None:
    for time in ("20230131172437", "20230131180000"):
        write_net(tmp_path / "d" / time / "0")
    with pytest.raises(InputError, match=r"several dumps of device 0, step 0: '20230131172437' and '20230131180000'; give the one"):
        open_run(tmp_path / "d")
    assert open_run(tmp_path / "d" / "20230131180000").ranks() == (0,)


def test_models_of_one_step_are_one_step(tmp_path: Path) -> None:
    write_net(tmp_path / "d" / "20230131172437" / "0" / "a" / "1" / "0")
    write_net(tmp_path / "d" / "20230131172437" / "0" / "b" / "2" / "0")
    run = open_run(tmp_path / "d")
    records = list(run.records(0, 0))
    assert [str(record.call) for record in records] == ["acl.MatMul.0", "acl.MatMul.1", "acl.Add.0", "acl.Add.1"]
    contents = [slot.content for record in records for slot in record.slots]
    assert len(set(contents)) == len(contents)
    for content in contents:
        assert content is not None
        run.tensor(0, 0, content)


def test_names_that_were_too_long(tmp_path: Path) -> None:
    write(tmp_path, "8831407736", writer.dump_bytes(outputs=[described(X)], op_name="long"))
    write(tmp_path, "77", b"unknown")
    write(tmp_path, "mapping.csv", f"8831407736,Add.{'long_' * 60}.7.3.{TIME}\n77,../../etc/passwd\n".encode())
    (record,) = records_of(tmp_path, 0, 0)
    assert (str(record.call), record.module) == ("acl.Add.0", "long")


def test_one_file_is_a_run_too(dump: Path) -> None:
    file = dump / PLACE / f"Add.block_Add.8.3.{TIME + 5}"
    assert [str(record.call) for record in records_of(file, 0, 0)] == ["acl.Add.0"]
    renamed = file.rename(file.with_name("copied.bin"))
    assert [(str(record.call), record.module) for record in records_of(renamed, 0, 0)] == [("acl.unnamed.0", "block/Add")]


STATISTICS = (
    writer.STATISTICS_HEADINGS + "Input,0,160,DT_FLOAT,ND,2x20,3.5,-1,0.25,40,0,0,0\n"
    "Input,1,20,DT_FLOAT16,NHWC,,inf,-inf,nan,5,1,1,2\n"
    "Input,2,8,DT_INT64,ND,1,,,,,,,\n"
    "Output,0,2048,DT_BF16,FRACTAL_NZ,2x1x16x16,1,0,0.5,512,0,0,0\n"
)


def test_statistics_instead_of_values(tmp_path: Path) -> None:
    write(tmp_path, f"Add.block_Add.8.3.{TIME}.csv", STATISTICS.encode())
    (record,) = records_of(tmp_path, 0, 0)
    first, second, third, output = record.slots
    assert first.summary == Summary(40, -1.0, 3.5, 0.25, num_nan=0, num_posinf=0, num_neginf=0)
    assert (first.dtype, first.shape, first.content) == ("float32", (2, 20), None)
    assert second.summary == Summary(5, -math.inf, math.inf, num_nan=1, num_posinf=2, num_neginf=1)
    assert third.summary == Summary(1)
    assert (output.dtype, output.shape, output.note) == ("bfloat16", (2, 1, 16, 16), "statistics of the tensor as stored, FRACTAL_NZ")
    assert open_run(tmp_path / f"Add.block_Add.8.3.{TIME}.csv").ranks() == (0,)


def test_values_win_over_statistics_of_the_same_slot(tmp_path: Path) -> None:
    write(tmp_path, f"Add.block_Add.8.3.{TIME}.csv", STATISTICS.encode())
    write(tmp_path, f"Add.block_Add.8.3.{TIME}", writer.dump_bytes(inputs=[described(X)]))
    (record,) = records_of(tmp_path, 0, 0)
    assert [(str(slot.slot), slot.content is not None) for slot in record.slots] == [
        ("input.0", True),
        ("input.1", False),
        ("input.2", False),
        ("output.0", False),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n", "has no column 'Input/Output'"),
        ("", "has no column"),
        (writer.STATISTICS_HEADINGS + "Neither,0,1,DT_FLOAT,ND,1,1,1,1,1,0,0,0\n", "line 2 .*neither Input nor Output"),
        (writer.STATISTICS_HEADINGS + "Input,-1,1,DT_FLOAT,ND,1,1,1,1,1,0,0,0\n", "line 2 .*no size or count"),
        (writer.STATISTICS_HEADINGS + f"Input,0,1,DT_FLOAT,ND,{'9' * 30},1,1,1,1,0,0,0\n", "no size or count"),
        (writer.STATISTICS_HEADINGS + "Input,0,1,DT_FLOAT,ND,1,abc,1,1,1,0,0,0\n", "could not convert"),
        (writer.STATISTICS_HEADINGS + "Input\n", "line 2"),
    ],
)
def test_statistics_that_are_none(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(DamagedRunError, match=sentence):
        read_statistics(write(tmp_path, "x.csv", text.encode()))


def test_an_overflow_is_told_at_its_operator(dump: Path) -> None:
    tale = writer.overflow_output(0, [1, 3, 7, 0, 65535, 65535, 0, 0, 0, 0, 0x800])
    write(dump / PLACE, f"Opdebug.Node_OpDebug.99.3.{TIME + 1}", writer.overflow_bytes(tale))
    product, total = records_of(dump)
    assert product.slots[2].note == "overflowed on the device (AI Core, status 0x800)"
    assert not any(slot.note for slot in (*product.slots[:2], *total.slots))
    assert open_run(dump).ledger(1) == ()


def test_an_overflow_without_its_operator_is_in_the_ledger(dump: Path) -> None:
    tale = writer.overflow_output(0, [1, 3, 70, 0, 65535, 65535, 0, 0, 0, 0, 0x800])
    write(dump / PLACE, f"Opdebug.Node_OpDebug.99.3.{TIME + 1}", writer.overflow_bytes(tale))
    run = open_run(dump)
    (entry,) = run.ledger(1)
    assert entry.why == "it tells of an overflow in task 70 of stream 3 (AI Core), which no dumped operator has"
    assert run.is_complete(1, 2)


def test_a_damaged_file_costs_its_call_only(dump: Path) -> None:
    write(dump / PLACE, f"Cast.x.9.3.{TIME + 9}", b"half")
    write(dump / PLACE, f"Mul.y.9.3.{TIME + 9}.csv", b"half")
    write(dump / PLACE, f"Opdebug.Node_OpDebug.99.3.{TIME + 1}", b"half")
    run = open_run(dump)
    assert [str(record.call) for record in run.records(1, 2)] == ["acl.MatMul.0", "acl.Add.0"]
    assert not run.is_complete(1, 2)
    assert [entry.what.split(".")[0] for entry in run.ledger(1)] == ["reading Opdebug", "reading Cast", "reading Mul"]


def test_a_tensor_that_cannot_be_read_costs_its_slot_only(tmp_path: Path) -> None:
    content = writer.dump_bytes(inputs=[described(X, shape=(1000, 1000)), described(W)], outputs=[described(X, address=0)])
    write(tmp_path, f"Add.x.8.3.{TIME}", content)
    run = open_run(tmp_path)
    (record,) = run.records(0, 0)
    assert [(slot.note, slot.content is not None) for slot in record.slots] == [
        ("its values cannot be read", False),
        ("", True),
        ("", True),
    ]
    assert "4000000 bytes, but has 192" in run.ledger(0)[0].why


def test_what_cannot_be_undone_stays_as_stored(tmp_path: Path) -> None:
    lstm = described(np.ones((2, 3), "f4"), format="FRACTAL_ZN_LSTM", original_shape=(2, 3))
    unfit = described(np.ones((1, 1, 16, 16), "f4"), format="FRACTAL_NZ", original_shape=(99, 99))
    narrow = writer.Described(b"\x08\x10", dtype="hifloat8", shape=(2,))
    write(tmp_path, f"LSTM.x.8.3.{TIME}", writer.dump_bytes(inputs=[lstm, unfit], outputs=[narrow]))
    run = open_run(tmp_path)
    (record,) = run.records(0, 0)
    assert [(slot.dtype, slot.shape, slot.note) for slot in record.slots] == [
        ("float32", (2, 3), "as stored, FRACTAL_ZN_LSTM"),
        ("float32", (1, 1, 16, 16), "as stored, FRACTAL_NZ"),
        ("bfloat16", (2,), "hifloat8 on the device"),
    ]
    assert record.slots[2].summary is not None
    assert (record.slots[2].summary.min, record.slots[2].summary.max) == (1.0, 2.0)


def test_values_that_the_device_left_out(tmp_path: Path) -> None:
    write(tmp_path, f"Add.x.8.3.{TIME}", writer.dump_bytes(inputs=[described(X, address=0, left_out=True)], outputs=[described(W)]))
    (record,) = records_of(tmp_path, 0, 0)
    assert [(slot.shape, slot.content is not None, slot.note) for slot in record.slots] == [
        ((2, 24), False, "its values are not in the file"),
        ((24, 20), True, ""),
    ]


def test_a_question_for_what_is_not_there(dump: Path) -> None:
    run = open_run(dump)
    with pytest.raises(NotARunError, match="holds no step 7 of rank 0; it holds step 2 of rank 1"):
        list(run.records(0, 7))
    with pytest.raises(DamagedRunError, match="keeps no tensor named"):
        run.tensor(1, 2, "../../etc/passwd")


def test_links_are_not_followed(tmp_path: Path, dump: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"Add.x.8.3.{TIME}").symlink_to(dump / PLACE / f"Add.block_Add.8.3.{TIME + 5}")
    (tmp_path / "other" / "7").symlink_to(dump)
    assert not recognize(tmp_path / "other")


@pytest.mark.parametrize("name", ["tree.json", "libfoo.so.1.2.3", "notes.txt"])
def test_other_folders_are_no_dumps(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, b"x")
    write(tmp_path / "sub", f"Add.x.8.3.{TIME}", writer.dump_bytes(outputs=[described(X)]))
    assert not recognize(tmp_path)
    with pytest.raises(NotARunError, match="holds no dump files of Ascend"):
        open_dump(tmp_path)
    with pytest.raises(NotARunError, match="is no run but holds 1: open 'sub'"):
        open_run(tmp_path)


def invoke(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    return result.exit_code, result.output


def test_two_dumps_compare(tmp_path: Path, dump: Path) -> None:
    write_net(tmp_path / "other" / "20240131172437/1/model/9/2")
    code, output = invoke("compare", dump, tmp_path / "other")
    assert code == 0, output


def test_the_operator_that_errs_is_named(tmp_path: Path, dump: Path) -> None:
    write_net(tmp_path / "wrong" / PLACE, wrong=0.5)
    code, output = invoke("compare", tmp_path / "wrong", dump)
    assert code == 1, output
    assert "MatMul" in output
    assert "Add" not in output


def test_a_dump_is_shown(dump: Path) -> None:
    code, output = invoke("show", dump)
    assert code == 0
    assert "block/MatMul/acl.MatMul.0" in output
    code, output = invoke("show", dump, "*MatMul*", "--tensor", "output.0")
    assert code == 0
    assert "float32" in output
