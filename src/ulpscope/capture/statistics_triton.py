# SPDX-License-Identifier: Apache-2.0
"""All tensors of a model measured and sampled by a handful of launches, where triton is installed.

What a launch has to know (where tensors lie, how large they are) stays on the device for as long as it is true; what is new travels
there without waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

__all__ = ["Readable", "can_read", "failure", "give_up", "measure", "readable", "readable_rows", "sample_matrix"]

ROW = 8192
_WARPS = 8
_BLOCK = 256
_MOST_TABLES = 32
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_CODES = {dtype: code for code, dtype in enumerate(_NAMES)}


class _Table:
    """Which row of which tensor each program reads."""

    def __init__(self, numels: tuple[int, ...], device: torch.device) -> None:
        self.numel = np.array(numels, dtype=np.float64)
        lengths = np.array([max(1, -(-numel // ROW)) for numel in numels], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tensors = np.repeat(np.arange(len(numels), dtype=np.int64), lengths)
        numbers = np.arange(starts[-1], dtype=np.int64) - starts[tensors]
        self.num_rows = int(starts[-1])
        self.numels, self.starts, self.tensors, self.numbers = (
            _on_device(array, device) for array in (np.array(numels, dtype=np.int64), starts, tensors, numbers)
        )


@dataclass(frozen=True)
class Readable:
    """Tensors on one device, with their addresses there; to be measured they have to share a dtype, to be sampled they need not."""

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    numels: tuple[int, ...]
    addresses: torch.Tensor
    is_aligned: bool

    @cached_property
    def table(self) -> _Table:
        table: _Table = _kept(("table", self.device, self.numels), lambda: _Table(self.numels, self.device))
        return table

    @cached_property
    def codes(self) -> torch.Tensor:
        """The dtypes, as `sampled_values` knows them."""
        codes = np.array([_CODES[dtype] for dtype in self.dtypes], dtype=np.int64)
        found: torch.Tensor = _kept(("codes", self.device, self.dtypes), lambda: _on_device(codes, self.device))
        return found


failure = ""
"""Why the kernels are not used, where they were tried and did not work."""

_tables: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def can_read(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read a tensor where it lies."""
    is_plain = tensor.dtype in _NAMES and type(tensor) in _PLAIN and not tensor.is_neg()
    return is_plain and not failure and _is_dense(tensor) and _kernels() is not None


def give_up(error: Exception) -> None:
    """Use the kernels no more: this triton does not compile them, or not for this device. The other ways do without."""
    global failure
    failure = f"{type(error).__name__}: {error}"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order."""
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
        from ulpscope.capture import triton_kernels
    except Exception:  # not installed, or not for this machine: the other ways do without
        return None
    return triton_kernels


def measure(tensors: Readable, bounds: tuple[float, ...]) -> tuple[torch.Tensor, Any]:
    """Float64 sums [tensors, 7 + counts] on the device, and the numbers of elements on the host."""
    kernels, table, device = _kernels(), tensors.table, tensors.device
    columns = 7 + (len(bounds) + 1 if bounds else 0)
    limits = _kept(("bounds", device, bounds), lambda: _on_device(np.array(bounds or [0.0], dtype=np.float32), device))
    partial = torch.empty((table.num_rows, columns), dtype=torch.float32, device=device)
    whole = torch.empty((len(tensors.numels), columns), dtype=torch.float64, device=device)
    with _current(device):
        kernels.partial_rows[(table.num_rows,)](
            tensors.addresses,
            table.numels,
            table.tensors,
            table.numbers,
            limits,
            partial,
            DTYPE=getattr(kernels.tl, _NAMES[tensors.dtypes[0]]),
            ROW=ROW,
            NUM_BOUNDS=len(bounds),
            COLUMNS=columns,
            IS_ALIGNED=tensors.is_aligned,
            num_warps=_WARPS,
        )
        kernels.whole_rows[(len(tensors.numels),)](partial, table.starts, whole, COLUMNS=columns, BLOCK=_BLOCK)
    return whole, table.numel


def readable(tensors: Sequence[torch.Tensor]) -> Readable:
    """Tensors where they lie now."""
    addresses, device = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64), tensors[0].device
    return Readable(
        device=device,
        dtypes=tuple(tensor.dtype for tensor in tensors),
        numels=tuple(tensor.numel() for tensor in tensors),
        addresses=_on_device(addresses, device),
        is_aligned=not (addresses % 16).any(),
    )


def readable_rows(matrix: torch.Tensor, counts: tuple[int, ...]) -> Readable:
    """The first `counts[row]` elements of each row of a contiguous matrix, as tensors of their own."""
    device, size = matrix.device, matrix.element_size() * matrix.shape[1]
    steps = _kept(("steps", device, len(counts), size), lambda: _on_device(np.arange(len(counts), dtype=np.int64) * size, device))
    return Readable(
        device=device,
        dtypes=(matrix.dtype,),
        numels=counts,
        addresses=steps + matrix.data_ptr(),
        is_aligned=size % 16 == 0 and matrix.data_ptr() % 16 == 0,
    )


def sample_matrix(tensors: Readable, offsets: torch.Tensor) -> torch.Tensor:
    """Float32 [tensors, width]: the values at `offsets` (in elements of memory, int64, the same shape; negative for none)."""
    device, (height, width) = tensors.device, offsets.shape
    out = torch.empty((height, width), dtype=torch.float32, device=device)
    with _current(device):
        _kernels().sampled_values[(height,)](
            tensors.addresses, tensors.codes, offsets, out, WIDTH=width, BLOCK=1 << max(0, width - 1).bit_length()
        )
    return out


def _kept(key: tuple[Any, ...], make: Any) -> Any:
    """What was made for this key before, or is made now."""
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
