# SPDX-License-Identifier: Apache-2.0
"""Run real processes that may open few files, write little or have little memory: at every door one sentence, and no traceback."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.children import on_linux
from tests.legacy.msprobe_dumps import Statistics, write_dump

pytestmark = pytest.mark.skipif(not on_linux(), reason="the limits are those of Linux")

MSPROBE = "import sys; from ulpscope.compat.msprobe.command.parser import main; sys.exit(main())"
RESULT = "NPU Name,Bench Name,Max diff\na.0,a.0,0.5\n"


def limited(folder: Path, which: int, most: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own under one limit."""
    command = [sys.executable, "-m", "ulpscope"] if words[0] == "ulpscope" else [sys.executable, "-c", MSPROBE]
    return subprocess.run(
        [*command, *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(which, (most, most)),
    )


def is_one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_no_room_for_a_workbook(tmp_path: Path) -> None:
    pytest.importorskip("xlsxwriter")
    for rank in (0, 1):
        (tmp_path / f"compare_result_rank{rank}_20260101000000.csv").write_text(RESULT)
    (tmp_path / "merge.yaml").write_text("compare_index: [Max diff]\n")
    words = "msprobe", "merge_result", "-i", ".", "-o", ".", "-config", "merge.yaml"
    said = is_one_sentence(limited(tmp_path, resource.RLIMIT_FSIZE, 2000, *words))
    assert "File too large" in said
    assert not list(tmp_path.glob("*.xlsx*"))


def test_no_memory_for_torch(tmp_path: Path) -> None:
    dump = write_dump(tmp_path, {"Torch.relu.0.forward": {"inputs": [Statistics(1.0, -1.0)], "outputs": [Statistics(1.0, 0.0)]}})
    said = is_one_sentence(limited(tmp_path, resource.RLIMIT_AS, 300_000_000, "msprobe", "acc_check", "-api_info", str(dump), "-o", "."))
    assert "Cannot allocate memory: there is not enough memory; end what is not needed" in said


def test_no_more_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"task": "statistics"}))
    said = is_one_sentence(limited(tmp_path, resource.RLIMIT_NOFILE, 5, "ulpscope", "compare", "a", "b"))
    assert "Too many open files" in said or "does not exist" in said
