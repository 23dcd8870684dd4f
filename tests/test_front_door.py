# SPDX-License-Identifier: Apache-2.0
"""The public names, what importing costs, and the house rules that hold for every file."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ulpscope

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "rich", "pyarrow", "safetensors")

PUBLIC_NAMES = [
    "CallRecord",
    "Capture",
    "CaptureWarning",
    "Check",
    "Comparison",
    "Finding",
    "HealthComparison",
    "HealthRecording",
    "HealthRun",
    "HealthWatch",
    "InputError",
    "MissingDependencyError",
    "NonFinite",
    "NonFiniteCall",
    "NonFiniteError",
    "NonFiniteReport",
    "Run",
    "TensorRecord",
    "UlpscopeError",
    "__version__",
    "check_run",
    "compare_health",
    "compare_runs",
    "find_nonfinite",
    "open_health",
    "open_run",
    "record_health",
    "watch",
]


def run_python(code: str, *arguments: str) -> str:
    """What a clean interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names() -> None:
    assert ulpscope.__all__ == PUBLIC_NAMES == sorted(PUBLIC_NAMES)
    assert dir(ulpscope) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(ulpscope, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'replay_everything'"):
        _ = ulpscope.replay_everything


def test_every_result_of_a_public_function_is_public() -> None:
    """Names for annotations: who keeps what a function returns can say so without a private path."""
    functions = [value for name in PUBLIC_NAMES if inspect.isfunction(value := getattr(ulpscope, name))]
    assert len(functions) > 5
    hidden = {function.__name__: inspect.signature(function).return_annotation for function in functions}
    assert {name: result for name, result in hidden.items() if result not in PUBLIC_NAMES} == {}


def test_importing_loads_nothing_heavy() -> None:
    loaded = run_python("import sys, json, ulpscope; print(json.dumps(sorted(sys.modules)))")
    assert not set(HEAVY) & set(json.loads(loaded))


def test_reading_and_comparing_resolve_without_torch() -> None:
    assert run_python("import sys, ulpscope; ulpscope.open_run, ulpscope.compare_runs; print('torch' in sys.modules)") == "False\n"


def test_importing_changes_no_torch_attribute() -> None:
    code = """
import sys, torch, torch.distributed, torch.nn.functional, torch.optim
def attributes():
    homes = [torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.autograd, torch.autograd.Function, torch.distributed,
             torch.optim.Optimizer, torch.utils.data.DataLoader]
    return {(str(home), name): value for home in homes for name, value in vars(home).items()}
before = attributes()
import ulpscope
for name in ulpscope.__all__:
    getattr(ulpscope, name)
after = attributes()
assert before.keys() == after.keys(), before.keys() ^ after.keys()
changed = [key for key in before if before[key] is not after[key]]
assert not changed, changed
assert torch.initial_seed() == torch.default_generator.initial_seed()
"""
    run_python(code)


@pytest.mark.parametrize("command", [(), ("run",), ("compare",), ("show",), ("demo",)], ids=lambda command: " ".join(command) or "top")
def test_help_loads_nothing_heavy(command: tuple[str, ...]) -> None:
    code = """
import json, runpy, sys
sys.argv = ["ulpscope", *sys.argv[1:], "--help"]
try:
    runpy.run_module("ulpscope", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
print(json.dumps(sorted(sys.modules)))
"""
    *text, loaded = run_python(code, *command).splitlines()
    assert "Usage: " in "\n".join(text)
    assert not set(HEAVY) & set(json.loads(loaded))


def test_the_version_stands_in_one_place() -> None:
    """Everything that is built or printed takes it from `ulpscope.__version__`; the changelog names it once it is released."""
    done = subprocess.run([sys.executable, "-m", "ulpscope", "--version"], capture_output=True, text=True, check=True)
    assert ulpscope.__version__ in done.stdout
    metadata = [built_version(ROOT), built_version(ROOT / "packages/legacy")]
    assert metadata == [ulpscope.__version__] * 2
    released = re.findall(r"^## \[(\d.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert not released or released[0] == ulpscope.__version__
    projects = [(ROOT / name / "pyproject.toml").read_text(encoding="utf-8") for name in (".", "packages/legacy")]
    assert all('dynamic = ["version"]' in text and not re.search('^version = "', text, re.MULTILINE) for text in projects)


def built_version(project: Path) -> str:
    """The version that setuptools gives to what it builds of a project."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from setuptools import setup; setup()" if not (project / "setup.py").exists() else "import setup",
            "--version",
        ],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


def own_files() -> Iterator[Path]:
    """Every file that is ours, whether or not git knows it yet; what is built or installed is not."""
    skipped = {"__pycache__", "node_modules"}
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")
    for folder in (".ci", ".github", "bench", "design", "docs", "packages", "src", "tests", "tools", "web"):
        for path in (ROOT / folder).rglob("*"):
            parts = set(path.relative_to(ROOT).parts)
            is_built = path.suffix == ".so" or (path.with_suffix(".pyx").exists() and path.suffix == ".c")
            if path.is_file() and not parts & skipped and not is_built and ".egg-info" not in str(path):
                yield path


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_source_file_begins_with_its_licence() -> None:
    sources = {".py", ".pyx", ".c", ".cpp", ".h", ".js", ".mjs", ".ts", ".svelte", ".css", ".sh"}
    files = [path for path in own_files() if path.suffix in sources or path.name in ("Makefile", "run")]
    assert len(files) > 20
    lacking = [named(path) for path in files if path.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]]
    assert not lacking


def test_every_file_is_named_for_what_it_holds() -> None:
    vague = re.compile(r"^_*(utils?|common|helpers?|misc)(\.|_|$)|_(utils?|helpers?)\.", re.IGNORECASE)
    assert not [named(path) for path in own_files() if any(vague.search(part) for part in path.relative_to(ROOT).parts)]


def test_no_file_holds_a_path_of_one_machine() -> None:
    pattern = re.compile("|".join(f"/{folder}/" for folder in ("work", "root", "farm")).encode())
    # Strings made up for tests, such as another person's stack in a dump, use /home/user.
    lines = [
        f"{named(path)}:{number}"
        for path in own_files()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not lines
