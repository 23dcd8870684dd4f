# SPDX-License-Identifier: Apache-2.0
"""Define a case: one program in two versions, and the culprit of their difference.

A case module lies in `bench/bugs/cases/`, imports nothing but torch, the standard library and `bench.bugs.{case,machines}` (it also
runs in environments where ulpscope is not installed), and ends in a list `CASES`. Seeds are set before `program` is called, so
both sides draw the same weights and batches unless the case says otherwise.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import pkgutil
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["SEED", "Case", "Expected", "Program", "Side", "all_cases", "build", "classifying", "minimised"]

Side: TypeAlias = Literal["subject", "reference"]
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Program:
    """One side of a case, ready to run: `step(i)` is one whole training step, called for i in range(steps).

    `machine` makes the context that every step runs in: how this side's backend computes. Recorders are told about `model` (one module or
    several).
    """

    step: Callable[[int], object]
    model: Any = None
    steps: int = 2
    machine: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The culprit of a case. Texts are globs, None means that anything will do; with `any_of` one of several will do.

    `call` is the operation without its count (`functional.layer_norm`, `Tensor.matmul`, `optimizer.Adam`), `slot` is written as in
    records (`output.0`, `mutated.fc.weight`), `kind` is the kind of the finding (contributed, backward, arguments, parameters, ...).
    """

    call: str | None = None
    module: str | None = None
    slot: str | None = None
    phase: str | None = None
    kind: str | None = None
    step: int | None = None
    rank: int | None = None
    any_of: tuple[Expected, ...] = ()

    def matches(self, finding: Any) -> bool:
        """Tell whether a finding (anything with the attributes of `ulpscope.Finding`) names this culprit.

        A field that it does not tell (None) is not held against it, and it may tell several kinds, as in `contributed|arguments`.
        """
        if self.any_of:
            return any(one.matches(finding) for one in self.any_of)
        return (
            _is_operation(finding.call, self.call)
            and _fits(finding.module, self.module)
            and _fits(finding.slot, self.slot)
            and (finding.kind is None or any(_fits(kind, self.kind) for kind in finding.kind.split("|")))
            and all(want is None or found in (None, want) for want, found in ((self.step, finding.step), (self.rank, finding.rank)))
            and self.has_phase_of(finding)
        )

    def has_phase_of(self, finding: Any) -> bool:
        if self.any_of:
            return any(one.has_phase_of(finding) for one in self.any_of)
        return self.phase is None or self.phase == finding.phase


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pair of programs. `expected` is None for a clean pair, where nothing may be blamed.

    `source` is a public url, or "synthetic". `machine` says in a few words how the subject's backend differs honestly from the
    reference's, besides the fault; empty where it does not. With `ranks` above one the program runs once in each of as many gloo
    processes, where torch.distributed is initialised before `program` is called. `ulpscope` is compared at `level`.
    """

    name: str
    source: str
    what: str
    program: Callable[[Side], Program]
    expected: Expected | None = None
    machine: str = ""
    ranks: int = 1
    level: str = "api"

    @property
    def is_clean(self) -> bool:
        return self.expected is None


def minimised(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], torch.Tensor],
    *,
    steps: int = 2,
    machine: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Program:
    """Train plainly: gradients to zero, back through `loss(index)`, one step of the optimizer."""

    def step(index: int) -> None:
        optimizer.zero_grad()
        loss(index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Program(step=step, model=model, steps=steps, machine=machine)


def classifying(model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor, **rest: Any) -> Program:
    """Train the same way on the cross entropy of a batch for each step."""
    return minimised(model, optimizer, lambda index: torch.nn.functional.cross_entropy(model(inputs[index]), labels[index]), **rest)


def build(case: Case, side: Side) -> Program:
    """Build the program of one side, with every seed set before it is made."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    return case.program(side)


def all_cases(pattern: str = "*") -> list[Case]:
    """List every case whose name fits the glob, in the order of their modules."""
    from bench.bugs import cases

    modules = [importlib.import_module(f"{cases.__name__}.{found.name}") for found in pkgutil.iter_modules(cases.__path__)]
    found = [case for module in modules for case in module.CASES]
    names = [case.name for case in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two cases are called {min(twice)!r}")
    return [case for case in found if fnmatch.fnmatchcase(case.name, pattern)]


def _is_operation(call: str | None, want: str | None) -> bool:
    """Tell whether a call is the wanted operation; it may have its count (`functional.gelu.1`), or no namespace (`gelu`)."""
    if call is None or want is None:
        return True
    operation, _, index = call.rpartition(".")
    name = operation if index.isdigit() else call
    return _fits(name, want) or ("." not in name and _fits(name, want.rpartition(".")[2]))


def _fits(found: str | None, want: str | None) -> bool:
    return want is None or found is None or fnmatch.fnmatchcase(found, want)
