# SPDX-License-Identifier: Apache-2.0
"""Summarise tensors on accelerators without waiting for them.

A tensor that is seen goes into a table. The device reads the table when it is full, when its tensors hold much memory, or when somebody is
about to write to one of them (`flush`). The results gather in memory of the device and are sent to the host once a step, or when a buffer
is full (`send`); `collect` hands over those that have arrived. Nothing before that waits for the device.

Until a tensor is read, its storage is held, so neither its memory nor its address is used again; autograd, which adds gradients in place
only where no other reference exists, then adds them elsewhere. A write that we do not see raises the tensor's version, and then its values
are reported as lost rather than wrong. Everything runs on the stream that was current when the tensor was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ulpscope.capture.device.address_tables import MOST_ROWS, Launcher, are_kernels_there, upload_size
from ulpscope.capture.device.arrivals import Arrivals
from ulpscope.capture.device.plain_torch import is_able, summary_row
from ulpscope.capture.device.values import LOST, Values, settle_rows
from ulpscope.capture.device.word_layouts import COLUMNS, Layout
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.torch_internals import blind, current_stream, detached, is_stream_capturing

__all__ = ["CudaSummaries", "Pending", "PendingSummaries", "TorchSummaries", "summaries_for"]

_MOST_BYTES = 1 << 30
_SHARE_HELD = 32
"""At most this part of a CUDA device's memory is held until it is read."""
_BATCH_ROWS = 8192
_BATCH_UPLOADS = _BATCH_ROWS * 32
_MOST_BATCHES = 3


class Pending(msgspec.Struct, gc=False):
    """A tensor that waits to be read. `alias` shares its storage until then; `version` is -1 for a copy of our own."""

    values: Values
    numel: int
    layout: Layout
    address: int
    alias: Any
    version: int


class _Batch:
    """Results of many flushes: the rows on the device, pinned memory for them, and the values that they belong to."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.rows = torch.empty((_BATCH_ROWS, COLUMNS), dtype=torch.int64, device=device)
            self.arrived = torch.empty((_BATCH_ROWS, COLUMNS), dtype=torch.int64, pin_memory=True)
            self.uploads = torch.empty(_BATCH_UPLOADS, dtype=torch.int64, pin_memory=True)
        self.numbers = self.arrived.numpy()  # asked for here, where no mode of the user's sees it
        self.upload_numbers = self.uploads.numpy()
        self.clear()

    def clear(self) -> None:
        self.owners: list[Values] = []
        self.numels: list[int] = []
        self.uploaded = 0

    def has_room(self, num_rows: int) -> bool:
        return len(self.owners) + num_rows <= _BATCH_ROWS and self.uploaded + upload_size(num_rows) <= _BATCH_UPLOADS


def _new_event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _stream_of(device: torch.device, address: int) -> Any:
    return torch.cuda.ExternalStream(address, device)  # type: ignore[no-untyped-call]


class _Queue:
    """The tensors of one device that wait to be read and, where it has streams, the stream behind which they were made."""

    has_streams = False

    def __init__(self) -> None:
        self.is_given_up = False
        self._pending: list[Pending] = []
        self._pending_bytes = 0
        self.most_rows = self.most_bytes = 0
        self._stream = -1

    @property
    def num_pending(self) -> int:
        return len(self._pending)


def _unchanged(pending: list[Pending], lose: Callable[[Values], None]) -> list[Pending]:
    """Return the tensors that nobody has written to since they were taken, those of one group together; call `lose` for the others."""
    entries = []
    for entry in pending:
        if entry.version == -1 or _is_unchanged(entry):
            entries.append(entry)
        else:
            lose(entry.values)
    entries.sort(key=_group)
    return entries


def _is_unchanged(entry: Pending) -> bool:
    try:
        return bool(entry.alias._version == entry.version and entry.alias.data_ptr() == entry.address)
    except RuntimeError:  # its memory may not be asked for any more: a graph of the compiler has taken it back
        return False


def _hand_over(entries: list[Pending], owners: list[Values], numels: list[int]) -> None:
    """Append the values that wait for the rows of a flush, and their numbers of elements; let the tensors go."""
    for entry in entries:
        owners.append(entry.values)
        numels.append(entry.numel)
        entry.alias = None


def _group(entry: Pending) -> int:
    return entry.layout.group


if COMPILED is not None and not TYPE_CHECKING:
    Pending, _Queue, _unchanged, _hand_over = COMPILED.Pending, COMPILED.Queue, COMPILED.unchanged, COMPILED.hand_over


class PendingSummaries(_Queue):
    """Tensors of one device that are read some time after they were seen; a subclass says how."""

    def __init__(self) -> None:
        super().__init__()
        self.most_rows, self.most_bytes = MOST_ROWS, _MOST_BYTES
        self.failure = ""
        self.unread: list[Pending] = []

    @property
    def is_full(self) -> bool:
        """Tell whether it is time to flush."""
        return len(self._pending) >= self.most_rows or self._pending_bytes >= self.most_bytes

    @property
    def is_waiting(self) -> bool:
        """Tell whether results of a taken tensor have not arrived."""
        raise NotImplementedError

    def can_take(self) -> bool:
        return True

    def is_at_hand(self) -> bool:
        """Tell whether a tensor can be taken at once, by the shorter way."""
        return not self.is_given_up

    def take(self, tensor: torch.Tensor, values: Values, numel: int, layout: Layout, address: int) -> None:
        """Read a tensor at the next flush. It is not held itself: autograd gives a gradient without another reference to its parameter."""
        alias = detached(tensor)
        version = -1 if alias.is_inference() else alias._version
        values.waits = True
        self.add(Pending(values, numel, layout, address, alias, version))

    def take_copy(self, copy: torch.Tensor, values: Values, numel: int, layout: Layout) -> None:
        """Read a copy of our own at the next flush."""
        values.waits = True
        self.add(Pending(values, numel, layout, copy.data_ptr(), copy, -1))

    def add(self, entry: Pending) -> bool:
        """Read this entry at the next flush; return whether it is time for that."""
        self._pending.append(entry)
        self._pending_bytes += entry.layout.num_bytes
        return len(self._pending) >= self.most_rows or self._pending_bytes >= self.most_bytes

    def flush(self) -> None:
        """Let the device read every tensor that waits; `unread` gets those that it could not read, and `failure` why."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        entries = _unchanged(pending, _lose)
        if not entries:
            return
        try:
            with blind():
                self._read(entries)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.unread += entries

    def _read(self, entries: list[Pending]) -> None:
        raise NotImplementedError

    def send(self) -> None:
        """Send all results to the host."""
        raise NotImplementedError

    def collect(self, *, wait: bool = False) -> bool:
        """Hand over the results that have arrived, or with `wait` all that were sent; return whether there were any."""
        raise NotImplementedError


class CudaSummaries(PendingSummaries):
    """Summarises the tensors of one CUDA device by kernels of triton."""

    def __init__(self, device: torch.device, *, statistics: bool) -> None:
        super().__init__()
        self._device = device
        self._statistics = statistics
        with torch.inference_mode(False):
            self._launcher = Launcher(device, statistics=statistics)
        self.has_streams = True
        self.most_bytes = torch.cuda.get_device_properties(device).total_memory // _SHARE_HELD
        self._batch: _Batch | None = None
        self._sent: Arrivals[_Batch] = Arrivals(device, copies_ahead=True)
        self._free: list[_Batch] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending or len(self._sent) or (self._batch is not None and self._batch.owners))

    def can_take(self) -> bool:
        """Tell whether a launch is allowed now: inside a CUDA graph's capture it would become part of the graph."""
        return not is_stream_capturing()

    def is_at_hand(self) -> bool:
        return current_stream(self._device) == self._stream and not is_stream_capturing() and not self.is_given_up

    def add(self, entry: Pending) -> bool:
        stream = current_stream(self._device)
        if stream != self._stream:
            self._change_stream(stream)
        return super().add(entry)

    def _change_stream(self, stream: int) -> None:
        """Go on behind another stream, after the work given to the last one: tables and results are shared."""
        if self._pending:
            self.flush()
        if self._stream != -1:
            event = _new_event()
            event.record(_stream_of(self._device, self._stream))
            _stream_of(self._device, stream).wait_event(event)
        self._stream = stream

    def _read(self, entries: list[Pending]) -> None:
        with self._here():
            batch = self._batch_with_room(len(entries))
            size = upload_size(len(entries))
            part = slice(batch.uploaded, batch.uploaded + size)
            self._launcher.launch(entries, batch.uploads[part], batch.upload_numbers[part], batch.rows[len(batch.owners) :], self._stream)
        batch.uploaded += size
        _hand_over(entries, batch.owners, batch.numels)

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the device, and the stream behind which the tensors were made."""
        if torch.cuda.current_device() == self._device.index and current_stream(self._device) == self._stream:
            return contextlib.nullcontext()
        return torch.cuda.stream(_stream_of(self._device, self._stream))

    def _batch_with_room(self, num_rows: int) -> _Batch:
        if self._batch is not None and not self._batch.has_room(num_rows):
            self._send(self._batch)
        if self._batch is None:
            if not self._free and len(self._sent) >= _MOST_BATCHES:
                self.collect(wait=True)
            self._batch = self._free.pop() if self._free else _Batch(self._device)
        return self._batch

    def send(self) -> None:
        if self._batch is not None and self._batch.owners:
            with blind(), self._here():
                self._send(self._batch)

    def _send(self, batch: _Batch) -> None:
        count = len(batch.owners)
        self._sent.send([batch.rows[:count]], batch, into=batch.arrived[:count])
        self._batch = None

    def collect(self, *, wait: bool = False) -> bool:
        has_come = False
        while (arrived := self._sent.pop(wait=wait)) is not None:
            batch, _ = arrived
            settle_rows(batch.numbers[: len(batch.owners)], batch.numels, batch.owners, statistics=self._statistics)
            batch.clear()
            self._free.append(batch)
            has_come = True
        return has_come


def _lose(values: Values) -> None:
    values.note = values.note or LOST
    values.waits = False


class TorchSummaries:
    """Summarises the tensors of one device by plain operations of torch: read at once, sent to the host together."""

    def __init__(self, device: torch.device, *, statistics: bool) -> None:
        self._statistics = statistics
        self._rows: Arrivals[tuple[Values, int]] = Arrivals(device, copies_ahead=False)

    @property
    def is_waiting(self) -> bool:
        return len(self._rows) > 0

    def can_take(self) -> bool:
        return True

    def take(self, tensor: torch.Tensor, values: Values, numel: int, dtype: str) -> None:
        with blind():
            self._rows.send([summary_row(tensor.detach(), dtype, statistics=self._statistics)], (values, numel))
        values.waits = True
        if len(self._rows) >= _BATCH_ROWS:
            self.collect(wait=True)

    def send(self) -> None:
        """Send nothing: no transfer without waiting works on every device, so `collect` fetches the results."""

    def collect(self, *, wait: bool = False) -> bool:
        if not wait or not len(self._rows):
            return False
        rows, owners, numels = [], [], []
        try:
            with blind():
                while (arrived := self._rows.pop(wait=True)) is not None:
                    (values, numel), (row,) = arrived
                    owners.append(values)
                    numels.append(numel)
                    rows.append(row)
                together = torch.stack(rows).numpy()
        except BaseException:
            for values in [*owners, *(values for values, _ in self._rows.owners())]:
                _lose(values)
            self._rows.clear()
            raise
        settle_rows(together, numels, owners, statistics=self._statistics)
        return True


def summaries_for(
    device: torch.device, *, statistics: bool, complain: Callable[[str, str], None]
) -> PendingSummaries | TorchSummaries | None:
    """Make the object that summarises tensors on a device; None where only the host can."""
    if device.type == "cuda" and are_kernels_there():
        try:
            return CudaSummaries(torch.device("cuda", device.index), statistics=statistics)
        except Exception as error:
            complain(f"summarise tensors on {device} by our kernels", f"{type(error).__name__}: {error}")
    if is_able(device):
        return TorchSummaries(device, statistics=statistics)
    complain(f"summarise tensors on {device} there", "its arithmetic gives other numbers; they are copied to the host, which is slower")
    return None
