# SPDX-License-Identifier: Apache-2.0
"""Refuse dumps that are broken or that lie: one clear sentence each; no foreign file is opened, and no claim takes memory."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptdbg_ascend
from tests.legacy.ptdbg_dumps import line, param, rows, write_dump, write_lines
from tests.legacy.test_ptdbg_compare import left_with, values

NAME = "Torch_f_0_forward_output"
ONES = np.ones(3, "f4")


class Payload:
    """Pickled, it would write a file when loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no line of an API"),
        (b"\n\n\n", "no line of an API"),
        (b"\x80\x04\x95" + bytes(50), "line 1 is not a JSON array"),
        (b'{"a": 1}\n', "line 1 is not a JSON array"),
        (b"[" * 200_000 + b"\n", "line 1 is not a JSON array"),
        (b'["x_0_forward_output", 0, [], "torch.float32", [' + b"9" * 100_000 + b"], [1, 1, 1]]\n", "line 1 is not a JSON array"),
        (b"[[1, 2], 3]\n", "line 1 does not begin with a name"),
        (b'["' + b"n" * 2000 + b'", 1, [], "t", [], []]\n', "line 1 does not begin with a name"),
        (b"[" + b" " * (17 << 20) + b"]\n", "line 1 is not a JSON array"),
        (b'["nothing known", 1]\n', "no line of an API"),
        (b'["Torch_f_0_forward_output", 1]\n', "no line of an API"),
    ],
    ids=["empty", "blank", "pickle", "object", "deep", "digits", "no name", "long name", "long line", "stranger", "short"],
)
def test_a_broken_dump_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str) -> None:
    good, bad = write_dump(tmp_path / "good", values()), write_dump(tmp_path / "bad", values())
    bad.write_bytes(content)
    sentence = left_with(lambda: ptdbg_ascend.compare(param(bad, good), tmp_path / "output"), 13, capsys)
    assert words in sentence
    assert str(bad) in sentence
    assert list((tmp_path / "output").iterdir()) == []


def test_no_pickle_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "was run"
    good, bad = write_dump(tmp_path / "good", {NAME: ONES}), write_dump(tmp_path / "bad", {NAME: ONES})
    np.save(tmp_path / "bad" / "dump" / f"{NAME}.npy", np.array([Payload(mark)], dtype=object), allow_pickle=True)
    row = rows(ptdbg_ascend.compare(param(bad, good), tmp_path / "output"))[0]
    assert (row["Cosine"], row["Accuracy Reached or Not"]) == ("Nan", "Nan")
    assert f"{NAME}.npy" in row["Err_message"]
    bad.write_bytes(pickle.dumps(Payload(mark)))
    left_with(lambda: ptdbg_ascend.compare(param(bad, good), tmp_path / "output"), 13, capsys)
    left_with(lambda: ptdbg_ascend.parse(str(bad), "x"), 13, capsys)
    assert not mark.exists()


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    good, cut = write_dump(tmp_path / "good", values()), write_dump(tmp_path / "cut", values())
    cut.write_bytes(cut.read_bytes()[:-30])
    assert len(rows(ptdbg_ascend.compare(param(cut, good), tmp_path / "output"))) == len(values()) - 1


def lying_npy(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(12)


@pytest.mark.parametrize("shape", ["(1073741824,)", "(4294967296, 4294967296)", "(-3,)", "('x',)", "(3, __import__('os'))"])
def test_a_tensor_file_that_lies_about_its_size_costs_its_row_only(tmp_path: Path, shape: str) -> None:
    found = {NAME: ONES, "Torch_g_0_forward_output": ONES}
    good, bad = write_dump(tmp_path / "good", found), write_dump(tmp_path / "bad", found)
    (tmp_path / "bad" / "dump" / f"{NAME}.npy").write_bytes(lying_npy(shape))
    tracemalloc.start()
    table = rows(ptdbg_ascend.compare(param(bad, good), tmp_path / "output"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert table[0]["Cosine"] in ("Nan", "shape unmatched")
    assert f"{NAME}" in table[0]["Err_message"] or "shapes" in table[0]["Err_message"]
    assert table[1]["Accuracy Reached or Not"] == "Yes"


def test_a_name_never_leads_out_of_its_folder(tmp_path: Path) -> None:
    names = [
        "../secret_0_forward_output",
        "/etc/x_0_forward_output",
        "a/b_0_forward_output",
        "..\\x_0_forward_output",
        "nul\0_0_forward_output",
    ]
    np.save(tmp_path / "secret_0_forward_output.npy", ONES)
    sides = []
    for side in ("npu", "bench"):
        (tmp_path / side / "dump").mkdir(parents=True)
        sides.append(write_lines(tmp_path / side, [line(name, ONES) for name in names]))
    table = rows(ptdbg_ascend.compare(param(*sides), tmp_path / "output"))
    assert {row["Cosine"] for row in table} == {"Nan"}
    assert all("not found" in row["Err_message"] for row in table)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    sides = [write_dump(tmp_path / side, {NAME: ONES}) for side in ("npu", "bench")]
    np.save(tmp_path / "secret.npy", ONES)
    file = tmp_path / "npu" / "dump" / f"{NAME}.npy"
    file.unlink()
    file.symlink_to(tmp_path / "secret.npy")
    assert "not found" in rows(ptdbg_ascend.compare(param(*sides), tmp_path / "output"))[0]["Err_message"]


MARKUP = [
    "Torch_<script>alert(1)</script>_0_forward_output",
    "Torch_[bold red]x[/]_0_forward_output",
    "=cmd|' /C calc'!A0_0_forward_output",
]


@pytest.mark.parametrize("name", [*MARKUP, "Torch_\x1b[31mred_0_forward_output"])
def test_names_are_shown_and_never_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    sides = [write_lines(tmp_path / side, [line(name, array)]) for side, array in (("npu", ONES), ("bench", ONES * 9))]
    paths = {"npu_pkl_path": sides[0], "bench_pkl_path": sides[1]}
    table = ptdbg_ascend.compare(paths, tmp_path / "output")
    ptdbg_ascend.parse(sides[0], name)
    assert "\x1b" not in capsys.readouterr().out
    cell = rows(table)[0]["NPU Name"]
    assert cell.lstrip("'") == name.replace("\x1b", "\\x1b")
    assert not cell.startswith("=")
    page = table.with_suffix(".html")
    assert not page.exists() or "<script>alert(1)" not in page.read_text()


@pytest.mark.parametrize(
    "statistics", [None, 7, "x", [], [None, None, None], ["a", {}, [1]], [1e400, -1e400, float("nan")], [10**300, 1, 1], [[[[]]]] * 3]
)
def test_statistics_of_any_kind_end_up_in_cells(tmp_path: Path, statistics: Any) -> None:
    text = json.dumps([NAME, 0, [], "torch.float32", [3], statistics])
    sides = []
    for side in ("npu", "bench"):
        (tmp_path / side).mkdir()
        sides.append(tmp_path / side / "dump.pkl")
        sides[-1].write_text(text + "\n")
    row = rows(ptdbg_ascend.compare({"npu_pkl_path": sides[0], "bench_pkl_path": sides[1]}, tmp_path / "output"))[0]
    assert len(row) == 18
    assert row["Max diff"] in ("Nan", "0.0")


def test_thousands_of_apis_without_partners_are_matched_in_no_time(tmp_path: Path) -> None:
    """Each of 20 000 APIs against each other would be 400 million comparisons."""
    from ulpscope.compat.ptdbg.compare.partner_keys import match_operators
    from ulpscope.model.written import WrittenCall as Operator
    from ulpscope.model.written import WrittenValue as TensorLine

    def operators(shape: str) -> list[Operator]:
        names = (f"Torch_f_{at}_forward" for at in range(20_000))
        return [Operator(name, [TensorLine(f"{name}_input.0", "torch.float32", shape, (), "")]) for name in names]

    assert sum(match.bench is None for match in match_operators(operators("[1]"), operators("[2]"), fuzzy=True)) == 20_000
