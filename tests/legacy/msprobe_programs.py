# SPDX-License-Identifier: Apache-2.0
"""Run small programs under msprobe's debugger, and read their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from msprobe.pytorch import PrecisionDebugger

X, LABELS = torch.linspace(-1, 1, 8).reshape(2, 4), torch.tensor([0, 2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.block(x))


def training_step(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    loss = F.cross_entropy(model(X if x is None else x), LABELS)
    loss.backward()
    return loss


def write_config(folder: Path, task: str = "statistics", block: dict[str, Any] | None = None, **common: Any) -> str:
    """Write a config.json as the guide prints it, with the changes of a test."""
    values = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "L1", **common, task: block or {}}
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return str(file)


def dump(
    folder: Path,
    task: str = "statistics",
    block: dict[str, Any] | None = None,
    *,
    steps: int = 1,
    program: Callable[[nn.Module], Any] = training_step,
    layout: str = "1.x",
    **common: Any,
) -> Path:
    """Train under the debugger; return the folder of the dump."""
    torch.manual_seed(0)
    model = Net()
    debugger = PrecisionDebugger(config_path=write_config(folder, task, block, **common), layout=layout)
    for _ in range(steps):
        debugger.start(model)
        program(model)
        debugger.stop()
        debugger.step()
    PrecisionDebugger.forget()
    return folder / "dump"


def read(folder: Path, name: str = "dump", step: int = 0, rank: str = "rank") -> Any:
    return json.loads((folder / f"step{step}" / rank / f"{name}.json").read_text())


def entries(folder: Path, step: int = 0, rank: str = "rank") -> dict[str, Any]:
    data: dict[str, Any] = read(folder, "dump", step, rank)["data"]
    return data


def tensor_files(folder: Path, step: int = 0) -> list[str]:
    return sorted(file.name for file in (folder / f"step{step}" / "rank" / "dump_tensor_data").glob("*"))


def load(folder: Path, name: str) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(folder / "step0" / "rank" / "dump_tensor_data" / name, weights_only=True)
    return tensor


def same(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
