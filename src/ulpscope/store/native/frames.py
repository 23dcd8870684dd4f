# SPDX-License-Identifier: Apache-2.0
"""Frames: records written one after another, so that a kill can cost only the last one.

A frame is a length, a checksum and a MessagePack array whose first element is its kind. Nothing here trusts a length:
a frame that claims more than its file holds, or more than MAX_BODY, or that holds more values than any call, is a bad frame, and reading
stops in front of it.
The layout is specified in docs/store-format.md, and capture/native/_compiled.pyx writes it too; change all three together.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from ulpscope.errors import DamagedRunError, InputError, NewerFormatError
from ulpscope.model import (
    FORMAT_VERSION,
    Arguments,
    CallName,
    CallRecord,
    DraftCall,
    DraftTensor,
    Frame,
    Level,
    Modes,
    Phase,
    Role,
    TensorRecord,
)

__all__ = [
    "FILE_MODE",
    "FOLDER_MODE",
    "MAX_BODY",
    "UNREADABLE",
    "AppendFile",
    "CallFrame",
    "EndFrame",
    "FrameReader",
    "SlotRow",
    "StackFrame",
    "StartFrame",
    "SummaryRow",
    "TensorFrame",
    "call_record",
    "encode_call",
    "encode_draft",
    "encode_end",
    "encode_stack",
    "encode_start",
    "encode_tensor",
    "end_of_step",
    "newer_format",
    "not_allowed",
    "open_regular",
    "read_text",
    "repeated",
    "verify_regular",
    "write_all",
]

FILE_MODE = 0o640
FOLDER_MODE = 0o750
MAX_BODY = 64 << 20
MAX_VALUES = 2 << 20  # texts, lists and maps, each of which takes up to 250 bytes in memory and as few as one here
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_HEAD = struct.Struct("<II")
_BEGINNINGS = bytes([*range(0x80, 0xC0), *range(0xC4, 0xCA), *range(0xD4, 0xE0)])  # of such values, and inside other ones
_END_BODY = struct.Struct(">BBBIBI")
_END_SIZE = _HEAD.size + _END_BODY.size

_Count = Annotated[int, msgspec.Meta(ge=0)]


class StartFrame(msgspec.Struct, array_like=True, tag=0):
    """First frame of every file."""

    version: int
    rank: _Count
    step: _Count


class StackFrame(msgspec.Struct, array_like=True, tag=1):
    """A stack, told once; later records of the file name it by `id`. Lines are (file, line, function, code)."""

    id: _Count
    lines: list[tuple[str, int, str, str]]


class SummaryRow(msgspec.Struct, array_like=True, gc=False):
    numel: _Count
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: float | None = None
    num_nan: int | None = None
    num_posinf: int | None = None
    num_neginf: int | None = None
    num_zero: int | None = None
    num_subnormal: int | None = None


class _SlotName(msgspec.Struct, array_like=True, gc=False):
    role: Role
    path: tuple[int | str, ...]


class SlotRow(msgspec.Struct, array_like=True, gc=False):
    slot: _SlotName
    dtype: str
    shape: tuple[_Count, ...]
    strides: tuple[int, ...] | None = None
    device: str = ""
    requires_grad: bool = False
    summary: SummaryRow | None = None
    fingerprint: str | None = None
    content: str | None = None
    note: str = ""


class _ModesRow(msgspec.Struct, array_like=True, gc=False):
    autocast: str | None = None
    grad: bool = True
    inference: bool = False
    training: bool | None = None
    deterministic: bool = False


class _ArgumentsRow(msgspec.Struct, array_like=True):
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


class CallFrame(msgspec.Struct, array_like=True, tag=2):
    """One CallRecord; its rank and step are those of the file."""

    order: int
    op: str
    index: int
    phase: Phase
    level: Level
    module: str
    parent: str
    arguments: _ArgumentsRow | None
    modes: _ModesRow | None
    slots: list[SlotRow]
    stack: int | None
    recompute: bool


class EndFrame(msgspec.Struct, array_like=True, tag=3):
    """Last frame of a complete step."""

    num_records: _Count
    num_tensors: _Count


class TensorFrame(msgspec.Struct, array_like=True, tag=4):
    """Where the bytes of one tensor lie; `offset` counts from the beginning of the shard's file."""

    hash: str
    dtype: str
    shape: tuple[_Count, ...]
    shard: _Count
    offset: _Count
    length: _Count


_AnyFrame = StartFrame | StackFrame | CallFrame | EndFrame | TensorFrame
_KINDS = range(5)
_decoder: msgspec.msgpack.Decoder[_AnyFrame] = msgspec.msgpack.Decoder(_AnyFrame)


# ---- writing


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise OSError(errno.EMSGSIZE, f"a record of {len(body)} bytes is larger than the store takes ({MAX_BODY})")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def encode_start(rank: int, step: int) -> bytes:
    return _frame(_encode((0, FORMAT_VERSION, rank, step)))


def encode_stack(number: int, lines: tuple[tuple[str, int, str, str], ...]) -> bytes:
    return _frame(_encode((1, number, lines)))


def encode_call(record: CallRecord, stack: int | None) -> bytes:
    arguments, modes, call = record.arguments, record.modes, record.call
    return _frame(
        _encode(
            (
                2,
                record.order,
                call.op,
                call.index,
                record.phase,
                record.level,
                record.module,
                record.parent,
                None if arguments is None else (arguments.args, arguments.kwargs),
                None if modes is None else (modes.autocast, modes.grad, modes.inference, modes.training, modes.deterministic),
                [_slot_row(slot) for slot in record.slots],
                stack,
                record.recompute,
            )
        )
    )


def encode_draft(draft: DraftCall, stack: int | None) -> bytes:
    return _frame(
        _encode(
            (
                2,
                draft.order,
                draft.op,
                draft.index,
                draft.phase,
                draft.level,
                draft.module,
                draft.parent,
                msgspec.Raw(draft.arguments) if isinstance(draft.arguments, bytes) else draft.arguments,
                draft.modes,
                [_slot_row(slot) for slot in draft.slots],
                stack,
                draft.recompute,
            )
        )
    )


def _slot_row(record: DraftTensor) -> tuple[Any, ...]:
    summary = record.summary
    return (
        (record.slot.role, record.slot.path),
        record.dtype,
        record.shape,
        record.strides,
        record.device,
        record.requires_grad,
        None
        if summary is None
        else (
            summary.numel,
            summary.min,
            summary.max,
            summary.mean,
            summary.rms,
            summary.num_nan,
            summary.num_posinf,
            summary.num_neginf,
            summary.num_zero,
            summary.num_subnormal,
        ),
        record.fingerprint,
        record.content,
        record.note,
    )


def encode_tensor(hash: str, dtype: str, shape: tuple[int, ...], shard: int, offset: int, length: int) -> bytes:
    return _frame(_encode((4, hash, dtype, shape, shard, offset, length)))


def encode_end(num_records: int, num_tensors: int) -> bytes:
    """Always of the same size, so that the last bytes of a file tell whether its step is complete."""
    return _frame(_END_BODY.pack(0x93, 3, 0xCE, num_records, 0xCE, num_tensors))


def _foreign(value: object) -> Any:
    """What MessagePack has no word for becomes what records.py has one for."""
    kind = type(value)
    return {"$object": f"{kind.__module__}.{kind.__qualname__}", "repr": repr(value)[:200]}


_encoder = msgspec.msgpack.Encoder(enc_hook=_foreign)


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError):
        return _encoder.encode(_plain(value, depth=24))


def _plain(value: Any, depth: int) -> Any:
    """Rare values made writable: lone surrogates are escaped, huge integers become `$int`, bottomless nesting is cut."""
    if depth == 0:
        return "..."
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**64 else {"$int": str(value) if value.bit_length() < 10_000 else hex(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {_plain(key, depth - 1): _plain(item, depth - 1) for key, item in value.items()}
    return value


class AppendFile:
    """A file that only grows. What a failed write left behind is cut off again, and the file then takes nothing more."""

    def __init__(self, path: Path, beginning: bytes) -> None:
        self.path = path
        self.size = 0
        self._failed: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), FILE_MODE)
        try:
            self.append(beginning)
        except OSError:
            self.close()
            raise

    def append(self, data: bytes | memoryview) -> None:
        """Hand the bytes to the kernel: from here on they outlive this process."""
        self.verify_whole()
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._cut(error)
            raise
        self.size += len(data)

    def overwrite(self, data: bytes, offset: int) -> None:
        """Replace bytes that are there already; the end of the file stays where it is."""
        os.lseek(self._fd, offset, os.SEEK_SET)
        try:
            write_all(self._fd, data)
        finally:
            os.lseek(self._fd, self.size, os.SEEK_SET)

    def verify_whole(self) -> None:
        """Raise where an earlier write has failed."""
        if self._failed is not None:
            raise repeated(self._failed)

    def verify_present(self) -> None:
        """Raise where somebody has removed the file meanwhile: what is written to it then reaches nobody."""
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was being written", str(self.path))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _cut(self, error: OSError) -> None:
        self._failed = OSError(error.errno, error.strerror, str(self.path))
        try:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
        except OSError:
            pass  # the torn frame stays; its checksum tells readers to stop in front of it


def repeated(error: OSError) -> OSError:
    """An earlier error to raise once more: a fresh one, since raising the same object again and again makes it grow."""
    return OSError(error.errno, f"nothing more is written here after an earlier failure: {error.strerror}", error.filename)


def write_all(fd: int, data: bytes | memoryview) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


# ---- reading


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, refusing what would block or never end (pipes, devices)."""
    try:
        verify_regular(path, path.stat())
        return path.open("rb", buffering=1 << 18)
    except PermissionError as error:
        raise not_allowed(path) from error


def not_allowed(path: Path) -> InputError:
    return InputError(f"{path} may not be read by you: the files of a run are open to their owner and group only")


def verify_regular(path: Path, status: os.stat_result) -> int:
    """The size of a file that is one."""
    if not stat.S_ISREG(status.st_mode):
        raise DamagedRunError(f"{path} should be a file of a run but is something else; nothing was read from it")
    return status.st_size


def read_text(path: Path, at_most: int) -> bytes:
    """The beginning of a small file, however large it is."""
    with open_regular(path) as file:
        return file.read(min(at_most, os.fstat(file.fileno()).st_size))


class FrameReader:
    """The frames of one file from the beginning, or from where the last reading stopped.

    After an iteration `position` is behind the last good frame; `problem` says what stands there, empty at a clean end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.problem = ""

    def __iter__(self) -> Iterator[Any]:
        with open_regular(self.path) as file:
            file.seek(self.position)
            for body in self._bodies(file):
                frame = self._decode(body)
                self.position += _HEAD.size + len(body)
                if frame is not None:
                    yield frame

    def damaged(self, what: str) -> DamagedRunError:
        return DamagedRunError(f"{self.path} is damaged at byte {self.position}: {what}; restore the file, or leave this step out")

    def _bodies(self, file: BinaryIO) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                self.problem = "a frame is cut off" if head else ""
                return
            length, checksum = _HEAD.unpack(head)
            end = self.position + _HEAD.size + length
            if end > size:
                size = os.fstat(file.fileno()).st_size  # it may have grown meanwhile
            if length > MAX_BODY or end > size:
                self.problem = f"a frame claims {length} bytes, more than there are"
                return
            body = file.read(length)
            if zlib.crc32(body) != checksum:
                self.problem = "the checksum of a frame is wrong"
                return
            if len(body) > MAX_VALUES and len(body) - len(body.translate(None, _BEGINNINGS)) > MAX_VALUES:
                self.problem = "a frame holds more values than any call has"
                return
            yield body

    def _decode(self, body: bytes) -> _AnyFrame | None:
        try:
            frame = _decoder.decode(body)
        except UNREADABLE as error:
            if _has_unknown_kind(body):
                return None
            raise self.damaged(f"a frame holds something unexpected ({error})") from error
        if isinstance(frame, StartFrame) and frame.version > FORMAT_VERSION:
            raise newer_format(self.path, frame.version)
        return frame


def newer_format(path: Path, version: int) -> NewerFormatError:
    return NewerFormatError(f"{path} has format version {version}; this ulpscope reads up to {FORMAT_VERSION}: pip install -U ulpscope")


def _has_unknown_kind(body: bytes) -> bool:
    """Frames of a kind that we do not know are additions of a later writer and are skipped."""
    try:
        kind = msgspec.msgpack.decode(body)[0]
    except (*UNREADABLE, TypeError, IndexError, KeyError):
        return False
    return isinstance(kind, int) and kind not in _KINDS


def end_of_step(path: Path) -> EndFrame | None:
    """The end frame of a step's records, found from the end of the file; None where the step is not complete."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _END_SIZE))
        tail = file.read(_END_SIZE)
    if len(tail) < _END_SIZE:
        return None
    body = tail[_HEAD.size :]
    if _HEAD.unpack(tail[: _HEAD.size]) != (len(body), zlib.crc32(body)):
        return None
    try:
        frame = _decoder.decode(body)
    except UNREADABLE:
        return None
    return frame if isinstance(frame, EndFrame) else None


def call_record(frame: CallFrame, rank: int, step: int, stack: tuple[Frame, ...]) -> CallRecord:
    return CallRecord(
        rank=rank,
        step=step,
        order=frame.order,
        call=CallName(frame.op, frame.index),
        phase=frame.phase,
        level=frame.level,
        module=frame.module,
        parent=frame.parent,
        arguments=None if frame.arguments is None else msgspec.convert(frame.arguments, Arguments, from_attributes=True),
        modes=None if frame.modes is None else msgspec.convert(frame.modes, Modes, from_attributes=True),
        slots=msgspec.convert(frame.slots, tuple[TensorRecord, ...], from_attributes=True),
        stack=stack,
        recompute=frame.recompute,
    )
