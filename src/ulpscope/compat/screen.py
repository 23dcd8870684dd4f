# SPDX-License-Identifier: Apache-2.0
"""Print lines as the old tools do: time, process, level, text. Control characters in texts of a dump are made visible first."""

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
    except UnicodeEncodeError:  # a terminal that cannot encode it must not cost the result
        print(line.encode("ascii", "backslashreplace").decode("ascii"), flush=True)
