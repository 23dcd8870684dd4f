# SPDX-License-Identifier: Apache-2.0
"""Compute the exact result a second time with other code: torch's decompositions down to primitives, and NumPy for the primitives.

Where the device under test is the CPU, its float64 kernels would judge its float32 kernels, and both may have the same mistake. So the
float64 result itself is compared with one that shares no kernel with it. torch computes a primitive that has no NumPy form here. An
operation that cannot be taken apart leaves the call without a second opinion.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ulpscope.model import DType, Slot, SlotReplay
from ulpscope.replay.formulas.decompositions import Decomposed
from ulpscope.replay.program import Program
from ulpscope.replay.yardstick.honest import Moves
from ulpscope.replay.yardstick.probes import STEP, coarsest_dtype, coarsest_of, is_floating, widened
from ulpscope.replay.yardstick.ratios import Evidence, Ratios, ratios

__all__ = ["second_opinions"]

Values = Mapping[Slot, torch.Tensor]
_CLEAR = 1.0
_TIES = 16.0
_MOST_ONE_BY_ONE = 1 << 18


def second_opinions(program: Program, exact: Values, made: Values) -> dict[Slot, SlotReplay]:
    """Measure how far the float64 result is from the independent one, in units of an honest kernel's error in the dtype of `made`."""
    other = _independent(program)
    if other is None:
        return {}
    moves, known, inputs = Moves(program), dict(exact), coarsest_of(program.inputs.values())
    return {
        slot: _compared(slot, other[slot], known, made[slot], coarsest_dtype([*inputs, made[slot]]), moves)
        for slot in made
        if slot in exact and slot in other and other[slot].shape == exact[slot].shape
    }


def _independent(program: Program) -> dict[Slot, torch.Tensor] | None:
    mode = Independent()
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            found = {slot: value.detach() for slot, value in program(widened(program.inputs)).items()}
    except Exception:  # decompositions are written for tracing; if one fails here, the call has no second opinion
        return None
    return found if mode.is_covered else None


def _compared(
    slot: Slot, other: torch.Tensor, exact: dict[Slot, torch.Tensor], made: torch.Tensor, coarsest: DType, moves: Moves
) -> SlotReplay:
    if not (is_floating(other) and is_floating(exact[slot])):
        flipped = moves.num_flipped(slot, other, exact[slot])
        return SlotReplay(slot=slot, dtype=coarsest.name, numel=made.numel(), max_ratio=0.0, rms_ratio=0.0, num_flipped=flipped)
    largest = float(torch.finfo(made.dtype).max) if is_floating(made) else math.inf
    other = _overflowing(other, largest)
    found = ratios(_real(other), Evidence(exact=_real(exact[slot])), coarsest, largest)
    if found.max_ratio > _CLEAR or found.num_nonfinite:
        found = _with_conditioning(slot, other, exact, coarsest, largest, moves)
    if found.max_ratio > _CLEAR and made.dtype is torch.float64:
        found = _with_other_roundings(slot, other, exact, coarsest, largest, moves)
    return SlotReplay(
        slot=slot,
        dtype=coarsest.name,
        numel=made.numel(),
        max_ratio=found.max_ratio,
        rms_ratio=found.rms_ratio,
        num_nonfinite=found.num_nonfinite,
        error=found.error,
    )


def _overflowing(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Make float64 values infinite that are beyond the largest number of the result's dtype, as the exact ones count."""
    if not math.isfinite(largest) or values.is_complex() or not bool((values.abs() > largest).any()):
        return values
    return values.masked_fill(values > largest, math.inf).masked_fill(values < -largest, -math.inf)


def _with_conditioning(
    slot: Slot, other: torch.Tensor, exact: dict[Slot, torch.Tensor], coarsest: DType, largest: float, moves: Moves
) -> Ratios:
    def measured() -> Ratios:
        moved = moves.of(slot, exact, with_zeros=True)
        evidence = Evidence(exact=_real(exact[slot]), moved2=_real(moved.square), step=STEP, is_fragile=moved.is_fragile)
        return ratios(_real(other), evidence, coarsest, largest)

    found = measured()
    if found.max_ratio > _TIES and moves.has_jumps(slot, exact):
        moves.look_for_ties(exact)
        found = measured()
    return found


def _with_other_roundings(
    slot: Slot, other: torch.Tensor, exact: dict[Slot, torch.Tensor], coarsest: DType, largest: float, moves: Moves
) -> Ratios:
    """Compare two float64 results, both of which round, also where noise in the inputs does not show it.

    A norm over equal elements is exactly 0, and where a pixel lies between others is rounded too.
    """
    moved = moves.of(slot, exact, with_zeros=True)
    centre, spread = _real(exact[slot]), moves.evaluations.spread(slot)
    evidence = Evidence(
        exact=centre,
        moved2=_real(moved.square),
        step=STEP,
        is_fragile=moved.is_fragile,
        decomposed=None if spread is None else centre + spread,
    )
    return ratios(_real(other), evidence, coarsest, largest)


class Independent(Decomposed):  # type: ignore[no-untyped-call]
    """Computes primitives with NumPy where there is such a form."""

    def _primitive(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], accumulator: torch.dtype) -> Any:
        formula = _NUMPY.get(name)
        if formula is None or (kwargs and name not in ("sum",)):
            return super()._primitive(func, name, args, kwargs, accumulator)
        found = formula(*(_array(one) for one in args))
        return tuple(map(_tensor, found)) if isinstance(found, tuple) else _tensor(found)


def _array(value: Any) -> Any:
    return value.detach().resolve_conj().numpy() if isinstance(value, torch.Tensor) else value


def _tensor(value: Any) -> Any:
    return None if value is None else torch.from_numpy(np.array(value))


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return call


def _one_by_one(function: Callable[[float], float], torchs: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """Apply a function of the standard library to every element; use torch's own where that would take long."""

    def call(values: Any) -> Any:
        if values.size > _MOST_ONE_BY_ONE:
            return torchs(torch.from_numpy(values)).numpy()
        return np.array([function(one) for one in values.ravel().tolist()], dtype=np.float64).reshape(values.shape)

    return call


def _sum(values: Any, dims: Any = None, **_: Any) -> Any:
    return np.sum(values, axis=tuple(dims) if dims else None)


def _convolution(
    given: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:
    if transposed:
        size = [
            (n - 1) * s - 2 * p + d * (k - 1) + o + 1
            for n, s, p, d, k, o in zip(given.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=True)
        ]
        found = _spread(given, weight, (given.shape[0], weight.shape[1] * groups, *size), stride, padding, dilation, groups)
    else:
        found = _gathered(given, weight, stride, padding, dilation, groups)
    return found if bias is None else found + bias.reshape(1, -1, *(1,) * (found.ndim - 2))


def _convolution_backward(
    grad: Any,
    given: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Any,
) -> Any:
    to_input = to_weight = to_bias = None
    if wanted[0]:
        to_input = (
            _gathered(grad, weight, stride, padding, dilation, groups)
            if transposed
            else _spread(grad, weight, given.shape, stride, padding, dilation, groups)
        )
    if wanted[1]:
        wide, narrow = (grad, given) if transposed else (given, grad)
        to_weight = _correlated(wide, narrow, weight.shape, stride, padding, dilation, groups)
    if wanted[2]:
        to_bias = grad.sum(axis=(0, *range(2, grad.ndim)))
    return to_input, to_weight, to_bias


def _windows(shape: Any, count: Any, stride: Any, dilation: Any) -> Any:
    """Yield each place in the kernel with the slice of the padded input that it meets; both index the last dimensions."""
    for place in itertools.product(*map(range, shape)):
        starts = [k * d for k, d in zip(place, dilation, strict=True)]
        window = tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, count, stride, strict=True))
        yield (..., *place), (..., *window)


def _padded(values: Any, padding: Any) -> Any:
    return np.pad(values, [(0, 0), (0, 0), *((p, p) for p in padding)])


def _grouped(values: Any, groups: int) -> Any:
    return values.reshape(values.shape[0], groups, -1, *values.shape[2:])


def _gathered(given: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    outer, kernel = given.shape[2:], weight.shape[2:]
    sizes = zip(outer, padding, dilation, kernel, stride, strict=True)
    count = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes]
    wide = _padded(given, padding)
    parts = weight.reshape(groups, -1, *weight.shape[1:])
    total: Any = 0.0
    for place, window in _windows(kernel, count, stride, dilation):
        total = total + np.einsum("ngc...,goc->ngo...", _grouped(wide[window], groups), parts[place])
    return total.reshape(given.shape[0], -1, *count)


def _spread(grad: Any, weight: Any, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    total = np.zeros((shape[0], shape[1], *(n + 2 * p for n, p in zip(shape[2:], padding, strict=True))))
    parts = weight.reshape(groups, -1, *weight.shape[1:])
    here = _grouped(grad, groups)
    for place, window in _windows(weight.shape[2:], grad.shape[2:], stride, dilation):
        found = np.einsum("ngo...,goc->ngc...", here, parts[place])
        total[window] += found.reshape(shape[0], shape[1], *grad.shape[2:])
    inner: Any = (..., *(slice(p, p + n) for n, p in zip(shape[2:], padding, strict=True)))
    return total[inner]


def _correlated(given: Any, grad: Any, shape: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    total = np.zeros((groups, shape[0] // groups, *shape[1:]))
    wide, here = _padded(given, padding), _grouped(grad, groups)
    for place, window in _windows(shape[2:], grad.shape[2:], stride, dilation):
        there = _grouped(wide[window], groups)
        flat = (here.reshape(*here.shape[:3], -1), there.reshape(*there.shape[:3], -1))
        total[place] = np.einsum("ngop,ngcp->goc", *flat)
    return total.reshape(shape)


def _added_at(values: Any, dim: int, places: Any, source: Any) -> Any:
    """Compute `scatter_add`, and `index_add` where the places are one row for all."""
    total = np.array(values)
    if places.ndim <= 1 < total.ndim:
        np.add.at(np.moveaxis(total, dim, 0), places, np.moveaxis(source, dim, 0))
        return total
    at: list[Any] = list(np.indices(places.shape))
    if at:
        at[dim] = places
    np.add.at(total, tuple(at), source[tuple(slice(0, size) for size in places.shape)])
    return total


_FORMS: dict[str, Callable[..., Any]] = {
    "mm": np.matmul,
    "bmm": np.matmul,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "sum": _sum,
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "scatter_add": _added_at,
    "index_add": _added_at,
    "abs": np.abs,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda values: 1 / np.sqrt(values),
    "reciprocal": np.reciprocal,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "sign": np.sign,
    "erf": _one_by_one(math.erf, torch.erf),
    "erfc": _one_by_one(math.erfc, torch.erfc),
}
_NUMPY = {name: _quietly(function) for name, function in _FORMS.items()}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
