# SPDX-License-Identifier: Apache-2.0
"""Lend memory for tensors that are read once and dropped: fresh memory costs several times the work on it, so it is used again.

A room is free when no view of it is left; Python shows that by letting the room change its size.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

__all__ = ["LARGEST_KEPT", "room_for"]

LARGEST_KEPT = 4 << 20
_SMALLEST = 1 << 20
_rooms: deque[bytearray] = deque(maxlen=16)
_lock = Lock()


def room_for(size: int) -> memoryview:
    """Return room for so many bytes; it holds leftovers."""
    if size > LARGEST_KEPT:
        return memoryview(bytearray(size))
    with _lock:
        for room in _rooms:
            if len(room) >= size and _is_free(room):
                return memoryview(room)[:size]
        room = bytearray(max(_SMALLEST, 1 << (size - 1).bit_length()))
        _rooms.appendleft(room)
        return memoryview(room)[:size]


def _is_free(room: bytearray) -> bool:
    try:
        room.append(0)
    except BufferError:
        return False
    room.pop()
    return True
