# SPDX-License-Identifier: Apache-2.0
"""Make and parse content keys, the names of kept tensors in records, and hash with XXH3: every such hash is made here."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

import xxhash

from ulpscope.errors import DamagedRunError, InputError
from ulpscope.model import DTYPES

__all__ = ["Content", "content_hash", "content_key", "hash_of_name", "hash_words", "parse_content"]

content_hash = xxhash.xxh3_128_hexdigest


def hash_words(hash: str) -> tuple[int, int]:
    """Return the words of a content hash, the higher one first, as the kernel compares them.

    >>> hash_words(f"{1:016x}{2:016x}")
    (1, 2)
    """
    return int(hash[:16], 16), int(hash[16:], 16)


def hash_of_name(name: str, numel: int) -> int:
    """Hash the name and size of a tensor to 64 bits, which choose the positions to sample. Runs on disk depend on them."""
    return xxhash.xxh3_64_intdigest(f"{name}:{numel}".encode("utf-8", "backslashreplace"))


def content_key(hash: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Name a kept tensor: equal bytes share a hash, whatever dtype and shape they are read as."""
    return f"{hash}:{dtype}:{'x'.join(map(str, shape))}"


_NUMBER = "[0-9]{1,19}"
_NUMBERS = f"(?:{_NUMBER}(?:x{_NUMBER})*)?"
_is_content = re.compile(f"([0-9a-f]{{32}}):([a-z0-9_]{{1,40}}):({_NUMBERS})(?::({_NUMBERS}):({_NUMBER}))?").fullmatch


class Content(NamedTuple):
    """The parts of a content key. Without strides the tensor is all of the bytes; with strides it is a view of them, counted in
    elements.
    """

    hash: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int

    def verify(self, length: int, where: object) -> None:
        """Raise `DamagedRunError` unless the tensor is exactly `length` bytes or, with strides, a view within them that has no more bytes
        itself.
        """
        if self.dtype not in DTYPES:
            raise DamagedRunError(f"{where}: a tensor should be of dtype {self.dtype!r}, which is none that we know ({', '.join(DTYPES)})")
        size = DTYPES[self.dtype].size_bytes
        needed = prod(self.shape) * size
        if self.strides is None:
            fits = needed == length
        else:
            fits = 0 < needed <= length and len(self.strides) == len(self.shape) and (self._last() + 1) * size <= length
        if not fits:
            raise DamagedRunError(
                f"{where}: {length} bytes are listed for a {self.dtype} tensor of shape {list(self.shape)}, which cannot be"
            )

    def _last(self) -> int:
        assert self.strides is not None
        return self.offset + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))


def parse_content(content: str) -> Content:
    found = _is_content(content)
    if found is None:
        raise InputError(f"{content[:80]!r} is not the key of a kept tensor; take it from the `content` of a record of the same run")
    hash, dtype, shape, strides, offset = found.groups()
    return Content(hash, dtype, _numbers(shape), None if strides is None else _numbers(strides), int(offset or 0))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x"))) if text else ()
