# SPDX-License-Identifier: Apache-2.0
"""Opdebug files: the overflows that a device reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store import acl_writer as writer
from ulpscope.errors import DamagedRunError
from ulpscope.store.acl.debug_files import read_overflows
from ulpscope.store.acl.file_names import parse_acl_name

TIME = 1675157077183551
CORE = [1, 3, 45, 0, 65535, 65535, 0xAA, 0xBB, 7, 2]  # model, stream, task, task type, context, thread, pc, para, core, block


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / f"Opdebug.Node_OpDebug.99.8.{TIME}"


@pytest.mark.parametrize(("unit", "name"), [(0, "AI Core"), (1, "AI Vector")])
def test_a_core(file: Path, unit: int, name: str) -> None:
    file.write_bytes(writer.overflow_bytes(writer.overflow_output(unit, [*CORE, 0x800])))
    (told,) = read_overflows(file)
    assert (told.unit, told.task, told.stream, told.context, told.thread, told.status) == (name, 45, 3, None, None, (0x800,))
    assert told.fields["pc_start"] == 0xAA
    assert told.fields["core"] == 7


def test_a_core_with_four_statuses(file: Path) -> None:
    file.write_bytes(writer.overflow_bytes(writer.overflow_output(0, [*CORE, 0, 0, 4, 0], version=1)))
    assert read_overflows(file)[0].status == (0, 0, 4, 0)


def test_the_other_units(file: Path) -> None:
    file.write_bytes(writer.overflow_bytes(writer.overflow_output(2, [1, 3, 45, 1, 10, 6, 20, 9])))
    (told,) = read_overflows(file)
    assert (told.unit, told.context, told.thread, told.fields["cpu"], told.status) == ("AI CPU", 10, 20, 6, (9,))
    file.write_bytes(writer.overflow_bytes(writer.overflow_output(3, [1, 3, 45, 0, 10, 65535, 100, 200, 4, 1])))
    (told,) = read_overflows(file)
    assert (told.unit, told.context, told.thread, told.fields["destination"]) == ("SDMA", 10, None, 200)


def test_the_older_form_has_a_place_for_each_unit(file: Path) -> None:
    tale = writer.old_overflow_output(dha=[1, 2, 3, 0, 0, 0], l2=[1, 5, 6, 0, 0, 0], core=[1, 8, 9, 0, 0xAA, 0], statuses=(0, 17, 19))
    file.write_bytes(writer.overflow_bytes(tale))
    told = read_overflows(file)
    assert [(one.unit, one.stream, one.task, one.status) for one in told] == [("L2 atomic add", 5, 6, (17,)), ("AI Core", 8, 9, (19,))]
    assert (told[1].fields["kernel"], told[1].fields["block"]) == (0xC0DE, 5)


def test_no_status_is_no_overflow(file: Path) -> None:
    file.write_bytes(writer.overflow_bytes(writer.overflow_output(0, [*CORE, 0])))
    assert read_overflows(file) == ()
    file.write_bytes(writer.overflow_bytes(writer.old_overflow_output()))
    assert read_overflows(file) == ()


def test_it_is_joined_to_an_operator_by_task_and_stream_and_slice(file: Path) -> None:
    file.write_bytes(writer.overflow_bytes(writer.overflow_output(0, [1, 3, 45, 4, 487, 1, 0, 0, 0, 0, 1])))
    (told,) = read_overflows(file)
    assert told.concerns(parse_acl_name(f"MatMul.a.45.3.{TIME}.4.487.1.0"))
    assert told.concerns(parse_acl_name(f"MatMul.a.45.3.{TIME}"))
    assert told.concerns(parse_acl_name(f"MatMul.a.45.{TIME}"))
    assert not told.concerns(parse_acl_name(f"MatMul.a.45.3.{TIME}.4.487.2.0"))
    assert not told.concerns(parse_acl_name(f"MatMul.a.45.4.{TIME}"))
    assert not told.concerns(parse_acl_name(f"MatMul.a.3.45.{TIME}"))
    assert not told.concerns(parse_acl_name(f"Opdebug.Node_OpDebug.45.3.{TIME}"))


@pytest.mark.parametrize(
    ("tale", "sentence"),
    [
        (b"", "0 bytes that tell of no overflow"),
        (bytes(100), "100 bytes that tell of no overflow"),
        (writer.overflow_output(9, CORE), "on unit 9"),
        (writer.overflow_output(0, CORE), "ends in the middle"),
    ],
)
def test_what_tells_nothing_is_said_in_a_sentence(file: Path, tale: bytes, sentence: str) -> None:
    file.write_bytes(writer.overflow_bytes(tale))
    with pytest.raises(DamagedRunError, match=sentence):
        read_overflows(file)
