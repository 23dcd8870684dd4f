# SPDX-License-Identifier: Apache-2.0
"""Write commands for a user to paste: each word reaches its program as it is, and nothing in it acts on a terminal or a shell."""

from __future__ import annotations

import os
import shlex

__all__ = ["as_glob", "as_path", "command_line", "quoted"]


def command_line(*words: str | os.PathLike[str]) -> str:
    """Join words to one line for a shell.

    >>> command_line("ulpscope", "show", "runs/with space")
    "ulpscope show 'runs/with space'"
    """
    return " ".join(map(quoted, words))


def quoted(word: str | os.PathLike[str]) -> str:
    r"""Quote one word for a shell; unprintable characters are spelled out, in the way of bash, zsh, ksh and POSIX 2024.

    >>> print(quoted("two\nlines"))
    $'two\012lines'
    """
    text = os.fspath(word)
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_spelled, text))}'"


def as_path(path: str | os.PathLike[str]) -> str:
    """Return a path as a word that no program takes for an option: `./-x`."""
    text = os.fspath(path)
    return f"./{text}" if text.startswith("-") else text


def as_glob(name: str) -> str:
    """Return a name as a pattern that no program takes for an option: `[-]x`."""
    return f"[-]{name[1:].replace('[', '[[]')}" if name.startswith("-") else name


def _spelled(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    try:
        raw = char.encode("utf-8", "surrogateescape")  # Python stores undecodable bytes of a path as surrogates
    except UnicodeEncodeError:
        raw = char.encode("utf-8", "backslashreplace")
    return "".join(f"\\{byte:03o}" for byte in raw)
