# SPDX-License-Identifier: Apache-2.0
"""Make tensors of every dtype and many layouts, with the values that summaries go wrong on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ulpscope.model import DTYPES, Summary
from ulpscope.numerics.summary.summary import summarize

DTYPE_NAMES = [name for name in DTYPES if name != "complex32" and hasattr(torch, name)]
"""Those that this torch has (float8_e8m0fnu from 2.7 on), but for complex32, for which it has hardly an operation."""

LAYOUTS = {
    "whole": lambda block: block,
    "permuted": lambda block: block.permute(2, 0, 1),
    "transposed": lambda block: block.transpose(1, 2),
    "cut": lambda block: block[:, 1:7, 2:6],
    "every other": lambda block: block[:, ::2],
    "heads": lambda block: block.view(40, 6, 4, 8).transpose(1, 2),
    "expanded": lambda block: block[3, 2, 1].expand(7, 11),
    "shifted": lambda block: block.reshape(-1)[1:],
    "odd": lambda block: block.reshape(-1)[3:1000],
    "six dimensions": lambda block: block.view(5, 8, 3, 8, 4, 2).permute(5, 1, 0, 4, 2, 3),
    "scalar": lambda block: block[2, 3, 4],
    "one": lambda block: block.reshape(-1)[:1],
    "row": lambda block: block.reshape(1, -1)[:, :17],
}


def block(name: str, seed: int = 0) -> torch.Tensor:
    """Make a tensor [40, 24, 8] of random bits: NaN, infinities and subnormal numbers are among them."""
    dtype = getattr(torch, name)
    raw = torch.randint(0, 256, (40 * 24 * 8 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if name == "bool" else raw).view(dtype).view(40, 24, 8)


def special() -> Iterator[torch.Tensor]:
    """Yield values at the ends of the range that a sum can hold."""
    yield torch.tensor([1e300, -1e308, 1e-300, 5e-324, 0.0, -0.0, math.nan, math.inf] * 300, dtype=torch.float64)
    yield torch.tensor([1e-200, 3e-190] * 300, dtype=torch.float64)
    yield torch.cat([torch.full((9000,), 1e-250, dtype=torch.float64), torch.full((70_000,), 1e250, dtype=torch.float64)])
    for value in (1e-30, 1e30, 1e-40, 0.0, -0.0, math.nan, math.inf, -math.inf):
        yield torch.full((70_001,), value, dtype=torch.bfloat16)
        yield torch.full((301,), value)
    yield torch.randn(200_003, generator=torch.Generator().manual_seed(1)).half()
    yield torch.randn(70_000, generator=torch.Generator().manual_seed(2)).bfloat16()
    yield torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1, -1, 0] * 100)
    yield torch.randn(33, 5, dtype=torch.complex64).conj()
    yield torch.randn(33, 5, dtype=torch.complex64).conj().imag  # marked as negative


def expected(tensor: torch.Tensor) -> tuple[Summary, str]:
    """Return the host's summary of the values."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return summarize(str(tensor.dtype).removeprefix("torch."), plain.view(torch.uint8).numpy())


def wrong(tensor: torch.Tensor, summary: Summary | None, fingerprint: str | None) -> list[str]:
    """Tell where a summary differs from the host's; sums may be off by the documented tolerance."""
    right, mark = expected(tensor)
    found = [] if fingerprint == mark else [f"fingerprint {fingerprint}, should be {mark}"]
    if summary is None:
        return [*found, "no summary"]
    exact = ("numel", "min", "max", "num_nan", "num_posinf", "num_neginf", "num_zero", "num_subnormal")
    found += [
        f"{field} {getattr(summary, field)}, should be {getattr(right, field)}"
        for field in exact
        if getattr(summary, field) != getattr(right, field)
    ]
    bound = 2.0**-22 if tensor.dtype in (torch.float16, torch.bfloat16) else 2.0**-44
    for field in ("mean", "rms"):
        one, other = getattr(summary, field), getattr(right, field)
        if (one is None) != (other is None) or (one is not None and abs(one - other) > bound * right.rms):
            found.append(f"{field} {one}, should be {other}")
    return found
