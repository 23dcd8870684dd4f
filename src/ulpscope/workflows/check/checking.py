# SPDX-License-Identifier: Apache-2.0
"""Check a run (`check_run`): run every recorded call again on a device and judge each by itself against a higher precision.

Processes of ulpscope's own do the work, so that a crash or a hang costs only the call in which it happened. Results are written to a
journal as they come. A machine that rounds the operands of all its matrix products is recognised once all calls are known; the calls of
such a family are then checked once more by that yardstick.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ulpscope.errors import InputError, MissingDependencyError
from ulpscope.explain.checks import explain_check
from ulpscope.judge import product_family
from ulpscope.judge.checks import check_multiple, overflows, settle
from ulpscope.judge.published.standard_tables import EDITIONS
from ulpscope.model import CallRecord, OperandFormat, Run
from ulpscope.model.check.checks import Check, CheckedCall, CheckRole, FamilyPrecision
from ulpscope.model.step_index import ForwardCalls
from ulpscope.store import open_run
from ulpscope.store.foreign.checker import open_info
from ulpscope.workflows.check.messages import Journal, sent_path
from ulpscope.workflows.check.opaque import OPAQUE, Opaqueness
from ulpscope.workflows.check.processes import Processes
from ulpscope.workflows.check.rules import RULES, CheckOptions, Precision
from ulpscope.workflows.check.worker import Setup

__all__ = ["check_run"]

_SAMPLE = 8
_DEVICE_ANSWERS_S = 120
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_WITHOUT_RESULTS = "api_accuracy_checker"
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Task:
    """A call to check: its place in the run, and the facts known beforehand."""

    place: Place
    stub: CheckedCall
    family: str | None


class _Checking(Protocol):
    """The worker: other processes, or this one."""

    def check(
        self,
        tasks: Sequence[tuple[Place, CheckedCall]],
        operands: Callable[[Place], dict[CheckRole, OperandFormat]],
        done: Callable[[CheckedCall], None],
    ) -> None: ...

    def recognise(self, role: CheckRole, members: Sequence[Place]) -> OperandFormat | None: ...

    def close(self) -> None: ...


def check_run(
    run: Run | str | os.PathLike[str],
    *,
    backward: str | os.PathLike[str] | None = None,
    device: str | Sequence[str] | None = None,
    rules: str = "derived",
    edition: str = "2024",
    reference_precision: Precision = "auto",
    jobs: int = 1,
    select: str | Sequence[str] | None = None,
    seed: int = 0,
    overflow: bool = False,
    save_failures: str | os.PathLike[str] | None = None,
    journal: str | os.PathLike[str] | None = None,
    resume: bool = False,
    timeout_s: float = 300.0,
    imports: Sequence[str] = (),
    isolated: bool = True,
    progress: Callable[[int, int], None] | None = None,
    found: Callable[[CheckedCall], None] | None = None,
) -> Check:
    """Run every recorded call again on `device` and judge it against a higher precision on the CPU.

    The default device is the one that the run was recorded on, if it is here, else the CPU; `Check.device` says which.

    >>> check = ulpscope.check_run("runs/npu", device="npu")  # doctest: +SKIP
    >>> [str(call.call) for call in check.failures]  # doctest: +SKIP
    ['functional.gelu.1']

    `jobs` processes share the work, and the devices where there are several; each call may take `timeout_s`. `imports` are modules that
    register custom operations or devices. With `resume` and a `journal`, calls of an earlier check are not checked again.
    `isolated=False` checks in this process. `backward` is the other file of a recording of api_accuracy_checker whose names do not tell.
    `edition` is that of the published standards. `found` gets every call as soon as it is known.
    """
    started = time.perf_counter()
    opened = _opened(run, backward)
    chosen, absent = (device, "") if device is not None else _recorded_device(opened, imports, isolated)
    devices = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    _check_words(rules, edition, reference_precision, jobs, devices, isolated, opened)
    options = CheckOptions(
        device=devices[0],
        rules=rules,
        precision=reference_precision,
        edition=edition,
        seed=seed,
        overflow=overflow,
        failures=_folder(save_failures),
    )
    tasks, is_all_opaque = _planned(opened, devices[0], select, overflow)
    if not tasks and (not overflow or not _planned(opened, devices[0], select, overflow=False)[0]):
        raise InputError(f"'{opened.path}' holds no call{' that the selection names' if select else ''}: there is nothing to check")
    book = _Book(tasks, _journal(journal, opened, options, select, resume), progress, found)
    worker = _worker(opened, options, devices, jobs, timeout_s, imports, isolated, backward)
    try:
        worker.check(_longest_first(book.waiting()) if jobs > 1 else book.waiting(), lambda place: {}, book.enter)
        precision = _recognise(worker, book) if rules == "derived" else ()
    except BaseException:
        worker.close()
        book.close(is_done=False)
        raise
    worker.close()
    book.close(is_done=True)
    calls = settle(book.calls()) if rules == "derived" else book.calls()
    return Check(
        info=opened.info,
        path=str(opened.path),
        device=", ".join(devices),
        rules=rules,
        seed=seed,
        calls=calls,
        is_all_opaque=is_all_opaque,
        precision=precision,
        findings=explain_check(
            calls, precision, device=", ".join(devices), path=str(opened.path), rules=rules, complete=_incomplete(opened), absent=absent
        ),
        num_resumed=book.num_resumed,
        elapsed_s=time.perf_counter() - started,
    )


def _recorded_device(run: Run, imports: Sequence[str], isolated: bool) -> tuple[str, str]:
    """Return the device that calls were recorded on, and ""; or the CPU and the name of the device if it is not here."""
    kind = _kind_recorded(run)
    if kind == "cpu" or find_spec("torch") is None:
        return "cpu", ""
    return (kind, "") if _is_here(kind, imports, isolated) else ("cpu", kind)


def _is_here(kind: str, imports: Sequence[str], isolated: bool) -> bool:
    if not isolated:
        from ulpscope.workflows.check.device_probe import is_usable

        return is_usable(kind, imports)
    words = [sys.executable, "-m", "ulpscope.workflows.check.device_probe", kind, *imports]
    try:
        return subprocess.run(words, capture_output=True, timeout=_DEVICE_ANSWERS_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _kind_recorded(run: Run) -> str:
    """Return the kind of device that the tensors of the first step lie on; CPU tensors may lie beside those of any other kind."""
    for rank in run.ranks():
        for step in run.steps(rank)[:1]:
            for record in run.records(rank, step):
                kinds = (slot.device.partition(":")[0] for slot in record.slots)
                if (found := next((kind for kind in kinds if kind.isidentifier() and kind not in ("cpu", "meta")), None)) is not None:
                    return found
    return "cpu"


def _opened(run: Run | str | os.PathLike[str], backward: str | os.PathLike[str] | None) -> Run:
    if not isinstance(run, (str, os.PathLike)):
        return run
    return open_run(Path(run)) if backward is None else open_info(Path(run), Path(backward))


def _check_words(rules: str, edition: str, precision: str, jobs: int, devices: Sequence[str], isolated: bool, run: Run) -> None:
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "checking calls runs them again and needs torch; install it, for example with: pip install 'ulpscope[torch]'"
        )
    if rules != "derived" and rules not in RULES:
        raise InputError(f"there are no rules named {rules!r}; choose one of {', '.join(['derived', *RULES])}")
    if edition not in EDITIONS:
        raise InputError(f"there is no edition {edition!r} of the standards; choose one of {', '.join(EDITIONS)}")
    if precision not in ("auto", "float64"):
        raise InputError(f"the reference cannot be computed in {precision!r}; choose auto or float64")
    if jobs < 1:
        raise InputError(f"{jobs} processes cannot share the work; give a number from 1 up")
    if not devices or (len(devices) > 1 and not isolated):
        raise InputError(f"{len(devices)} devices cannot be checked at once in one process; name one")
    if isolated and not Path(run.path).exists():
        raise InputError(f"'{run.path}' is not on disk, so no other process can read it; save it, or check with isolated=False")


def _folder(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return ""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder '{path}': {error.strerror or error}; choose another with --save-failures") from error
    return str(Path(path).resolve())


def _planned(run: Run, device: str, select: str | Sequence[str] | None, overflow: bool) -> tuple[list[_Task], bool]:
    """Plan the calls to check, opaque modules among them; tell also whether every layer lies inside an opaque module."""
    selection = _selection(select)
    tasks: list[_Task] = []
    is_seen: list[bool] = []
    for rank in run.ranks():
        for step in run.steps(rank):
            selection and selection.begin_step()
            found, opaqueness = _planned_step(run, rank, step, device, selection, overflow)
            tasks += found
            sees_layers = opaqueness.sees_layers
            is_seen.append(any(_is_inside(task.stub) for task in found) if sees_layers is None else sees_layers)
    return tasks, any(task.stub.is_opaque for task in tasks) and not any(is_seen)


def _planned_step(run: Run, rank: int, step: int, device: str, selection: Any, overflow: bool) -> tuple[list[_Task], Opaqueness]:
    tasks: list[_Task] = []
    called = ForwardCalls[CallRecord]()
    opaqueness = Opaqueness()
    for index, record in enumerate(run.records(rank, step)):
        opaqueness.add(record)
        called.add(record, record)
        is_module = record.level == "module" and not overflow
        if not (_is_call(record) or is_module) or (selection and not _is_wanted(selection, record)):
            continue
        if overflow and not overflows(record, called.of(record), with_results=run.info.format != _WITHOUT_RESULTS):
            continue
        tasks.append(_Task((rank, step, index), replace(CheckedCall.of(record, device), is_opaque=is_module), product_family(record)))
    return _with_opaque(tasks, opaqueness.regions()), opaqueness


def _with_opaque(tasks: Sequence[_Task], regions: Mapping[int, int]) -> list[_Task]:
    """Drop the tasks of modules except the opaque ones, which are marked as skipped."""
    known = {
        task.stub.order: replace(task.stub, status="skipped", reason=OPAQUE, stands_for=regions[task.stub.order])
        for task in tasks
        if task.stub.is_opaque and task.stub.order in regions
    }
    return [
        replace(task, stub=known[task.stub.order]) if task.stub.is_opaque else task
        for task in tasks
        if not task.stub.is_opaque or task.stub.order in known
    ]


def _is_inside(call: CheckedCall) -> bool:
    """Tell whether a call lies inside a module whose calls were recorded."""
    return bool(call.module) and not call.is_opaque


def _is_call(record: CallRecord) -> bool:
    """Tell whether the record computed something; a call that only allocates memory did not, and its contents mean nothing."""
    if record.phase == "optimizer":
        return True
    return record.call.short not in _ALLOCATIONS and record.level in ("api", "op") and record.phase in ("forward", "backward")


def _selection(select: str | Sequence[str] | None) -> Any:
    if select is None:
        return None
    from ulpscope.recording.selection import Selection

    return Selection.parse(select=select)


def _is_wanted(selection: Any, record: CallRecord) -> bool:
    return bool(selection.wants_call(record.module, record.call)) and (selection.phases is None or record.phase in selection.phases)


def _journal(
    path: str | os.PathLike[str] | None, run: Run, options: CheckOptions, select: str | Sequence[str] | None, resume: bool
) -> Journal | None:
    if path is None:
        if resume:
            raise InputError("there is nothing to go on with: --resume needs the journal of an earlier check")
        return None
    named = [select] if isinstance(select, str) else list(select or ())
    facts = {"run": str(Path(run.path).resolve()), "select": " ".join(named)}
    facts |= {name: str(value) for name, value in asdict(options).items() if name != "failures"}
    return Journal(Path(path), facts, resume=resume)


def _worker(
    run: Run,
    options: CheckOptions,
    devices: Sequence[str],
    jobs: int,
    timeout_s: float,
    imports: Sequence[str],
    isolated: bool,
    backward: str | os.PathLike[str] | None,
) -> _Checking:
    if not isolated:
        return _Here(run, options, imports)
    path, other = sent_path(Path(run.path).resolve()), "" if backward is None else sent_path(Path(backward).resolve())
    setups = [Setup(path=path, backward=other, options=replace(options, device=one), imports=tuple(imports)) for one in devices]
    return Processes(setups, jobs=jobs, timeout_s=timeout_s)


class _Here:
    """Does the same work in this process, where a crash ends everything."""

    def __init__(self, run: Run, options: CheckOptions, imports: Iterable[str]) -> None:
        from ulpscope.replay.calls.devices import open_device
        from ulpscope.replay.calls.registered import import_and_register
        from ulpscope.workflows.check.one_call import CallChecker

        for name in imports:
            import_and_register(name)
        open_device(options.device)
        self._checker = CallChecker(run, options)

    def check(
        self,
        tasks: Sequence[tuple[Place, CheckedCall]],
        operands: Callable[[Place], dict[CheckRole, OperandFormat]],
        done: Callable[[CheckedCall], None],
    ) -> None:
        for place, _ in tasks:
            done(self._checker.check(*place, operands=operands(place)))

    def recognise(self, role: CheckRole, members: Sequence[Place]) -> OperandFormat | None:
        return self._checker.recognise(role, members)

    def close(self) -> None: ...


class _Book:
    """Keeps the list of calls, and the results so far."""

    def __init__(
        self,
        tasks: Sequence[_Task],
        journal: Journal | None,
        progress: Callable[[int, int], None] | None,
        tell: Callable[[CheckedCall], None] | None,
    ) -> None:
        self._tasks = tasks
        self._journal = journal
        self._progress = progress or (lambda done, total: None)
        self._tell = tell or (lambda call: None)
        self._found: dict[Place, CheckedCall] = {}
        if journal is not None:
            known = {task.stub.key for task in tasks}
            self._found = {call.key: call for call in journal.found(CheckedCall) if call.key in known}
        self.num_resumed = len(self._found)
        self._found |= {task.stub.key: task.stub for task in tasks if task.stub.is_opaque}

    def waiting(self) -> list[tuple[Place, CheckedCall]]:
        return [(task.place, task.stub) for task in self._tasks if task.stub.key not in self._found]

    def enter(self, call: CheckedCall) -> None:
        self._found[call.key] = call
        if self._journal is not None:
            self._journal.append(call)
        self._tell(call)
        self._progress(len(self._found), len(self._tasks))

    def calls(self) -> tuple[CheckedCall, ...]:
        return tuple(self._found[task.stub.key] for task in self._tasks if task.stub.key in self._found)

    def family(self, family: str) -> list[tuple[_Task, CheckedCall]]:
        return [(task, self._found[task.stub.key]) for task in self._tasks if task.family == family and task.stub.key in self._found]

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(task.family for task in self._tasks if task.family is not None))

    def close(self, *, is_done: bool) -> None:
        if self._journal is not None:
            self._journal.close(is_done=is_done)


def _longest_first(tasks: list[tuple[Place, CheckedCall]]) -> list[tuple[Place, CheckedCall]]:
    """Sort the optimizer's step first within a step: it takes as long as a hundred calls, and would be waited for at the end."""
    return sorted(tasks, key=lambda task: (task[0][:2], task[1].phase != "optimizer"))


def _recognise(worker: _Checking, book: _Book) -> tuple[FamilyPrecision, ...]:
    """Find the operand format of each family that has calls beyond their limits, and check these calls again by that yardstick."""
    formats: dict[tuple[str, CheckRole], OperandFormat] = {}
    for family in book.families:
        for role in _ROLES:
            members = book.family(family)
            if any(_is_beyond(call, role) for _, call in members):
                operands = worker.recognise(role, _sample(members, role))
                if operands is not None:
                    formats[family, role] = operands
    again: defaultdict[Place, dict[CheckRole, OperandFormat]] = defaultdict(dict)
    tasks = []
    for family in {name for name, _ in formats}:
        for task, call in book.family(family):
            if any(_is_beyond(call, role) for role in _ROLES):
                tasks.append((task.place, task.stub))
                again[task.place] = {role: formats[family, role] for role in _ROLES if (family, role) in formats}
    if tasks:
        worker.check(tasks, lambda place: again[place], book.enter)
    return tuple(_precision(book, family, role, operands, again) for (family, role), operands in formats.items())


def _precision(
    book: _Book, family: str, role: CheckRole, operands: OperandFormat, again: Mapping[Place, dict[CheckRole, OperandFormat]]
) -> FamilyPrecision:
    members = [(task.place, call) for task, call in book.family(family) if call.status != "skipped"]
    like = sum(role in again[place] and call.status == "passed" for place, call in members if place in again)
    return FamilyPrecision(family=family, operands=operands, role=role, num_calls=len(members), num_like=like)


def _sample(members: Sequence[tuple[_Task, CheckedCall]], role: CheckRole) -> list[Place]:
    """Choose some calls of each phase and some that err, spread over all.

    Gradients are small, and so tell apart formats whose ranges differ.
    """
    known = [(task.place, call) for task, call in members if call.status != "skipped"]
    phases = ([place for place, call in known if call.phase == phase] for phase in ("forward", "backward"))
    beyond = [place for place, call in known if _is_beyond(call, role)]
    return list(dict.fromkeys(place for some in (*phases, beyond) for place in some[:: max(1, len(some) // _SAMPLE)][:_SAMPLE]))


_ROLES: tuple[CheckRole, ...] = ("device", "recorded")


def _is_beyond(call: CheckedCall, role: CheckRole) -> bool:
    return any(found is not None and check_multiple(found, call.phase) > 1 for slot in call.slots for found in (slot.of(role),))


def _incomplete(run: Run) -> tuple[str, ...]:
    return tuple(f"step {step} of rank {rank}" for rank in run.ranks() for step in run.steps(rank) if not run.is_complete(rank, step))
