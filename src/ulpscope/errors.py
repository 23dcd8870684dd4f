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
