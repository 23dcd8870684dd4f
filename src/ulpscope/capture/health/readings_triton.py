# SPDX-License-Identifier: Apache-2.0
"""Measure and sample all tensors of a model by a handful of launches, where triton is installed.

The facts that a launch needs (how large tensors are, which of them go together) stay on the device for as long as they are true; the
addresses of the tensors travel there when they have moved, without waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

__all__ = ["Readable", "Table", "can_read", "failure", "give_up", "measure", "readable_rows", "sample_matrix"]

ROW = 32768
HEIGHT, WIDTH, WARPS = 4, 1024, 4  # a tile that a program reads at a time, and by how many warps
_BLOCK = 256
_MOST_TABLES = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_CODES = {dtype: code for code, dtype in enumerate(_NAMES)}


class Table:
    """Some of the tensors of a Readable, all of one dtype, and the row of the tensor that each program reads."""

    def __init__(self, readable: Readable, places: Sequence[int]) -> None:
        device = readable.device
        numels = np.array([readable.numels[place] for place in places], dtype=np.int64)
        lengths = np.maximum(1, -(-numels // ROW))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self.dtype = readable.dtypes[places[0]]
        self.numel = numels.astype(np.float64)
        self.num_rows = int(starts[-1])
        self.starts = _on_device(starts, device)
        self.tensors = _on_device(np.repeat(np.array(places, dtype=np.int64), lengths), device)
        self.numbers = _on_device(np.arange(starts[-1], dtype=np.int64) - np.repeat(starts[:-1], lengths), device)


class Readable:
    """Tensors on one device, and their addresses since `move`."""

    def __init__(self, device: torch.device, dtypes: tuple[torch.dtype, ...], numels: tuple[int, ...]) -> None:
        self.device, self.dtypes, self.numels = device, dtypes, numels
        self.addresses: torch.Tensor | None = None

    def move(self, addresses: Sequence[int]) -> None:
        self.addresses = _on_device(np.array(addresses, dtype=np.int64), self.device)

    @cached_property
    def sizes(self) -> torch.Tensor:
        sizes = np.array(self.numels, dtype=np.int64)
        found: torch.Tensor = _kept(("sizes", self.device, self.numels), lambda: _on_device(sizes, self.device))
        return found

    @cached_property
    def codes(self) -> torch.Tensor:
        """Return the codes by which `sampled_values` knows the dtypes."""
        codes = np.array([_CODES[dtype] for dtype in self.dtypes], dtype=np.int64)
        found: torch.Tensor = _kept(("codes", self.device, self.dtypes), lambda: _on_device(codes, self.device))
        return found


failure = ""
"""Why the kernels are not used, if they were tried and failed."""

_tables: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def can_read(tensor: torch.Tensor) -> bool:
    """Tell whether the kernels can read a tensor where it lies."""
    is_plain = tensor.dtype in _NAMES and type(tensor) in _PLAIN and not tensor.is_neg()
    return is_plain and not failure and _is_dense(tensor) and _kernels() is not None


def give_up(error: Exception) -> None:
    """Stop using the kernels: this triton does not compile them, or not for this device. The other ways work without."""
    global failure
    failure = f"{type(error).__name__}: {error}"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill their memory, in any order."""
    if tensor.is_contiguous():
        return True
    strides = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in strides:
        if stride != expected:
            return False
        expected *= size
    return True


@cache
def _kernels() -> Any:
    try:
        from ulpscope.capture.health import reading_kernels as triton_kernels
    except Exception:  # not installed, or not for this machine: the other ways do without
        return None
    return triton_kernels


def measure(tensors: Readable, table: Table, bounds: tuple[float, ...]) -> torch.Tensor:
    """Compute float64 sums [tensors of the table, 7 + counts], on the device."""
    kernels, device = _kernels(), tensors.device
    columns = 7 + (len(bounds) + 1 if bounds else 0)
    limits = _kept(("bounds", device, bounds), lambda: _on_device(np.array(bounds or [0.0], dtype=np.float32), device))
    partial = torch.empty((table.num_rows, columns), dtype=torch.float32, device=device)
    whole = torch.empty((len(table.numel), columns), dtype=torch.float64, device=device)
    with _current(device):
        kernels.partial_rows[(table.num_rows,)](
            tensors.addresses,
            tensors.sizes,
            table.tensors,
            table.numbers,
            limits,
            partial,
            DTYPE=getattr(kernels.tl, _NAMES[table.dtype]),
            ROW=ROW,
            HEIGHT=HEIGHT,
            WIDTH=WIDTH,
            NUM_BOUNDS=len(bounds),
            COLUMNS=columns,
            num_warps=WARPS,
        )
        kernels.whole_rows[(len(table.numel),)](partial, table.starts, whole, COLUMNS=columns, BLOCK=_BLOCK)
    return whole


def readable_rows(matrix: torch.Tensor, counts: tuple[int, ...]) -> tuple[Readable, Table]:
    """Describe the first `counts[row]` elements of each row of a contiguous matrix as tensors of their own."""
    device, size = matrix.device, matrix.element_size() * matrix.shape[1]
    steps = np.arange(len(counts), dtype=np.int64) * size
    found = Readable(device, (matrix.dtype,) * len(counts), counts)
    found.addresses = _kept(("steps", device, len(counts), size), lambda: _on_device(steps, device)) + matrix.data_ptr()
    table = _kept(("rows", device, matrix.dtype, counts), lambda: Table(found, range(len(counts))))
    return found, table


def sample_matrix(tensors: Readable, offsets: torch.Tensor) -> torch.Tensor:
    """Return float32 [tensors, width]: the values at `offsets` (in elements of memory, int64, the same shape; negative for none)."""
    device, (height, width) = tensors.device, offsets.shape
    out = torch.empty((height, width), dtype=torch.float32, device=device)
    with _current(device):
        _kernels().sampled_values[(height,)](
            tensors.addresses, tensors.codes, offsets, out, WIDTH=width, BLOCK=1 << max(0, width - 1).bit_length()
        )
    return out


def _kept(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the object made for this key before, or make it now."""
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = make()
        if len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
    return found


def _on_device(values: Any, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
