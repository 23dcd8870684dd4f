# SPDX-License-Identifier: Apache-2.0
"""Write the dumps of msprobe as its 1.x and its 26.x line lay them out; the real tool reads both.

    {dump_path}/step0/rank0/dump.json            statistics of every call, `Functional.conv2d.0.forward`
                            stack.json           1.x: by name; 26.x: equal stacks once, with the names they belong to
                            construct.json       which module a call or module stands in; empty at level L1
                            dump_tensor_data/    Functional.conv2d.0.forward.input.0.pt

A process that is not distributed writes to `rank` (1.x) or `proc{pid}` (26.x). dump.json is valid JSON after each entry, the others after
each `flush`.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ulpscope.compat.json_files import GrowingJson
from ulpscope.compat.msprobe.dump.choosing import Choice
from ulpscope.compat.msprobe.dump.entry_names import Names, OldName
from ulpscope.compat.positions import with_positions
from ulpscope.compat.pt_files import save_pt
from ulpscope.compat.ptdbg.files.line_slots import floating_inputs
from ulpscope.compat.tensor_files import TensorFiles
from ulpscope.model import DTYPES, Arguments, CallName, CallRecord, Frame, LedgerEntry, SinkAbilities, Slot, Summary, TensorRecord
from ulpscope.report.escaping import visible

__all__ = ["Described", "DumpOptions", "Layout", "MsprobeSink", "json_header", "numbers_of"]

Layout: TypeAlias = Literal["1.x", "26.x"]

_WITH_MEAN = frozenset({"float16", "bfloat16", "float32"})
_WITHOUT_NUMBERS = ("float8", "float4")


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """Options of a written call. `checksum` is "md5" (the CRC-32 that the old tool calls so), "xor" or empty."""

    task: str = "statistics"
    level: str = "L1"
    layout: Layout = "26.x"
    checksum: Literal["", "md5", "xor"] = ""
    extra_info: bool = True
    values: Literal["none", "some", "all"] = "none"

    @property
    def has_data(self) -> bool:
        """Tell whether dump.json has entries; the task "structure" writes only stacks and parents."""
        return self.task != "structure"


class MsprobeSink:
    """Writes one rank of a dump; implements Sink. `folder` returns the folder of the current step."""

    abilities = SinkAbilities(shows_overwritten=True)

    def __init__(self, folder: Callable[[], Path], options: DumpOptions, names: Names, choice: Choice) -> None:
        self._folder = folder
        self._options = options
        self._names = names
        self._choice = choice
        self._step: _StepFiles | None = None

    def begin_step(self, step: int) -> None:
        self.end_step()
        self._names.begin_step()
        self._choice.begin_step()
        self._open()

    def _open(self) -> None:
        self._step = _StepFiles(self._folder(), self._options, self._names, self._choice)

    def end_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None

    def flush(self) -> None:
        """Write what is known of the current step; it stays open."""
        if self._step is not None:
            self._step.flush()

    def close(self, *, complete: bool = True) -> None:
        self.end_step()

    def note(self, entry: LedgerEntry) -> None:
        print(visible(f"msprobe: could not {entry.what}: {entry.why}"), file=sys.stderr)

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        return self._step.keep(dtype, shape, buffer) if self._step is not None else None

    def write(self, record: CallRecord) -> None:
        if self._step is None:
            return
        if record.level == "state":
            self._step.remember_parameters(record)
        elif record.phase in ("forward", "backward") and not (record.recompute and record.phase == "forward"):
            self._step.write(with_positions(record))


class _StepFiles:
    """The three json files and the tensors of one step."""

    def __init__(self, folder: Path, options: DumpOptions, names: Names, choice: Choice) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._options = options
        self._names = names
        self._choice = choice
        self._tensors = TensorFiles(folder / "dump_tensor_data", save_pt)
        self._records = GrowingJson(folder / "dump.json", *json_header(folder, options))
        self._construct = folder / "construct.json"
        self._parents: dict[str, str | None] = {}
        self._stacks = _Stacks(folder / "stack.json", options.layout)
        self._parameters: dict[str, list[tuple[str, TensorRecord]]] = {}
        self._checksums: dict[str, str] = {}
        self._inputs: dict[CallName, list[tuple[int | str, ...]]] = {}

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str:
        key = self._tensors.keep(dtype, shape, buffer) if self._options.values != "none" else ""
        if self._options.checksum:
            checksum = f"{zlib.crc32(buffer):08x}" if self._options.checksum == "md5" else _xor(buffer)
            key = key or f"{checksum}-{dtype}"
            self._checksums[key] = checksum
        return key

    def remember_parameters(self, record: CallRecord) -> None:
        if record.call.op != "state.parameters":
            return
        for slot in record.slots:
            path = ".".join(map(str, slot.slot.path)).split(".")
            if slot.slot.role == "parameter":
                self._parameters.setdefault(".".join(path[:-1]), []).append((path[-1], slot))

    def write(self, record: CallRecord) -> None:
        known = self._names.name(record.module, record.call)
        if record.phase == "forward" and self._choice.needs_backward:
            self._inputs[record.call] = floating_inputs(record)
        if known is None or not self._choice.wants(record, known):
            return
        name = known.of(record.phase)
        if self._options.extra_info:
            self._remember_place(record, name)
        if not self._options.has_data:
            return
        if record.phase == "forward":
            self._records.add(name, self._forward(record, self._described(name)))
        else:
            self._backward(record, known)

    def _remember_place(self, record: CallRecord, name: str) -> None:
        if record.phase == "forward":
            self._stacks.add(name, record.stack)
        if self._options.level != "L1":
            parent = self._names.known(record.parent)
            self._parents[name] = parent.of(record.phase) if parent is not None else None

    def _described(self, name: str) -> Described:
        has_values = self._options.values == "all" or (self._options.values == "some" and self._choice.keeps_values(name))
        return Described(self._tensors if has_values else None, self._checksums, name, self._options.layout)

    def _forward(self, record: CallRecord, described: Described) -> dict[str, Any]:
        slots = {str(slot.slot): slot for slot in record.slots}
        entry: dict[str, Any] = {}
        arguments = record.arguments or Arguments()
        if self._choice.has_part("forward", "input"):
            entry["input_args"] = [described.value(part, f"input.{at}", slots) for at, part in enumerate(arguments.args)]
            entry["input_kwargs"] = {
                name: described.value(part, f"kwargs.{name}", slots) for name, part in (arguments.kwargs or {}).items()
            }
        if self._choice.has_part("forward", "output"):
            returned = [slot for slot in record.slots if slot.slot.role == "output"]
            entry["output"] = described.nested(returned or [slot for slot in record.slots if slot.slot.role == "mutated"], "output")
        if record.level == "module" and entry:
            named = self._parameters.get(record.module, [])
            entry["parameters"] = {name: described.tensor(slot, f"parameters.{name}") for name, slot in named}
        return entry

    def _backward(self, record: CallRecord, name: OldName) -> None:
        is_module = name.count is not None
        gradients = [slot for slot in record.slots if slot.slot.role == "gradient"]
        if is_module and gradients and self._choice.has_part("backward", "output"):
            grad_name = f"{name.stem}.parameters_grad" + (f".{name.count}" if self._options.layout == "26.x" else "")
            described = self._described(grad_name)
            self._records.add(grad_name, {_last(slot): [described.tensor(slot, _last(slot))] for slot in gradients})
        described = self._described(name.of("backward"))
        entry: dict[str, Any] = {}
        if self._choice.has_part("backward", "input"):
            entry["input"] = described.nested([slot for slot in record.slots if slot.slot.role == "input"], "input")
        if self._choice.has_part("backward", "output"):
            roles = ("output",) if is_module else ("output", "gradient")
            made = {slot.slot.path: slot for slot in sorted(record.slots, key=_position) if slot.slot.role in roles}
            paths = [*self._inputs.get(record.call, []), *made]
            entry["output"] = [
                described.tensor(made[path], f"output.{at}") if path in made else None for at, path in enumerate(dict.fromkeys(paths))
            ]
        self._records.add(name.of("backward"), entry)

    def flush(self) -> None:
        """Write parents and, in 26.x, stacks, which are known at the end only."""
        construct = GrowingJson(self._construct)
        for name, parent in self._parents.items():
            construct.add(name, parent)
        construct.close()
        self._stacks.flush()

    def close(self) -> None:
        self._records.close()
        self.flush()
        self._stacks.close()
        self._tensors.close()


def json_header(folder: Path, options: DumpOptions) -> tuple[str, str]:
    """Return the texts before and behind the entries of dump.json and debug.json."""
    tensors = str((folder / "dump_tensor_data").absolute()) if options.values != "none" else None
    header = {"task": options.task, "level": options.level, "framework": "pytorch", "dump_data_dir": tensors}
    return f'{json.dumps(header)[:-1]}, "data": {{\n', "\n}}"


def _xor(buffer: Any) -> str:
    """Fold the bytes into 64 bits."""
    data = bytes(buffer)
    words = np.frombuffer(data + bytes(-len(data) % 8), np.uint64)
    return f"0x{int(np.bitwise_xor.reduce(words)) if words.size else 0:016x}"


def _position(slot: TensorRecord) -> list[tuple[bool, int | str]]:
    """Return a sort key: positions first, names after them."""
    return [(isinstance(part, str), part) for part in slot.slot.path]


def _last(slot: TensorRecord) -> str:
    return str(slot.slot.path[-1])


class Described:
    """Describes the values of one entry as the old tool does. With `tensors`, each has a file named after the entry."""

    def __init__(self, tensors: TensorFiles | None, checksums: dict[str, str], name: str, layout: Layout) -> None:
        self._tensors = tensors
        self._checksums = checksums
        self._name = name
        self._layout = layout

    def value(self, value: Any, place: str, slots: dict[str, TensorRecord]) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [self.value(part, f"{place}.{at}", slots) for at, part in enumerate(value)]
        if isinstance(value, dict):
            return self._special(value, place, slots)
        return {"type": type(value).__name__, "value": value}

    def _special(self, value: dict[str, Any], place: str, slots: dict[str, TensorRecord]) -> Any:
        kind = next(iter(value), "")
        content = value.get(kind)
        if kind == "$tensor":
            return self.tensor(slots[content], place) if content in slots else None
        if kind in ("$tuple", "$size"):
            return self.value(list(content), place, slots)  # type: ignore[arg-type]
        if kind in ("$dtype", "$memory_format", "$layout"):
            return {"type": f"torch.{kind[1:]}", "value": f"torch.{content}"}
        if kind == "$device":
            return {"type": "torch.device", "value": str(content)}
        if kind == "$slice":
            return {"type": "slice", "value": content}
        if kind == "$ellipsis":
            return {"type": "ellipsis", "value": "..."}
        if kind == "$int":
            return {"type": "int", "value": int(str(content))}
        if kind.startswith("$"):
            return {"type": str(content)[:80], "value": str(value.get("repr", content))[:200]}
        return {name: self.value(part, f"{place}.{name}", slots) for name, part in value.items()}

    def nested(self, slots: list[TensorRecord], role: str) -> list[Any]:
        """Nest tensors in lists by their paths; a place without a tensor is null."""
        return _nested({slot.slot.path: self.tensor(slot, _place(role, slot.slot)) for slot in slots})

    def tensor(self, slot: TensorRecord, place: str) -> dict[str, Any]:
        leaf: dict[str, Any] = {"type": "torch.Tensor", "dtype": f"torch.{slot.dtype}", "shape": list(slot.shape)}
        leaf |= numbers_of(slot, self._layout)
        leaf["requires_grad"] = slot.requires_grad
        if slot.content is not None and slot.content in self._checksums:
            leaf["md5"] = self._checksums[slot.content]
        if slot.content is not None and self._tensors is not None:
            leaf["data_name"] = f"{self._name}.{place}.pt" if place else f"{self._name}.pt"
            self._tensors.link(slot.content, leaf["data_name"])
        return leaf


def _place(role: str, slot: Slot) -> str:
    return ".".join((role, *map(str, slot.path or (0,))))


def _nested(leaves: dict[tuple[int | str, ...], Any]) -> list[Any]:
    groups: dict[int, dict[tuple[int | str, ...], Any]] = {}
    for path, leaf in leaves.items():
        at = path[0] if path and isinstance(path[0], int) else len(groups)
        groups.setdefault(at, {})[path[1:]] = leaf
    return [_group(groups.get(at, {(): None})) for at in range(max(groups, default=-1) + 1)]


def _group(group: dict[tuple[int | str, ...], Any]) -> Any:
    if () in group:
        return group[()]
    if all(isinstance(path[0], str) for path in group):
        return {str(path[0]): leaf for path, leaf in group.items()}
    return _nested(group)


def numbers_of(slot: TensorRecord, layout: Layout) -> dict[str, Any]:
    """Return Max, Min, Mean and Norm as the old tool takes them: NaN spreads, a bool says any and all.

    Integers and doubles have a mean and a norm in 1.x alone. The old tool takes those of a complex tensor from its magnitudes; they are not
    written here.
    """
    summary, dtype = slot.summary, DTYPES.get(slot.dtype)
    if summary is None or dtype is None or summary.numel == 0 or slot.dtype.startswith(_WITHOUT_NUMBERS) or dtype.kind == "complex":
        return {"Max": None, "Min": None, "Mean": None, "Norm": None}
    high, low = _extremes(summary)
    if slot.dtype == "bool":
        return {"Max": bool(high), "Min": bool(low), "Mean": None, "Norm": None}
    if slot.dtype in _WITH_MEAN or layout == "1.x":
        return {"Max": high, "Min": low, "Mean": _mean(summary), "Norm": _norm(summary)}
    if dtype.is_floating:
        return {"Max": high, "Min": low, "Mean": None, "Norm": None}
    return {"Max": _whole(high), "Min": _whole(low), "Mean": None, "Norm": None}


def _extremes(summary: Summary) -> tuple[float | None, float | None]:
    return (math.nan, math.nan) if summary.num_nan else (summary.max, summary.min)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _mean(summary: Summary) -> float | None:
    if summary.num_nan or (summary.num_posinf and summary.num_neginf):
        return math.nan
    if summary.num_posinf or summary.num_neginf:
        return math.inf if summary.num_posinf else -math.inf
    return summary.mean


def _norm(summary: Summary) -> float | None:
    if summary.num_nan:
        return math.nan
    if summary.num_posinf or summary.num_neginf:
        return math.inf
    return None if summary.rms is None else summary.rms * math.sqrt(summary.numel)


class _Stacks:
    """Writes stack.json: by name in 1.x; in 26.x each distinct stack once, which is known only at the end."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._file = GrowingJson(path) if layout == "1.x" else None
        self._shared: dict[tuple[Frame, ...], list[str]] = {}

    def add(self, name: str, stack: tuple[Frame, ...]) -> None:
        if self._file is not None:
            self._file.add(name, [_frame(frame) for frame in stack])
        else:
            self._shared.setdefault(stack, []).append(name)

    def flush(self) -> None:
        if self._file is not None:
            return
        file = GrowingJson(self._path)
        for number, (stack, names) in enumerate(self._shared.items()):
            file.add(str(number), [names, [_frame(frame) for frame in stack]])
        file.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _frame(frame: Frame) -> str:
    return f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.code}"
