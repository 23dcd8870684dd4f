# SPDX-License-Identifier: Apache-2.0
"""Memory is used again, but never while somebody still holds a view of it."""

from __future__ import annotations

from ulpscope.numerics.buffer_pool import LARGEST_KEPT, room_for
from ulpscope.numerics.buffers import address_of

SIZE = LARGEST_KEPT - 7


def test_a_room_is_given_out_again_once_nobody_looks_at_it() -> None:
    first = room_for(SIZE)
    part = first[100:200].toreadonly()
    address = address_of(first)
    del first
    assert address_of(room_for(SIZE)) != address  # a part of it is still looked at
    part.release()
    rooms = [room_for(SIZE) for _ in range(16)]
    assert len({address_of(room) for room in rooms}) == 16


def test_a_room_that_is_free_costs_no_new_memory() -> None:
    addresses = set()
    for _ in range(8):
        addresses.add(address_of(room_for(SIZE)))
    assert len(addresses) <= 2  # the first time it may move


def test_what_is_written_into_one_is_not_seen_in_another() -> None:
    rooms = [room_for(SIZE) for _ in range(20)]
    for number, room in enumerate(rooms):
        room[:] = bytes([number]) * SIZE
    assert [room[SIZE // 2] for room in rooms] == list(range(20))
