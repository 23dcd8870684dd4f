# SPDX-License-Identifier: Apache-2.0
"""Everything ulpscope raises on purpose.

    UlpscopeError
    ├── InputError                what was given cannot answer the question (exit code 2)
    │   ├── NotARunError          the path is missing, or holds nothing that we can read
    │   ├── DamagedRunError       the path is a run, but its bytes contradict themselves
    │   ├── NewerFormatError      the run was written by a newer ulpscope
    │   └── NothingComparableError  the two runs have no step, rank or call in common
    ├── NonFiniteError            a watched program made inf or NaN, and its author asked to be stopped
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
    """A watched program made inf or NaN; raised in its own code where `NonFinite(raise_error=True)` asks for it."""


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

# What the system refuses, and what to try.
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
    """What went wrong, in one sentence, for whoever typed the command: ours as it is, the system's with what to try."""
    if isinstance(error, MemoryError):
        return f"{os.strerror(errno.ENOMEM)}: {_ADVICE[errno.ENOMEM]}"
    if not isinstance(error, OSError):
        return _cut(str(error))
    said = error.strerror or str(error) or type(error).__name__
    where = f"cannot read or write '{error.filename}': " if error.filename else ""
    advice = _ADVICE.get(error.errno or 0, "")
    return f"{where}{said}{': ' if advice and not where else '; ' if advice else ''}{advice}"


def sentence_for(error: BaseException) -> str | None:
    """The sentence for what was refused on purpose or by the system; None for what nobody foresaw."""
    if isinstance(error, UlpscopeError):
        return sentence_of(error)
    refused = system_error_behind(error)
    return None if refused is None else sentence_of(refused)


def _cut(text: str) -> str:
    """The text without its middle, where it holds a name or a value that has no end."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def system_error_behind(error: BaseException) -> OSError | MemoryError | None:
    """The refusal of the system that an error comes from, itself included; None where it comes from something else.

    A library that cannot be loaded for want of files or memory is told by Python as one that cannot be imported, and torch and the
    threads of Python have words of their own.
    """
    if isinstance(error, (OSError, MemoryError)):
        return error
    if isinstance(error, (ImportError, RuntimeError)) and not isinstance(error, UlpscopeError):
        for words, number in _SAID_AS.items():
            if words in str(error):
                return OSError(number, os.strerror(number))
    behind = error.__cause__ or error.__context__
    return system_error_behind(behind) if isinstance(error, ImportError) and behind is not None else None
