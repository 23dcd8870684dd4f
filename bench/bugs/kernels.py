# SPDX-License-Identifier: Apache-2.0
"""Make cases with one faulty kernel in the subject's backend: one program for both sides, the fault behind several honest machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench.bugs.case import Case, Expected, Program, Side
from bench.bugs.machines import Fault, Kernel, Machine, honest_kernels
from bench.bugs.networks import program as train
from torch import Tensor

__all__ = ["as_if_contiguous", "changed_output", "faulty_kernel", "is_strided", "trained"]


def faulty_kernel(
    name: str,
    source: str,
    what: str,
    program: Callable[[Any], Program],
    fault: Callable[[], Fault],
    expected: Expected,
    *,
    behind: Sequence[str] = ("cpu", "accelerator"),
) -> list[Case]:
    """Make one case for each machine of `behind`.

    `program` is given the machine (None for the reference); a fault is made afresh for each run.
    """
    return [
        Case(
            name=f"{name}@{machine}",
            source=source,
            what=what,
            program=_on_either_side(program, fault, machine),
            expected=expected,
            machine="" if machine == "cpu" else machine,
        )
        for machine in behind
    ]


def _on_either_side(program: Callable[[Any], Program], fault: Callable[[], Fault], machine: str) -> Callable[[Side], Program]:
    def build(side: Side) -> Program:
        return program(Machine(honest_kernels(machine), fault()) if side == "subject" else None)

    return build


def trained(make: Callable[[], Any], **options: Any) -> Callable[[Any], Program]:
    """Train what `make` makes, on the machine that is handed over."""
    return lambda machine: train(make(), machine, **options)


def changed_output(change: Callable[[Tensor], Tensor], index: int | None = None) -> Kernel:
    """Make a kernel that changes its result (or the one at `index` of several) after it was computed."""

    def kernel(honest: Kernel, *args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        if index is None:
            return change(result)
        return tuple(change(one) if at == index and one is not None else one for at, one in enumerate(result))

    return kernel


def is_strided(x: Tensor) -> bool:
    return not x.is_contiguous()


def as_if_contiguous(x: Tensor) -> Tensor:
    """Read a tensor as a kernel does that takes its start and its shape, and never asks for strides."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset()).clone()
