# SPDX-License-Identifier: Apache-2.0
"""Write and read the envelope: a text file with the range of each statistic of each call over several runs, small and easy to compare in a
diff.

One JSON object a line, in execution order: first the head (versions, devices, seed), then for each call a line and for each of its slots a
line. A statistic is a number, or [lowest, highest] where runs differed. A slot with exactly the numbers of an earlier one only names that
one. A fingerprint stays as long as every run had it. Numbers have the digits that a verdict can depend on, and infinities are texts, as in
our JSON reports.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ulpscope.errors import DamagedRunError, InputError, NewerFormatError
from ulpscope.model import DTYPES, Arguments, CallName, CallRecord, Level, Modes, Phase, Slot, Summary, TensorRecord

__all__ = ["Envelope", "EnvelopeCall", "read_envelope", "rounded", "write_envelope"]

SCHEMA = "ulpscope.baseline/1"
_VALUES = ("min", "max", "mean", "rms")
_COUNTS = ("num_nan", "num_posinf", "num_neginf")
_MOST_BYTES = 1 << 30
_LONGEST_LINE = 16 << 20
_MOST_DIMS = 64
_MOST_BLANK = 1000
_DIGITS, _DIGITS_LOW = 9, 6
_FLOAT = "$float"

Number: TypeAlias = float | str
Range: TypeAlias = Number | list[Number]


@dataclass(frozen=True, slots=True)
class EnvelopeCall:
    """A call whose slots carry the lowest statistics seen; `highest` has the highest, slot by slot."""

    record: CallRecord
    highest: tuple[Summary | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The calls that `num_runs` runs had in common, in execution order."""

    num_runs: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    seed: int | None = None
    calls: tuple[EnvelopeCall, ...] = ()


class _Head(msgspec.Struct, forbid_unknown_fields=False):
    schema: str
    runs: int = 1
    versions: dict[str, str] = {}
    devices: list[str] = []
    seed: int | None = None


class _CallLine(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    call: str
    rank: int
    step: int
    order: int
    phase: Phase
    module: str = ""
    level: Level = "api"
    recompute: bool = False
    modes: dict[str, bool | str | None] | None = None
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None


class _SlotLine(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    slot: str
    like: str = ""
    dtype: str = ""
    shape: list[int] | None = None
    numel: int | None = None
    min: Range | None = None
    max: Range | None = None
    mean: Range | None = None
    rms: Range | None = None
    nan: Range | None = None
    posinf: Range | None = None
    neginf: Range | None = None
    counted: bool = True
    fingerprint: str = ""
    note: str = ""


def write_envelope(envelope: Envelope, path: Path) -> None:
    """Write the file whole; the same envelope gives the same bytes."""
    path.write_bytes(b"".join(line + b"\n" for line in _lines(envelope)))


def _lines(envelope: Envelope) -> Iterator[bytes]:
    head = _Head(SCHEMA, envelope.num_runs, dict(sorted(envelope.versions.items())), list(envelope.devices), envelope.seed)
    yield msgspec.json.encode(head)
    first: dict[Hashable, str] = {}
    part: tuple[int, int] | None = None
    for call in sorted(envelope.calls, key=lambda one: (one.record.rank, one.record.step, one.record.order)):
        record = call.record
        if part != (part := (record.rank, record.step)):
            first.clear()
        yield _encode(_call_line(record))
        for tensor, highest in zip(record.slots, call.highest, strict=True):
            line = _slot_line(tensor, highest)
            key = msgspec.json.encode([line.dtype, line.shape, line.numel, line.fingerprint, line.counted, *_ranges_of(line)])
            known = first.setdefault(key, f"{record.order}/{tensor.slot}") if tensor.summary or tensor.fingerprint else line.slot
            is_first = known in (f"{record.order}/{tensor.slot}", line.slot)
            yield b" " + _encode(line if is_first else _SlotLine(slot=line.slot, like=known, note=line.note))


def _encode(line: msgspec.Struct) -> bytes:
    return msgspec.json.encode(_spelled(msgspec.to_builtins(line)))


def _spelled(value: Any) -> Any:
    """Spell an argument that is NaN or infinite in a form that JSON has."""
    if isinstance(value, float) and not isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, (list, tuple)) else value


def _meant(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value[_FLOAT]) if _FLOAT in value else {key: _meant(item) for key, item in value.items()}
    return [_meant(item) for item in value] if isinstance(value, list) else value


def _call_line(record: CallRecord) -> _CallLine:
    given, modes = record.arguments, record.modes
    changed = {one.name: value for one in fields(modes) if (value := getattr(modes, one.name)) != one.default} if modes else {}
    return _CallLine(
        call=str(record.call),
        rank=record.rank,
        step=record.step,
        order=record.order,
        phase=record.phase,
        module=record.module,
        level=record.level,
        recompute=record.recompute,
        modes=changed or None,
        args=list(given.args) if given and given.args else None,
        kwargs=given.kwargs if given else None,
    )


def rounded(tensor: TensorRecord) -> TensorRecord:
    """Round the statistics of a tensor to the digits that an envelope keeps: far finer than any verdict looks, and the same in every run.

    Exact values, and those finer than float32, keep every digit.
    """
    kind = DTYPES.get(tensor.dtype)
    if tensor.summary is None or kind is None or not kind.is_floating or kind.mantissa > 23:
        return tensor
    digits = _DIGITS if kind.mantissa == 23 else _DIGITS_LOW
    values: dict[str, Any] = {name: _rounded(getattr(tensor.summary, name), digits) for name in _VALUES}
    return replace(tensor, summary=replace(tensor.summary, **values))


def _rounded(value: float | None, digits: int) -> float | None:
    return float(f"{value:.{digits}g}") if value is not None else None


def _slot_line(tensor: TensorRecord, highest: Summary | None) -> _SlotLine:
    lowest, highest = tensor.summary or Summary(0), highest or Summary(0)
    ranges: dict[str, Any] = {name: _range(getattr(lowest, name), getattr(highest, name)) for name in (*_VALUES, *_COUNTS)}
    counts: dict[str, Any] = {name.removeprefix("num_"): value if (value := ranges.pop(name)) != 0 else None for name in _COUNTS}
    return _SlotLine(
        slot=str(tensor.slot),
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        numel=lowest.numel if tensor.summary and lowest.numel != prod(tensor.shape) else None,
        counted=tensor.summary is None or lowest.num_nan is not None,
        fingerprint=tensor.fingerprint or "",
        note=tensor.note,
        **ranges,
        **counts,
    )


def _ranges_of(line: _SlotLine) -> tuple[Range | None, ...]:
    return line.min, line.max, line.mean, line.rms, line.nan, line.posinf, line.neginf


def _range(low: float | None, high: float | None) -> Range | None:
    if low is None or high is None:
        return None
    return _number(low) if low == high else [_number(low), _number(high)]


def _number(value: float) -> Number:
    if not isfinite(value):
        return "Infinity" if value > 0 else "-Infinity"
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else value


def read_envelope(path: Path) -> Envelope:
    """Read the file; an error names the line that is damaged."""
    lines = _read_lines(path)
    head = _head(next(lines, b""), path)
    calls: list[_Draft] = []
    known: dict[str, _SlotLine] = {}
    for number, line in enumerate(lines, 2):
        if not line.strip() and number < _MOST_BLANK:
            continue
        try:
            if line.startswith(b" "):
                calls[-1].add(msgspec.json.decode(line, type=_SlotLine), known)
                continue
            calls.append(_Draft(_record(msgspec.json.decode(line, type=_CallLine))))
            if len(calls) > 1 and calls[-2].part != calls[-1].part:
                known.clear()
        except (msgspec.DecodeError, ValueError, KeyError, IndexError, TypeError) as error:
            raise DamagedRunError(
                f"line {number} of the baseline '{path}' cannot be read ({error}); restore it, or write it anew with --update"
            ) from None
    done = tuple(call.done() for call in calls)
    return Envelope(num_runs=head.runs, versions=head.versions, devices=tuple(head.devices), seed=head.seed, calls=done)


@dataclass(slots=True)
class _Draft:
    """A call whose slots are still being read."""

    record: CallRecord
    lowest: list[TensorRecord] = field(default_factory=list)
    highest: list[Summary | None] = field(default_factory=list)

    @property
    def part(self) -> tuple[int, int]:
        return self.record.rank, self.record.step

    def add(self, line: _SlotLine, known: dict[str, _SlotLine]) -> None:
        slot = Slot.parse(line.slot)
        if line.like:
            line = msgspec.structs.replace(known[line.like], slot=line.slot, note=line.note)
        else:
            known[f"{self.record.order}/{slot}"] = line
        shape = tuple(line.shape or ())
        if any(size < 0 for size in shape) or len(shape) > _MOST_DIMS or not line.dtype:
            raise ValueError("a slot without a dtype, with a negative size or with more dimensions than any tensor")
        low, high = (_summary(line, end, shape) for end in (0, -1))
        self.lowest.append(
            TensorRecord(slot=slot, dtype=line.dtype, shape=shape, summary=low, fingerprint=line.fingerprint or None, note=line.note)
        )
        self.highest.append(high)

    def done(self) -> EnvelopeCall:
        return EnvelopeCall(replace(self.record, slots=tuple(self.lowest)), tuple(self.highest))


def _read_lines(path: Path) -> Iterator[bytes]:
    num_bytes = 0
    try:
        with path.open("rb") as stream:
            while line := stream.readline(_LONGEST_LINE):
                num_bytes += len(line)
                if num_bytes > _MOST_BYTES or len(line) == _LONGEST_LINE:
                    what = f"a line of {_LONGEST_LINE}" if num_bytes <= _MOST_BYTES else f"more than {_MOST_BYTES}"
                    raise InputError(f"the baseline '{path}' has {what} bytes, more than any baseline; give the file that --update wrote")
                yield line.removesuffix(b"\n")
    except OSError as error:
        advice = "write it first with --update" if isinstance(error, FileNotFoundError) else "give the file that --update wrote"
        raise InputError(f"the baseline '{path}' cannot be read: {error.strerror}; {advice}") from error


def _head(line: bytes, path: Path) -> _Head:
    try:
        head = msgspec.json.decode(line, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InputError(f"'{path}' is no baseline: its first line does not say so; give the file that --update wrote") from None
    if head.schema != SCHEMA:
        kind = NewerFormatError if head.schema.startswith("ulpscope.baseline/") else InputError
        raise kind(f"'{path}' has the format {head.schema!r}, and this ulpscope reads {SCHEMA!r}; use the version that wrote it")
    return head


def _record(line: _CallLine) -> CallRecord:
    if min(line.rank, line.step, line.order) < 0:
        raise ValueError("a negative rank, step or order")
    is_given = line.args is not None or line.kwargs is not None
    arguments = Arguments(args=tuple(_meant(line.args or [])), kwargs=_meant(line.kwargs)) if is_given else None
    modes = {name: value for name, value in (line.modes or {}).items() if name in {one.name for one in fields(Modes)}}
    return CallRecord(
        rank=line.rank,
        step=line.step,
        order=line.order,
        call=CallName.parse(line.call),
        phase=line.phase,
        module=line.module,
        level=line.level,
        recompute=line.recompute,
        modes=Modes(**modes),  # type: ignore[arg-type]
        arguments=arguments,
    )


def _summary(line: _SlotLine, end: int, shape: tuple[int, ...]) -> Summary | None:
    if all(one is None for one in _ranges_of(line)):
        return None
    values: dict[str, Any] = {name: _end(getattr(line, name), end) for name in _VALUES}
    counts = {f"num_{name}": int(_end(getattr(line, name), end) or 0) if line.counted else None for name in ("nan", "posinf", "neginf")}
    return Summary(line.numel if line.numel is not None else prod(shape), **values, **counts)


def _end(found: Range | None, end: int) -> float | None:
    if isinstance(found, list):
        if len(found) != 2:
            raise ValueError("a range of other than two numbers")
        found = found[end]
    if isinstance(found, str):
        return {"Infinity": inf, "-Infinity": -inf}[found]
    return found
