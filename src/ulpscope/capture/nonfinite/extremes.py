# SPDX-License-Identifier: Apache-2.0
"""Read the smallest and largest value of a tensor: one reading shows NaN, infinities and the distance to the end of the dtype's range.

On the CPU a tensor is read at once. On an accelerator nobody waits: tensors are collected, one launch over all of them leaves their largest
magnitudes in device memory, and the host reads them when the device is done anyway, at the end of the step at the latest.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from ulpscope._torch_private import current_stream as current_stream_of
from ulpscope._torch_private import foreach_norm
from ulpscope.capture.device.arrivals import Arrivals
from ulpscope.capture.torch_internals import Quiet, is_fake, is_foreign, is_traced

__all__ = ["FLOATS", "DeferredExtremes", "is_on_a_device", "is_plain_here", "is_readable", "local_values", "read_extremes", "sum_tells"]

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_RARE = frozenset(
    getattr(torch, name)
    for name in ("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_SUMMED = frozenset({torch.float32, torch.bfloat16, torch.float64})  # the sum of a float16 may overflow where no element does
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BATCH = 64
_ANY = -2
_MOST_HELD_BYTES = 1 << 30


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has floating values that can be looked at."""
    dtype = tensor.dtype
    if dtype not in FLOATS and dtype not in _RARE:
        return False
    if type(tensor) in _PLAIN and tensor.is_cpu:
        return tensor.layout is torch.strided and not is_traced(tensor) and tensor.numel() > 0
    if is_foreign(tensor):  # its code must not run
        return False
    if tensor.is_nested or tensor.layout is not torch.strided or is_fake(tensor) or is_traced(tensor):
        return False
    return not tensor.is_meta and tensor.numel() > 0


def is_plain_here(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is readable and all of it is in this process, so that a look at it starts no communication."""
    return is_readable(tensor) and local_values(tensor) is tensor


def is_on_a_device(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor on an accelerator is readable, by a quick test that settles it for nearly all of them."""
    return type(tensor) in _PLAIN and tensor.is_cuda and tensor.dtype in FLOATS and tensor.layout is torch.strided and tensor.numel() > 0


def sum_tells(tensor: torch.Tensor) -> bool:
    """Tell whether the sum of a tensor on the CPU is finite exactly where its elements are, except for very large ones. Do not ask it of
    traced tensors.
    """
    if type(tensor) not in _PLAIN or tensor.dtype not in _SUMMED or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested and tensor.numel() > 0


def local_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of this process: the local shard of a distributed tensor; None where a subclass of the user's stands in the way."""
    if is_foreign(tensor):
        return None
    if type(tensor) in _PLAIN or not tensor.is_cpu:
        local = getattr(tensor, "to_local", None) if type(tensor) not in _PLAIN else None
        return tensor if local is None else _sharded(local)
    local = getattr(tensor, "to_local", None)
    return None if local is None else _sharded(local)


def _sharded(to_local: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    with Quiet():
        local = to_local()
    return local if local.numel() else None


def read_extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and largest value; NaN where one is NaN. Call it inside `Quiet`, on a tensor that `is_readable`."""
    if tensor.dtype not in FLOATS:
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.float()
    if tensor.is_contiguous():
        low, high = torch.aminmax(tensor)
    else:
        low, high = tensor.amin(), tensor.amax()
    return low.item(), high.item()


class _Entry(Protocol):
    def let_go(self) -> None: ...


class _Learner(Protocol):
    def learn(self, entries: list[Any], owners: list[int], magnitudes: torch.Tensor) -> None: ...


class _Flight(NamedTuple):
    """The calls that magnitudes on their way belong to: `owners` has the entry of each magnitude."""

    entries: list[_Entry | int]
    owners: list[int]
    size_bytes: int


class DeferredExtremes:
    """Reads the largest magnitudes of tensors on one accelerator, in order, without waiting for it.

    The learner gets the entries in the order in which they came, and the number of a step where it ended. Tensors that were overwritten
    before they were read are left out. Entries and their tensors are kept until then, up to a limit in bytes beyond which the oldest let
    theirs go.
    """

    def __init__(self, device: torch.device, learner: _Learner) -> None:
        self._device = device
        self._learner = learner
        self._entries: list[_Entry | int] = []
        self._tensors: list[torch.Tensor] = []
        self._owners: list[int] = []
        self._versions: list[int] = []
        self._size_bytes = 0
        self._num_open_steps = 0
        self._flights: Arrivals[_Flight] = Arrivals(device, copies_ahead=device.type == "cuda")
        self._lock = threading.RLock()
        self._stream: int | None = None
        self._index = device.index or 0
        self._is_cuda = device.type == "cuda"

    def add(self, entry: _Entry, tensors: Iterable[torch.Tensor]) -> None:
        """Have these tensors read, on the stream that is current now."""
        with self._lock:
            if self._is_cuda:
                self._follow_stream()
            owner = len(self._entries)
            self._entries.append(entry)
            for tensor in tensors:
                self._tensors.append(tensor)
                self._owners.append(owner)
                self._versions.append(_version(tensor))
                self._size_bytes += tensor.nbytes
            if len(self._tensors) >= _BATCH or self._size_bytes >= _MOST_HELD_BYTES:
                self.launch()
                self.poll()

    def read_now(self, entry: _Entry, tensors: list[torch.Tensor]) -> None:
        """Have these tensors read before anything else happens to them, together with all that wait."""
        with self._lock:
            if self._is_cuda:
                self._follow_stream()
            self._owners += [len(self._entries)] * len(tensors)
            self._entries.append(entry)
            self._tensors += tensors
            self._versions += [_ANY] * len(tensors)
            self.launch()

    def end_step(self, number: int) -> None:
        """Mark the end of a step; the learner hears of it when all magnitudes of the step have arrived, one step late at most."""
        with self._lock:
            self._entries.append(number)
            self._num_open_steps += 1
            self.launch()
            self.poll(wait=not self._is_cuda)
            while self._num_open_steps > 1 and self._land(wait=True):
                pass

    def _follow_stream(self) -> None:
        """Read waiting tensors on the stream on which they were made."""
        stream = current_stream_of(self._index)
        if stream != self._stream:
            if self._stream is not None and self._tensors:
                with torch.cuda.stream(_stream_at(self._stream, self._device)):
                    self.launch()
            self._stream = stream

    def launch(self) -> None:
        """Start to read the waiting tensors."""
        with self._lock:
            if not self._entries:
                return
            entries, tensors, owners, versions, size_bytes = self._entries, self._tensors, self._owners, self._versions, self._size_bytes
            self._entries, self._tensors, self._owners, self._versions, self._size_bytes = [], [], [], [], 0
            if self._is_cuda and torch.cuda.is_current_stream_capturing():  # nothing may be added to the graph that the user records
                self._entries = [entry for entry in entries if isinstance(entry, int)]
                return
            with Quiet():
                owners, magnitudes = _magnitudes(tensors, owners, versions)
                self._flights.send([] if magnitudes is None else [magnitudes], _Flight(entries, owners, size_bytes))
            if len(self._flights) > 1:
                self._limit_memory()

    def _limit_memory(self) -> None:
        held = sum(flight.size_bytes for flight in self._flights.owners())
        for flight in self._flights.owners():
            if held <= _MOST_HELD_BYTES:
                return
            for entry in flight.entries:
                if not isinstance(entry, int):
                    entry.let_go()
            held -= flight.size_bytes

    def poll(self, *, wait: bool = False) -> None:
        """Hand over the magnitudes that have arrived; with `wait`, all of them."""
        with self._lock:
            if wait:
                self.launch()
            while self._land(wait=wait):
                pass

    def _land(self, *, wait: bool) -> bool:
        """Hand the oldest magnitudes to the learner; return False if they have not come."""
        arrived = self._flights.pop(wait=wait)
        if arrived is None:
            return False
        flight, magnitudes = arrived
        self._num_open_steps -= sum(isinstance(entry, int) for entry in flight.entries)
        if not magnitudes:
            with Quiet():  # a mode of the user's sees nothing of ours
                magnitudes = [torch.empty(0)]
        self._learner.learn(flight.entries, flight.owners, magnitudes[0])
        return True

    def forget(self) -> None:
        with self._lock:
            self._entries, self._tensors, self._owners, self._versions, self._size_bytes = [], [], [], [], 0
            self._flights.clear()


def _stream_at(address: int, device: torch.device) -> torch.cuda.Stream:
    if address == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(address, device=device)  # type: ignore[no-untyped-call]


def _magnitudes(tensors: list[torch.Tensor], owners: list[int], versions: list[int]) -> tuple[list[int], torch.Tensor | None]:
    """Compute the largest magnitude of every tensor that was not written to, and return the owner of each; None if all were."""
    groups: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
    for tensor, owner, version in zip(tensors, owners, versions, strict=True):
        if version == _ANY or _version(tensor) == version:
            group = groups.get(tensor.dtype)
            if group is None:
                group = groups[tensor.dtype] = ([], [])
            group[0].append(owner)
            group[1].append(tensor)
    if not groups:
        return [], None
    together = [torch.stack(foreach_norm(_real(dtype, group), math.inf)) for dtype, (_, group) in groups.items()]
    kept = [owner for group, _ in groups.values() for owner in group]
    return kept, together[0] if len(together) == 1 else torch.cat([part.double() for part in together])


def _real(dtype: torch.dtype, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if dtype in FLOATS:
        return tensors
    if dtype.is_complex:
        return [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
    return [tensor.float() for tensor in tensors]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
