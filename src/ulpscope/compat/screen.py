# SPDX-License-Identifier: Apache-2.0
"""Lines on the screen as the old tools print them: time, process, level, text. What a dump says is made visible first."""

from __future__ import annotations

import os
import time

from ulpscope.report.escaping import visible

__all__ = ["print_error", "print_info", "print_warning"]


def print_info(text: str) -> None:
    _print("INFO", text)


def print_warning(text: str) -> None:
    _print("WARNING", text)


def print_error(text: str) -> None:
    _print("ERROR", text)


def _print(level: str, text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}({os.getpid()})-[{level}]{visible(text)}"
    try:
        print(line, flush=True)
    except UnicodeEncodeError:  # a terminal that cannot spell it is no reason to lose a result
        print(line.encode("ascii", "backslashreplace").decode("ascii"), flush=True)
