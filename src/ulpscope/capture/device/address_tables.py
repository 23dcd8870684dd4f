# SPDX-License-Identifier: Apache-2.0
"""Read many tensors by few launches: the kernels of triton over a table of addresses.

Nothing here waits for the device. Every launch goes on the current stream, behind the work that made the tensors.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ulpscope.capture.device.word_layouts import CHUNK, COLUMNS, FIELDS, JOINED, RATIO, Layout
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.model import DTYPES
from ulpscope.numerics.casting import byte_values

__all__ = ["MOST_ROWS", "Launcher", "are_kernels_there", "upload_size"]

MOST_ROWS = 256
_WIDTH = 256
_WARPS = 4
_NEVER = 2**62
_LINE_POWER = pow(RATIO, _WIDTH, 2**64)
_JOINED_POWER = pow(RATIO, CHUNK * JOINED, 2**64)


@cache
def _kernels() -> Any:
    from ulpscope.capture.device import table_kernels as device_kernels

    return device_kernels


@cache
def are_kernels_there() -> bool:
    """Tell whether triton is installed and works on this machine."""
    try:
        _kernels()
    except Exception:  # not installed, or not for this machine
        return False
    return True


def upload_size(num_rows: int) -> int:
    """Return how many numbers a flush of so many tensors sends to the device: the first program of each tensor, and the rows."""
    return MOST_ROWS + num_rows * FIELDS


class Launcher:
    """The kernels on one device, with their weights, values of one-byte codes, and room for parts."""

    def __init__(self, device: torch.device, *, statistics: bool) -> None:
        self._device = device
        self._table = torch.empty(upload_size(MOST_ROWS), dtype=torch.int64, device=device)
        self._rows = self._table[MOST_ROWS:]
        self._lane_weights = _powers(1, _WIDTH).to(device)
        self._chunk_weights = _powers(CHUNK, JOINED).to(device)
        self._parts = torch.empty((4096, COLUMNS), dtype=torch.int64, device=device)
        self._codes: dict[str, torch.Tensor] = {}
        self._compiled: dict[int, Any] = {}
        # One instruction compares two bfloat16; NVIDIA's devices have it since 2020.
        self._compares_pairs = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
        self._shared = (statistics, FIELDS, MOST_ROWS, CHUNK, _WIDTH, _LINE_POWER, COLUMNS)
        self._whole_constants = (statistics, FIELDS, JOINED, _JOINED_POWER, COLUMNS)

    def launch(self, entries: list[Any], upload: torch.Tensor, numbers: Any, out: torch.Tensor, stream: int) -> None:
        """Summarise tensors that wait (`Pending`), sorted by group, into the rows of `out`, on the current stream.

        `upload` is pinned memory of `upload_size` numbers, `numbers` the same as an array. It must not change until the device is done.
        """
        groups, num_programs = _fill(numbers, entries)
        self._table[: upload.shape[0]].copy_(upload, non_blocking=True)
        if self._parts.shape[0] < num_programs:
            self._parts = torch.empty((2 * num_programs, COLUMNS), dtype=torch.int64, device=self._device)
        for layout, first, count in groups:
            self._launch_group(layout, first, count, stream)
        self._run("whole_tensors", -1, self._whole_constants, len(entries), stream, self._rows, self._parts, self._chunk_weights, out)

    def _launch_group(self, layout: Layout, first: int, count: int, stream: int) -> None:
        is_narrow, kind, size, unit, dims = layout.variant
        if is_narrow:
            given: list[Any] = [self._rows, self._table, self._lane_weights, self._parts, first]
            constants = (kind, unit, dims, self._compares_pairs and kind == 0, *self._shared)
            self._run("narrow_parts", layout.group, constants, count, stream, *given)
        else:
            codes = self._values_of_codes(layout.real) if size == 1 else self._lane_weights
            given = [self._rows, self._table, self._lane_weights, codes, self._parts, first]
            self._run("wide_parts", layout.group, (kind, size, unit, dims, *self._shared), count, stream, *given)

    def _run(self, name: str, group: int, constants: tuple[Any, ...], grid: int, stream: int, *arguments: Any) -> None:
        """Launch a kernel; from the second time on without triton's checks of every argument, which take longer than the launch."""
        compiled = self._compiled.get(group)
        if compiled is None:
            self._compiled[group] = getattr(_kernels(), name)[(grid,)](*arguments, *constants, num_warps=_WARPS)
        else:
            compiled[(grid, 1, 1)](*arguments, *constants, stream=stream)

    def _values_of_codes(self, name: str) -> torch.Tensor:
        """Return values and classes of the 256 codes of a one-byte dtype."""
        if name not in self._codes:
            self._codes[name] = torch.from_numpy(_classified(name)).to(self._device)
        return self._codes[name]


def _fill(numbers: Any, entries: list[Any]) -> tuple[list[tuple[Layout, int, int]], int]:
    """Write the rows of a flush. Return for each group of layouts its first layout, its first program and its number of programs; then the
    number of all programs.
    """
    if COMPILED is not None:
        return COMPILED.fill(numbers, entries, MOST_ROWS, FIELDS, _NEVER)  # type: ignore[no-any-return]
    count = len(entries)
    layouts = [entry.layout for entry in entries]
    table = numbers[MOST_ROWS:].reshape(count, FIELDS)
    table[:] = np.frombuffer(b"".join([layout.row for layout in layouts]), np.int64).reshape(count, FIELDS)
    firsts = list(accumulate([layout.num_programs for layout in layouts], initial=0))
    table[:, 0] = [entry.address for entry in entries]
    table[:, 2] = numbers[:count] = firsts[:-1]
    numbers[count:MOST_ROWS] = _NEVER
    begins = [place for place in range(count) if place == 0 or layouts[place].group != layouts[place - 1].group]
    return [
        (layouts[begin], firsts[begin], firsts[end] - firsts[begin]) for begin, end in zip(begins, [*begins[1:], count], strict=True)
    ], firsts[-1]


def _powers(step: int, count: int) -> torch.Tensor:
    """Return r**(step * (count - 1)), ..., r**step, 1 as uint64."""
    powers = np.array([pow(RATIO, step * (count - 1 - lane), 2**64) for lane in range(count)], np.uint64)
    return torch.from_numpy(powers.view(np.int64)).view(torch.uint64)


def _classified(name: str) -> Any:
    values = byte_values(name)
    classes = np.zeros(256)
    classes[np.isnan(values)] = 1
    classes[values == np.inf] = 2
    classes[values == -np.inf] = 3
    classes[values == 0] = 4
    classes[(values != 0) & (np.abs(values) < DTYPES[name].tiny)] = 5
    return np.concatenate([values, classes])
