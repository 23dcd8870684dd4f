# SPDX-License-Identifier: Apache-2.0
"""Find the calls of a step's file as places in its bytes, many at a time, without decoding them.

A slot is found by its first bytes, which is a guess. The code that then walks through the slots proves it: each must end exactly where the
next one begins. A file that another writer encoded otherwise (further elements, other widths) is decoded and encoded again, and its calls
are then found the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from ulpscope.errors import DamagedRunError
from ulpscope.format.frames import (
    HEAD_SIZE,
    MAX_BODY,
    CallFrame,
    EndFrame,
    PlainCall,
    StackFrame,
    StartFrame,
    TensorFrame,
    checksum,
    head_at,
)
from ulpscope.format.packed_values import Integers, Unusual, expect
from ulpscope.format.reading import FrameReader, open_regular
from ulpscope.model import FORMAT_VERSION, ROLES

__all__ = ["BYTES_AT_ONCE", "Group", "Stacks", "ends_of_slots", "groups", "groups_encoded_again", "slots_begin"]

RECORDS_IN_GROUP = 5_000
BYTES_IN_GROUP = 64 << 20
BYTES_AT_ONCE = 64 << 10  # fresh pages cost more than the work on them

Stacks: TypeAlias = dict[int, StackFrame]

_CALL = 2
_encode = msgspec.msgpack.Encoder().encode
_call_decoder = msgspec.msgpack.Decoder(CallFrame)
_other_decoder = msgspec.msgpack.Decoder(StartFrame | StackFrame | EndFrame | TensorFrame)


class Group(NamedTuple):
    """Calls that become rows of a table together, as places in the data."""

    data: bytes
    begins: Integers
    ends: Integers
    num_slots: Integers
    slots: Integers  # where each slot begins
    slots_end: dict[int, int]  # where the slots of a call end, for those without any at least


def groups(path: Path) -> Iterator[tuple[StartFrame, Group, Stacks]]:
    """Find the calls of the file without decoding them, as far as its frames are good."""
    start: StartFrame | None = None
    stacks: Stacks = {}
    rest, more = b"", True
    with open_regular(path) as file:
        size = min(os.fstat(file.fileno()).st_size + 1, BYTES_IN_GROUP)
        while more and (block := os.read(file.fileno(), size)):
            data = rest + block if rest else block
            bounds, more = _good_frames(data)
            begins, ends = bounds[:-1] + HEAD_SIZE, bounds[1:]
            is_call = np.frombuffer(data, np.uint8).take(begins + 1) == _CALL
            for frame in _decoded(data, begins[~is_call], ends[~is_call]):
                if isinstance(frame, StackFrame):
                    stacks[frame.id] = frame
                elif isinstance(frame, StartFrame):
                    start = frame
            if start is None or start.version > FORMAT_VERSION:
                raise Unusual
            begins, ends = begins[is_call], ends[is_call]
            for k in range(0, len(begins), RECORDS_IN_GROUP):
                yield start, _found(data, begins[k : k + RECORDS_IN_GROUP], ends[k : k + RECORDS_IN_GROUP]), stacks
            rest = data[bounds[-1] :]
    expect(start is not None)


def _good_frames(data: bytes) -> tuple[Integers, bool]:
    """Return where the frames begin, then where the last of them ends; and whether more data could complete another frame."""
    bounds, at, size = [0], 0, len(data)
    while at + HEAD_SIZE <= size:
        length, expected = head_at(data, at)
        end = at + HEAD_SIZE + length
        if end > size or checksum(data[at + HEAD_SIZE : end]) != expected:
            return np.array(bounds), end > size and length <= MAX_BODY
        bounds.append(end)
        at = end
    return np.array(bounds), True


def _decoded(data: bytes, begins: Integers, ends: Integers) -> Iterator[Any]:
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        yield _other_decoder.decode(data[begin:end])


_BEGINS_ROLE = np.zeros(1 << 16, np.bool_)
_BEGINS_ROLE[[(0xA0 + len(role)) << 8 | ord(role[0]) for role in ROLES]] = True


def _found(data: bytes, begins: Integers, ends: Integers) -> Group:
    """Find the slots: each begins as a list of ten, whose first element is a list of two, whose first element is a role."""
    codes = np.frombuffer(data, np.uint8, int(ends[-1]))
    within = range(int(begins[0]), len(codes) - 3)
    blocks = (within[k : k + BYTES_AT_ONCE] for k in range(0, len(within), BYTES_AT_ONCE))
    marks = np.concatenate([np.flatnonzero(codes[block.start : block.stop] == 0x9A) + block.start for block in blocks])
    marks = marks[codes.take(marks + 1) == 0x92]
    slots = marks[_BEGINS_ROLE.take(codes.take(marks + 2).astype(np.int64) << 8 | codes.take(marks + 3))]
    num_slots = np.diff(np.searchsorted(slots, begins), append=len(slots))
    without = np.flatnonzero(num_slots == 0).tolist()
    return Group(data, begins, ends, num_slots, slots, {k: _end_of_no_slots(data[begins[k] : ends[k]], int(ends[k])) for k in without})


def _end_of_no_slots(body: bytes, end: int) -> int:
    call = _call_decoder.decode(body)
    expect(not call.slots)
    return end - 1 - len(_encode(call.stack))


def groups_encoded_again(path: Path) -> Iterator[tuple[StartFrame, Group, Stacks]]:
    reader = FrameReader(path)
    frames = iter(reader)
    start = next(frames, None)
    if not isinstance(start, StartFrame):
        raise DamagedRunError(f"{path} does not begin as the records of a step do; no table was made of it")
    stacks: Stacks = {}
    calls: list[CallFrame] = []
    end = BYTES_IN_GROUP
    for frame in frames:
        if isinstance(frame, CallFrame):
            calls.append(frame)
        elif isinstance(frame, StackFrame):
            stacks[frame.id] = frame
        if len(calls) == RECORDS_IN_GROUP or (calls and reader.position > end):
            yield start, _encoded_again(calls), stacks
            calls, end = [], reader.position + BYTES_IN_GROUP
    if calls:
        yield start, _encoded_again(calls), stacks


def _encoded_again(calls: list[CallFrame]) -> Group:
    bodies = [_encode(PlainCall(*(getattr(call, name) for name in PlainCall.__struct_fields__))) for call in calls]
    bounds = np.cumsum([0, *map(len, bodies)])
    slots: list[int] = []
    slots_end = {}
    for k, call in enumerate(calls):
        at = slots_end[k] = int(bounds[k + 1]) - 1 - len(_encode(call.stack))
        sizes = np.array([len(_encode(slot)) for slot in call.slots], np.int64)
        slots += (at - sizes[::-1].cumsum()[::-1]).tolist()
    num_slots = np.array([len(call.slots) for call in calls])
    return Group(b"".join(bodies), bounds[:-1], bounds[1:], num_slots, np.array(slots, np.int64), slots_end)


def slots_begin(group: Group) -> Integers:
    """Return where the first slot of each call begins; for a call without slots, where it would begin."""
    first = (np.cumsum(group.num_slots) - group.num_slots).clip(max=max(len(group.slots) - 1, 0))
    found = group.slots[first] if len(group.slots) else first
    for k in np.flatnonzero(group.num_slots == 0).tolist():
        found[k] = group.slots_end[k]
    return found


def ends_of_slots(group: Group, ends: Integers) -> Integers:
    """Return where the slots of each call end; verify that each slot ends where the next slot of the call begins."""
    last = np.cumsum(group.num_slots) - 1
    followed = np.ones(len(ends), np.bool_)
    followed[last[group.num_slots > 0]] = False
    expect((ends[:-1] == group.slots[1:]) | ~followed[:-1])
    found = ends[last] if len(ends) else last
    for k, end in group.slots_end.items():
        found[k] = end
    return found
