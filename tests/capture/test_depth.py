# SPDX-License-Identifier: Apache-2.0
"""Modules inside modules inside modules: a program recurses as deep as it does without a capture, and no deeper than Python lets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope

HOW = [{"level": level} for level in ("api", "module", "both", "op")] + [{"watch": "nonfinite"}]


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Endless(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return self(x)


def nested(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(depth):
        model = Inside(model)
    return model


def deepest() -> int:
    """Find how many nested modules can run here and now."""
    depth = 0
    for more in (100, 20, 5, 1):
        while True:
            try:
                nested(depth + more)(torch.ones(1, 2)).sum().backward()
            except RecursionError:
                break
            depth += more
    return depth


@pytest.mark.parametrize("how", HOW, ids=str)
def test_modules_nest_as_deep_as_without_a_capture(how: dict[str, Any], tmp_path: Path) -> None:
    model = nested(deepest())
    with ulpscope.Capture(tmp_path / "run", **how):
        model(torch.ones(1, 2)).sum().backward()
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_modules_nest_as_deep_where_the_recorder_is_not_compiled() -> None:
    code = (
        "import sys, tempfile; sys.modules['ulpscope.capture.native._compiled'] = None\n"
        "import torch, ulpscope; from tests.capture.test_depth import deepest, nested\n"
        "model = nested(deepest())\n"
        "with tempfile.TemporaryDirectory() as folder, ulpscope.Capture(folder + '/run', level='both'): model(torch.ones(1, 2))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error::ulpscope.errors.CaptureWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_recursion_without_an_end_is_still_refused(how: dict[str, Any], tmp_path: Path) -> None:
    with ulpscope.Capture(tmp_path / "run", **how), pytest.raises(RecursionError):
        Endless()(torch.ones(1))


def test_the_limit_is_put_back_and_one_of_the_users_is_left_alone(tmp_path: Path) -> None:
    class Sets(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            sys.setrecursionlimit(5000)
            return x

    before = sys.getrecursionlimit()
    with ulpscope.Capture(tmp_path / "first"):
        nested(3)(torch.ones(1, 2))
    assert sys.getrecursionlimit() == before
    try:
        with ulpscope.Capture(tmp_path / "second"):
            Inside(Sets())(torch.ones(1))
            assert sys.getrecursionlimit() == 5000
        assert sys.getrecursionlimit() == 5000
    finally:
        sys.setrecursionlimit(before)
