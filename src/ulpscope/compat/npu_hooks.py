# SPDX-License-Identifier: Apache-2.0
"""Serve scripts of torch_npu.hooks (2022): dump every operator and leaf module of a model into one file, compare two files into a csv.

    from ulpscope.compat import npu_hooks
    npu_hooks.install()                       # from here on `from torch_npu.hooks import ...` works as it used to

Recording begins with `register_acc_cmp_hook` and goes on until the process ends, as it always did; lines are written while a path is set.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import json
import os
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ulpscope.compat.bridge import add_finding
from ulpscope.compat.seeding import seed_all
from ulpscope.errors import InputError
from ulpscope.format.content import content_hash
from ulpscope.measure import measure_tensors
from ulpscope.model import CallRecord, LedgerEntry, SinkAbilities, Slot, TensorData, Undefined
from ulpscope.numerics.casting import real_dtype, reals, widen
from ulpscope.report.escaping import visible
from ulpscope.store.foreign.npu_hooks import HooksLine, HooksRun

if TYPE_CHECKING:
    import torch

    from ulpscope.workflows.record.capturing import Capture

__all__ = ["compare", "install", "register_acc_cmp_hook", "seed_all", "set_dump_path"]

COLUMNS = ("Name", "Npu Tensor Dtype", "Bench Tensor Dtype", "Npu Tensor Shape", "Bench Tensor Shape", "Cosine", "RMSE", "MAPE")
_PREFIXES = {"functional": "Functional", "Tensor": "Tensor", "torch": "Torch", "module": "Module"}
_MOVES = frozenset({"cpu", "cuda", "npu"})


# ---- dumping


class HooksSink:
    """Writes the lines of the old tool. The text of a tensor's values is made once and kept in an unnamed file."""

    abilities = SinkAbilities(shows_overwritten=True)

    def __init__(self) -> None:
        self.path: Path | None = None
        self.leaves: frozenset[str] = frozenset()
        self._texts: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[str, tuple[int, int]] = {}

    def begin_step(self, step: int) -> None:
        """Do nothing: this tool has no steps."""

    def end_step(self) -> None:
        """Do nothing: this tool has no steps."""

    def note(self, entry: LedgerEntry) -> None:
        print(visible(f"ulpscope: could not {entry.what}: {entry.why}"), file=sys.stderr)

    def close(self, *, complete: bool = True) -> None:
        self._texts.close()

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        data = np.frombuffer(buffer, np.uint8)
        key = f"{content_hash(data.data)}:{dtype}"
        if key not in self._places:
            text = json.dumps(_values(dtype, data)).encode()
            self._places[key] = (self._texts.seek(0, os.SEEK_END), len(text))
            self._texts.write(text)
        return key

    def write(self, record: CallRecord) -> None:
        name = self._name(record)
        if self.path is None or name is None:
            return
        with self.path.open("ab") as file:
            for slot in record.slots:
                if slot.content is not None and slot.slot.role in ("input", "output"):
                    place, size = self._places[slot.content]
                    self._texts.seek(place)
                    head = json.dumps(f"{name}_{record.phase}_{_slot_name(slot.slot, record)}").encode()
                    tail = json.dumps([f"torch.{slot.dtype}", list(slot.shape)]).encode()
                    file.write(b"[" + head + b", " + self._texts.read(size) + b", " + tail[1:] + b"\n")

    def _name(self, record: CallRecord) -> str | None:
        namespace, _, op = record.call.op.partition(".")
        if record.phase not in ("forward", "backward") or record.recompute or namespace not in _PREFIXES:
            return None
        if op in _MOVES or (op.startswith("_") and not op.startswith("__")) or (namespace == "module" and op not in self.leaves):
            return None
        return f"{_PREFIXES[namespace]}_{op}"


def _values(dtype: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        return widen(real_dtype(dtype), reals(dtype, data)).astype(np.float32).tolist()  # type: ignore[no-any-return]


def _slot_name(slot: Slot, record: CallRecord) -> str:
    """Name a slot: arguments are always numbered; a single result is not."""
    alone = slot.role == "output" and record.phase == "forward" and sum(other.slot.role == "output" for other in record.slots) == 1
    return slot.role if alone and slot.path == (0,) else str(slot)


@dataclass(slots=True)
class _Hooks:
    """The state that the old functions share in a process."""

    sink: HooksSink
    models: list[torch.nn.Module]
    capture: Capture


_hooks: _Hooks | None = None
_wanted_path: Path | None = None


def set_dump_path(fpath: str | os.PathLike[str]) -> None:
    """Name the file that later records are appended to.

    >>> set_dump_path("./npu_module_op.pkl")  # doctest: +SKIP
    """
    global _wanted_path
    path = Path(fpath)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"set_dump_path wants a file in a folder that exists, not '{path}'; write for example './npu_module_op.pkl'")
    _wanted_path = path.absolute()
    if _hooks is not None:
        _hooks.sink.path = _wanted_path


def register_acc_cmp_hook(model: torch.nn.Module) -> None:
    """Record every call of the process from here on, with the leaf modules of this model and of those registered before it.

    >>> register_acc_cmp_hook(model)  # doctest: +SKIP
    """
    global _hooks
    import torch

    from ulpscope.workflows.record.capturing import Capture

    if not isinstance(model, torch.nn.Module):
        raise InputError(f"register_acc_cmp_hook wants a torch.nn.Module, not {type(model).__name__}")
    models = [*_hooks.models, model] if _hooks is not None else [model]
    stop()
    sink = HooksSink()
    sink.path = _wanted_path
    sink.leaves = frozenset(type(part).__name__ for each in models for part in each.modules() if next(part.children(), None) is None)
    capture = Capture.into_sink(lambda rank: sink, operators=True, model=models, level="both", keep="tensors")
    capture.start()
    _hooks = _Hooks(sink, models, capture)
    atexit.unregister(stop)
    atexit.register(stop)


def stop() -> None:
    """Stop recording and put back what was patched; the old tool had no word for it and needs none."""
    global _hooks
    if _hooks is not None:
        _hooks.capture.stop()
    _hooks = None


# ---- comparing


@dataclass(frozen=True, slots=True)
class _Operator:
    lines: tuple[HooksLine, ...]

    def key(self, with_shapes: bool) -> tuple[object, ...]:
        return tuple((line.name, line.shape) if with_shapes else line.name for line in self.lines)


def compare(
    npu_pkl_path: str | os.PathLike[str],
    bench_pkl_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    shape_flag: bool = True,
) -> None:
    """Compare two dumps into a csv with Cosine, RMSE and MAPE; the bench is taken as the truth.

    >>> compare("./npu_module_op.pkl", "./cpu_module_op.pkl", "./module_result.csv")  # doctest: +SKIP

    Operators match by name and by the number and shapes of their tensors (`shape_flag=False`: by name and number). One without a match
    is skipped, and matching goes on at the next operator that both have.
    """
    npu, bench = (HooksRun(_existing(path)) for path in (npu_pkl_path, bench_pkl_path))
    output = Path(output_path)
    with _unrecorded():
        _compare(npu, bench, output, shape_flag)


def _compare(npu: HooksRun, bench: HooksRun, output: Path, shape_flag: bool) -> None:
    with output.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for ours, theirs in _matched(list(_operators(npu)), list(_operators(bench)), shape_flag):
            rows.writerows(_row(npu, bench, left, right) for left, right in zip(ours.lines, theirs.lines, strict=True))
    print(f"the result is in {visible(str(output))}")
    add_finding(npu, bench, output.with_suffix(".html"))


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Pause the capture, since comparing computes too and is no part of the dump."""
    capture = _hooks.capture if _hooks is not None else None
    if capture is None:
        yield
        return
    capture.pause()
    try:
        yield
    finally:
        capture.resume()


def _existing(path: str | os.PathLike[str]) -> Path:
    if not Path(path).is_file():
        raise InputError(f"compare wants the file that set_dump_path named, and '{path}' is none; see what the two dumps were called")
    return Path(path)


def _operators(run: HooksRun) -> Iterator[_Operator]:
    """Group lines into operators; an operator ends with its last output."""
    lines: list[HooksLine] = []
    for line in run.lines():
        if lines and lines[-1].is_output and (not line.is_output or _stem(line) != _stem(lines[-1])):
            yield _Operator(tuple(lines))
            lines = []
        lines.append(line)
    if lines:
        yield _Operator(tuple(lines))


def _stem(line: HooksLine) -> str:
    return line.name.partition("_output")[0]


def _matched(npu: list[_Operator], bench: list[_Operator], with_shapes: bool) -> Iterator[tuple[_Operator, _Operator]]:
    places: dict[tuple[object, ...], list[int]] = {}
    for place, operator in enumerate(bench):
        places.setdefault(operator.key(with_shapes), []).append(place)
    ours = theirs = 0
    while (found := _next_common(npu, places, ours, theirs, with_shapes)) is not None:
        ours, theirs = found
        yield npu[ours], bench[theirs]
        ours, theirs = ours + 1, theirs + 1


def _next_common(
    npu: list[_Operator], places: dict[tuple[object, ...], list[int]], ours: int, theirs: int, with_shapes: bool
) -> tuple[int, int] | None:
    """Find the next operator that both have: the one that skips the fewest on both sides together."""
    best: tuple[int, int] | None = None
    for skipped in count():
        if ours + skipped >= len(npu) or (best is not None and skipped >= best[0] + best[1]):
            break
        candidates = places.get(npu[ours + skipped].key(with_shapes), [])
        at = bisect_left(candidates, theirs)
        if at < len(candidates) and (best is None or skipped + candidates[at] - theirs < best[0] + best[1]):
            best = (skipped, candidates[at] - theirs)
    return None if best is None else (ours + best[0], theirs + best[1])


def _row(npu: HooksRun, bench: HooksRun, left: HooksLine, right: HooksLine) -> list[object]:
    facts: list[object] = [left.name, left.dtype, right.dtype, list(left.shape), list(right.shape)]
    if left.shape != right.shape:
        return [*facts, *["cannot be calculated"] * 3]
    ours, theirs = npu.values(left.offset, left.shape), bench.values(right.offset, right.shape)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()) or not ours.size:
        return [*facts, "nan", "nan", "nan"]
    measured = measure_tensors(_data(ours, left.shape), _data(theirs, right.shape))
    cosine = _one_direction(ours, theirs) if isinstance(measured.cosine, Undefined) else measured.cosine
    return [*facts, cosine, measured.rms_error, _mape(ours.astype(np.float64), theirs.astype(np.float64))]


def _data(values: np.ndarray[Any, np.dtype[np.float32]], shape: tuple[int, ...]) -> TensorData:
    return TensorData("float32", shape, values.view(np.uint8).data)


def _one_direction(ours: np.ndarray[Any, np.dtype[np.float32]], theirs: np.ndarray[Any, np.dtype[np.float32]]) -> float | str:
    """Return the cosine of single numbers by the guide's formula; a vector of zeros has none."""
    return float(np.sign(ours[0]) * np.sign(theirs[0])) if ours.size == 1 and ours[0] and theirs[0] else "nan"


def _mape(ours: np.ndarray[Any, np.dtype[np.float64]], theirs: np.ndarray[Any, np.dtype[np.float64]]) -> float | str:
    return float(np.mean(np.abs((ours - theirs) / theirs))) if theirs.all() else "nan"


# ---- the old import names


def install() -> None:
    """Make `from torch_npu.hooks import ...` and `from torch_npu.hooks.tools import compare` work.

    A real torch_npu stays what it is and gets the two modules added; where it has hooks of its own, they stay too.
    """
    parent = _torch_npu()
    if getattr(parent, "hooks", None) is not None or "torch_npu.hooks" in sys.modules:
        return
    tools = _module("torch_npu.hooks.tools", compare=compare)
    names = {"set_dump_path": set_dump_path, "seed_all": seed_all, "register_acc_cmp_hook": register_acc_cmp_hook}
    parent.hooks = _module("torch_npu.hooks", tools=tools, **names)  # type: ignore[attr-defined]


def _torch_npu() -> ModuleType:
    if "torch_npu" in sys.modules or find_spec("torch_npu") is not None:
        return __import__("torch_npu")
    module = _module("torch_npu")
    module.__path__ = []
    return module


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name, "Served by ulpscope.compat.npu_hooks.")
    vars(module).update(contents, __all__=[each for each in contents if each != "tools"])
    if "tools" in contents:
        module.__path__ = []
    sys.modules[name] = module
    return module
