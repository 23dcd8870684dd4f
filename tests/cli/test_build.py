# SPDX-License-Identifier: Apache-2.0
"""`ulpscope build` says what it made, `ulpscope --version` whether it is in use; the builds themselves are tested with the recorder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from tests.capture.test_native import compile_stand_in, copying, needs_compiler, put, write_compiler
from ulpscope import _native_home
from ulpscope.capture.native import building as native
from ulpscope.capture.native import compiled
from ulpscope.cli import cli

pytestmark = [pytest.mark.compiled("recorder"), pytest.mark.compiled("part")]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file where a part is expected; a process that has just begun would not find it."""
    (tmp_path / "_native.cpp").write_text("int main() {}\n")
    monkeypatch.setattr(_native_home, "SOURCE", tmp_path / "_native.cpp")
    monkeypatch.setattr(native, "TABLE", None)
    monkeypatch.setenv("ULPSCOPE_NATIVE", str(tmp_path / "parts"))
    part = _native_home.expected_part()
    assert part is not None
    return part.file


def build() -> Result:
    return CliRunner().invoke(cli, ["build"])


def version() -> str:
    return CliRunner().invoke(cli, ["--version"]).stdout.partition("; ")[2]


def test_what_is_there_is_not_built_again(native_part: Path) -> None:
    written = native_part.stat().st_mtime_ns
    done = build()
    assert (done.exit_code, done.stdout, done.stderr) == (
        0,
        f"already built for torch {torch.__version__}, and in use: '{native_part}'\n",
        "",
    )
    assert native_part.stat().st_mtime_ns == written


@needs_compiler
def test_it_says_what_was_built_and_where(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(copying(tmp_path / "cxx", compile_stand_in(tmp_path / "made"))))
    assert version() == "compiled recorder)\n"
    done = build()
    assert done.exit_code == 0
    assert done.stderr.startswith(f"compiling the part of the recorder that fits torch {torch.__version__}")
    assert done.stdout == f"built '{file}': recordings with this Python and torch {torch.__version__} use it from now on\n"
    assert file.is_file()
    assert version() == f"compiled recorder, built for torch {torch.__version__})\n"


def test_a_compiler_that_fails_is_one_line(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", "echo 'error: \033[31mno' >&2; exit 1")))
    done = build()
    assert (done.exit_code, done.stdout) == (2, "")
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"ulpscope: '{tmp_path / 'cxx'}' cannot compile ")
    assert line.endswith(": error: \\x1b[31mno")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = build()
    assert done.exit_code == 2
    assert "pip install 'ulpscope[torch]'" in done.stderr


def test_nothing_is_built_that_nothing_would_use(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILED", None)
    done = build()
    assert done.exit_code == 2
    assert "only the compiled recorder would use it" in done.stderr
    assert not file.parents[1].exists()


def test_the_version_says_why_a_part_is_not_used(file: Path) -> None:
    put(file, b"anything")
    file.chmod(0o775)
    assert version() == f"compiled recorder, without what was built, since '{file}' is writable by others)\n"
    file.chmod(0o755)
    file.write_bytes(b"anything else")
    assert version() == f"compiled recorder, without what was built, since '{file}' is not as it was built)\n"


def test_the_version_does_without_the_compiled_recorder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(file, b"anything")
    monkeypatch.setenv("ULPSCOPE_NO_KERNEL", "1")
    assert version() == "recorder in Python)\n"


def test_the_version_is_told_without_torch(native_part: Path) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from ulpscope.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f", built for torch {torch.__version__})\nFalse\n")
