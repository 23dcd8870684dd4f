# SPDX-License-Identifier: Apache-2.0
"""Hold records on their way to the sink, in order: each is written once all its facts are known.

On the CPU that is at once. Where values are still to come from a device, their record waits, and so do all later records and the end of the
step. `settle` writes the records that have become complete. At most `_MOST_HELD` records wait: the next one waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec

from ulpscope.capture.device.queue import Devices
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.state import ModeRow
from ulpscope.capture.record.taking import Taken
from ulpscope.capture.record.tensor_reader import record_of
from ulpscope.capture.walk import Encoded
from ulpscope.model import Arguments, CallName, CallRecord, Frame, FrameSink, Level, Modes, Phase, Sink

__all__ = ["Draft", "Outbox"]

_MOST_HELD = 20_000


class Draft(msgspec.Struct, gc=False):
    """A record whose tensors may lack their values."""

    step: int
    order: int
    op: str
    index: int
    phase: Phase
    level: Level
    module: str
    parent: str
    arguments: Encoded | None
    modes: ModeRow | None
    slots: list[Taken]
    stack: tuple[Frame, ...]
    recompute: bool

    def is_complete(self) -> bool:
        for taken in self.slots:
            values = taken.values
            if values.waits or (values.kept is not None and values.kept.is_under_way):
                return False
        return True


def _complete_of(held: deque[Draft | Callable[[], None]]) -> list[Draft]:
    """Take the records at the front whose values are all there."""
    ready: list[Draft] = []
    while held:
        first = held[0]
        if not isinstance(first, Draft) or not first.is_complete():
            break
        ready.append(first)
        held.popleft()
    return ready


if COMPILED is not None and not TYPE_CHECKING:
    Draft, _complete_of = COMPILED.Draft, COMPILED.complete_of


def _record(draft: Draft, rank: int) -> CallRecord:
    return CallRecord(
        rank=rank,
        step=draft.step,
        order=draft.order,
        call=CallName(draft.op, draft.index),
        phase=draft.phase,
        level=draft.level,
        module=draft.module,
        parent=draft.parent,
        arguments=None if draft.arguments is None else Arguments(args=draft.arguments[0], kwargs=draft.arguments[1]),
        modes=None if draft.modes is None else _modes(*draft.modes),
        slots=tuple(map(record_of, draft.slots)),
        stack=draft.stack,
        recompute=draft.recompute,
    )


def _modes(autocast: str | None, grad: bool, inference: bool, training: bool | None, deterministic: bool) -> Modes:
    return Modes(autocast=autocast, grad=grad, inference=inference, training=training, deterministic=deterministic)


class Outbox:
    """The drafts on their way to a sink, and the actions that have to happen between them."""

    def __init__(self, sink: Sink, rank: int, devices: Devices, lock: AbstractContextManager[Any]) -> None:
        self._sink = sink
        self._frame_sink = sink if isinstance(sink, FrameSink) else None
        self._lock = lock
        self._rank = rank
        self._devices = devices
        self.most_held = _MOST_HELD
        self._held: deque[Draft | Callable[[], None]] = deque()
        self._frames = COMPILED.Frames() if COMPILED is not None and self._frame_sink is not None else None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def write(self, draft: Draft) -> None:
        """Write a record now, or as soon as its values have come and everything before it is written."""
        if not self._held and draft.is_complete():
            self._emit([draft])
            return
        self._held.append(draft)
        if len(self._held) > self.most_held:
            self.settle(wait=True)

    def run(self, action: Callable[[], None]) -> None:
        """Run an action on the sink after everything before it."""
        if self._held:
            self._held.append(action)
        else:
            action()

    def settle(self, *, wait: bool = False) -> None:
        """Write the records that are complete; with `wait` all of them."""
        if not self._held:
            return
        if wait:
            self._devices.send()
        if not self._devices.collect(wait=wait) and not wait:
            return
        try:
            self._write_complete()
        except OSError:
            self._held.clear()  # nothing more can be written, and nothing may gather
            raise

    def release(self) -> None:
        """Write the records that have become complete by themselves."""
        if self._held:
            self._write_complete()

    def _write_complete(self) -> None:
        while self._held:
            self._emit(_complete_of(self._held))
            if self._held and isinstance(self._held[0], Draft):
                return
            if self._held:
                self._held.popleft()()  # type: ignore[operator]

    def _emit(self, drafts: list[Draft]) -> None:
        if not drafts:
            return
        with self._lock:
            if self._frame_sink is not None:
                self._write_frames(self._frame_sink, drafts)
                return
            for draft in drafts:
                self._sink.write(_record(draft, self._rank))

    def _write_frames(self, sink: FrameSink, drafts: list[Draft]) -> None:
        frames = None if self._frames is None else self._frames.of(drafts, sink.number_stack)
        if frames is None:
            sink.write_drafts(drafts)
        else:
            sink.write_frames(frames, len(drafts))

    def drop(self) -> None:
        """Forget the records that were not written."""
        self._held.clear()
