# SPDX-License-Identifier: Apache-2.0
"""Compose statistics of parts, and choose sample positions that every device and every sharding agree on.

Rows are float64 in the order of `model.STATISTICS`. The rows of shards give the row of the whole without reading the values again, so
training communicates nothing for them. Sampled positions follow from a name and a size alone: one in each of equal strata, placed by a
fixed mixing function, so that two runs sample the same positions on any machine.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ulpscope.format.content import hash_of_name

__all__ = ["Floats", "compose", "counts_of_intervals", "equal_signs", "norms", "sample_positions"]

Floats: TypeAlias = npt.NDArray[np.float64]

_MIN, _MAX, _MEAN, _RMS, _ZERO, _NONFINITE = range(6)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NUM_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


def compose(values: Floats, numel: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], num_groups: int) -> Floats:
    """Compose the rows of unions: `values` is [..., rows, 6], row i belongs to `groups[i]`, a negative group to none.

    >>> compose(np.array([[1.0, 1, 1, 1, 0, 0], [3.0, 3, 3, 3, 0, 0]]), np.array([1, 1]), np.array([0, 0]), 1).round(3).tolist()
    [[1.0, 3.0, 2.0, 2.236, 0.0, 0.0]]
    """
    result = np.full((*values.shape[:-2], num_groups, 6), np.nan)
    order = np.argsort(groups, kind="stable")
    order = order[groups[order] >= 0]
    if order.size:
        present, starts = np.unique(groups[order], return_index=True)
        result[..., present, :] = _unions(values[..., order, :], numel[order], starts)
    return result


def _unions(values: Floats, numel: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> Floats:
    """Compose consecutive rows, each union beginning at one of `starts`; a single row stays as it is."""

    def total(each: Floats) -> Floats:
        return np.add.reduceat(each, starts, axis=-1)

    sizes = np.diff(starts, append=len(numel))
    counts = np.where(np.isnan(values[..., _ZERO]), 0, numel).astype(np.float64)
    finite = counts * (1 - np.nan_to_num(values[..., _NONFINITE]))
    rms = np.nan_to_num(values[..., _RMS])
    scale = np.maximum.reduceat(rms, starts, axis=-1)
    spread = np.repeat(scale, sizes, axis=-1)
    relative = np.divide(rms, spread, out=np.zeros_like(rms), where=spread > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        columns = [
            np.fmin.reduceat(values[..., _MIN], starts, axis=-1),
            np.fmax.reduceat(values[..., _MAX], starts, axis=-1),
            total(np.nan_to_num(values[..., _MEAN]) * finite) / total(finite),
            np.sqrt(total(relative**2 * finite) / total(finite)) * scale,
            total(np.nan_to_num(values[..., _ZERO]) * counts) / total(counts),
            total(np.nan_to_num(values[..., _NONFINITE]) * counts) / total(counts),
        ]
    result = np.stack(columns, axis=-1)
    is_alone = sizes == 1
    result[..., is_alone, :] = values[..., starts[is_alone], :]
    return result


def norms(values: Floats, numel: npt.NDArray[np.int64]) -> Floats:
    """Return the Euclidean norms of rows [..., rows, 6] over their finite elements."""
    result: Floats = values[..., _RMS] * np.sqrt(numel * (1 - np.nan_to_num(values[..., _NONFINITE])))
    return result


def sample_positions(name: str, numel: int, at_most: int) -> npt.NDArray[np.int64]:
    """Return ascending positions below `numel`, all of them if they are few: the same for a name and size everywhere and for ever."""
    if numel <= at_most:
        return np.arange(numel, dtype=np.int64)
    seed = np.uint64(hash_of_name(name, numel))
    places = np.arange(at_most, dtype=np.uint64)
    whole, rest = divmod(numel, at_most)
    starts = places * np.uint64(whole) + places * np.uint64(rest) // np.uint64(at_most)
    ends = (places + np.uint64(1)) * np.uint64(whole) + (places + np.uint64(1)) * np.uint64(rest) // np.uint64(at_most)
    with np.errstate(over="ignore"):
        mixed = _mixed(seed + (places + np.uint64(1)) * _GOLDEN)
    places_in: npt.NDArray[np.int64] = (starts + mixed % (ends - starts)).astype(np.int64)
    return places_in


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def equal_signs(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], counts: npt.NDArray[np.int64]) -> Floats:
    """Return the share of equal bits: packed bits [..., rows, bytes], of which the first `counts[row]` count; NaN for a row without any."""
    width = min(one.shape[-1], other.shape[-1])
    different = _NUM_ONES[one[..., :width] ^ other[..., :width]].sum(-1, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        share: Floats = np.where(counts > 0, 1.0 - different / np.maximum(counts, 1), math.nan)
    return share


def counts_of_intervals(values: npt.NDArray[Any], bounds: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """Count the values in (-inf, b0], (b0, b1] ... (bk, inf); NaN lies in none."""
    plain = np.asarray(values, dtype=np.float64).ravel()
    places = np.searchsorted(np.asarray(bounds, dtype=np.float64), plain[~np.isnan(plain)], side="left")
    return np.bincount(places, minlength=len(bounds) + 1).astype(np.int64)
