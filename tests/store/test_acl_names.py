# SPDX-License-Identifier: Apache-2.0
"""The names of Ascend's dump files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.errors import DamagedRunError, InputError
from ulpscope.store.acl.file_names import AclName, match_acl_name, parse_acl_name, read_mapping

TIME = 1675157077183551


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (f"MatMul.MatMul_1.45.0.{TIME}", AclName("MatMul", "MatMul_1", 45, 0, TIME)),
        (f"Add.Add.7.{TIME}", AclName("Add", "Add", 7, None, TIME)),
        (f"Cast.trans.Cast.0.7.3.{TIME}", AclName("Cast", "trans.Cast.0", 7, 3, TIME)),
        (f"Conv2D.conv_lxslice0.2.9.{TIME}.4.487.1.5", AclName("Conv2D", "conv_lxslice0", 2, 9, TIME, 4, 487, 1, 5)),
        (f"Conv2D.conv.2.9.{TIME}.4.487.1", AclName("Conv2D", "conv", 2, 9, TIME, 4, 487, 1)),
        (f"Opdebug.Node_OpDebug.12.3.{TIME}", AclName("Opdebug", "Node_OpDebug", 12, 3, TIME)),
        (f"exception_info.3.45.{TIME}", AclName("exception_info", "", 45, 3, TIME)),
        (f"te_matmul_abc.3.45.1.12.{TIME}", AclName("te_matmul_abc", "", 45, 3, TIME)),
        (f"Add.12.7.3.{TIME}", AclName("Add", "12", 7, 3, TIME)),
    ],
)
def test_names_are_taken_apart(name: str, parts: AclName) -> None:
    assert parse_acl_name(name) == parts
    assert parts.is_overflow == name.startswith("Opdebug")
    assert parts.is_exception == (parts.op_name == "")


@pytest.mark.parametrize(
    "name",
    [
        "", "dump.json", "libfoo.so.1.2.3", f"../MatMul.x.45.0.{TIME}", f"MatMul.a/../b.45.0.{TIME}", f"MatMul.x\n.45.0.{TIME}",
        f"MatMul.x.45.0.{TIME}.output.0.npy", f"a.{'b' * 5000}.1.2.{TIME}", f"MatMul\\x.y.45.0.{TIME}",
    ],
)  # fmt: skip
def test_what_is_no_name_is_said_in_a_sentence(name: str) -> None:
    assert match_acl_name(name) is None
    with pytest.raises(InputError, match="is not the name of a dump file") as caught:
        parse_acl_name(name)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)
numbers = st.integers(0, 10**6)


@given(op_type=words, op_name=words, task=numbers, stream=numbers, time=st.integers(10**15, 10**16 - 1))
def test_names_round_trip(op_type: str, op_name: str, task: int, stream: int, time: int) -> None:
    assert parse_acl_name(f"{op_type}.{op_name}.{task}.{stream}.{time}") == AclName(op_type, op_name, task, stream, time)


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_none(text: str) -> None:
    name = match_acl_name(text)
    assert name is None or "/" not in name.op_type + name.op_name


def test_the_list_of_long_names(tmp_path: Path) -> None:
    (tmp_path / "mapping.csv").write_text(f"123,MatMul.long.1.2.{TIME}\nnot a row\n../x,y\n456,a,b\n")
    assert read_mapping(tmp_path) == {"123": f"MatMul.long.1.2.{TIME}"}
    assert read_mapping(tmp_path / "none") == {}


def test_a_list_of_names_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "mapping.csv").write_bytes(b'1,"' + b"x" * 200_000 + b'"\n')
    with pytest.raises(DamagedRunError, match="not the list of names"):
        read_mapping(tmp_path)
    (tmp_path / "mapping.csv").write_bytes(b"\xff\xfe\x00,\x01\n")
    assert read_mapping(tmp_path) == {}
