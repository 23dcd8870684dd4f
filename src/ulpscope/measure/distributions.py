# SPDX-License-Identifier: Apache-2.0
"""Count two tensors and their difference into histograms, for a picture: finite values only, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ulpscope.model import Histogram, TensorData
from ulpscope.numerics.casting import as_bytes, real_dtype, reals, widen

__all__ = ["distributions"]

_BLOCK = 1 << 13
Floats: TypeAlias = npt.NDArray[np.float64]
Blocks: TypeAlias = Callable[[], Iterator[Floats]]


def distributions(subject: TensorData, reference: TensorData, bins: int = 60) -> tuple[Histogram, ...]:
    """Count subject and reference over the same edges, and their difference where the shapes are the same.

    A tensor without a finite value gets no histogram.
    """
    sides: dict[str, Blocks] = {"subject": lambda: _blocks(subject), "reference": lambda: _blocks(reference)}
    ranges = [found for found in map(_range, sides.values()) if found is not None]
    result = []
    if ranges:
        edges = _edges(min(low for low, _ in ranges), max(high for _, high in ranges), bins)
        result = [Histogram(what, tuple(edges.tolist()), _counts(blocks, edges)) for what, blocks in sides.items()]
    if subject.shape == reference.shape:
        result += _difference_histogram(subject, reference, bins)
    return tuple(result)


def _difference_histogram(subject: TensorData, reference: TensorData, bins: int) -> list[Histogram]:
    def blocks() -> Iterator[Floats]:
        with np.errstate(invalid="ignore", over="ignore"):
            for left, right in zip(_blocks(subject), _blocks(reference), strict=True):
                yield left - right

    found = _range(blocks)
    if found is None:
        return []
    edges = _edges(*found, bins)
    return [Histogram("difference", tuple(edges.tolist()), _counts(blocks, edges))]


def _blocks(data: TensorData) -> Iterator[Floats]:
    carrier = reals(data.dtype, as_bytes(data))
    for start in range(0, carrier.size, _BLOCK):
        yield widen(real_dtype(data.dtype), carrier[start : start + _BLOCK])


def _range(blocks: Blocks) -> tuple[float, float] | None:
    low, high = math.inf, -math.inf
    for block in blocks():
        finite = block[np.isfinite(block)]
        low, high = min(low, float(finite.min(initial=math.inf))), max(high, float(finite.max(initial=-math.inf)))
    return (low, high) if low <= high else None


def _edges(low: float, high: float, bins: int) -> Floats:
    if low == high:
        half, limit = abs(low) / 2 or 0.5, float(np.finfo(np.float64).max)
        low, high = max(low - half, -limit), min(high + half, limit)
    share = np.linspace(0.0, 1.0, bins + 1)
    edges: Floats = np.maximum.accumulate(low * (1 - share) + high * share)  # a range itself may overflow, a weighted sum does not
    edges[-1] = high
    return edges


def _counts(blocks: Blocks, edges: Floats) -> tuple[int, ...]:
    total = np.zeros(edges.size - 1, np.int64)
    for block in blocks():
        total += np.histogram(block[np.isfinite(block)], edges)[0]
    return tuple(total.tolist())
