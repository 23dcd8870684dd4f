# SPDX-License-Identifier: Apache-2.0
"""Both ways: the real `msprobe compare` reads our dumps, ours reads its dumps, and on the same dumps both say the same.

Needs a Python with mindstudio-probe 26.2.0, named by ULPSCOPE_PEER_PYTHON; for the 1.x line a folder with that wheel unpacked, named by
ULPSCOPE_PEER_OLD (old names of NumPy and pandas are put back for it).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.legacy.msprobe_dumps import csv_rows, msprobe, only, write_dump, xlsx_rows
from tests.legacy.msprobe_programs import dump
from tests.legacy.test_msprobe_compare import network

PEER = os.environ.get("ULPSCOPE_PEER_PYTHON", "")
OLD = os.environ.get("ULPSCOPE_PEER_OLD", "")
pytestmark = [pytest.mark.long, pytest.mark.skipif(not PEER, reason="ULPSCOPE_PEER_PYTHON names no Python with mindstudio-probe")]
MODES = {
    "statistics": ("statistics", {}),
    "tensor": ("tensor", {}),
    "md5": ("statistics", {"summary_mode": "md5"}),
}
OWN_WORDS = ("Err_message",)


def real_compare(target: Path, golden: Path, output: Path) -> list[dict[str, str]]:
    words = [str(Path(PEER).with_name("msprobe")), "compare", "-tp", str(target), "-gp", str(golden), "-o", str(output)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert "ends successfully" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return csv_rows(only(output, "*.csv"))


@pytest.mark.promise("E70")
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("mode", MODES)
def test_the_real_compare_passes_identical_dumps_of_ours(tmp_path: Path, mode: str, level: str) -> None:
    task, block = MODES[mode]
    sides = []
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        sides.append(dump(tmp_path / side, task, block, layout="26.x", level=level) / "step0")
    theirs = real_compare(*sides, tmp_path / "theirs")
    assert theirs
    assert {row["Result"] for row in theirs} == {"pass"}
    assert "N/A" not in {row["Bench Name"] for row in theirs}
    assert msprobe("compare", "-tp", sides[0], "-gp", sides[1], "-o", tmp_path / "ours") == 0
    ours = csv_rows(only(tmp_path / "ours", "*.csv"))
    assert [row["NPU Name"] for row in ours] == [row["NPU Name"] for row in theirs]
    assert {row["Result"] for row in ours} == {"pass"}


def same(ours: str, theirs: str) -> bool:
    try:
        return float(ours.rstrip("%")) == pytest.approx(float(theirs.rstrip("%")), rel=1e-5, abs=1e-9)
    except ValueError:
        return ours == theirs


@pytest.mark.promise("E61", "E62", "E70")
@pytest.mark.parametrize("mode", MODES)
def test_both_say_the_same_of_two_dumps(tmp_path: Path, mode: str) -> None:
    """A gelu that is off by half: cell by cell, but for wordings and for what only one side has."""
    target = write_dump(tmp_path / "npu" / "step0" / "rank0", network(1.5), mode)
    golden = write_dump(tmp_path / "bench" / "step0" / "rank0", network(), mode)
    for file in (target, golden):
        file.with_name("construct.json").write_text("{}")
    sides = [file.parents[1] for file in (target, golden)]
    theirs = real_compare(*sides, tmp_path / "theirs")
    assert msprobe("compare", "-tp", sides[0], "-gp", sides[1], "-o", tmp_path / "ours") == 0
    ours = csv_rows(only(tmp_path / "ours", "*.csv"))
    differing = {
        (row["NPU Name"], column): (row[column], other.get(column, ""))
        for row, other in zip(ours, theirs, strict=True)
        for column in row
        if column not in OWN_WORDS and not same(row[column], other.get(column, "")) and column != "NPU_Stack_Info"
    }
    assert differing == {}


OLD_COMPARE = """
import sys
import numpy as np
for old, new in (("unicode_", "str_"), ("float_", "float64"), ("complex_", "complex128"), ("bool8", "bool_")):
    if not hasattr(np, old): setattr(np, old, getattr(np, new))
import pandas
pandas.set_option("future.infer_string", False)
if not hasattr(pandas.DataFrame, "applymap"): pandas.DataFrame.applymap = pandas.DataFrame.map
from msprobe.pytorch.compare.pt_compare import compare
paths = {"npu_json_path": sys.argv[1], "bench_json_path": sys.argv[2], "stack_json_path": sys.argv[3], "is_print_compare_log": False}
compare(paths, sys.argv[4], stack_mode=True)
"""


@pytest.mark.promise("E70")
@pytest.mark.skipif(not OLD, reason="ULPSCOPE_PEER_OLD names no folder with a wheel of the 1.x line")
@pytest.mark.parametrize("mode", MODES)
def test_the_compare_of_1x_reads_our_tree_of_1x(tmp_path: Path, mode: str) -> None:
    task, block = MODES[mode]
    files: list[Any] = []
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        (rank,) = (dump(tmp_path / side, task, block, layout="1.x") / "step0").iterdir()
        files.append(rank / "dump.json")
    (tmp_path / "out").mkdir()
    words = [PEER, "-c", OLD_COMPARE, *map(str, files), str(files[0].with_name("stack.json")), str(tmp_path / "out")]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": OLD}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = xlsx_rows(only(tmp_path / "out", "compare_result_*.xlsx"))
    assert len(rows) > 20
    assert {row.get("Result", row.get("Accuracy Reached or Not")) for row in rows} <= {None, "None", "pass", "Yes"}
    assert {row["colour"] for row in rows if row["NPU Dtype"] != "None"} == {""}  # a gradient that does not exist is red in 1.0
