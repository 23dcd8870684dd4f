# SPDX-License-Identifier: Apache-2.0
"""Print answers to stdout, and progress to stderr if it is a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "open_console", "showing_progress"]

Progress: TypeAlias = Callable[[int, int], None]
_PATIENCE_S = 0.5


def open_console() -> Console:
    """Open a console on stdout that prints text as it is; a character that stdout cannot encode is escaped."""
    from rich.console import Console

    class Answer(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1, which here means that something diverges

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Answer(markup=False, highlight=False, emoji=False)


@contextmanager
def showing_progress(what: str) -> Iterator[Progress | None]:
    """Show a progress bar on stderr, updated by calls with (done, total); yield None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)
    began = time.monotonic()

    def show(done: int, total: int) -> None:
        if time.monotonic() - began > _PATIENCE_S:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
