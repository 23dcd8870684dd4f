# SPDX-License-Identifier: Apache-2.0
"""A command that we print can be pasted: a real shell hands every word to the program as it was meant, and nothing in it runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.conftest import write_run
from ulpscope._shell import as_glob, as_path, command_line, quoted
from ulpscope.cli import cli
from ulpscope.cli.run import _say_what_came

ODD = {
    "plain": "runs/a",
    "space": "with space",
    "quotes": 'it\'s "quoted" `id`',
    "substitution": "$(touch planted)${HOME}$x",
    "operators": "a;touch planted&touch planted|touch planted>planted",
    "glob": "a*[b]?{c,d}~!x#y",
    "backslash": "a\\nb\\",
    "dash": "-rf",
    "option": "--help",
    "tilde": "~",
    "unicode": "größe é 実行",
    "newline": "two\nlines",
    "end": "ends with a newline\n",
    "control": "\x1b[31mred\x07\r\t",
    "bidi": "\u202egnp\u2066",
    "separator": "a\u2028b\u00a0c\u3000d",
    "bytes": "no \udcff\udc80 text",
    "mixed": "'\n$(touch planted)\\'",
}
SHELLS = [shell for shell in ("sh", "bash", "zsh") if shutil.which(shell)]


def words_in(shell: str, line: str, cwd: Path) -> list[bytes]:
    """Return the words that a shell makes of a line, as the program behind it gets them."""
    code = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    done = subprocess.run([shell, "-c", f"{quoted(sys.executable)} -c {quoted(code)} {line}"], cwd=cwd, capture_output=True, check=True)
    assert not list(cwd.iterdir())
    return done.stdout.split(b"\0")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_word_arrives(shell: str, tmp_path: Path) -> None:
    words = list(ODD.values())
    if shell == "sh":  # what does not print is spelled in a way that older ones do not know
        words = [word for word in words if word.isprintable()]
    line = command_line(*words, "")
    assert line.isprintable()
    assert words_in(shell, line, tmp_path) == [*(word.encode("utf-8", "surrogateescape") for word in words), b""]


@settings(max_examples=20)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=40))
def test_any_words_arrive_in_bash(words: list[str]) -> None:
    line = command_line(*words)
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


def test_no_word_is_taken_for_an_option() -> None:
    assert (as_path("-rf"), as_path("a/-b"), as_path("a")) == ("./-rf", "a/-b", "a")
    assert (as_glob("-x[0]"), as_glob("x[0]")) == ("[-]x[[]0]", "x[0]")


def ulpscope_in(shell: str, line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return the printed line as it stands, with our own command in the path."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run([shell, "-c", line], cwd=cwd, env={"PATH": path, "HOME": str(cwd)}, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["space", "quotes", "substitution", "dash", "newline"])
def test_what_is_printed_after_a_recording_shows_that_recording(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path(ODD[name]), keep="statistics")
    _say_what_came(Path(ODD[name]))
    said = capsys.readouterr().err
    assert said.endswith("\n")
    assert said[:-1].isprintable()
    done = ulpscope_in("bash", said.partition("look at it with: ")[2], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ulpscope run, format" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [ODD[name]]


def test_refine_prints_commands_for_odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a $(touch planted)'s\n"), keep="statistics", scale=1.01)
    write_run(Path("-b c"), keep="statistics")
    result = CliRunner().invoke(cli, ["refine", "--into", 'my "calls".txt', "--", "a $(touch planted)'s\n", "-b c"])
    assert result.exit_code == 0, result.output
    assert all(line.isprintable() for line in result.stdout.split("\n"))
    [ours, theirs] = [line.partition("   # the ")[0] for line in result.stdout.splitlines() if "   # the " in line]
    then = result.stdout.splitlines()[-1].removeprefix("then: ")
    got = {line: words_in_bash(line) for line in (ours, theirs, then)}
    assert got[ours][got[ours].index("--into") + 1] == "a $(touch planted)'s\n-closer"
    assert got[theirs][got[theirs].index("--into") + 1] == "./-b c-closer"
    assert got[ours][got[ours].index("--select") + 1] == '@my "calls".txt'
    assert got[then] == ["ulpscope", "compare", "a $(touch planted)'s\n-closer", "./-b c-closer"]
    assert not (tmp_path / "planted").exists()


def words_in_bash(line: str) -> list[str]:
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]
