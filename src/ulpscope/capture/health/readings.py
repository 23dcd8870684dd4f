# SPDX-License-Identifier: Apache-2.0
"""Take statistics of many tensors at once, without waiting for a device.

A `Batch` knows how to read its tensors, and stays good for as long as their `traits` do. Measuring starts the work and returns a `Pending`:
arrays that still lie on their device, and a function that makes rows of them once they have been copied to the host. Rows are those of
`model.STATISTICS`, with counts between bounds behind them. On the CPU the trunk's own kernel reads each tensor once; on CUDA two Triton
kernels read all of them; elsewhere tensors are joined into rows of equal length, so that a few dozen operations do for a whole model. The
result does not depend on memory formats, and is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ulpscope.capture.health import readings_triton as statistics_triton
from ulpscope.model import DTYPES
from ulpscope.numerics.summary.composing import Floats, counts_of_intervals
from ulpscope.numerics.summary.summary import summarize_address

__all__ = ["Batch", "Pending", "Sampler", "measure", "measure_rows", "traits"]

ROW = 8192
_MOST_JOINED = 1 << 26
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Pending(NamedTuple):
    """Arrays on a device, and the work on the host: `finish` takes them as NumPy arrays, in the same order."""

    arrays: list[torch.Tensor]
    finish: Callable[[list[Any]], Any]


_Read: TypeAlias = Callable[[list[torch.Tensor], tuple[float, ...]], Pending]


def traits(tensors: Sequence[torch.Tensor]) -> tuple[list[int], tuple[list[Any], ...]]:
    """Return the traits that a batch depends on: the addresses of the tensors, and their forms. Every step calls this, so it asks for
    little.
    """
    if not _PLAIN.issuperset(map(type, tensors)):
        return [_address(each) for each in tensors], ([_form(each) for each in tensors],)
    return [each.data_ptr() for each in tensors], (
        [each.numel() for each in tensors],
        [each.dtype for each in tensors],
        [each.get_device() for each in tensors],
        [each.is_contiguous() or (each.shape, each.stride()) for each in tensors],
    )


def _form(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if type(tensor) in _PLAIN else ()
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, strides


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; zero if only its own operations can read it."""
    return tensor.data_ptr() if type(tensor) in _PLAIN else 0


class Batch:
    """Plain dense tensors of one device, with the ways to measure and to sample them. Use it where no mode is active.

    It is good for tensors of the same `traits`; when only their addresses change, `move` is enough.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], sampler: Sampler | None = None) -> None:
        self._sampler = sampler
        self._offsets: torch.Tensor | None = None
        self._readable: statistics_triton.Readable | None = None
        groups: dict[tuple[str, Any], list[int]] = {}
        for place, tensor in enumerate(tensors):
            groups.setdefault(_way(tensor), []).append(place)
        self._ways = {way for way, _ in groups}
        if "triton" in self._ways:
            dtypes, numels = tuple(tensor.dtype for tensor in tensors), tuple(tensor.numel() for tensor in tensors)
            self._readable = statistics_triton.Readable(tensors[0].device, dtypes, numels)
            self._readable.move([_address(tensor) for tensor in tensors])
        self._parts = [(places, self._reading(way, places)) for (way, _), places in groups.items()]

    def move(self, addresses: Sequence[int]) -> None:
        """Take the new addresses of the tensors."""
        if self._readable is not None:
            self._readable.move(addresses)

    def measure(self, tensors: Sequence[torch.Tensor], bounds: tuple[float, ...] = ()) -> Pending:
        """Start to measure tensors; the rows come back in their order."""
        if len(self._parts) == 1:
            return self._parts[0][1](list(tensors), bounds)
        parts = [(places, read([tensors[place] for place in places], bounds)) for places, read in self._parts]
        return _joined(len(tensors), parts, len(bounds) + 1 if bounds else 0)

    def sample(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values at the places of the sampler, one row for each tensor; shorter rows end with zeros."""
        assert self._sampler is not None
        if self._readable is not None and self._ways == {"triton"} and not statistics_triton.failure:
            try:
                if self._offsets is None:
                    self._offsets = self._sampler.offsets(tensors)
                return statistics_triton.sample_matrix(self._readable, self._offsets)
            except Exception as error:
                statistics_triton.give_up(error)
        return self._sampler.take(tensors)

    def _reading(self, way: str, places: list[int]) -> _Read:
        if way == "cpu":
            return _measure_on_cpu
        if way == "rows" or self._readable is None:
            return _measure_in_rows
        where, table = self._readable, statistics_triton.Table(self._readable, places)
        return lambda tensors, bounds: _measure_with_triton(where, table, bounds) or _measure_in_rows(tensors, bounds)


def measure(tensors: Sequence[torch.Tensor], bounds: tuple[float, ...] = ()) -> Pending:
    """Start to measure tensors that will hardly be seen again."""
    return Batch(tensors).measure(tensors, bounds)


def measure_rows(matrix: torch.Tensor, counts: tuple[int, ...], bounds: tuple[float, ...] = ()) -> Pending:
    """Start to measure the first `counts[row]` elements of each row of a matrix."""
    if _way(matrix)[0] == "triton" and matrix.is_contiguous():
        pending = _measure_with_triton(*statistics_triton.readable_rows(matrix, counts), bounds)
        if pending is not None:
            return pending
    return measure([row[:count] for row, count in zip(matrix.unbind(), counts, strict=True)], bounds)


def _joined(num_rows: int, parts: list[tuple[list[int], Pending]], num_counts: int) -> Pending:
    def finish(arrays: list[Any]) -> Floats:
        rows = np.empty((num_rows, 6 + num_counts))
        for places, pending in parts:
            rows[places] = pending.finish(arrays[: len(pending.arrays)])
            arrays = arrays[len(pending.arrays) :]
        return rows

    return Pending([array for _, pending in parts for array in pending.arrays], finish)


def _way(tensor: torch.Tensor) -> tuple[str, Any]:
    """Choose how to measure a tensor, and the key of the tensors that are measured together with it."""
    kind = tensor.device.type
    if kind == "cpu" and type(tensor) in _PLAIN:
        return "cpu", None
    if kind == "cuda" and statistics_triton.can_read(tensor):
        return "triton", (tensor.device, tensor.dtype)
    return "rows", (tensor.device, tensor.dtype)


# ---- on the CPU


def _measure_on_cpu(tensors: list[torch.Tensor], bounds: tuple[float, ...]) -> Pending:
    rows = np.array([_cpu_row(tensor, bounds) for tensor in tensors]).reshape(len(tensors), -1)
    return Pending([], lambda arrays: rows)


def _cpu_row(tensor: torch.Tensor, bounds: tuple[float, ...]) -> list[float]:
    dtype = _dtype_name(tensor.dtype)
    if tensor.data_ptr() == 0:  # nothing, or memory that was given back
        tensor = tensor.new_empty(0)
    plain = tensor if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() else _dense(tensor)
    if dtype not in DTYPES:
        plain, dtype = plain.float(), "float32"
    summary, _ = summarize_address(dtype, plain.data_ptr(), plain.numel() * plain.element_size())
    numel = summary.numel or 1
    row: list[Any] = [summary.min, summary.max, summary.mean, summary.rms, (summary.num_zero or 0) / numel, 0.0]
    if summary.mean is None or summary.num_nonfinite:
        row = [float("nan") if value is None else value for value in row]
        row[5] = (summary.num_nonfinite or 0) / numel
    if bounds:
        row += [float(count) for count in counts_of_intervals(_as_real(plain).detach().double().numpy(), bounds)]
    return row


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# ---- with Triton


def _measure_with_triton(tensors: statistics_triton.Readable, table: statistics_triton.Table, bounds: tuple[float, ...]) -> Pending | None:
    """Start to measure by the kernels; None where they do not work."""
    if statistics_triton.failure:
        return None
    try:
        sums = statistics_triton.measure(tensors, table, bounds)
    except Exception as error:
        statistics_triton.give_up(error)
        return None
    return Pending([sums], lambda arrays: _rows_of_sums(arrays[0], table.numel))


# ---- anywhere: joined into rows of equal length


def _measure_in_rows(tensors: list[torch.Tensor], bounds: tuple[float, ...]) -> Pending:
    flat = [_as_real(_dense(tensor)).reshape(-1) for tensor in tensors]
    if flat[0].dtype not in _FLOATS:
        flat = [tensor.float() for tensor in flat]
    lengths = [max(1, -(-tensor.numel() // ROW)) for tensor in flat]
    arrays, first, size = [], 0, 0
    for place, length in enumerate(lengths):
        size += length * ROW
        if size >= _MOST_JOINED or place + 1 == len(flat):
            arrays.append(_partial_rows(flat[first : place + 1], lengths[first : place + 1], bounds))
            first, size = place + 1, 0
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    numel = np.array([tensor.numel() for tensor in flat], dtype=np.float64)
    return Pending(arrays, lambda found: _rows_of_sums(_summed(np.concatenate(found).astype(np.float64), starts), numel))


def _partial_rows(flat: list[torch.Tensor], lengths: list[int], bounds: tuple[float, ...]) -> torch.Tensor:
    """Compute [rows, 7 + counts]: low, high, sum over scale, scale, squares over its square, zeros, non-finite; zeros pad a tensor's last
    row.
    """
    numels = [tensor.numel() for tensor in flat]
    pads = [length * ROW - numel for length, numel in zip(lengths, numels, strict=True)]
    padding = flat[0].new_zeros(max(pads))
    pieces = [piece for tensor, pad in zip(flat, pads, strict=True) for piece in (tensor, padding[:pad])]
    joined = torch.cat(pieces).view(-1, ROW)
    values = joined if joined.dtype is torch.float64 else joined.float()
    is_finite = torch.isfinite(values)
    finite = torch.where(is_finite, values, 0.0)
    scale = finite.abs().amax(1)
    scaled = finite / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    is_nan = torch.isnan(values)
    columns = [
        *_extremes(values, is_nan, lengths, pads),
        scaled.sum(1),
        scale,
        scaled.square().sum(1),
        (values == 0).sum(1).to(values.dtype),
        (~is_finite).sum(1).to(values.dtype),
    ]
    if bounds:
        columns.append((values <= bounds[0]).sum(1).to(values.dtype))
        columns += [(values > bound).sum(1).to(values.dtype) for bound in bounds]
    result = torch.stack(columns, dim=1)
    return _without_padding(result, lengths, pads, bounds)


def _extremes(values: torch.Tensor, is_nan: torch.Tensor, lengths: list[int], pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest number of each row. Only a tensor's last row holds padding, which is left out there."""
    infinity = float("inf")
    low, high = torch.where(is_nan, infinity, values).amin(1), torch.where(is_nan, -infinity, values).amax(1)
    last = torch.tensor([end - 1 for end in np.cumsum(lengths)], device=values.device)
    used = torch.tensor([ROW - pad for pad in pads], device=values.device)
    is_used = (torch.arange(ROW, device=values.device) < used.unsqueeze(1)) & ~is_nan[last]
    low[last] = torch.where(is_used, values[last], infinity).amin(1)
    high[last] = torch.where(is_used, values[last], -infinity).amax(1)
    return low, high


def _without_padding(partial: torch.Tensor, lengths: list[int], pads: list[int], bounds: tuple[float, ...]) -> torch.Tensor:
    """Subtract the padding, which was counted as zeros."""
    correction = np.zeros(tuple(partial.shape))
    last = np.cumsum(lengths) - 1
    correction[last, 5] = pads
    if bounds:
        correction[last, 7] = np.where(bounds[0] >= 0, pads, 0)
        for place, bound in enumerate(bounds):
            correction[last, 8 + place] = np.where(bound < 0, pads, 0)
    return partial - torch.tensor(correction, dtype=partial.dtype, device=partial.device)


def _summed(partial: Floats, starts: Any) -> Floats:
    """Sum the partial rows of each tensor into one row of the same columns, in float64."""
    result = np.empty((len(starts), partial.shape[1]))
    result[:, 0] = np.minimum.reduceat(partial[:, 0], starts)
    result[:, 1] = np.maximum.reduceat(partial[:, 1], starts)
    result[:, 2] = np.add.reduceat(partial[:, 2] * partial[:, 3], starts)
    result[:, 3] = np.maximum.reduceat(partial[:, 3], starts)
    scale = np.repeat(result[:, 3], np.diff([*starts, len(partial)]))
    share = np.divide(partial[:, 3], scale, out=np.zeros(len(partial)), where=scale > 0)
    result[:, 4] = np.add.reduceat(partial[:, 4] * share**2, starts)
    result[:, 5:] = np.add.reduceat(partial[:, 5:], starts, axis=0)
    return result


def _rows_of_sums(sums: Floats, numel: Floats) -> Floats:
    """Turn sums into the rows of `measure`."""
    finite = numel - sums[:, 6]
    rows = np.empty((len(sums), 6 + max(0, sums.shape[1] - 7)))
    nothing = np.where(finite > 0, 1.0, np.nan)
    divisor = np.maximum(finite, 1)
    rows[:, 0] = np.where(sums[:, 0] > sums[:, 1], np.nan, sums[:, 0]) + 0.0
    rows[:, 1] = np.where(sums[:, 0] > sums[:, 1], np.nan, sums[:, 1]) + 0.0
    rows[:, 2] = sums[:, 2] / divisor * nothing
    rows[:, 3] = np.sqrt(sums[:, 4] / divisor) * sums[:, 3] * nothing
    rows[:, 4:6] = sums[:, 5:7] / np.maximum(numel, 1)[:, None]
    if sums.shape[1] > 7:
        above = sums[:, 8:]
        rows[:, 6] = sums[:, 7]
        rows[:, 7:-1] = above[:, :-1] - above[:, 1:]
        rows[:, -1] = above[:, -1]
    return rows


# ---- values at chosen places


class Sampler:
    """Takes the values at fixed places of tensors that share a device, as one matrix [tensors, width].

    `places` are positions in index order, for any memory format. Shorter rows end with zeros.
    """

    def __init__(self, places: Sequence[Any]) -> None:
        self.counts = tuple(len(each) for each in places)
        self.width = max(self.counts, default=0)
        self._places = [torch.from_numpy(np.asarray(each, dtype=np.int64)) for each in places]
        self._moved: dict[Any, Any] = {}

    def take(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        work = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
        found = [_real_part(tensor).take(place).to(work) for tensor, place in zip(tensors, self._on(tensors[0].device), strict=True)]
        if all(count == self.width for count in self.counts):
            return torch.stack(found)
        return torch.stack([torch.cat([each, each.new_zeros(self.width - len(each))]) for each in found])

    def offsets(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return where the places lie in memory, by the strides of the tensors; negative where a row has none."""
        key = (tensors[0].device, tuple(None if tensor.is_contiguous() else tensor.stride() for tensor in tensors))
        if key not in self._moved:
            offsets = np.full((len(tensors), self.width), -1, dtype=np.int64)
            for row, (tensor, place) in enumerate(zip(tensors, self._places, strict=True)):
                offsets[row, : len(place)] = _memory_offsets(place.numpy(), tuple(tensor.shape), tensor.stride())
            self._moved[key] = torch.from_numpy(offsets).to(tensors[0].device)
        found: torch.Tensor = self._moved[key]
        return found

    def _on(self, device: torch.device) -> list[torch.Tensor]:
        if device not in self._moved:
            self._moved[device] = [place.to(device) for place in self._places]
        found: list[torch.Tensor] = self._moved[device]
        return found


def _real_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().real if tensor.is_complex() else tensor.detach()


def _memory_offsets(places: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    offsets = np.zeros(len(places), dtype=np.int64)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        offsets += places % size * stride
        places = places // size
    return offsets
