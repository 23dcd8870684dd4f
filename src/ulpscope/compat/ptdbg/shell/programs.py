# SPDX-License-Identifier: Apache-2.0
"""Start other programs from the prompt, without a system shell in between, so that a name in a command is never more than a name."""

from __future__ import annotations

import glob
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ulpscope.errors import InputError

__all__ = ["hand_over", "matching_paths", "run_line"]

_SYNTAX = frozenset({"|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"})


def run_line(line: str) -> None:
    """Run a program with its arguments; wildcards are filled in, pipes and redirections are refused."""
    words = shlex.split(line)
    if not words:
        return
    syntax = [word for word in words if word in _SYNTAX]
    if syntax:
        raise InputError(f"'{syntax[0]}' is not understood here: programs are started one at a time, without pipes and redirections")
    if words[0] == "cd":
        _change_folder(words[1:])
        return
    arguments = [word for pattern in words[1:] for word in (matching_paths(pattern) or [pattern])]
    _run([words[0], *arguments])


def matching_paths(pattern: str) -> list[str]:
    """List the paths that a pattern with wildcards fits, written as the pattern is."""
    return sorted(glob.glob(pattern))  # noqa: PTH207  a Path would lose the "./" that was typed


def _change_folder(words: Sequence[str]) -> None:
    folder = Path(words[0]).expanduser() if words else Path.home()
    try:
        os.chdir(folder)
    except OSError as error:
        raise InputError(f"the folder '{folder}' cannot be entered: {error.strerror}") from None


def _run(command: Sequence[str]) -> int:
    sys.stdout.flush()
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise InputError(f"'{command[0]}' cannot be run: {error.strerror}; type help for the commands of this shell") from None


def hand_over(script: Path, arguments: Sequence[str | Path]) -> None:
    """Let CANN's msaccucmp do the work, after asking it for its help to see that it runs."""
    if not script.is_file():
        raise InputError(f"there is no msaccucmp at '{script}': give its path with -asc, or leave -asc out to do without CANN")
    command = [sys.executable, str(script)]
    probe = subprocess.run([*command, "--help"], check=False, capture_output=True)
    if probe.returncode:
        raise InputError(f"'{script}' does not run: its --help ended with status {probe.returncode}; source CANN's set_env.sh first")
    status = _run([*command, *map(str, arguments)])
    if status:
        raise InputError(f"msaccucmp ended with status {status}; what it said is above")
