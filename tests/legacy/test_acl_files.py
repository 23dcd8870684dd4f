# SPDX-License-Identifier: Apache-2.0
"""Ascend's own dump files, through the parse shell of ptdbg. The files are synthetic: the tests' own writer makes them."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.store import acl_writer as writer
from tests.store.acl_writer import described

TIME = 1675157077183551
TREE = "20230131172437/0/1"  # time, device, model
X = np.arange(12, dtype="f4").reshape(3, 4)


def typed(folder: Path, *lines: str) -> str:
    """Return the shell's output for some lines typed into it."""
    done = subprocess.run(
        [sys.executable, "-m", "ptdbg_ascend.parse"], input="\n".join(lines) + "\n", cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_dump(root: Path, wrong: float = 0.0) -> Path:
    """Write the tree of a dump of two operators; the second in the blocks of a matrix unit."""
    folder = root / TREE
    folder.mkdir(parents=True)
    total, product = X + X, (X + X) @ X.T + np.float32(wrong)
    blocks = described(writer.fractal_nz(product), format="FRACTAL_NZ", original_shape=product.shape)
    (folder / f"Add.Add_0.5.2.{TIME}").write_bytes(writer.dump_bytes([described(X), described(X)], [described(total)], op_name="Add_0"))
    (folder / f"MatMul.MatMul_1.6.2.{TIME + 1}").write_bytes(writer.dump_bytes([described(total)], [blocks], op_name="MatMul_1"))
    return folder


@pytest.mark.promise("P136")
def test_the_tree_and_the_names_of_a_dump_are_understood(tmp_path: Path) -> None:
    write_dump(tmp_path / "mine", wrong=1.0)
    write_dump(tmp_path / "golden")
    printed = typed(tmp_path, "vc -m mine -g golden")
    (table,) = (tmp_path / "parse_data" / "compare_result").glob("result_*.csv")
    assert table.name in printed
    with table.open(newline="") as stream:
        rows = {(row["OpType"], row["OpName"], row["TensorIndex"]): row for row in csv.DictReader(stream)}
    assert {("Add", "Add_0", "input.0"), ("Add", "Add_0", "output.0"), ("MatMul", "MatMul_1", "output.0")} <= set(rows)
    wrong = rows["MatMul", "MatMul_1", "output.0"]
    assert (wrong["NPUDump"], wrong["Shape"]) == (f"MatMul.MatMul_1.6.2.{TIME + 1}", "[3, 3]")
    assert float(wrong["MaxAbsoluteError"]) == 1.0
    assert float(rows["Add", "Add_0", "output.0"]["MaxAbsoluteError"]) == 0.0


def test_the_files_of_an_overflow_are_readable_by_the_shell(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "dump")
    words = [1, 2, 6, 0, 65535, 65535, 0, 0, 0, 0, 0x800]
    told = f"Opdebug.Node_OpDebug.9.2.{TIME + 2}"
    (folder / told).write_bytes(writer.overflow_bytes(writer.overflow_output(0, words)))
    printed = typed(tmp_path, f"dc -n {folder} -f ND", f"pt -n parse_data/dump_convert/MatMul.MatMul_1.6.2.{TIME + 1}.output.0.3x3.npy")
    assert f"{told}.output.0." in printed
    assert "[Shape: (3, 3)]" in printed
    converted = np.load(next((tmp_path / "parse_data" / "dump_convert").glob(f"{told}.output.0.*npy")))
    np.testing.assert_array_equal(converted[24:].view("<u8"), words)
