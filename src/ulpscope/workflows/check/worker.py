# SPDX-License-Identifier: Apache-2.0
"""Run a process that checks the calls it is told to, one at a time: `python -m ulpscope.workflows.check.worker`.

Orders come on stdin and answers go to the original stdout; a user's operation that prints, prints to stderr. The process ends with its
input. A device that no longer answers ends it too: the next process may use the device again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ulpscope.model import OperandFormat
from ulpscope.model.check.checks import CheckedCall, CheckRole
from ulpscope.workflows.check.messages import read_frame, received_path, write_frame
from ulpscope.workflows.check.rules import CheckOptions

if TYPE_CHECKING:
    from ulpscope.workflows.check.one_call import CallChecker

__all__ = ["Answer", "Order", "Setup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message: the run, how to check, how many threads to use, and modules to import before.

    A path is encoded by `sent_path`, since a name on disk need not be valid text.
    """

    path: str
    options: CheckOptions
    backward: str = ""
    num_threads: int = 1
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One call to check, or the calls of a family to recognise a format from."""

    call: tuple[int, int, int] | None = None
    operands: dict[CheckRole, OperandFormat] | None = None
    role: CheckRole = "device"
    members: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A result, or the current stage, or why nothing can be checked. After the last answer, other orders are left unanswered."""

    stage: str = ""
    checked: CheckedCall | None = None
    is_last: bool = False
    operands: OperandFormat | None = None
    error: str = ""


def serve(orders: BinaryIO, answers: BinaryIO) -> None:
    setup = read_frame(orders, Setup)
    if setup is None:
        return
    try:
        checker = _opened(setup, lambda stage: write_frame(answers, Answer(stage=stage)))
    except Exception as error:
        write_frame(answers, Answer(error=str(error) or type(error).__name__))
        return
    write_frame(answers, Answer(stage="ready"))
    while (order := read_frame(orders, Order)) is not None:
        if order.call is not None:
            checked = checker.check(*order.call, operands=order.operands)
            write_frame(answers, Answer(checked=checked, is_last=checker.is_device_lost))
        else:
            write_frame(answers, Answer(stage="recognised", operands=checker.recognise(order.role, order.members)))
        if checker.is_device_lost:
            return


def _opened(setup: Setup, tell: Callable[[str], None]) -> CallChecker:
    from ulpscope._optional import keep_triton_out
    from ulpscope.replay.calls.compiler import without_compiler
    from ulpscope.replay.calls.devices import open_device
    from ulpscope.replay.calls.registered import import_and_register
    from ulpscope.store import open_run
    from ulpscope.store.foreign.checker import open_info
    from ulpscope.workflows.check.one_call import CallChecker

    keep_triton_out()
    for slow in ("torch._decomp", "torch._refs"):  # imported here, or the first call would seem slow, and calls have a time limit
        importlib.import_module(slow)
    for name in setup.imports:
        import_and_register(name)
    without_compiler()
    open_device(setup.options.device)
    path, backward = received_path(setup.path), received_path(setup.backward)
    run = open_info(path, backward) if setup.backward else open_run(path)
    return CallChecker(run, setup.options, tell, num_threads=setup.num_threads)


def _without_core_dumps() -> None:
    """Switch core dumps off: a crash is an answer here, and must not write gigabytes of memory to disk."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    _without_core_dumps()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
