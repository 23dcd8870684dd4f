# SPDX-License-Identifier: Apache-2.0
"""Zeros of other signs: told apart by what jumps at zero, and harmless for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.explain.programs import recorded
from ulpscope.judge.allowance.zeros import tells_zeros_apart
from ulpscope.model import CallName, CallRecord, Comparison
from ulpscope.workflows.compare.comparing import compare_runs

UNARY = """reciprocal rsqrt signbit angle digamma lgamma log sqrt sign exp sin sinc erfinv expm1 log1p cos abs neg square asinh atan tan
 sinh tanh relu sigmoid floor round trunc exp2 erf erfc cosh deg2rad i0 nan_to_num isfinite""".split()


class NegativeZeros(TorchDispatchMode):
    """A kernel of `abs` that returns zeros of the other sign."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return torch.where(result == 0, -torch.zeros_like(result), result) if func is torch.ops.aten.abs.default else result


def compared(use: Callable[[Tensor], Tensor]) -> Comparison:
    def program(done: Callable[[], None], mode: str) -> None:
        x = torch.tensor([-1.0, 0.0, 2.0, 0.0])
        if mode:
            with NegativeZeros():
                y = x.abs()
        else:
            y = x.abs()
        use(y)
        done()

    return compare_runs(recorded("negative", program=program), recorded(program=program))


@pytest.mark.parametrize(
    "use",
    [
        lambda y: torch.atan2(y, -torch.ones(4)),
        lambda y: torch.copysign(torch.ones(4), y),
        lambda y: 1.0 / y,
        lambda y: torch.ones(4).div(y),
        lambda y: y.reciprocal(),
        lambda y: y.rsqrt(),
        lambda y: y.pow(-1),
        lambda y: y.signbit(),
        lambda y: torch.complex(-torch.ones(4), y).sqrt().imag,
    ],
)
def test_what_tells_zeros_apart_makes_them_a_fault(use: Callable[[Tensor], Tensor]) -> None:
    comparison = compared(use)
    assert comparison.verdict == "diverges"
    fault = comparison.faults[0]
    assert not any(finding.kind in ("amplified", "fork") for finding in comparison.findings)
    assert fault.call in ("Tensor.abs.0", "complex.0", "torch.complex.0"), fault.headline
    assert fault.headline.startswith("zeros of other signs")


@pytest.mark.parametrize(
    "use",
    [lambda y: y.exp(), lambda y: y + 1, lambda y: y / 2, lambda y: y.sqrt(), lambda y: y.softmax(0), lambda y: y @ torch.ones(4)],
)
def test_for_the_rest_they_are_harmless(use: Callable[[Tensor], Tensor]) -> None:
    comparison = compared(use)
    assert comparison.verdict in ("same", "rounding")


@pytest.mark.parametrize("name", UNARY)
def test_the_list_has_what_torch_tells_apart(name: str) -> None:
    """Values, and derivatives, at both zeros."""
    function = getattr(torch, name)
    zeros = torch.tensor([0.0, -0.0], dtype=torch.float64, requires_grad=True)
    result = function(zeros)
    found = [result.detach()]
    if result.is_floating_point() and result.requires_grad:
        found += torch.autograd.grad(result.sum(), zeros)
    is_told = any(bool(one[0] != one[1]) and not bool(one.isnan().all()) for one in found)
    record = CallRecord(rank=0, step=0, order=0, call=CallName(f"torch.{name}", 0), phase="forward")
    assert not is_told or tells_zeros_apart(record)
