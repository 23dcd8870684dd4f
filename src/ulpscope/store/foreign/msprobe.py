# SPDX-License-Identifier: Apache-2.0
"""Read the dumps of msprobe, 1.x to 26.x: dump.json with stack.json, construct.json and dump_tensor_data/.

    dump/step0/rank0/dump.json      any of these four paths can be opened; `rank` alone and `proc4711`
                                    stand for a process that was not distributed

dump.json is needed; errors in the other two go to the ledger. Absolute paths inside a dump are not followed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ulpscope.errors import DamagedRunError, NotARunError
from ulpscope.model import Arguments, CallName, CallRecord, Frame, LedgerEntry, Phase, RunInfo, Slot, TensorRecord
from ulpscope.store.foreign.msprobe_words import (
    Leaf,
    gradient_leaves,
    input_containers,
    is_leaf,
    is_tensor,
    load_json,
    part_leaves,
    written_stacks,
)
from ulpscope.store.foreign.reader import (
    NOT_RECORDED,
    ForeignRun,
    Numbering,
    Place,
    Reading,
    canonical_dtype,
    fingerprint,
    join_backward,
    mark_late_inputs,
    number_ranks,
    operation,
    summary,
    tensor_shape,
    user_frames,
)

__all__ = ["open_dump", "open_files", "recognize"]

_HEAD_BYTES = 4096
_MAX_NAME = 1024

_API_NAME = re.compile(r"(?P<namespace>.+?)\.(?P<name>.+)\.(?P<index>\d{1,9})\.(?P<phase>forward|backward)")
_MODULE_NAME = re.compile(
    r"(?:Module|Cell)\.(?:(?P<path>.+)\.)?(?P<kind>[^.]+)\.(?P<phase>forward|backward|parameters_grad)(?:\.(?P<index>\d{1,9}))?"
)
_FRAME = re.compile(r"File (?P<file>.+?), line (?P<line>\d{1,9}), in (?P<function>.+?),? ?(?:\n(?P<code>.*))?", re.DOTALL)
_HEADER = re.compile(rb'"(task|level|framework)"\s*:\s*"([^"\\]*)"')


def recognize(path: Path) -> bool:
    """Tell whether the path looks like a dump of msprobe."""
    if path.is_file():
        return path.name == "dump.json" or (path.suffix == ".json" and b'"dump_data_dir"' in _head(path))
    return bool(_rank_folders(path))


def open_dump(path: Path) -> ForeignRun:
    """Open a dump by its root, a step folder, a rank folder or its dump.json."""
    places = tuple(_places(path))
    if not places:
        raise NotARunError(f"'{path}' holds no dump.json, neither itself nor in step*/rank* below; give the folder that holds the steps")
    return _run(path, places)


def open_files(path: Path, files: Mapping[tuple[int, int], Path]) -> ForeignRun:
    """Open dump files as one run, each at the rank and step that the caller gives; `path` is the run's name for the user."""
    return _run(path, tuple(Place(rank, step, file, file.parent / "dump_tensor_data") for (rank, step), file in files.items()))


def _run(path: Path, places: tuple[Place, ...]) -> ForeignRun:
    header = {key.decode(): value.decode("utf-8", "replace") for key, value in _HEADER.findall(_head(places[0].file))}
    world_size = len({place.rank for place in places})
    return ForeignRun(path, RunInfo(format="msprobe", tool="msprobe", world_size=world_size, options=header), places, _read)


def _head(file: Path) -> bytes:
    with _opened(file) as stream:
        return stream.read(_HEAD_BYTES)


def _opened(file: Path) -> IO[bytes]:
    try:
        return file.open("rb")
    except OSError as error:
        raise DamagedRunError(f"'{file}' cannot be opened ({error.strerror}); see whether it is still there and may be read") from None


def _places(path: Path) -> Iterator[Place]:
    if path.is_file():
        yield Place(0, _step_number(path.parent.parent), path, path.parent / "dump_tensor_data")
        return
    steps: dict[int, list[Path]] = {}
    for folder in _rank_folders(path):
        steps.setdefault(_step_number(folder.parent), []).append(folder)
    for step, folders in sorted(steps.items()):
        for rank, folder in number_ranks(folders).items():
            yield Place(rank, step, folder / "dump.json", folder / "dump_tensor_data")


def _rank_folders(path: Path) -> list[Path]:
    if (path / "dump.json").is_file():
        return [path]
    if not path.is_dir():
        return []
    candidates = [
        *_folders(path, r"(rank|proc|pid)\d*"),
        *(rank for step in _folders(path, r"step\d+") for rank in _folders(step, r"(rank|proc|pid)\d*")),
    ]
    return [folder for folder in candidates if (folder / "dump.json").is_file()]


def _folders(path: Path, pattern: str) -> list[Path]:
    if not os.access(path, os.R_OK | os.X_OK):
        return []
    return sorted(entry for entry in path.iterdir() if re.fullmatch(pattern, entry.name) and entry.is_dir())


def _step_number(folder: Path) -> int:
    match = re.fullmatch(r"step(\d{1,9})", folder.name)
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class _Name:
    """A key of `data`: our operation, the tool's operation and count, and what the entry holds."""

    op: str
    source: str
    index: int
    phase: Phase
    module: str | None = None
    is_parameters_grad: bool = False

    @classmethod
    def parse(cls, text: str) -> _Name | None:
        if len(text) > _MAX_NAME:
            return None
        if match := _MODULE_NAME.fullmatch(text):
            path, kind, phase = match["path"] or "", match["kind"], match["phase"]
            return cls(f"module.{kind}", f"{path}.{kind}", int(match["index"] or 0), _phase(phase), path, phase == "parameters_grad")
        if match := _API_NAME.fullmatch(text):
            namespace, name = match["namespace"], match["name"]
            return cls(operation(namespace, name), f"{namespace}.{name}", int(match["index"]), _phase(match["phase"]))
        return None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of `data`."""

    key: str
    name: _Name
    body: dict[str, Any]


def _phase(text: str) -> Phase:
    return "forward" if text == "forward" else "backward"


def _read(place: Place) -> Reading:
    data = load_json(place.file).get("data")
    if not isinstance(data, dict):
        raise DamagedRunError(f"'{place.file}' has no object named 'data', so it is no dump of msprobe; give another path")
    ledger: list[LedgerEntry] = []
    entries = _entries(place, data, ledger)
    dump = _Dump(
        place=place,
        entries=_in_order(entries),
        numbering=Numbering((entry.name.op, entry.name.source, entry.name.index) for entry in entries),
        stacks=_stacks(_side_file(place, "stack.json", ledger)),
        parents=_parents(_side_file(place, "construct.json", ledger)),
        kept=place.kept(),
    )
    return Reading(tuple(dump.records()), tuple(ledger))


def _entries(place: Place, data: dict[str, Any], ledger: list[LedgerEntry]) -> list[_Entry]:
    """Return the entries that are calls; the ledger gets the number of the others."""
    entries: list[_Entry] = []
    unknown: list[str] = []
    for key, body in data.items():
        name = _Name.parse(key)
        if name is None or not isinstance(body, dict):
            unknown.append(key)
        else:
            entries.append(_Entry(key, name, body))
    if unknown:
        why = f"entries such as '{unknown[0][:80]}' are no calls"
        ledger.append(LedgerEntry(what=f"reading {place.file.name}", why=why, step=place.step, count=len(unknown)))
    return entries


def _in_order(entries: list[_Entry]) -> list[_Entry]:
    """Move early gradients of parameters behind the backward: 1.x reserves the place of a parameter's gradient when its module runs
    forward.

    Gradients arrive in the opposite order, which is also the order of later versions.
    """
    backward = [at for at, entry in enumerate(entries) if entry.name.phase == "backward" and not entry.name.is_parameters_grad]
    if not backward:
        return entries
    early = [entry for entry in reversed(entries[: backward[0]]) if entry.name.is_parameters_grad]
    before = [entry for entry in entries[: backward[0]] if not entry.name.is_parameters_grad]
    return [*before, *entries[backward[0] : backward[-1] + 1], *early, *entries[backward[-1] + 1 :]]


def _side_file(place: Place, name: str, ledger: list[LedgerEntry]) -> dict[str, Any]:
    file = place.file.with_name(name)
    if not file.is_file():
        return {}
    try:
        return load_json(file)
    except DamagedRunError as error:
        ledger.append(LedgerEntry(what=f"reading {name}", why=str(error), step=place.step))
        return {}


def _stacks(data: dict[str, Any]) -> dict[str, tuple[Frame, ...]]:
    """Return the frames of each entry."""
    stacks: dict[str, tuple[Frame, ...]] = {}
    for names, frames in written_stacks(data):
        parsed = user_frames(_frames(frames))
        stacks.update((name, parsed) for name in names)
    return stacks


def _frames(lines: list[Any]) -> Iterator[Frame]:
    for line in lines:
        match = _FRAME.fullmatch(line) if isinstance(line, str) and len(line) < 8 * _MAX_NAME else None
        if match:
            yield Frame(match["file"], int(match["line"]), match["function"], (match["code"] or "").strip())


def _parents(data: dict[str, Any]) -> dict[str, str]:
    """Return the parent of each entry; under Megatron the value is [parent, number of the micro step]."""
    firsts = ((key, value[0] if isinstance(value, list) and value else value) for key, value in data.items())
    return {key: parent for key, parent in firsts if isinstance(parent, str)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dump:
    """The contents of the files of one step of one rank."""

    place: Place
    entries: list[_Entry]
    numbering: Numbering
    stacks: dict[str, tuple[Frame, ...]]
    parents: dict[str, str]
    kept: frozenset[str]

    def records(self) -> Iterator[CallRecord]:
        return join_backward(mark_late_inputs(self._record(order, entry) for order, entry in enumerate(self.entries)))

    def _record(self, order: int, entry: _Entry) -> CallRecord:
        name, slots = entry.name, tuple(self._tensors(entry))  # first, since it refuses what is nested too deeply
        parent = self.parents.get(entry.key, "")
        above = _Name.parse(parent)
        return CallRecord(
            rank=self.place.rank,
            step=self.place.step,
            order=order,
            call=self._call(name),
            phase=name.phase,
            level="api" if name.module is None else "module",
            module=name.module if name.module is not None else (above.module or "") if above else "",
            parent=str(self._call(above)) if above and self.numbering.knows(above.op, above.source, above.index) else parent,
            arguments=_arguments(entry.body) if name.phase == "forward" else None,
            slots=slots,
            stack=self.stacks.get(entry.key, ()),
            recompute=entry.body.get("is_recompute") is True,
            recorded_as=entry.key,
        )

    def _call(self, name: _Name) -> CallName:
        call = self.numbering.name(name.op, name.source, name.index)
        return CallName(f"{call.op}.parameters_grad", call.index) if name.is_parameters_grad else call

    def _tensors(self, entry: _Entry) -> Iterator[TensorRecord]:
        leaves = gradient_leaves if entry.name.is_parameters_grad else part_leaves
        for leaf in leaves(entry.body, entry.key, self.place.file):
            if is_tensor(leaf.value):
                yield self._tensor(leaf, entry.key)

    def _tensor(self, leaf: Leaf, key: str) -> TensorRecord:
        said, slot = leaf.value, Slot(leaf.role, leaf.path)
        dtype, shape = canonical_dtype(str(said["dtype"])), tensor_shape(said["shape"])
        if shape is None:
            raise DamagedRunError(
                f"'{self.place.file}' gives {slot} of '{key}' the shape {str(said['shape'])[:60]}, which is none; dump this run again"
            )
        content, note = self._content(said.get("data_name"))
        return TensorRecord(
            slot=slot,
            dtype=dtype,
            shape=shape,
            requires_grad=said.get("requires_grad") is True,
            summary=summary(dtype, shape, low=said.get("Min"), high=said.get("Max"), mean=said.get("Mean"), norm=said.get("Norm")),
            fingerprint=fingerprint(said.get("md5")),
            content=content,
            note=note,
        )

    def _content(self, name: object) -> tuple[str | None, str]:
        if not isinstance(name, str) or not name.endswith((".pt", ".npy")):
            return None, ""
        if name in self.kept:
            return name, ""
        return None, f"the file '{name[:200]}' is not in the dump"


def _arguments(body: dict[str, Any]) -> Arguments:
    """Rebuild the arguments of a forward call, with a reference where a tensor stood."""
    args, kwargs = (dict(_by_place(container)) for container in input_containers(body))
    return Arguments(args=tuple(args.values()), kwargs={str(key): value for key, value in kwargs.items()} or None)


def _by_place(container: Any) -> Iterator[tuple[int | str, Any]]:
    """Return the values of a container by position or name; a lone leaf counts as position 0."""
    if isinstance(container, dict) and not is_leaf(container):
        places: Iterable[tuple[int | str, Any]] = container.items()
    else:
        places = enumerate(container if isinstance(container, list) else [] if container is None else [container])
    for key, leaf in places:
        yield key, _argument_value(leaf, Slot("input", (key,)))


def _argument_value(leaf: Any, slot: Slot) -> Any:
    if isinstance(leaf, list):
        return [_argument_value(part, Slot(slot.role, (*slot.path, at))) for at, part in enumerate(leaf)]
    if not isinstance(leaf, dict):
        return _plain(leaf)
    if is_tensor(leaf):
        return {"$tensor": str(slot)}
    if is_leaf(leaf):
        return _argument(leaf["type"], leaf)
    return {key: _argument_value(part, Slot(slot.role, (*slot.path, key))) for key, part in leaf.items()} or NOT_RECORDED


def _plain(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return {"$int": str(value)}
    return value


def _argument(kind: str, leaf: dict[str, Any]) -> Any:
    """Turn a leaf that is no tensor into our notation."""
    value = leaf.get("value")
    name = str(value if value is not None else leaf.get("format", "")).removeprefix("torch.")
    match kind:
        case "int" | "float" | "bool" | "str":
            return _plain(value)
        case "slice":
            return {"$slice": value}
        case "ellipsis":
            return {"$ellipsis": True}
        case "torch.Size":
            return {"$size": value}
        case "torch.dtype":
            return {"$dtype": name}
        case "torch.device":
            return {"$device": name}
        case "torch.memory_format":
            return {"$memory_format": name}
        case "complex" if isinstance(value, list):
            return {"$complex": value}
    rest = {key: part for key, part in leaf.items() if key != "type"}
    return {"$object": kind, "repr": json.dumps(rest)[:200]}
