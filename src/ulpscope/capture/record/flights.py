# SPDX-License-Identifier: Apache-2.0
"""Follow memory that collectives still write to, and the slots that wait to be read once the program has waited for it.

A collective that returns before it is done leaves its results to be waited for. Until then nobody knows what the memory holds, so nothing
reads it: a slot that shows it gets its values at the moment at which the program has waited. Nothing here ever waits by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ulpscope.capture.device.values import Values
from ulpscope.capture.record.taking import PLAIN, Taken
from ulpscope.capture.torch_internals import detached, storage_identity

__all__ = ["NEVER_AWAITED", "PARTLY", "Flight", "Flights", "is_handle"]

_Memory = tuple[int, int, int, torch.Tensor]
"""Storage, first byte, end, and a tensor that keeps the storage."""

PARTLY = "partly written to by a collective that nobody has waited for: values are not read"
NEVER_AWAITED = "written to by a collective that nobody had waited for when the step ended: values are not read"


def is_handle(result: Any) -> bool:
    """Tell whether a program can wait for this: asks its type, since a handle may refuse every question."""
    return hasattr(type(result), "wait") and not isinstance(result, torch.Tensor)


class Flight:
    """One collective under way: `handle` is the object that the program waits for, None where it waits for the memory itself."""

    __slots__ = ("asks", "awaiting", "future", "group", "handle", "is_told", "memory", "op")

    def __init__(self, op: str, handle: Any, group: Any, memory: list[_Memory], is_told: bool) -> None:
        self.op = op
        self.handle = handle
        self.future: Any = None
        self.asks = False  # whether somebody may wait for the handle unseen: then we have to ask it
        self.group = group  # of a coalescing manager that has not sent it off
        self.memory = memory
        self.awaiting: list[tuple[Taken, torch.Tensor, str]] = []
        self.is_told = is_told  # whether a record says that it began


class Flights:
    """All collectives under way. `by_storage` has those that write to a storage; it is empty nearly always."""

    def __init__(self) -> None:
        self.by_storage: dict[int, list[Flight]] = {}
        self._flights: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, op: str, tensors: Iterable[torch.Tensor], handle: Any = None, *, group: Any = None, is_told: bool = False) -> Flight:
        """Begin to follow a collective that writes to these tensors and returned before it was done."""
        memory = [each for tensor in tensors if (each := _memory_of(tensor)) is not None]
        flight = Flight(op, handle, group, memory, is_told)
        self._flights.append(flight)
        for storage in {each[0] for each in memory}:
            self.by_storage.setdefault(storage, []).append(flight)
        return flight

    def over(self, tensor: torch.Tensor) -> list[Flight]:
        """Return the collectives that write to the memory of this tensor right now, the last of them first."""
        place = _memory_of(tensor) if self.by_storage else None
        if place is None:
            return []
        storage, first, end, _ = place
        flights = reversed(self.by_storage.get(storage, []))
        return [each for each in flights if any(known == storage and begin < end and first < stop for known, begin, stop, _ in each.memory)]

    def holds(self, flight: Flight, tensor: torch.Tensor) -> bool:
        """Tell whether the collective writes to all of the memory of this tensor; any other part of it may change before the collective is
        done.
        """
        place = _memory_of(tensor)
        return place is not None and any(
            known == place[0] and begin <= place[1] and place[2] <= stop for known, begin, stop, _ in flight.memory
        )

    def handed(self, is_over: Callable[[Any], bool], handle: Any) -> None:
        """Give the handle of a coalescing manager to the collectives that it has sent off for a group."""
        for flight in self._flights:
            if flight.group is not None and is_over(flight.group):
                flight.group, flight.handle = None, handle

    def end_with(self, handle: Any) -> list[Flight]:
        """End the collectives of a handle that the program has waited for, itself or through a future made of it."""
        return self.end([flight for flight in self._flights if handle is flight.handle or handle is flight.future])

    def end_in(self, tensor: torch.Tensor) -> list[Flight]:
        """End the collectives that write to memory that the program has waited for."""
        known = self.by_storage.get(storage_identity(tensor), ())
        return self.end([flight for flight in known if flight.handle is None and flight.group is None])

    def end(self, ended: list[Flight]) -> list[Flight]:
        """End these collectives, and return those that were under way until now."""
        ended = [flight for flight in ended if flight in self._flights]
        for flight in ended:
            self._flights.remove(flight)
            for storage in {each[0] for each in flight.memory}:
                rest = [other for other in self.by_storage[storage] if other is not flight]
                if rest:
                    self.by_storage[storage] = rest
                else:
                    del self.by_storage[storage]
        return ended

    def find(self, has_ended: Callable[[Flight], bool]) -> list[Flight]:
        return [flight for flight in self._flights if has_ended(flight)]

    def follow(self, handle: Any, future: Any) -> None:
        """Note that the program leaves the waiting for a handle to a future."""
        for flight in self._flights:
            if flight.handle is handle:
                flight.future, flight.is_told, flight.asks = future, False, True

    def shown(self, handle: Any) -> None:
        """Note that the program was given a handle: it will wait for that where we see it."""
        for flight in self._flights:
            if flight.handle is handle:
                flight.asks = False

    def give_up(self) -> set[str]:
        """Let nothing wait any longer, and return the operations that a record shows and nobody waited for.

        Collectives still under way stay known, and their memory is not read.
        """
        told = {flight.op for flight in self._flights if flight.is_told or flight.awaiting}
        for flight in self._flights:
            flight.is_told = False
            for taken, _, _ in flight.awaiting:
                taken.values = Values(note=NEVER_AWAITED)
            flight.awaiting.clear()
        return told


def _memory_of(tensor: torch.Tensor) -> _Memory | None:
    """Return the memory of a tensor; None if it has none of its own."""
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN:
        return None
    try:
        first = tensor.data_ptr()
    except RuntimeError:
        return None
    extent = 0 if not tensor.numel() else 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage_identity(tensor), first, first + extent * tensor.element_size(), detached(tensor)
