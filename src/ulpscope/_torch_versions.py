# SPDX-License-Identifier: Apache-2.0
"""Which versions of torch the tests were run on; told without torch.

These are the only such numbers of the project: `pyproject.toml`, the workflow of the CI, `tools/matrix.py` and the documentation are held
against them by tests.
"""

from __future__ import annotations

import re

__all__ = ["OLDEST", "TRIED", "newer_than_tried", "range_tried"]

TRIED = ("2.11.0", "2.13.0", "2.15.0")
"""The oldest supported, that of `constraints.txt`, and the newest, as `make test-matrix` runs them; docs/versions.md has the figures."""

OLDEST = TRIED[0].rpartition(".")[0]
"""The oldest that `pip install 'ulpscope[torch]'` accepts."""


def newer_than_tried(version: str) -> str:
    """One line about a torch that is newer than any that was tried; empty for every other.

    >>> newer_than_tried("2.13.0+cpu")
    ''
    """
    newest = TRIED[-1]
    if _release(version) <= _release(newest):
        return ""
    return f"torch {version} is newer than {newest}, the newest that ulpscope was tried with: what it lacks is said where it is missed"


def range_tried() -> str:
    return f"torch {OLDEST} to {TRIED[-1].rpartition('.')[0]}"


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number: what a patch release changes is not asked."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
