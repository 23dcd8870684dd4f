# SPDX-License-Identifier: Apache-2.0
"""The wheel works where the checkout is not: with PyTorch, and with nothing but the core dependencies.

No environment here downloads anything. An environment with PyTorch borrows the packages of the one that runs the tests through a
`.pth` file; one without PyTorch borrows links to the core dependencies, so that `import torch` fails there as it would on a laptop.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from ulpscope.model import CallName, CallRecord, RunInfo, Slot, TensorRecord
from ulpscope.store import DirectorySink, create_run

ROOT = Path(__file__).parents[1]
CORE = ("click", "msgspec", "numpy", "rich", "safetensors", "xxhash")

BFLOAT16 = struct.pack("<8H", *range(0x3F80, 0x3F88))  # 1.0 and the seven numbers after it
FLOAT8 = bytes(range(0x38, 0x40))  # 1.0 to 1.875 in float8_e4m3fn
WRONG_BFLOAT16 = struct.pack("<8H", *range(0x4080, 0x4088))  # 4.0 and on
WRONG_FLOAT8 = bytes(range(0x60, 0x68))  # 32.0 and on


def run(*command: str | Path, cwd: Path, expect: int = 0) -> str:
    """What a command prints, in a folder, with no trace of the environment that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**environment, "NO_COLOR": "1"}, text=True, capture_output=True, check=False
    )
    assert done.returncode == expect, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing left over in the checkout gets into it."""
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, source, cwd=source)
    (built,) = wheels.glob("ulpscope-*.whl")
    return built


def make_environment(folder: Path, wheel: Path, borrowed: list[Path]) -> Path:
    """An empty environment with the wheel in it and the borrowed folders on its path; returns its folder of scripts.

    `.pth` files inside a borrowed folder are not read, so the editable ulpscope of the test environment stays invisible.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    scripts = folder / "bin"
    (site,) = folder.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--no-index", "--no-deps", wheel, cwd=folder)
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    home = run(scripts / "python", "-c", "import ulpscope; print(ulpscope.__file__)", cwd=folder)
    assert Path(home.strip()).is_relative_to(folder)
    return scripts


def core_distributions() -> Iterator[metadata.Distribution]:
    """What `pip install ulpscope` without extras brings along."""
    waiting, seen = list(CORE), set[str]()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            distribution = metadata.distribution(name)
            yield distribution
            waiting += [re.split(r"[^\w.-]", line)[0] for line in distribution.requires or () if ";" not in line]


def link_core_dependencies(folder: Path) -> Path:
    folder.mkdir()
    for distribution in core_distributions():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (folder / name).symlink_to(Path(str(distribution.locate_file(name))))
    return folder


@pytest.fixture(scope="module")
def without_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without_torch")
    scripts = make_environment(folder / "environment", wheel, [link_core_dependencies(folder / "core")])
    assert run(scripts / "python", "-c", "import importlib.util; print(importlib.util.find_spec('torch'))", cwd=folder) == "None\n"
    return scripts


def test_the_core_is_what_the_project_names() -> None:
    """The environment without PyTorch has the declared dependencies, no more and no less."""
    line = re.search(r"^dependencies = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert line
    assert tuple(re.split(r"[^\w-]", each)[0] for each in json.loads(line[1])) == CORE


def test_the_wheel_holds_what_is_compiled_exactly_where_it_can_be(wheel: Path) -> None:
    """It is optional, so what stopped compiling would go unnoticed otherwise."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    can_compile = shutil.which(compiler.split()[0]) is not None
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("numerics/_kernel", "capture/native/_compiled"):
        assert any(re.search(rf"{file}\..*(so|pyd)$", name) for name in names) == can_compile
    assert "ulpscope/capture/native/_native.cpp" in names  # for `ulpscope build`


def test_the_demo_runs_from_the_wheel_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    borrowed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    scripts = make_environment(tmp_path / "environment", wheel, sorted(borrowed))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    output = run(scripts / "ulpscope", "demo", cwd=elsewhere)
    assert "gelu" in output
    reports = list(elsewhere.rglob("*.html"))
    assert reports
    assert all(report.stat().st_size > 10_000 for report in reports)


def write_run(path: Path, *, bfloat16: bytes, float8: bytes) -> Path:
    """One step with one call in low precision: an input that is always the same, and two outputs as given."""
    create_run(path, RunInfo(tool="test"))
    sink = DirectorySink(path, 0)
    sink.begin_step(0)
    contents = [("input.0", "bfloat16", BFLOAT16), ("output.0", "bfloat16", bfloat16), ("output.1", "float8_e4m3fn", float8)]
    slots = tuple(
        TensorRecord(slot=Slot.parse(slot), dtype=dtype, shape=(8,), strides=(1,), content=sink.keep(dtype, (8,), data))
        for slot, dtype, data in contents
    )
    sink.write(CallRecord(rank=0, step=0, order=0, call=CallName("functional.scaled", 0), phase="forward", module="block.0", slots=slots))
    sink.end_step()
    sink.close()
    return path


@pytest.mark.parametrize(
    ("bfloat16", "float8", "slot"),
    [(WRONG_BFLOAT16, FLOAT8, "output.0"), (BFLOAT16, WRONG_FLOAT8, "output.1")],
    ids=["bfloat16", "float8"],
)
def test_reading_needs_no_torch(bfloat16: bytes, float8: bytes, slot: str, without_torch: Path, tmp_path: Path) -> None:
    right = write_run(tmp_path / "right", bfloat16=BFLOAT16, float8=FLOAT8)
    wrong = write_run(tmp_path / "wrong", bfloat16=bfloat16, float8=float8)

    shown = run(without_torch / "ulpscope", "show", right, cwd=tmp_path)
    assert "block.0" in shown
    run(without_torch / "ulpscope", "compare", right, right, cwd=tmp_path)
    files = ("--html", "report.html", "--json", "report.json", "--csv", "report.csv")
    run(without_torch / "ulpscope", "compare", wrong, right, *files, cwd=tmp_path, expect=1)

    report = json.loads((tmp_path / "report.json").read_text())
    first = report["findings"][0]
    assert (first["level"], first["module"], first["slot"]) == ("fault", "block.0", slot)
    assert "block.0" in (tmp_path / "report.csv").read_text()
    assert (tmp_path / "report.html").stat().st_size > 10_000
