# SPDX-License-Identifier: Apache-2.0
"""Classes of modules of the user's may compare, hash, list and print themselves as they like: none of that code is run for a recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from ulpscope.workflows.health_recording import record_script_health as watch_script

ASKED: list[str] = []


@dataclass
class Comparable(nn.Module):
    """Compares its fields, so that Python gives it no hash."""

    size: int

    def __post_init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(self.size, self.size)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given)  # type: ignore[no-any-return]


class Alike(nn.Linear):
    """All of them are equal, and in one place of every table."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Silent(nn.Module):
    """Raises when asked for its submodules, parameters, text or length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("nobody may ask")

    parameters = named_parameters = modules = named_modules = named_buffers = buffers = children = _refuse
    __repr__ = __str__ = __bool__ = __len__ = _refuse

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Writes down who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        ASKED.append(name)
        return super().__getattr__(name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        ASKED.append("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.inner(given)  # type: ignore[no-any-return]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.comparable = Comparable(2)
        self.alike = nn.ModuleList([Alike(2, 2), Alike(2, 2)])
        self.silent = Silent()
        self.counting = Counting()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for alike in self.alike:
            given = alike(given)
        return self.counting(self.silent(self.comparable(given)))  # type: ignore[no-any-return]


def trained() -> list[torch.Tensor]:
    torch.manual_seed(0)
    ASKED.clear()
    model = Outer()
    parts = [model.comparable.inner, *model.alike, model.silent.inner, model.counting.inner]
    optimizer = torch.optim.Adam([tensor for part in parts for tensor in part.parameters()])
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    alone = Comparable(2)(torch.ones(1, 2))
    return [*losses, alone.detach(), *(tensor.detach() for part in parts for tensor in part.parameters())]


def context(kind: str, folder: Path) -> AbstractContextManager[Any]:
    if kind == "health":
        return watch_script(folder / "run", quiet=True, activations="*")
    if kind == "nonfinite":
        return ulpscope.Capture(folder / "run", watch="nonfinite")
    return ulpscope.Capture(folder / "run", level=kind, keep="tensors")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["api", "module", "both", "op", "nonfinite", "health"])
def test_nothing_that_they_say_of_themselves_is_asked_for(tmp_path: Path, kind: str) -> None:
    bare, asked = trained(), list(ASKED)
    with context(kind, tmp_path):
        recorded = trained()
    assert all(torch.equal(one, other) for one, other in zip(bare, recorded, strict=True))
    assert asked == ASKED
    if kind not in ("health", "nonfinite"):
        assert not ulpscope.open_run(tmp_path / "run").ledger(0)


def test_equal_modules_have_paths_of_their_own(tmp_path: Path) -> None:
    with ulpscope.Capture(tmp_path / "run", level="module"):
        trained()
    run = ulpscope.open_run(tmp_path / "run")
    paths = {record.module for record in run.records(0, 0)}
    assert {"alike.0", "alike.1", "comparable", "comparable.inner", "silent.inner"} <= paths


def test_a_model_that_is_given_is_looked_at_past_its_class(tmp_path: Path) -> None:
    model = Silent()
    with ulpscope.Capture(tmp_path / "run", model=model, keep="tensors") as capture:
        model(torch.ones(1, 2)).sum().backward()
        capture.step()
    assert not ulpscope.open_run(tmp_path / "run").ledger(0)
