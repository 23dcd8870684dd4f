# SPDX-License-Identifier: Apache-2.0
"""Machines that round the operands of some products and not of others: the operands tell, and what errs further is still a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ulpscope import Capture, compare_runs
from ulpscope.model import Comparison

aten = torch.ops.aten
_OPERANDS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}


def _tf32(value: Tensor) -> Tensor:
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _tf32_cut_off(value: Tensor) -> Tensor:
    return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "tf32": _tf32,
    "tf32 cut off": _tf32_cut_off,
    "float16": lambda value: value.half().float(),
    "bfloat16": lambda value: value.bfloat16().float(),
}


class Machine(TorchDispatchMode):
    """Rounds the operands of the products that it is told to; `kernel` may do more to one of them."""

    def __init__(
        self,
        rounding: str = "tf32",
        *,
        only: Callable[[int, Any], bool] = lambda index, func: True,
        spoil: Callable[[int, Any], bool] = lambda index, func: False,
        product: Callable[[Tensor, Tensor], Tensor] | None = None,
        by: float = 1.01,
    ) -> None:
        super().__init__()
        self.round, self.only, self.spoil, self.product, self.by = ROUNDINGS[rounding], only, spoil, product, by
        self.index = self.num_rounded = self.num_spoilt = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        places = _OPERANDS.get(func)
        if places is None or args[places[0]].dtype is not torch.float32:
            return func(*args, **(kwargs or {}))
        index, self.index = self.index, self.index + 1
        if self.only(index, func):
            self.num_rounded += 1
            args = tuple(self.round(one) if place in places else one for place, one in enumerate(args))
        result = self.product(*args[:2]) if self.product and func is aten.mm.default else func(*args, **(kwargs or {}))
        if self.spoil(index, func):
            self.num_spoilt += 1
            result = tuple(None if one is None else one * self.by for one in result) if isinstance(result, tuple) else result * self.by
        return result


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_all = nn.Linear(size, 3 * size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.of_all(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _linear() -> tuple[nn.Module, Tensor]:
    return Layers(*[part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())]), torch.randn(24, 32)


def _images() -> tuple[nn.Module, Tensor]:
    return Layers(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.Conv2d(8, 16, 2, 2)), torch.randn(
        2, 3, 32, 32
    )


def _attention() -> tuple[nn.Module, Tensor]:
    return Layers(nn.Linear(32, 32), Attention(32), nn.Linear(32, 32)), torch.randn(2, 12, 32)


def _recurrent() -> tuple[nn.Module, Tensor]:
    return Layers(nn.Linear(16, 16), nn.GRU(16, 24, batch_first=True), Function(lambda x: x[0])), torch.randn(3, 7, 16)


def _triangular(x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(torch.eye(16) * 3 + 0.3 * (x @ x.mT).tril(-1) / 16, x, upper=False)


def _inside_others() -> tuple[nn.Module, Tensor]:
    return Layers(nn.Linear(16, 16), Function(_triangular), nn.Linear(16, 16)), torch.randn(2, 16, 16)


def _by_other_names() -> tuple[nn.Module, Tensor]:
    def function(x: Tensor) -> Tensor:
        scores = torch.einsum("bid,bjd->bij", x, x)
        return torch.baddbmm(x, scores.softmax(-1), x) + torch.tensordot(scores, x, dims=([2], [1]))[:, :, 0].mT.mean() / 16

    return Layers(nn.Linear(16, 16), Function(function), nn.Linear(16, 16)), torch.randn(2, 16, 16)


PROGRAMS = {
    "linear": _linear,
    "images": _images,
    "attention": _attention,
    "recurrent": _recurrent,
    "inside others": _inside_others,
    "by other names": _by_other_names,
}


def _run(into: Path, program: str, machine: Machine | None) -> Path:
    torch.manual_seed(0)
    model, x = PROGRAMS[program]()
    with Capture(into, model=model, keep="tensors"), machine or contextlib.nullcontext():
        model(x).square().mean().backward()
    return into


def _compared(folder: Path, program: str, machine: Machine) -> Comparison:
    return compare_runs(_run(folder / "subject", program, machine), _run(folder / "reference", program, None))


def _notes(comparison: Comparison) -> list[str]:
    return [one.headline for one in comparison.findings if one.kind == "precision"]


QUICK = ("linear", "images", "inside others")
SOME = [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in PROGRAMS]
SOME_ROUNDINGS = [one if one == "tf32" else pytest.param(one, marks=pytest.mark.long) for one in ROUNDINGS]


@pytest.mark.parametrize("rounding", SOME_ROUNDINGS)
@pytest.mark.parametrize("program", SOME)
def test_rounded_operands_explain_every_product_that_they_explain(tmp_path: Path, program: str, rounding: str) -> None:
    machine = Machine(rounding)
    comparison = _compared(tmp_path, program, machine)
    assert machine.num_rounded
    assert comparison.faults == ()
    assert any("operands" in note and "the subject" in note for note in _notes(comparison))


@pytest.mark.parametrize("program", SOME)
@pytest.mark.parametrize("every", [3, pytest.param(4, marks=pytest.mark.long)])
def test_some_products_may_round_and_others_not(tmp_path: Path, program: str, every: int) -> None:
    machine = Machine(only=lambda index, func: index % every == 1)
    comparison = _compared(tmp_path, program, machine)
    assert machine.num_rounded
    assert comparison.faults == ()


def test_one_product_that_rounds_is_named_and_how_many_do_not(tmp_path: Path) -> None:
    comparison = _compared(tmp_path, "linear", Machine(only=lambda index, func: index == 4))
    assert comparison.faults == ()
    (note,) = [one for one in comparison.findings if one.kind == "precision"]
    assert note.headline.startswith("1 call of the subject computes with ")
    assert "functional.linear" in note.headline
    assert "other matrix products of this side do not" in note.evidence[0]


@pytest.mark.parametrize("program", SOME)
@pytest.mark.parametrize("rounding", ["tf32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("index", [pytest.param(1, marks=pytest.mark.long), -1])
def test_one_percent_more_is_still_a_fault(tmp_path: Path, program: str, rounding: str, index: int) -> None:
    counting = Machine(rounding)
    _run(tmp_path / "counted", program, counting)
    struck = index % counting.index
    machine = Machine(rounding, spoil=lambda at, func: at == struck)
    comparison = _compared(tmp_path, program, machine)
    assert machine.num_spoilt == 1
    assert len(comparison.faults) == 1, (program, rounding)


def _rounded_on_the_way(left: Tensor, right: Tensor) -> Tensor:
    """Multiply transformed operands, as fast convolutions do: no rounding of the operands themselves gives the digits of the product."""
    turn, _ = torch.linalg.qr(torch.randn(left.shape[1], left.shape[1], generator=torch.Generator().manual_seed(0)))
    return _tf32(left @ turn) @ _tf32(turn.T @ right)


@pytest.mark.parametrize("by", [1.0, 1.01])
def test_rounding_on_the_way_counts_by_its_size_once_the_format_is_known(tmp_path: Path, by: float) -> None:
    machine = Machine(spoil=lambda index, func: index == 7 and by != 1.0, product=_rounded_on_the_way, by=by)
    comparison = _compared(tmp_path, "linear", machine)
    assert len(comparison.faults) == (by != 1.0)


def test_noise_as_large_as_rounding_is_a_fault_where_no_product_rounds(tmp_path: Path) -> None:
    def noisy(left: Tensor, right: Tensor) -> Tensor:
        exact = left @ right
        return exact * (1 + 2.0**-11 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0)))

    machine = Machine(only=lambda index, func: False, product=noisy)
    comparison = _compared(tmp_path, "linear", machine)
    assert len(comparison.faults) == 1


class Scaled(TorchDispatchMode):
    """Products of 16 bits come out 0.6 % too large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not aten.addmm.default:
            return result
        bias, given, weight = (one.float() for one in args)
        return (bias + 1.006 * (given @ weight)).to(result.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_format_explains_nothing_where_it_cuts_off_no_digit_or_the_result_has_none_to_lose(tmp_path: Path, dtype: torch.dtype) -> None:
    def record(into: Path, machine: Any) -> Path:
        torch.manual_seed(0)
        layers = Layers(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)).to(dtype)
        x = torch.randn(64, 32).to(dtype)
        with Capture(into, model=layers, keep="tensors") as capture, machine:
            layers(x).float().square().mean().backward()
            capture.step()
        return into

    comparison = compare_runs(record(tmp_path / "a", Scaled()), record(tmp_path / "b", contextlib.nullcontext()))
    assert [fault.call for fault in comparison.faults] == ["functional.linear.0"]
    assert any("1.00" in line and "times the exact" in line for line in comparison.faults[0].evidence)
