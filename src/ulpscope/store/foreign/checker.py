# SPDX-License-Identifier: Apache-2.0
"""Read what api_accuracy_checker recorded: forward_info_*.json with backward_info_*.json, stack_info_*.json and the real data beside them.

    dump/step1/forward_info_4711.json     the file, its folder or the folder of the steps can be opened; a process is a rank,
                                          in the order of the numbers at the end of the names

Names come as `Functional*silu*0` (the checker), `Functional_silu_0_forward` (overflow detection) or with dots. Only inputs and gradients of
outputs were recorded, no results; the gradients that a backward call makes stand in its record without values. Of a path to real data only
the part from its folder `forward_real_data*` or `backward_real_data*` on counts; it lies beside the json and never leads out of there. An
entry that cannot be understood goes to the ledger, and the others are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ulpscope.errors import DamagedRunError, MissingDependencyError, NotARunError
from ulpscope.model import Arguments, CallRecord, Frame, LedgerEntry, Phase, RunInfo, Slot, TensorRecord
from ulpscope.store.foreign.msprobe import _argument, _frames, _opened, _plain
from ulpscope.store.foreign.msprobe_words import load_json
from ulpscope.store.foreign.reader import (
    NOT_RECORDED,
    ForeignRun,
    Numbering,
    Place,
    Reading,
    canonical_dtype,
    join_backward,
    open_tensor,
    operation,
    summary,
    tensor_shape,
    user_frames,
)

__all__ = ["UNRECORDED", "open_info", "own_name", "recognize"]

_HEAD_BYTES = 4096
_MAX_DEPTH = 32
_INFO = re.compile(r"(?P<kind>forward|backward)_info(?P<suffix>[^/]{0,60})\.json")
_FIRST_ENTRY = re.compile(rb'\s*\{\s*"[^"]{3,400}"\s*:\s*\{\s*"args"\s*:')
_KEY = re.compile(
    r"(?P<namespace>Functional|Tensor|Torch|VF|NPU|Aten|Distributed)[*._](?P<name>.{1,400}?)[*._](?P<index>\d{1,9})"
    r"(?:[._](?:forward|backward))?"
)
UNRECORDED = "the checker does not record gradients of inputs"
"""The note of a gradient that the call had, and that was recorded by its place alone."""
_REAL_DATA = re.compile(r"(forward|backward)_real_data[\w.-]*")


def recognize(path: Path) -> bool:
    """Tell whether the path looks like a recording of api_accuracy_checker."""
    if path.is_file():
        return path.suffix == ".json" and (_INFO.fullmatch(path.name) is not None or _FIRST_ENTRY.match(_head(path)) is not None)
    return path.is_dir() and any(True for _ in _found(path))


def own_name(key: str) -> str | None:
    """Return our name for a call of the recording, if no other call shares it; None for an entry that is no call.

    >>> own_name("Functional*conv2d*0"), own_name("Tensor.__add__.3.forward")
    ('functional.conv2d.0', 'Tensor.add.3')
    """
    match = _KEY.fullmatch(key)
    return f"{operation(match['namespace'], match['name'])}.{int(match['index'])}" if match else None


def open_info(path: Path, backward: Path | None = None) -> ForeignRun:
    """Open a recording by its forward_info file, its backward_info file, or the folder that holds them.

    With `backward`, the two are files of any name.
    """
    if backward is not None:
        return _opened_both(path, backward)
    places = tuple(_places(path))
    if not places:
        raise NotARunError(f"'{path}' holds no forward_info_*.json, neither itself nor in step* below; give the folder that holds them")
    info = RunInfo(format="api_accuracy_checker", tool="api_accuracy_checker", world_size=len({place.rank for place in places}))
    return ForeignRun(path, info, places, _read)


def _opened_both(forward: Path, backward: Path) -> ForeignRun:
    for file in (forward, backward):
        if not file.is_file():
            raise NotARunError(f"'{file}' is no file; give the forward_info and the backward_info of one recording")
    place = Place(0, _step(forward.parent), forward, forward.parent)
    info = RunInfo(format="api_accuracy_checker", tool="api_accuracy_checker")
    return ForeignRun(forward, info, (place,), lambda known: _read(known, backward))


def _head(file: Path) -> bytes:
    with _opened(file) as stream:
        return stream.read(_HEAD_BYTES)


def _places(path: Path) -> Iterator[Place]:
    if path.is_file():
        yield Place(0, _step(path.parent), _forward_of(path), path.parent)
        return
    steps: dict[int, list[Path]] = {}
    for file in _found(path):
        steps.setdefault(_step(file.parent), []).append(file)
    for step, files in sorted(steps.items()):
        for rank, file in enumerate(sorted(files, key=_process)):
            yield Place(rank, step, file, file.parent)


def _found(folder: Path) -> Iterator[Path]:
    """Find one file for each process and step: forward_info, or backward_info where there is no other."""
    folders = [folder, *sorted(entry for entry in _entries(folder) if re.fullmatch(r"step\d{1,9}", entry.name) and entry.is_dir())]
    for place in folders:
        names = {entry.name: entry for entry in _entries(place) if _INFO.fullmatch(entry.name) and entry.is_file()}
        yield from sorted(entry for name, entry in names.items() if name.startswith("forward") or _other(name, "forward") not in names)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _forward_of(file: Path) -> Path:
    forward = file.with_name(_other(file.name, "forward"))
    return forward if forward.is_file() else file


def _other(name: str, kind: str) -> str:
    """Name the sibling file of another kind: `backward_info_7.json` for `forward_info_7.json`, and so for names that the user chose."""
    return re.sub("forward|backward|stack", kind, name, count=1)


def _process(file: Path) -> tuple[int, str]:
    digits = re.findall(r"\d{1,18}", file.stem)
    return int(digits[-1]) if digits else 0, file.name


def _step(folder: Path) -> int:
    match = re.fullmatch(r"step(\d{1,9})", folder.name)
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """One key of one file."""

    key: str
    op: str
    source: str
    index: int
    phase: Phase
    body: Any


def _read(place: Place, backward: Path | None = None) -> Reading:
    ledger: list[LedgerEntry] = []
    entries = [entry for phase in _PHASES for entry in _entries_of(place, phase, ledger, backward)]
    numbering = Numbering((entry.op, entry.source, entry.index) for entry in entries)
    stacks = _stacks(place, ledger)
    records: list[CallRecord] = []
    for entry in entries:
        leaves = _Leaves(place)
        try:
            arguments = leaves.take(entry)
        except _NoSense as error:
            ledger.append(_note(place, f"reading '{entry.key[:80]}'", str(error)))
            continue
        ledger += [_note(place, f"reading a tensor of '{entry.key[:80]}'", why) for why in leaves.missing]
        call = numbering.name(entry.op, entry.source, entry.index)
        records.append(
            CallRecord(
                rank=place.rank,
                step=place.step,
                order=len(records),
                call=call,
                phase=entry.phase,
                arguments=arguments,
                slots=tuple(leaves.found),
                stack=stacks.get(entry.key, ()),
                recorded_as=entry.key,
            )
        )
    return Reading(tuple(join_backward(records, _with_wanted_gradients)), tuple(ledger))


_PHASES: tuple[Phase, ...] = ("forward", "backward")


def _with_wanted_gradients(record: CallRecord, forward: CallRecord | None) -> CallRecord:
    """Add the gradients of inputs, which the checker does not keep: a call has one for each input that required it."""
    wanted = (slot for slot in forward.slots if slot.requires_grad) if forward is not None else ()
    gradients = (replace(slot, slot=Slot("output", slot.slot.path), summary=None, content=None, note=UNRECORDED) for slot in wanted)
    return replace(record, slots=(*record.slots, *gradients))


def _note(place: Place, what: str, why: str) -> LedgerEntry:
    return LedgerEntry(what=what, why=why, step=place.step)


def _entries_of(place: Place, phase: Phase, ledger: list[LedgerEntry], backward: Path | None) -> Iterator[_Entry]:
    file = place.file.with_name(_other(place.file.name, phase))
    if backward is not None:
        file = place.file if phase == "forward" else backward
    elif not file.is_file() or (file == place.file and not _is_of(place.file, phase)):
        return
    unknown: list[str] = []
    for key, body in load_json(file).items():
        match = _KEY.fullmatch(key)
        if match is None or not isinstance(body, dict if phase == "forward" else list):
            unknown.append(key)
            continue
        namespace, name = match["namespace"], match["name"]
        yield _Entry(key, operation(namespace, name), f"{namespace}.{name}", int(match["index"]), phase, body)
    if unknown:
        why = f"entries such as '{unknown[0][:80]}' are no calls"
        ledger.append(LedgerEntry(what=f"reading {file.name}", why=why, step=place.step, count=len(unknown)))


def _is_of(file: Path, phase: Phase) -> bool:
    """Tell whether a file holds calls of this phase; a file with neither word in its name holds forward calls."""
    return phase in file.name or (phase == "forward" and "backward" not in file.name)


def _stacks(place: Place, ledger: list[LedgerEntry]) -> dict[str, tuple[Frame, ...]]:
    file = place.file.with_name(_other(place.file.name, "stack"))
    if file == place.file or not file.is_file():
        return {}
    try:
        found = load_json(file)
    except DamagedRunError as error:
        ledger.append(_note(place, f"reading {file.name}", str(error)))
        return {}
    return {key: user_frames(_frames(lines)) for key, lines in found.items() if isinstance(lines, list)}


class _NoSense(Exception):
    """An entry that cannot be read, and why."""


@dataclass(slots=True)
class _Leaves:
    """Walks the values of one entry: collects the tensors in `found` and turns the rest into arguments."""

    place: Place
    found: list[TensorRecord] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def take(self, entry: _Entry) -> Arguments | None:
        if entry.phase == "backward":
            for at, leaf in enumerate(entry.body):
                self._value(leaf, Slot("input", (at,)))
            return None
        args, kwargs = entry.body.get("args", []), entry.body.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise _NoSense("its args are no list, or its kwargs no object")
        positional = tuple(self._value(leaf, Slot("input", (at,))) for at, leaf in enumerate(args))
        named = {key: self._value(leaf, Slot("input", (key,))) for key, leaf in kwargs.items()}
        return Arguments(args=positional, kwargs=named or None)

    def _value(self, leaf: Any, slot: Slot) -> Any:
        if len(slot.path) > _MAX_DEPTH:
            raise _NoSense("its values are nested too deeply")
        if isinstance(leaf, list):
            return [self._value(part, Slot(slot.role, (*slot.path, at))) for at, part in enumerate(leaf)]
        if not isinstance(leaf, dict):
            return _plain(leaf)
        kind = leaf.get("type")
        if not isinstance(kind, str):
            return {key: self._value(part, Slot(slot.role, (*slot.path, key))) for key, part in leaf.items()}
        if kind == "NoneType":
            return None
        if kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            return self._tensor(leaf, slot)
        return _argument(kind, leaf)

    def _tensor(self, leaf: dict[str, Any], slot: Slot) -> Any:
        record = self._described(leaf, slot) if "shape" in leaf else self._real(leaf, slot)
        if record is None:
            return NOT_RECORDED
        self.found.append(record)
        return {"$tensor": str(slot)}

    def _described(self, leaf: dict[str, Any], slot: Slot) -> TensorRecord:
        shape, dtype = tensor_shape(leaf["shape"]), leaf.get("dtype")
        if shape is None or not isinstance(dtype, str):
            raise _NoSense(f"{slot} has the shape {str(leaf['shape'])[:60]} and the dtype {str(dtype)[:40]}, which no tensor has")
        name = canonical_dtype(dtype)
        return TensorRecord(
            slot=slot,
            dtype=name,
            shape=shape,
            requires_grad=leaf.get("requires_grad") is True,
            summary=summary(name, shape, low=leaf.get("Min"), high=leaf.get("Max"), mean=None, norm=None),
        )

    def _real(self, leaf: dict[str, Any], slot: Slot) -> TensorRecord | None:
        """Read the dtype and the shape of real data from its file: the json has neither."""
        content = _inside(self.place.tensors, leaf.get("datapath"))
        if content is None:
            self.missing.append(f"{slot}: the file {str(leaf.get('datapath'))[-120:]!r} is not in the recording")
            return None
        try:
            data = open_tensor(self.place.tensors / content)
        except (DamagedRunError, MissingDependencyError) as error:
            self.missing.append(f"{slot}: {error}")
            return None
        return TensorRecord(slot=slot, dtype=data.dtype, shape=data.shape, requires_grad=leaf.get("requires_grad") is True, content=content)


def _inside(folder: Path, path: object) -> str | None:
    """Return the part of a recorded path that lies in the folder of the recording, if that file is there."""
    if not isinstance(path, str) or not path.endswith((".pt", ".npy")) or "\0" in path or len(path) > 4096:
        return None
    parts = PurePosixPath(path.replace("\\", "/")).parts
    begins = [at for at, part in enumerate(parts) if _REAL_DATA.fullmatch(part)]
    if not begins or ".." in parts[begins[-1] :]:
        return None
    inner = "/".join(parts[begins[-1] :])
    try:
        file = (folder / inner).resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return inner if file.is_file() and file.is_relative_to(folder.resolve()) else None
