# SPDX-License-Identifier: Apache-2.0
"""`ulpscope compare SUBJECT --baseline FILE`, as a pipeline runs it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from click.testing import CliRunner, Result

from ulpscope.cli import cli


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def test_write_compare_widen(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "numerics.jsonl"
    result = compare(runs / "good", "--baseline", file, "--update")
    assert (result.exit_code, result.stdout) == (0, f"baseline '{file}' written: 6 calls of '{runs / 'good'}'\n")
    assert compare(runs / "same", "--baseline", file, "--quiet").exit_code == 0
    result = compare(runs / "bad", "--baseline", file, "--junit", tmp_path / "j.xml", "--github-summary", tmp_path / "s.md")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"diverges: {runs / 'bad'} against {file}")
    assert "first contributed error: mlp  gelu (call 0, forward, output 0), step 0, rank 0" in result.stdout
    failed = [case.get("name") for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase") if case.find("failure") is not None]
    assert failed == ["mlp"]
    assert (tmp_path / "s.md").read_text().startswith("## ulpscope: ❌ diverges\n")
    assert "is left as it is" in compare(runs / "same", "--baseline", file, "--update").stdout
    assert "now holds 2 runs: 6 slots widened, 0 calls added" in compare(runs / "bad", "--baseline", file, "--update").stdout
    assert compare(runs / "bad", "--baseline", file).exit_code == 0
    assert compare(runs / "good", "--baseline", file).exit_code == 0


def test_a_fault_against_a_baseline_has_a_repro_too(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "numerics.jsonl"
    compare(runs / "good", "--baseline", file, "--update")
    result = compare(runs / "bad", "--baseline", file, "--repro", tmp_path / "repro")
    assert f"repro: {tmp_path / 'repro' / 'gelu_0.py'}" in result.stdout
    assert not (tmp_path / "repro" / "gelu_0.reference.safetensors").exists()


def test_a_baseline_that_is_not_there_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    result = compare(runs / "good", "--baseline", tmp_path / "none.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "write it first with --update" in result.stderr
    result = compare(runs / "good", "--baseline", tmp_path / "no" / "b.jsonl", "--update")
    assert (result.exit_code, "create it first" in result.stderr) == (2, True)
