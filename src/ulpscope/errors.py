# SPDX-License-Identifier: Apache-2.0
"""Define everything ulpscope raises on purpose.

    UlpscopeError
    ├── InputError                the given input cannot answer the question (exit code 2)
    │   ├── NotARunError          the path is missing, or holds nothing that ulpscope can read
    │   ├── DamagedRunError       the path is a run, but its bytes contradict themselves
    │   ├── NewerFormatError      the run was written by a newer ulpscope
    │   └── NothingComparableError  the two runs have no step, rank or call in common
    ├── NonFiniteError            a program made inf or NaN, and its author asked to be stopped
    └── MissingDependencyError    an optional package is needed; the message holds the install line

Every message says what was asked, what was found, where, and what to try.
"""

from __future__ import annotations

import errno
import os

__all__ = [
    "CaptureWarning",
    "DamagedRunError",
    "InputError",
    "MissingDependencyError",
    "NewerFormatError",
    "NonFiniteError",
    "NotARunError",
    "NothingComparableError",
    "UlpscopeError",
    "sentence_for",
    "sentence_of",
    "system_error_behind",
]


class UlpscopeError(Exception):
    """Root of all errors raised on purpose."""


class InputError(UlpscopeError, ValueError):
    """The given input cannot answer the question."""


class NotARunError(InputError):
    """The path is missing or holds nothing that can be read as a run."""


class DamagedRunError(InputError):
    """A run whose bytes contradict themselves."""


class NewerFormatError(InputError):
    """A run written in a format version that this ulpscope does not know."""


class NothingComparableError(InputError):
    """Two runs without a step, rank or call in common."""


class NonFiniteError(UlpscopeError, ArithmeticError):
    """Raised in a program that made inf or NaN, where `NonFinite(raise_error=True)` asks for it."""


class MissingDependencyError(UlpscopeError, ImportError):
    """An optional package is missing."""


class CaptureWarning(UserWarning):
    """Capture could not record something; training went on unchanged."""


_SAID_AS = {os.strerror(number): number for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)} | {
    "failed to map segment from shared object": errno.ENOMEM,
    "cannot allocate memory": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
    "not enough memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
_LONGEST = 2000

# Errors of the operating system, and what to try.
_ADVICE = {
    errno.EMFILE: "this process may not open more; raise the limit, as in 'ulimit -n 4096', and try again",
    errno.ENFILE: "the system cannot open more; end what is not needed, and try again",
    errno.ENOMEM: "there is not enough memory; end what is not needed, or ask for less at once, and try again",
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EROFS: "name another place",
    errno.ENAMETOOLONG: "name a place with a shorter path",
    errno.EAGAIN: "this user may not start more processes or threads; end what is not needed, and try again",
    errno.EIO: "the disk or the network behind it fails; look at the system's log",
}


def sentence_of(error: BaseException) -> str:
    """Say in one sentence what went wrong: ulpscope's own message as it is, the system's with what to try."""
    if isinstance(error, MemoryError):
        return f"{os.strerror(errno.ENOMEM)}: {_ADVICE[errno.ENOMEM]}"
    if not isinstance(error, OSError):
        return _cut(str(error))
    said = error.strerror or str(error) or type(error).__name__
    where = f"cannot read or write '{error.filename}': " if error.filename else ""
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{where}{said}{': ' if advice and not where else '; ' if advice else ''}{advice}"


def sentence_for(error: BaseException) -> str | None:
    """Return the sentence for an error raised on purpose or by the system; None for an unforeseen one."""
    if isinstance(error, UlpscopeError):
        return sentence_of(error)
    refused = system_error_behind(error)
    return None if refused is None else sentence_of(refused)


def _cut(text: str) -> str:
    """Cut out the middle of a message, where it holds a name or a value that has no end."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def system_error_behind(error: BaseException) -> OSError | MemoryError | None:
    """Find the system's error behind an error, itself included; None where it comes from something else.

    If a library cannot be loaded for want of files or memory, Python reports an import error; torch and Python's threads have messages of
    their own for it.
    """
    if isinstance(error, (OSError, MemoryError)):
        return error
    if isinstance(error, (ImportError, RuntimeError)) and not isinstance(error, UlpscopeError):
        for words, number in _SAID_AS.items():
            if words in str(error):
                return OSError(number, os.strerror(number))
    behind = error.__cause__ or error.__context__
    return system_error_behind(behind) if isinstance(error, ImportError) and behind is not None else None
