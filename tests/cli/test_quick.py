# SPDX-License-Identifier: Apache-2.0
"""Check that two shortcuts change no answer: an early start, and a process that ends without a last collection."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.conftest import write_run
from tests.cli.test_group import ulpscope_command
from ulpscope.cli import cli


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def answer_in(path: Path) -> str:
    return re.sub(r'"elapsed_s": [^,]+', "", path.read_text())


@pytest.mark.parametrize(("subject", "code"), [("bad", 1), ("same", 0), ("good", 0)])
@pytest.mark.parametrize("quiet", [("--quiet",), ()])
def test_the_answer_is_that_of_the_slow_way(subject: str, code: int, quiet: tuple[str, ...], runs: Path, report: Path) -> None:
    words = ["compare", str(runs / subject), str(runs / "good"), *quiet, "--replay", "none", "--json", str(report)]
    slow = CliRunner().invoke(cli, words)
    expected = answer_in(report)
    report.unlink()
    done = ulpscope_command(*words)
    assert (done.returncode, done.stdout, done.stderr) == (code, slow.stdout, "")
    assert slow.exit_code == code
    assert answer_in(report) == expected


def test_without_the_kernel_it_is_the_same(runs: Path, report: Path) -> None:
    words = ["compare", runs / "bad", runs / "good", "--quiet", "--replay", "none", "--json", report]
    assert ulpscope_command(*words).returncode == 1
    verdicts = [json.loads(report.read_text())["counts"]]
    assert ulpscope_command(*words, env={"ULPSCOPE_NO_KERNEL": "1"}).returncode == 1
    assert json.loads(report.read_text())["counts"] == verdicts[0]


def test_runs_that_keep_their_tensors_in_another_order_get_the_same_answer(runs: Path, tmp_path: Path, report: Path) -> None:
    """One more tensor in front puts every pair of the early start one off."""
    other = write_run(tmp_path / "other", scale=1.01, steps=(1,))
    words = ["compare", str(other), str(runs / "good"), "--quiet", "--replay", "none", "--json", str(report)]
    CliRunner().invoke(cli, words)
    expected = answer_in(report)
    assert ulpscope_command(*words).returncode == 1
    assert answer_in(report) == expected


def test_a_quiet_comparison_loads_only_what_it_needs(runs: Path, report: Path) -> None:
    words = ["compare", str(runs / "same"), str(runs / "good"), "--quiet", "--replay", "none", "--json", str(report)]
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "ulpscope", *words], capture_output=True, text=True, timeout=60)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ulpscope.workflows.compare.comparing" in loaded
    assert not loaded & {"rich", "numpy", "torch", "pyarrow", "concurrent.futures", "asyncio", "difflib"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["bad", "good", "--json", "missing/report.json"], 2, "the folder 'missing' does not exist; create it first"),
        (["bad", "hurt"], 2, "is damaged"),
    ],
)
def test_what_goes_wrong_is_one_sentence(words: list[str], code: int, said: str, runs: Path, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).symlink_to(runs / name)
    hurt = write_run(tmp_path / "hurt")
    records = hurt / "rank00000" / "step00000" / "records.msgpack"
    data = bytearray(records.read_bytes())
    data[200] ^= 255
    records.write_bytes(data)
    done = ulpscope_command("compare", *words, "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("ulpscope: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def into_a_closed_pipe(*words: Any) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "ulpscope", *map(str, words)]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("more", [(), ("--json", "-"), ("--json", "-", "--quiet")])
def test_a_reader_that_has_left_is_no_divergence(more: tuple[str, ...], runs: Path) -> None:
    assert into_a_closed_pipe("compare", runs / "bad", runs / "good", "--replay", "none", *more) == (141, "")


def test_nobody_listens_to_a_quiet_comparison(runs: Path) -> None:
    assert into_a_closed_pipe("compare", runs / "bad", runs / "good", "--replay", "none", "--quiet") == (1, "")


def test_what_others_do_at_exit_is_done(runs: Path) -> None:
    code = "import atexit, sys; atexit.register(print, 'at the end'); from ulpscope.__main__ import main; main()"
    words = ["compare", runs / "bad", runs / "good", "--quiet", "--replay", "none"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "at the end\n", "")


@pytest.mark.parametrize("where", ["ulpscope.__main__._run", "ulpscope.cli.compare.answer", "ulpscope.__main__._early_start"])
def test_an_interrupt_is_told_wherever_it_comes(where: str, runs: Path) -> None:
    code = f"""
import ulpscope.cli.compare
from unittest.mock import patch
from ulpscope.__main__ import main
with patch({where!r}, side_effect=KeyboardInterrupt):
    main()
"""
    words = ["compare", runs / "bad", runs / "good", "--quiet", "--replay", "none"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nulpscope: interrupted\n")
