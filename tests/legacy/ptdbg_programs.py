# SPDX-License-Identifier: Apache-2.0
"""Dump small programs with ptdbg_ascend, and read the lines and files of their dumps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NPU = "from ulpscope.testing import npu\nnpu.install(stand_in_torch_npu=True)\n"


def lines(pkl: Path) -> list[list[Any]]:
    return [json.loads(line) for line in pkl.read_text(encoding="utf-8").splitlines()]


def names(pkl: Path) -> list[str]:
    return [line[0] for line in lines(pkl)]


def apis(pkl: Path) -> list[str]:
    """Return the calls of a dump with their phases, each once, in the order of the file."""
    found = (name.rpartition("_stack_info")[0] or name.rpartition("_input")[0] or name.rpartition("_output")[0] for name in names(pkl))
    return list(dict.fromkeys(found))


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def rank_folder(path: Path, tag: str = "ptdbg_dump", rank: int = 0) -> Path:
    return path / f"{tag}_v4.0" / f"rank{rank}"


class Net(torch.nn.Module):
    """Two linear layers with relu, dropout, an addition and two views between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(4, 4)
        self.drop = torch.nn.Dropout(0.5)
        self.two = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.one(x)))
        mixed = (hidden + x).permute(1, 0).transpose(0, 1)
        return self.two(mixed.abs())  # type: ignore[no-any-return]


with torch.random.fork_rng():
    torch.manual_seed(1)
    MODEL = Net()
BATCH = torch.linspace(-1, 1, 12).reshape(3, 4)


def step(model: torch.nn.Module = MODEL) -> float:
    """Run one forward and backward pass, the same every time."""
    model.zero_grad()
    loss = model(BATCH).square().sum()
    loss.backward()
    return float(loss.item())


def dump(folder: Path, program: Callable[[], Any] = step, **options: Any) -> Path:
    """Dump a program by the function style; return the rank folder."""
    import ptdbg_ascend

    ptdbg_ascend.set_dump_path(str(folder))
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump)
    ptdbg_ascend.set_dump_switch("ON", **options)
    program()
    ptdbg_ascend.set_dump_switch("OFF")
    return rank_folder(folder)


def run(folder: Path, script: str, *arguments: str, code: int = 0, **environment: str) -> str:
    """Run a script in a folder as a process of its own; return its output, errors last."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
