# SPDX-License-Identifier: Apache-2.0
"""Ask questions of a program, in the process that runs it; each answer is a figure or a sentence of a `Row`.

1. Is everything bitwise what it was, at every level?
2. Do two runs from one seed compare as the same (exit 0)?
3. Does `check` find nothing wrong, and how many calls could it judge?
4. Does another precision, attention or device go without a fault?

Unwritten memory is filled with another byte before every run (the allocator of glibc does that on request), so that a program which depends
on it shows so each time and not now and then. If its own results depend on it, it is left out of 1, and still asked 2.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from bench.programs.catalogue import Program, Way, run
from bench.programs.known import gone, is_known
from bench.programs.ranks import record_layout
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harmless.programs import Nothing, differences
from ulpscope import Capture, check_run, compare_runs, open_run
from ulpscope.errors import InputError

__all__ = ["ENVIRONMENT", "EXIT_CODES", "Pair", "Row", "ask"]

LEVELS = ("api", "both", "op")
EXIT_CODES = {"same": 0, "rounding": 0, "diverges": 1, "unknown": 2}
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
"""Has to stand in the environment of a process before it begins: without small caches of its own, the allocator fills what it hands out."""

_FILLS = (0x42, 0x3F)
_M_PERTURB = -6
_MOST = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """The answer of `compare` for two runs: its exit code, and its first headline where something is found."""

    exit_code: int
    headline: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The answers for one program. `problem` says why there are none.

    `changed_by_torch` is what differs at level op and differs in the same way under a dispatch mode that does nothing: in some formulas
    torch asks whether any such mode is on, and computes otherwise then.
    """

    key: str
    device: str = "cpu"
    problem: str = ""
    is_repeatable: bool = True
    changed: tuple[str, ...] = ()
    changed_by_torch: tuple[str, ...] = ()
    ledger: tuple[str, ...] = ()
    num_calls: dict[str, int] = field(default_factory=dict)
    num_checked: int = 0
    num_skipped: int = 0
    failures: tuple[str, ...] = ()
    skips: dict[str, int] = field(default_factory=dict)
    pairs: dict[str, Pair] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def share(self) -> float:
        """Return the share of the calls to check that were judged."""
        return self.num_checked / (self.num_checked + self.num_skipped) if self.num_checked else 0.0

    @property
    def complaints(self) -> list[str]:
        """Say what is wrong with this program; a finding known to be true (`bench.programs.known`) is no complaint, unless it is gone."""
        found = [f"did not end: {self.problem}"] if self.problem else []
        found += _some("changed by recording", self.changed)
        found += _some("in the ledger", self.ledger)
        found += _some("check fails", tuple(text for text in self.failures if not self._is_known("check", text)))
        for name, pair in self.pairs.items():
            allowed = (0,) if name == "same seed" else (0, 2)
            is_right = pair.exit_code in allowed or (pair.exit_code == 1 and self._is_known(name, pair.headline))
            found += [] if is_right else [f"{name}: exit {pair.exit_code}, {pair.headline}"]
        return found + self._gone()

    def _is_known(self, question: str, text: str) -> bool:
        return self.device == "cpu" and is_known(self.key, question, text)

    def _gone(self) -> list[str]:
        """Return the known findings that these answers do not hold."""
        answers = {name: (pair.headline,) if pair.exit_code == 1 else () for name, pair in self.pairs.items()}
        asked = answers | ({"check": self.failures} if self.num_checked else {})
        return gone(self.key, asked) if self.device == "cpu" and not self.problem else []


def _some(what: str, texts: tuple[str, ...]) -> list[str]:
    more = [f"{what}: {len(texts) - _MOST} more"] if len(texts) > _MOST else []
    return [f"{what}: {text}" for text in texts[:_MOST]] + more


class _Idle(TorchDispatchMode):
    """Stands where a capture at level op would, and does nothing."""

    def __init__(self, model: Any = None, optimizer: Any = None) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    def step(self) -> None: ...


def ask(program: Program, device: str, folder: Path) -> Row:
    """Run a program bare and recorded below `folder` and ask every question about it on a device."""
    begin = time.perf_counter()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = _laid_out(program, folder) if program.kind == "layout" else _alone(program, replace(program.way, device=device), folder)
        row = _checked(row, folder / "api", device)
        for name, subject, reference in _pairs(program, device, folder):
            row = replace(row, pairs={**row.pairs, name: _compared(subject, reference)})
    return replace(row, elapsed_s=time.perf_counter() - begin)


def _alone(program: Program, way: Way, folder: Path) -> Row:
    """Run the program without a capture, twice, and with one at each level; run level api once more, to compare it with itself."""
    with _deterministic(way.device):
        bare = _filled(0, lambda: run(program, Nothing, way))
        is_repeatable = not differences(bare, _filled(1, lambda: run(program, Nothing, way)))
        changed: list[str] = []
        changed_by_torch: list[str] = []
        for level in LEVELS:
            found = _filled(0, lambda level=level: _recorded(program, way, folder / level, level))
            texts = [f"level {level}, {text}" for text in differences(bare, found)] if is_repeatable else []
            is_torchs = texts and level == "op" and not differences(_filled(0, lambda: run(program, _Idle, way)), found)
            (changed_by_torch if is_torchs else changed).extend(texts)
        _filled(1, lambda: _recorded(program, way, folder / "again", "api"))
    row = Row(program.key, way.device, is_repeatable=is_repeatable, changed=tuple(changed), changed_by_torch=tuple(changed_by_torch))
    return _read(row, folder)


def _laid_out(program: Program, folder: Path) -> Row:
    """Ask the same of a program of several processes."""
    from tests.harmless.layouts import WORLD_SIZES

    changed = record_layout(program.name, WORLD_SIZES[program.name], LEVELS, folder)
    for level in LEVELS:
        (folder / f"{program.name}-{level}-first").rename(folder / level)
    (folder / f"{program.name}-api-second").rename(folder / "again")
    return _read(Row(program.key, changed=tuple(changed)), folder)


def _read(row: Row, folder: Path) -> Row:
    """Fill a row with the contents of its recordings, and with how the two at level api compare."""
    runs = {level: open_run(folder / level) for level in LEVELS}
    ledger = [
        f"level {level}, {entry.what}: {entry.why}" for level, one in runs.items() for rank in one.ranks() for entry in one.ledger(rank)
    ]
    num_calls = {level: _num_calls(one) for level, one in runs.items()}
    pairs = {"same seed": _compared(folder / "again", folder / "api")} if num_calls["api"] else {}
    return replace(row, ledger=tuple(dict.fromkeys(ledger)), num_calls=num_calls, pairs=pairs)


def _checked(row: Row, path: Path, device: str) -> Row:
    if not row.num_calls["api"]:
        return row
    try:
        check = check_run(path, device=device, isolated=False)
    except InputError:  # calls that only allocate memory compute nothing to check
        return row
    failures = [f"{call.call} ({call.phase}): {call.reason}" for call in check.failures]
    calls = [call.status for call in check.calls if not call.is_opaque]
    return replace(
        row,
        num_checked=len(calls) - calls.count("skipped"),
        num_skipped=calls.count("skipped"),
        failures=tuple(failures),
        skips=check.reasons,
    )


def _pairs(program: Program, device: str, folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield the same program in two ways, recorded when asked for."""
    if program.kind != "architecture" or program.dtype != "float32":
        return
    plain = replace(program.way, device=device)

    def recorded(name: str, way: Way, fill: int = 1) -> Path:
        _filled(fill, lambda: _recorded(program, way, folder / name, "api"))
        return folder / name

    here = recorded("plain", plain, fill=0)
    yield "bfloat16 against float32", recorded("bfloat16", replace(plain, autocast="bfloat16")), here
    if device == "cpu":
        if _has_two_attentions(program.name):
            eager, sdpa = (recorded(name, replace(plain, attention=name), fill) for fill, name in enumerate(("eager", "sdpa")))
            yield "eager against SDPA", eager, sdpa
    else:
        there = recorded("cpu", program.way, fill=0)
        narrow = recorded("tf32", replace(plain, tf32=True))
        yield f"{device} against cpu", here, there
        yield "TF32 against float32", narrow, here
        yield "TF32 against cpu", narrow, there


def _has_two_attentions(name: str) -> bool:
    from bench.architectures import ARCHITECTURES

    try:
        ARCHITECTURES[name].build("sdpa")
    except ValueError:  # transformers raises it for an architecture with no attention but its own
        return False
    return True


def _recorded(program: Program, way: Way, path: Path, level: Any) -> Any:
    def record(model: Any, optimizer: Any) -> Capture:
        return Capture(path, model, optimizer=optimizer, level=level, keep="statistics" if level == "both" else "tensors")

    return run(program, record, way)


def _compared(subject: Path, reference: Path) -> Pair:
    comparison = compare_runs(subject, reference)
    first = next(iter(comparison.faults or comparison.findings), None)
    return Pair(EXIT_CODES[comparison.verdict], first.headline if first is not None else "")


def _num_calls(found: Any) -> int:
    return sum(record.level != "state" for rank in found.ranks() for step in found.steps(rank) for record in found.records(rank, step))


def _filled(which: int, work: Callable[[], Any]) -> Any:
    """Do some work where fresh memory holds one byte over and over; another C library than glibc leaves it as it is."""
    perturb = getattr(ctypes.CDLL(None), "mallopt", None) or (lambda name, value: 0)
    perturb(_M_PERTURB, _FILLS[which])
    try:
        return work()
    finally:
        perturb(_M_PERTURB, 0)


@contextlib.contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Choose the kernels of an accelerator that give the same bits twice; on the CPU they all do."""
    if torch.device(device).type != "cuda":
        yield
        return
    attention = torch.backends.cuda
    torch.use_deterministic_algorithms(True, warn_only=True)
    attention.enable_flash_sdp(False)  # the backward of these two is not deterministic
    attention.enable_mem_efficient_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        attention.enable_flash_sdp(True)
        attention.enable_mem_efficient_sdp(True)
