# SPDX-License-Identifier: Apache-2.0
"""No command loads triton on a machine without a GPU, and none ends with anything but its answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="triton has a device here")

SCRIPT = """
import torch

torch.nn.functional.gelu(torch.randn(3, 4, requires_grad=True)).sum().backward()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    package = folder / "path" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\nraise RuntimeError('triton was imported')\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def ulpscope(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "path"), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-m", "ulpscope", *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_no_command_loads_triton(folder: Path) -> None:
    commands = [
        ("demo",),
        ("run", "--into", "run", "--keep", "tensors", "--seed", "1", "--deterministic", "train.py"),
        ("run", "--into", "nan", "--watch", "nonfinite", "train.py"),
        ("run", "--into", "health", "--watch", "health", "train.py"),
        ("compare", "ulpscope-demo/subject", "ulpscope-demo/reference", "--html", "report.html"),
        ("check", "ulpscope-demo/subject"),
        ("refine", "ulpscope-demo/subject", "ulpscope-demo/reference"),
        ("nonfinite", "ulpscope-demo/subject"),
        ("show", "ulpscope-demo/subject"),
        ("--version",),
    ]
    for words in commands:
        done = ulpscope(folder, *words)
        assert done.returncode in (0, 1), (words, done.stderr)
        assert not (folder / "imported").exists(), (words, done.stderr)
        assert "Traceback" not in done.stderr, (words, done.stderr)


def test_deterministic_kernels_are_asked_for_without_the_compiler(folder: Path) -> None:
    (folder / "asks.py").write_text(
        "import os, sys, torch\n"
        "assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()\n"
        "assert 'torch._inductor' not in sys.modules\n"
        "assert os.environ['TORCHINDUCTOR_DETERMINISTIC'] == '1'\n"
    )
    done = ulpscope(folder, "run", "--into", "asked", "--deterministic", "asks.py")
    assert done.returncode == 0, done.stderr


def test_only_torch_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("loaded = True\n")
    program = (
        "from ulpscope._optional import keep_triton_out; keep_triton_out(); keep_triton_out()\n"
        "import torch\n"
        "from torch.utils._triton import has_triton_package\n"
        "assert not has_triton_package()\n"
        "import triton\n"
        "assert triton.loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_leaves_the_garbage_collector_as_python_needs_it_to_end(folder: Path) -> None:
    (folder / "freezes.py").write_text("import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count()))\n")
    done = ulpscope(folder, "run", "--into", "frozen", "freezes.py")
    assert "frozen 0" in done.stdout, done.stderr
