# SPDX-License-Identifier: Apache-2.0
"""Questions that cannot be answered are refused at once, with what to do instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ulpscope.cli import cli
from ulpscope.model import CallName, Slot
from ulpscope.recording.selection import Selection

SCRIPT = """
import sys
import torch

torch.manual_seed(int(sys.argv[1]) if sys.argv[1:] else 0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def ulpscope(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ulpscope", *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("into", ["train.py", "train.py/deeper"])
@pytest.mark.parametrize("watch", [(), ("--watch", "health")])
def test_a_file_in_the_place_of_the_folder_stops_the_command_before_the_training(folder: Path, into: str, watch: tuple[str, ...]) -> None:
    done = ulpscope(folder, "run", "--into", into, *watch, "train.py")
    assert done.returncode == 2
    assert "trained" not in done.stdout
    assert "is a file and not a folder; give another folder with --into" in done.stderr


def test_a_selection_that_matches_nothing_is_told(folder: Path) -> None:
    done = ulpscope(folder, "run", "--into", "run", "--select", "linaer*", "--select", "relu", "--select", "slot:output*", "train.py")
    assert done.returncode == 0
    assert "could not find what 'linaer*' selects: it matched nothing that the program did" in done.stderr
    assert "'relu'" not in done.stderr
    assert "find what 'linaer*' selects" in ulpscope(folder, "show", "run").stdout


def test_patterns_are_idle_until_they_match() -> None:
    selection = Selection.parse(select=["linear", "module:layers.1", "slot:output*", "!relu", "phase:forward"])
    assert selection.idle_patterns == ("linear", "module:layers.1", "slot:output*")
    assert selection.wants_call("layers.0", CallName("functional.linear", 0))
    assert selection.wants_slot(Slot.parse("output.0"))
    assert selection.idle_patterns == ("module:layers.1",)


def test_watched_runs_are_handed_on_to_the_command_that_compares_them(folder: Path) -> None:
    for name, seed in (("a", "1"), ("b", "2")):
        done = ulpscope(folder, "run", "--into", name, "--watch", "health", "train.py", seed)
        assert done.returncode == 0
        assert f"recorded health into '{name}'; draw it with: ulpscope health --once {name}" in done.stderr
        assert f"ulpscope compare-health {name} OTHER" in done.stderr
    done = ulpscope(folder, "compare", "a", "b")
    assert done.returncode == 2
    assert "use 'ulpscope compare-health a b'" in done.stderr


@pytest.mark.parametrize(("wrong", "right"), [("comapre", "compare"), ("shwo", "show"), ("compare_health", "compare-health")])
def test_a_misspelt_command_is_answered_with_the_right_one(folder: Path, wrong: str, right: str) -> None:
    done = ulpscope(folder, wrong)
    assert done.returncode == 2
    assert f"No such command '{wrong}'. Did you mean '{right}'?" in done.stderr


def test_a_command_that_is_like_none_is_refused_without_a_guess(folder: Path) -> None:
    done = ulpscope(folder, "xyzzy")
    assert done.returncode == 2
    assert "Did you mean" not in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--steps", "0-99999999999"), "is more than 1000000 numbers"),
        (("--steps", "3-1"), "is not a list of numbers"),
        (("--steps", "²"), "is not a list of numbers"),
        (("--max-bytes", "1e999"), "is not a size"),
        (("--max-bytes", "-5GB"), "is not a size"),
        (("--seed", "9" * 30), "a seed has at most 64 bits"),
        (("-m", "nothing.py"), "there is no module 'nothing.py' here"),
        (("-m", "ulpscope_has_no_such_thing.x"), "there is no module"),
    ],
)
def test_words_that_cannot_be_meant(words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))  # a script would have its own
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = () if "-m" in words else ("train.py",)
    result = CliRunner().invoke(cli, ["run", "--into", str(tmp_path / "run"), *words, *script])
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
