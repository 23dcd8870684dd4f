# SPDX-License-Identifier: Apache-2.0
"""Calls whose wider form is not the same code with a wider dtype: each is checked, and passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ulpscope import Capture
from ulpscope.model import Arguments, CallName, CallRecord, Slot, TensorRecord
from ulpscope.replay import NotReplayable
from ulpscope.replay.calls.memory_need import check_result_sizes, largest_result
from ulpscope.workflows.check.checking import check_run

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def _next_numbers() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        torch.nextafter(torch.randn(40).to(dtype), torch.randn(40).to(dtype)).nextafter_(torch.zeros(40, dtype=dtype))


def _casts() -> torch.Tensor:
    z = _leaf(4, dtype=torch.complex64)
    torch.randn(3).cdouble(), torch.randn(3).bfloat16().cfloat(), torch.arange(3).cfloat(), torch.randn(3).chalf(), z.detach().cdouble()
    return _leaf(3, 4).cfloat().real * z.to(torch.complex128).imag.float()


def _without_gradient() -> torch.Tensor:
    """The number of elements that are not zero has no gradient, and autograd leaves it out."""
    return torch.linalg.vector_norm(_leaf(5), 0) * _leaf(1)


def _one_element() -> torch.Tensor:
    return _leaf(1).expand(1, 1) * _leaf(3, 1) + _leaf(1, 1).expand(1, 1).as_strided((1,), (0,))


def _grouped() -> torch.Tensor:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    a, b = _leaf(8, 16, dtype=torch.bfloat16), _leaf(3, 16, 8, dtype=torch.bfloat16)
    rows = torch._grouped_mm(a, b, ends) * torch.ones(8, 8)
    wide = F.grouped_mm(_leaf(8, 16), _leaf(3, 16, 8), offs=ends) * torch.ones(8, 8)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    shared = torch._grouped_mm(_leaf(4, 16), _leaf(16, 8), ends) * torch.ones(2, 4, 8)
    return rows.float().sum() + wide.sum() + shared.sum()


def _norms_of_one() -> torch.Tensor:
    """The result is 0 whatever the input is, so that no noise in the input shows what a kernel rounds inside."""
    parts = []
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 17):
            x, weight, bias = ((9 * torch.randn(size)).to(dtype).requires_grad_() for size in ((rows, 1), (1,), (1,)))
            normal = (F.layer_norm(x, (1,), weight, bias), F.layer_norm(x, (1,)), torch.native_layer_norm(x, (1,), None, None, 1e-5)[0])
            parts += [one.sum().float() for one in normal]
    return torch.stack(parts)


def _sampled() -> torch.Tensor:
    """Places between pixels are found in 16 bits, and one of them decides which pixels count."""
    grid = (2 * torch.rand(2, 16, 16, 2, dtype=torch.bfloat16) - 1).detach()
    return F.grid_sample(_leaf(2, 3, 8, 8, dtype=torch.bfloat16).detach(), grid, align_corners=False)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "next_numbers": _next_numbers,
    "casts": _casts,
    "complex_variance": lambda: (torch.var(_leaf(3, 5, dtype=torch.complex64), 1) + torch.std(_leaf(3, 5, dtype=torch.complex64), 1)).sum(),
    "without_gradient": _without_gradient,
    "one_element": _one_element,
    "norms_of_one": _norms_of_one,
    "sampled": _sampled,
    "grouped": _grouped,
    "combinations": lambda: torch.combinations(_leaf(6), 3).sum() + torch.combinations(_leaf(4), with_replacement=True).sum(),
}
if hasattr(F, "linear_cross_entropy"):
    PROGRAMS["fused_loss"] = lambda: F.linear_cross_entropy(_leaf(8, 4), _leaf(5, 4), torch.arange(8) % 5)
    PROGRAMS["fused_loss_in_chunks"] = lambda: F.linear_cross_entropy(
        _leaf(8, 4), _leaf(5, 4), torch.arange(8) % 5, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_checked_and_passes(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    with Capture(tmp_path / "run", keep="tensors") as capture:
        made = PROGRAMS[name]()
        if made is not None and made.requires_grad:
            made.sum().backward()
        capture.step()
    check = check_run(tmp_path / "run", isolated=False)
    assert [(str(call.call), call.phase, call.reason) for call in check.calls if call.status != "passed"] == []
    assert len(check.calls) >= 3


def test_combinations_that_would_fill_the_memory_are_refused() -> None:
    x = TensorRecord(slot=Slot("input", (0,)), dtype="float32", shape=(1000,), content="x")
    arguments = Arguments(args=({"$tensor": "input.0"}, 5))
    record = CallRecord(rank=0, step=0, order=0, call=CallName("torch.combinations", 0), phase="forward", slots=(x,), arguments=arguments)
    with pytest.raises(NotReplayable, match="far more than were recorded"):
        check_result_sizes(
            "torch.combinations", arguments, {x.slot: x}, {x.slot: torch.zeros(1000)}, largest_result([record]), lambda given: []
        )


def test_rows_that_belong_to_no_group_are_nobody_s_result(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", keep="tensors") as capture:
        torch._grouped_mm(torch.randn(8, 16), torch.randn(1, 16, 8), torch.tensor([5], dtype=torch.int32))
        capture.step()
    check = check_run(tmp_path / "run", isolated=False, select="*_grouped_mm*")
    assert [(call.status, "belong to no group" in call.reason) for call in check.calls] == [("skipped", True)]
