# SPDX-License-Identifier: Apache-2.0
"""Take statistics and the fingerprint `u1` of a tensor by plain operations of torch, for devices without kernels of ours.

The result stays on the device: a row of int64 with the columns of `table_kernels`. It takes a few dozen launches and waits for none. A
device may lack float64 or 64-bit multiplication: `is_able` finds that out, and waits for the device once.
"""

from __future__ import annotations

from typing import Any

import torch

from ulpscope.capture.device.word_layouts import RATIO
from ulpscope.model import DTYPES
from ulpscope.numerics.casting import byte_values, real_dtype
from ulpscope.numerics.summary.summary import summarize

__all__ = ["is_able", "summary_row"]

_LINE = 4096
_SLICE = 1 << 23
"""Words that are read together, so that intermediate results stay small."""
_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xD6E8FEB86659FD93 - 2**64)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def summary_row(tensor: torch.Tensor, name: str, *, statistics: bool) -> torch.Tensor:
    """Compute one row of results of a tensor with elements, in memory that is not shared with it."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() == 1:  # contiguous whatever its stride, but torch views it as bytes only with stride 1
        flat = flat.as_strided((1,), (1,))
    data = flat.view(torch.uint8) if flat.dtype is not torch.uint8 else flat
    columns = list(_fingerprint(data))
    if statistics:
        columns += _statistics(data, real_dtype(name))
    return torch.stack(columns)


def _fingerprint(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s0 = s1 = None
    for start in range(0, data.numel(), 8 * _SLICE):
        part = data[start : start + 8 * _SLICE]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        count = words.numel()
        mixed = _mixed(torch.nn.functional.pad(words, (0, -count % _LINE))).view(-1, _LINE)
        lines = (mixed * _powers(RATIO, _LINE, data.device)).sum(1)
        weighted = (lines * _powers(pow(RATIO, _LINE, 2**64), lines.numel(), data.device)).sum()
        weighted = weighted * _signed(
            pow(RATIO, count - mixed.numel(), 2**64)
        )  # words beyond the end count as zeros: take their power back
        s0 = mixed.sum() if s0 is None else s0 + mixed.sum()
        s1 = weighted if s1 is None else s1 * _signed(pow(RATIO, count, 2**64)) + weighted
    assert s0 is not None
    assert s1 is not None
    return s0, s1


def _mixed(words: torch.Tensor) -> torch.Tensor:
    for multiplier in _MIX:
        words = words * multiplier
        words = words ^ ((words >> 32) & 0xFFFFFFFF)
    return words


def _powers(ratio: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ratio**(count - 1), ..., ratio, 1."""
    factors = torch.full((count,), _signed(ratio), dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0).flip(0)


def _statistics(data: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Compute columns 2 to 11: minimum, maximum, sum and sum of squares scaled by a power of two, its exponent, and the counts."""
    size, kind = DTYPES[name].size_bytes, DTYPES[name].kind
    values = _values(data, name)
    is_nan, is_finite = values.isnan(), values.isfinite()
    if kind == "float" and size > 1:
        bits = data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        magnitude = bits & ((1 << (8 * size - 1)) - 1)
        is_zero, is_small = magnitude == 0, magnitude < (1 << DTYPES[name].mantissa)
    else:
        is_zero = values == 0
        is_small = values.abs() < DTYPES[name].tiny if kind == "float" else is_zero
    infinity = torch.inf
    low = torch.where(is_nan, infinity, values).min()
    high = torch.where(is_nan, -infinity, values).max()
    finite = torch.where(is_finite, values, 0.0)
    exponent = _exponent(finite.abs().max()) if name == "float64" else torch.zeros((), dtype=torch.int64, device=data.device)
    scaled = torch.ldexp(finite, -exponent) if name == "float64" else finite
    floats = [low, high, scaled.sum(), scaled.square().sum()]
    counts = [is_nan, values == infinity, values == -infinity, is_zero, is_small & ~is_zero]
    return [number.view(torch.int64) for number in floats] + [exponent] + [count.sum() for count in counts]


def _exponent(largest: torch.Tensor) -> torch.Tensor:
    return ((largest.view(torch.int64) >> 52) - 1023).clamp(-1000, 1000)


def _values(data: torch.Tensor, name: str) -> torch.Tensor:
    if DTYPES[name].size_bytes == 1:
        table: Any = torch.from_numpy(byte_values(name).copy()).to(data.device)
        return table[data.long()]  # type: ignore[no-any-return]
    if name in ("uint16", "uint32", "uint64"):
        return _unsigned(data, name)
    return data.view(getattr(torch, name)).double()


def _unsigned(data: torch.Tensor, name: str) -> torch.Tensor:
    """Widen unsigned integers from their bits: few devices compute with them."""
    size = DTYPES[name].size_bytes
    signed = data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    if size < 8:
        return (signed.long() & ((1 << (8 * size)) - 1)).double()
    # Keep the lowest bit in the halved number, so that twice the rounded half is the rounded whole.
    halved = ((signed >> 1) & (2**63 - 1)) | (signed & 1)
    return torch.where(signed < 0, halved.double() * 2, signed.double())


def is_able(device: torch.device) -> bool:
    """Tell whether the operations give the same on this device as elsewhere, tried on a few hundred numbers."""
    numbers = torch.linspace(-3, 3, 501, dtype=torch.float32)
    try:
        row = summary_row(numbers.to(device), "float32", statistics=True).cpu()
    except Exception:
        return False
    summary, fingerprint = summarize("float32", numbers.view(torch.uint8).numpy())
    s0, s1, *rest = row.tolist()
    low, high = row[2:4].view(torch.float64).tolist()
    counts = (summary.num_nan, summary.num_posinf, summary.num_neginf, summary.num_zero, summary.num_subnormal)
    same = f"u1:{s1 % 2**64:016x}{s0 % 2**64:016x}" == fingerprint
    return same and (low, high) == (summary.min, summary.max) and tuple(rest[5:]) == counts
