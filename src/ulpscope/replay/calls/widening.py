# SPDX-License-Identifier: Apache-2.0
"""Run the same call in a wider precision: choose the dtype, and adjust the arguments that would make it another call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ulpscope.model import DTYPES, Slot, TensorRecord
from ulpscope.replay.formulas.grouped import grouped_product

__all__ = ["in_wider_precision", "wider_dtype", "wider_precision"]

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}
_CASTS = frozenset("Tensor.float Tensor.half Tensor.bfloat16 Tensor.double Tensor.cfloat Tensor.chalf Tensor.cdouble".split())
_RANKED = {"matrix_rank": ("rtol", 1), "pinv": ("rtol", 1), "lstsq": ("rcond", 2)}
"""What decides how many singular values of a matrix are 0: the argument that says from where on, and how many stand before it."""
_TOLERANCES = frozenset("tol atol rtol rcond".split())
_COMPUTED_IN_FLOAT32 = frozenset({"float32", "bfloat16", "float16"})


def wider_precision(given: Mapping[Slot, torch.Tensor], recorded: Mapping[Slot, TensorRecord]) -> torch.dtype | None:
    """Return the widest real dtype among the given tensors, if any is wider than recorded; None for a native replay."""
    widest: torch.dtype | None = None
    is_wider = False
    for slot, tensor in given.items():
        if not (tensor.is_floating_point() or tensor.is_complex()) or slot not in recorded:
            continue
        dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        is_wider = is_wider or tensor.dtype.itemsize > DTYPES[recorded[slot].dtype].size_bytes
        if widest is None or dtype.itemsize > widest.itemsize:
            widest = dtype
    return widest if is_wider else None


def wider_dtype(dtype: torch.dtype, wide: torch.dtype | None) -> torch.dtype:
    """Return the dtype to put in for an argument that asks for `dtype`, in the wider precision."""
    if wide is None:
        return dtype
    if dtype.is_complex:
        return max(dtype, _COMPLEX[wide], key=lambda each: each.itemsize)
    return max(dtype, wide, key=lambda each: each.itemsize) if dtype.is_floating_point else dtype


def in_wider_precision(
    op: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], native: str
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Rewrite a call whose meaning would change with the dtype alone, so that it does not.

    `native` is the recorded dtype of the first floating tensor. A cast keeps its value, and the defaults that torch takes from the dtype
    are those of the recorded one.
    """
    short = op.removesuffix(".default").rpartition(".")[2]
    if op in _CASTS:
        return _cast_kept(short), args[:1], {}
    if short in ("_grouped_mm", "grouped_mm"):
        return grouped_product, args, kwargs
    if short == "rms_norm" and native in _COMPUTED_IN_FLOAT32:
        return function, *_with_default(args, kwargs, 3, "eps", torch.finfo(torch.float32).eps)
    if short in _RANKED and native in DTYPES:
        return function, *_with_tolerance(short, args, kwargs, DTYPES[native].eps)
    if short in ("nan_to_num", "nan_to_num_") and native in DTYPES:
        largest = DTYPES[native].max
        args, kwargs = _with_default(args, kwargs, 2, "posinf", largest)
        return function, *_with_default(args, kwargs, 3, "neginf", -largest)
    return function, args, kwargs


def _with_tolerance(short: str, args: list[Any], kwargs: dict[str, Any], eps: float) -> tuple[list[Any], dict[str, Any]]:
    """Fill in the tolerance that torch takes from the dtype, where the caller gave none.

    A singular value below this share of the largest one counts as 0.
    """
    name, num_before = _RANKED[short]
    given = [*args[num_before:], *(value for key, value in kwargs.items() if key in _TOLERANCES)]
    matrix = args[0] if args else next((kwargs[key] for key in ("A", "input") if key in kwargs), None)
    if not isinstance(matrix, torch.Tensor) or matrix.dim() < 2 or any(value is not None for value in given):
        return args, kwargs
    return args, {**kwargs, name: eps * max(matrix.shape[-2:])}


def _cast_kept(short: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that does what a cast does in any precision: keep real and imaginary part, or the real part alone."""
    is_complex = short in ("cfloat", "chalf", "cdouble")

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex() is is_complex:
            return tensor.view_as(tensor)
        return tensor.to(torch.complex128) if is_complex else tensor.real

    return keep


def _with_default(args: list[Any], kwargs: dict[str, Any], position: int, name: str, value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with a value for one that was left to its default."""
    if len(args) > position:
        return [*args[:position], value if args[position] is None else args[position], *args[position + 1 :]], kwargs
    return args, {**kwargs, name: value if kwargs.get(name) is None else kwargs[name]}
