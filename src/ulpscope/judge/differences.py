# SPDX-License-Identifier: Apache-2.0
"""What differs between two calls besides the values of their tensors. Devices are expected to differ and are left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from ulpscope.judge.limits import are_same_limit
from ulpscope.model import ArgumentDifference, Arguments, CallRecord, Pair

__all__ = ["argument_differences"]

Alike = Callable[[Any, Any], bool]
_ABSENT = object()
_ABSENT_TEXT = "not given"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|musa|meta|privateuseone|privateuse1)(:\d+)?")
_LIMIT = 120
_MOST = 64


def argument_differences(pair: Pair) -> tuple[ArgumentDifference, ...]:
    """Arguments (the first few), dtypes, strides, requires_grad and modes that differ; nothing where a side is missing."""
    if pair.subject is None or pair.reference is None:
        return ()
    return (*islice(_arguments(pair.subject, pair.reference), _MOST), *_tensors(pair), *_modes(pair.subject, pair.reference))


def _arguments(subject: CallRecord, reference: CallRecord) -> Iterator[ArgumentDifference]:
    if subject.call.op != reference.call.op:
        yield ArgumentDifference("operation", subject.call.op, reference.call.op)
    if subject.arguments is None or reference.arguments is None or _literally(subject.arguments) == _literally(reference.arguments):
        return
    ours, theirs = _named(subject.arguments), _named(reference.arguments)
    alike = partial(_are_alike, subject=subject, reference=reference)
    same = {name for name in ours if name in theirs and alike(ours[name], theirs[name])}
    ours = {name: value for name, value in ours.items() if name not in same}
    theirs = {name: value for name, value in theirs.items() if name not in same}
    _drop_passed_otherwise(ours, theirs, alike)
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        yield from _apart(name, ours.get(name, _ABSENT), theirs.get(name, _ABSENT), alike)


def _are_alike(ours: Any, theirs: Any, *, subject: CallRecord, reference: CallRecord) -> bool:
    return _text(ours) == _text(theirs) or are_same_limit(ours, theirs, subject, reference)


def _literally(arguments: Arguments) -> str:
    """All arguments as one text, quickly made: where it is the same nothing differs, and that is so for most calls."""
    return repr((arguments.args, arguments.kwargs))


def _named(arguments: Arguments) -> dict[str, Any]:
    """Each argument in a form that can be compared, positional ones under their position."""
    named: dict[str, Any] = {f"argument {at}": value for at, value in enumerate(arguments.args)}
    named.update(arguments.kwargs or {})
    return {name: _comparable(value) for name, value in named.items()}


def _apart(name: str, ours: Any, theirs: Any, alike: Alike) -> Iterator[ArgumentDifference]:
    """Settings inside lists and groups by their own names: `groups.0.lr`."""
    if _is_group(ours) and _is_group(theirs):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            yield from _apart(f"{name}.{key}", ours.get(key, _ABSENT), theirs.get(key, _ABSENT), alike)
    elif isinstance(ours, list) and isinstance(theirs, list) and (len(ours) == len(theirs) or any(map(_is_nested, (*ours, *theirs)))):
        if len(ours) != len(theirs):
            yield ArgumentDifference(f"length of {name}", str(len(ours)), str(len(theirs)))
        for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _apart(f"{name}.{at}", one, other, alike)
    elif not alike(ours, theirs):
        yield ArgumentDifference(name, *_shortened(_text(ours), _text(theirs)))


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and not any(str(key).startswith("$") for key in value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (list, dict))


def _drop_passed_otherwise(ours: dict[str, Any], theirs: dict[str, Any], alike: Alike) -> None:
    """The same value by position here and by keyword there is no difference."""
    for name, value in list(ours.items()):
        other = next((key for key, one in theirs.items() if _is_positional(key) != _is_positional(name) and alike(value, one)), None)
        if other is not None:
            del ours[name], theirs[other]


def _is_positional(name: str) -> bool:
    return name.startswith("argument ")


def _text(value: Any) -> str:
    return _ABSENT_TEXT if value is _ABSENT else _ADDRESS.sub("0x", repr(value))


def _shortened(ours: str, theirs: str) -> list[str]:
    """Each text, or the part of it where the two begin to differ."""
    first = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), min(len(ours), len(theirs)))
    start = 0 if first < _LIMIT // 2 else first - _LIMIT // 4
    return [_cut(f"...{text[start:]}" if start else text) for text in (ours, theirs)]


def _cut(text: str) -> str:
    return text if len(text) <= _LIMIT else text[: _LIMIT - 3] + "..."


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        for special, stands_for in (("$tensor", "tensor"), ("$device", "device")):
            if special in value:
                return stands_for
        for special in ("$tuple", "$size", "$dtype", "$memory_format", "$layout", "$int"):
            if special in value:
                return _comparable(value[special])
        return {key: _comparable(part) for key, part in value.items()}
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return "device"
    if isinstance(value, (list, tuple)):
        return [_comparable(part) for part in value]
    return value


def _tensors(pair: Pair) -> Iterator[ArgumentDifference]:
    for slot in pair.slots:
        one, other = slot.subject, slot.reference
        if one is None or other is None:
            continue
        if one.dtype != other.dtype:
            yield ArgumentDifference(f"dtype of {slot.slot}", one.dtype, other.dtype)
        if one.shape != other.shape:
            yield ArgumentDifference(f"shape of {slot.slot}", str(list(one.shape)), str(list(other.shape)))
        elif one.strides and other.strides and one.strides != other.strides and _significant(one) != _significant(other):
            yield ArgumentDifference(f"strides of {slot.slot}", str(list(one.strides)), str(list(other.strides)))
        if one.requires_grad != other.requires_grad and one.device and other.device:
            yield ArgumentDifference(f"requires_grad of {slot.slot}", str(one.requires_grad), str(other.requires_grad))


def _significant(record: Any) -> list[int]:
    """Strides of the dimensions that have more than one element; the others mean nothing."""
    return [stride for stride, length in zip(record.strides, record.shape, strict=False) if length > 1]


def _modes(subject: CallRecord, reference: CallRecord) -> Iterator[ArgumentDifference]:
    if subject.modes is None or reference.modes is None:
        return
    for name in ("autocast", "grad", "inference", "training", "deterministic"):
        ours, theirs = getattr(subject.modes, name), getattr(reference.modes, name)
        if name == "autocast":
            ours, theirs = _autocast(ours), _autocast(theirs)
        if ours != theirs:
            yield ArgumentDifference(f"mode {name}", str(ours), str(theirs))


def _autocast(mode: str | None) -> str | None:
    """The dtype without the device it is for: `bfloat16` of `cuda:bfloat16`."""
    return mode.rpartition(":")[2] if mode else mode
