# SPDX-License-Identifier: Apache-2.0
"""Name the place of a kept tensor in a file, for code that reads it without the interpreter."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Kept"]


class Kept(NamedTuple):
    """A tensor in an open file: all of the bytes or, with strides, a view of them in elements. `owner` keeps the file open.

    Who makes one has verified that the tensor lies within the bytes, and the bytes within the file.
    """

    owner: object
    fd: int
    offset: int
    length: int
    hash: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    first: int
