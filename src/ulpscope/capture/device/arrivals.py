# SPDX-License-Identifier: Apache-2.0
"""Bring readings of a device to the host, through one queue: statistics of a recording, of health, and magnitudes of a NaN hunt.

Nothing here waits for a device before it is asked to. A device that copies to pinned memory by itself starts the copy at once, and an event
says when it is done. On any other device readings stay until somebody waits for one, and then all of them come in one transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from ulpscope.capture.torch_internals import Quiet

__all__ = ["Arrivals"]

_Owner = TypeVar("_Owner")


class _Shipment(Generic[_Owner]):
    """Readings under way: `arrays` on the device, `host` where they arrive, `event` behind the copy."""

    __slots__ = ("arrays", "event", "host", "owner")

    def __init__(self, owner: _Owner, arrays: list[torch.Tensor]) -> None:
        self.owner = owner
        self.arrays = arrays
        self.host: list[torch.Tensor] | None = None
        self.event: Any = None

    def has_come(self) -> bool:
        return self.host is not None and (self.event is None or self.event.query())


class Arrivals(Generic[_Owner]):
    """Brings the readings of one device to the host, in the order in which they were sent.

    With `copies_ahead` the device copies them as soon as they are sent, if memory can be pinned for it.
    """

    def __init__(self, device: torch.device, *, copies_ahead: bool) -> None:
        self._device = device
        self._copies_ahead = copies_ahead and device.type != "cpu"
        self._shipments: deque[_Shipment[_Owner]] = deque()

    def __len__(self) -> int:
        return len(self._shipments)

    def owners(self) -> Iterator[_Owner]:
        """Return the owners of the readings under way, the oldest first."""
        return (shipment.owner for shipment in self._shipments)

    def send(self, arrays: Sequence[torch.Tensor], owner: _Owner, into: torch.Tensor | None = None) -> None:
        """Send readings behind the work that makes them; with `into` one array, into this pinned memory. Readings on the host arrive at
        once.
        """
        shipment = _Shipment(owner, list(arrays))
        if self._device.type == "cpu" or not arrays:
            shipment.host = shipment.arrays
        elif self._copies_ahead:
            self._copy(shipment, into)
        self._shipments.append(shipment)

    def _copy(self, shipment: _Shipment[_Owner], into: torch.Tensor | None) -> None:
        with Quiet():
            whole = shipment.arrays[0] if into is not None else _joined(shipment.arrays)
            host = into
            if host is None:
                try:
                    host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
                except (RuntimeError, NotImplementedError):  # memory cannot be pinned for this device
                    self._copies_ahead = False
                    return
            host.copy_(whole, non_blocking=True)
            module = torch.get_device_module(self._device)
            shipment.event = module.Event()
            shipment.event.record(module.current_stream(self._device))
            shipment.host = [host] if into is not None else _taken_apart(host, shipment.arrays)
            shipment.arrays = []

    def pop(self, *, wait: bool = False) -> tuple[_Owner, list[torch.Tensor]] | None:
        """Take the oldest readings from the queue, on the host; None if there are none, or if they have not come and `wait` is false."""
        if not self._shipments:
            return None
        shipment = self._shipments[0]
        if not wait and not shipment.has_come():
            return None
        if shipment.host is None:
            self._fetch()
        self._shipments.popleft()
        if shipment.event is not None:
            shipment.event.synchronize()
        assert shipment.host is not None
        return shipment.owner, shipment.host

    def _fetch(self) -> None:
        """Bring everything that is still on the device to the host, in one transfer."""
        there = [shipment for shipment in self._shipments if shipment.host is None]
        arrays = [array for shipment in there for array in shipment.arrays]
        with Quiet():
            host = _taken_apart(_joined(arrays).cpu(), arrays)
        for shipment in there:
            count = len(shipment.arrays)
            shipment.host, host = host[:count], host[count:]

    def clear(self) -> None:
        """Forget the readings under way."""
        self._shipments.clear()


def _joined(arrays: list[torch.Tensor]) -> torch.Tensor:
    """Put arrays one behind the other: as they are if they share one dtype, else as bytes."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    parts = [array.reshape(-1) for array in arrays]
    is_one = all(part.dtype == parts[0].dtype for part in parts)
    return torch.cat(parts if is_one else [part.view(torch.uint8) for part in parts])


def _taken_apart(host: torch.Tensor, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    start = 0
    for array in arrays:
        count = array.numel() * (1 if host.dtype == array.dtype else array.element_size())
        part = host[start : start + count]
        start += count
        if part.dtype != array.dtype:
            part = (part if part.data_ptr() % array.element_size() == 0 else part.clone()).view(array.dtype)
        found.append(part.reshape(array.shape))
    return found
