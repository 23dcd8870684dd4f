# SPDX-License-Identifier: Apache-2.0
"""Run the demo: it finds the broken operation, says what happened, and leaves existing files alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import ulpscope
from ulpscope.cli import demo as demo_module
from ulpscope.cli.demo import demo
from ulpscope.errors import InputError, MissingDependencyError, UlpscopeError


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the demo, as a user does, in a folder of its own."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "ulpscope", "demo"]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done, folder / "ulpscope-demo"


def test_it_finds_the_planted_fault(played: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = played
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layers.1.mlp" in done.stdout
    assert "gelu" in done.stdout
    assert "return self.fc2(F.gelu(self.fc1(x)))" in done.stdout
    assert "broken on purpose" in done.stdout
    assert "Traceback" not in done.stderr


def test_its_report_is_one_page(played: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = played
    assert "layers.1.mlp" in (folder / "report.html").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["reference", "report.html", "report_repro", "subject", "train.py"]


def test_only_the_broken_call_is_blamed(played: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = played
    comparison = ulpscope.compare_runs(folder / "subject", folder / "reference")
    (fault,) = comparison.faults
    assert (fault.module, fault.phase, fault.slot, fault.step, fault.rank) == ("layers.1.mlp", "forward", "output.0", 0, 0)
    assert fault.source is not None
    assert Path(fault.source.file).name == "train.py"


def test_a_run_compared_with_itself_is_not_a_found_fault(played: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = played
    comparison = ulpscope.compare_runs(folder / "reference", folder / "reference")
    assert not comparison.faults
    assert not demo_module._is_found(comparison)
    assert "report this as a bug" in demo_module._explanation(folder, found=False)


def test_what_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_module._new_folder(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new" / "mine").write_text("precious")
    assert demo_module._new_folder(tmp_path / "new") == tmp_path / "new-2"
    assert "is left as it is" in capsys.readouterr().out
    assert (tmp_path / "new" / "mine").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--into DIR"):
        demo_module._new_folder(tmp_path / "file" / "demo")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_module, "find_spec", lambda name: None)
    result = CliRunner().invoke(demo, ["--into", str(tmp_path / "demo")])
    assert isinstance(result.exception, MissingDependencyError)
    assert "pip install 'ulpscope[torch]'" in str(result.exception)
    assert not (tmp_path / "demo").exists()


def test_a_recording_that_fails_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such device')")
    with pytest.raises(UlpscopeError, match="exit code 1: no such device") as caught:
        demo_module._record(demo_module._command(tmp_path / "run", script, "cpu"))
    assert "\n" not in str(caught.value)


def test_the_readme_shows_what_it_prints(played: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Every line of the block in the README, word by word; numbers within a tenth, since kernels of other processors round otherwise."""
    done, _ = played
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme.split("$ ulpscope compare ulpscope-demo/subject ulpscope-demo/reference --html report.html\n")[1].split("```")[0]
    printed = done.stdout[done.stdout.index("diverges:") :].splitlines()
    for line, real in zip(shown.rstrip().splitlines(), printed, strict=False):
        assert _NUMBER.sub("#", line) == _NUMBER.sub("#", real)
        assert [float(one) for one in _NUMBER.findall(line)] == pytest.approx([float(one) for one in _NUMBER.findall(real)], rel=0.1)


_NUMBER = re.compile(r"\d+(?:\.\d+)?")
