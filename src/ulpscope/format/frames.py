# SPDX-License-Identifier: Apache-2.0
"""Encode and decode frames: a length, a checksum and a MessagePack array whose first element is its kind.

The layout is specified in docs/store-format.md. `Frames` in capture/native/_compiled.pyx writes the frame of a call too; a test compares
the two.
"""

from __future__ import annotations

import errno
import struct
import zlib
from typing import Annotated, Any

import msgspec

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
    "END_SIZE",
    "HEAD_SIZE",
    "MAX_BODY",
    "UNREADABLE",
    "AnyFrame",
    "CallFrame",
    "EndFrame",
    "PlainCall",
    "SlotRow",
    "StackFrame",
    "StartFrame",
    "SummaryRow",
    "TensorFrame",
    "call_record",
    "checksum",
    "decoded",
    "encode_call",
    "encode_draft",
    "encode_end",
    "encode_stack",
    "encode_start",
    "encode_tensor",
    "end_frame",
    "framed",
    "head_at",
    "holds_too_much",
    "is_of_unknown_kind",
]

MAX_BODY = 64 << 20
MAX_VALUES = 2 << 20  # texts, lists and maps: each takes up to 250 bytes in memory, and may take one byte here
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_HEAD = struct.Struct("<II")
HEAD_SIZE = _HEAD.size
_BEGINNINGS = bytes([*range(0x80, 0xC0), *range(0xC4, 0xCA), *range(0xD4, 0xE0)])  # of such values, and inside others
_END_BODY = struct.Struct(">BBBIBI")
END_SIZE = HEAD_SIZE + _END_BODY.size

_Count = Annotated[int, msgspec.Meta(ge=0)]


class StartFrame(msgspec.Struct, array_like=True, tag=0):
    """First frame of every file."""

    version: int
    rank: _Count
    step: _Count


class StackFrame(msgspec.Struct, array_like=True, tag=1):
    """A stack, written once; later records of the file name it by `id`. Lines are (file, line, function, code)."""

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


class PlainCall(msgspec.Struct, array_like=True, tag=2):
    """The elements that the frame of every call has."""

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


class CallFrame(PlainCall, array_like=True, tag=2):
    """One CallRecord; its rank and step are those of the file. The last element is missing where there is nothing to tell."""

    recorded_as: str = ""


class EndFrame(msgspec.Struct, array_like=True, tag=3):
    """Last frame of a complete step."""

    num_records: _Count
    num_tensors: _Count


class TensorFrame(msgspec.Struct, array_like=True, tag=4):
    """The place of the bytes of one tensor; `offset` counts from the beginning of the shard's file."""

    hash: str
    dtype: str
    shape: tuple[_Count, ...]
    shard: _Count
    offset: _Count
    length: _Count


AnyFrame = StartFrame | StackFrame | CallFrame | EndFrame | TensorFrame
_KINDS = range(5)
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def framed(body: bytes) -> bytes:
    """Put a length and a checksum in front."""
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def head_at(data: bytes, place: int = 0) -> tuple[int, int]:
    """Return the length and the checksum of the body that follows a head."""
    length, checksum = _HEAD.unpack_from(data, place)
    return length, checksum


checksum = zlib.crc32


def holds_too_much(body: bytes) -> bool:
    """Tell whether decoding would take far more memory than the frame of any call."""
    return len(body) > MAX_VALUES and len(body) - len(body.translate(None, _BEGINNINGS)) > MAX_VALUES


decoded = _decoder.decode


def is_of_unknown_kind(body: bytes) -> bool:
    """Tell whether a frame is an addition of a later writer, which readers skip."""
    try:
        kind = msgspec.msgpack.decode(body)[0]
    except (*UNREADABLE, TypeError, IndexError, KeyError):
        return False
    return isinstance(kind, int) and kind not in _KINDS


def end_frame(tail: bytes) -> EndFrame | None:
    """Return the end frame in the last bytes of a file; None where there is none."""
    if len(tail) < END_SIZE:
        return None
    body = tail[-END_SIZE + HEAD_SIZE :]
    if head_at(tail, len(tail) - END_SIZE) != (len(body), zlib.crc32(body)):
        return None
    try:
        frame = decoded(body)
    except UNREADABLE:
        return None
    return frame if isinstance(frame, EndFrame) else None


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_BODY:
        raise OSError(errno.EMSGSIZE, f"a record of {len(body)} bytes is larger than the store takes ({MAX_BODY})")
    return framed(body)


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
                *((record.recorded_as,) if record.recorded_as else ()),
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
    """Encode the end frame, always of the same size, so that the last bytes of a file tell whether its step is complete."""
    return _frame(_END_BODY.pack(0x93, 3, 0xCE, num_records, 0xCE, num_tensors))


def _foreign(value: object) -> Any:
    """Write a value that MessagePack cannot hold as the `$object` of records.py."""
    kind = type(value)
    return {"$object": f"{kind.__module__}.{kind.__qualname__}", "repr": repr(value)[:200]}


_encoder = msgspec.msgpack.Encoder(enc_hook=_foreign)


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError):
        return _encoder.encode(_plain(value, depth=24))


def _plain(value: Any, depth: int) -> Any:
    """Make rare values writable: escape lone surrogates, write huge integers as `$int`, cut bottomless nesting."""
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
        recorded_as=frame.recorded_as,
    )
