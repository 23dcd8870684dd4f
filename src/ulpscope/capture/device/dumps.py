# SPDX-License-Identifier: Apache-2.0
"""Send the bytes of tensors on a CUDA device to the store while training goes on.

A tensor is copied on the device at once, behind the work that made it, so that later writes do not reach the copy. The copy goes to pinned
memory on a stream of its own, and threads hash it and write it. Pinned memory is one ring of fixed size, and copies on the device are
limited too: the thread that brings the next tensor waits until there is room, instead of running out of memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ulpscope.capture.device.values import Form, Kept
from ulpscope.capture.torch_internals import blind

__all__ = ["DeviceDumps", "Ring", "Store"]

RING_BYTES = 1 << 30
STAGED_BYTES = 1 << 30
_NUM_THREADS = 4
_ALIGNMENT = 4096

Store = Callable[[str, tuple[int, ...], Any], "str | None"]


class Ring:
    """A ring that lends parts of one piece of memory in order; a part is free again once it and all parts before it are given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._begin = self._end = 0  # of the bytes taken, never wrapped
        self._parts: deque[list[Any]] = deque()
        self._changed = threading.Condition()

    def take(self, size: int) -> int:
        """Take a part of that size and return where it begins; wait until there is room for it."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if size > self.size:
            raise ValueError(f"a part of {size} bytes does not fit into a ring of {self.size}")
        with self._changed:
            skipped = self.size - self._end % self.size if self._end % self.size + size > self.size else 0
            while self._end + skipped + size - self._begin > self.size:
                self._changed.wait()
            self._end += skipped + size
            place = (self._end - size) % self.size
            self._parts.append([place, self._end, False])
            return place

    def give_back(self, place: int) -> None:
        with self._changed:
            next(part for part in self._parts if part[0] == place and not part[2])[2] = True
            while self._parts and self._parts[0][2]:
                self._begin = self._parts.popleft()[1]
            if not self._parts:
                self._begin = self._end
            self._changed.notify_all()


class _Job(NamedTuple):
    """A tensor on its way: where its bytes arrive, and the copy on the device that has to live until then."""

    kept: Kept
    dtype: str
    shape: tuple[int, ...]
    place: int
    size: int
    copied: Any
    staged: list[torch.Tensor]


class DeviceDumps:
    """Stores tensors of one device. Several threads may call `store` at a time."""

    def __init__(self, device: torch.device, store: Store) -> None:
        self._store = store
        with torch.inference_mode(False):
            self._memory = torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)
        numbers: Any = self._memory.numpy()
        self._bytes = memoryview(numbers)
        self._ring = Ring(RING_BYTES)
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Kept, str | None, Exception | None]] = queue.SimpleQueue()
        self._num_under_way = 0
        self._staged_bytes = 0
        self._has_room = threading.Condition()
        self._threads = [threading.Thread(target=self._work, name=f"ulpscope-dump-{number}", daemon=True) for number in range(_NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    @property
    def is_waiting(self) -> bool:
        return self._num_under_way > 0

    def can_take(self, size: int) -> bool:
        return size <= RING_BYTES

    def take(self, tensor: torch.Tensor, form: Form, *, as_memory: bool) -> Kept:
        """Store a tensor, or with `as_memory` the memory that it fills, in the order of that memory; the key comes later."""
        size = tensor.numel() * form.size
        self._wait_for_room(size)
        place = self._ring.take(size)
        try:
            staged, copied = self._copy(tensor, place, size, as_memory)
        except BaseException:
            self._ring.give_back(place)
            raise
        kept = Kept(tensor.data_ptr(), size if as_memory else -1, is_under_way=True)
        self._num_under_way += 1
        shape = form.shape if form.is_contiguous or not as_memory else (tensor.numel(),)
        self._jobs.put(_Job(kept, form.dtype, shape, place, size, copied, [staged]))
        return kept

    def _wait_for_room(self, size: int) -> None:
        with self._has_room:
            while self._staged_bytes and self._staged_bytes + size > STAGED_BYTES:
                self._has_room.wait()
            self._staged_bytes += size

    def _copy(self, tensor: torch.Tensor, place: int, size: int, as_memory: bool) -> tuple[torch.Tensor, Any]:
        with blind(), torch.inference_mode(False):
            whole = tensor.detach()
            source = whole.as_strided((tensor.numel(),), (1,)) if as_memory else whole.resolve_conj().resolve_neg()
            staged = torch.empty(source.shape, dtype=source.dtype, device=source.device)
            staged.copy_(source)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                self._memory[place : place + size].copy_(staged.view(-1).view(torch.uint8), non_blocking=True)
                copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                copied.record()
        return staged, copied

    def _work(self) -> None:
        """Run one thread: wait for a copy, store it, report that."""
        while (job := self._jobs.get()) is not None:
            content, failure = None, None
            try:
                job.copied.synchronize()
                job.staged.clear()
                self._make_room(job.size)
                content = self._store(job.dtype, job.shape, self._bytes[job.place : job.place + job.size])
            except Exception as error:
                failure = error
                if job.staged:
                    job.staged.clear()
                    self._make_room(job.size)
            self._ring.give_back(job.place)
            self._done.put((job.kept, content, failure))

    def _make_room(self, size: int) -> None:
        with self._has_room:
            self._staged_bytes -= size
            self._has_room.notify_all()

    def collect(self, *, wait: bool = False) -> bool:
        """Hand over the keys of stored tensors, or with `wait` of all tensors taken; return whether there were any. A failed store
        raises.
        """
        has_come = False
        failure: Exception | None = None
        while self._num_under_way:
            try:
                kept, content, error = self._done.get(block=wait)
            except queue.Empty:
                break
            has_come = True
            self._num_under_way -= 1
            kept.key, kept.is_under_way = content, False
            if error is not None:
                kept.note, failure = f"values not kept: {error}", failure or error
        if failure is not None:
            raise failure
        return has_come

    def close(self) -> None:
        """End the threads; first they store what is still under way."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
