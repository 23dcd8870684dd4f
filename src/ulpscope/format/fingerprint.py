# SPDX-License-Identifier: Apache-2.0
"""Take the fingerprint `u1` of a tensor: 128 bits of a tensor's values, the same from every device and implementation.

1. Bytes. The tensor's elements in row-major index order (whatever its strides), each little-endian, a bool as one
   byte 0 or 1. The bytes are padded with zeros to a multiple of 8 and read as little-endian uint64 words w_0 ... w_{n-1}.
2. Mix. All arithmetic is modulo 2**64:

       mix(w):  w *= 0x9E3779B97F4A7C15;  w ^= w >> 32;  w *= 0xD6E8FEB86659FD93;  w ^= w >> 32

3. Sums, with r = 0xD1342543DE82EF95, modulo 2**64:

       S0 = sum of mix(w_j)        S1 = sum of r**(n - 1 - j) * mix(w_j)

   A loop computes S1 with S1 = S1 * r + mix(w) for each word.
4. Text.     "u1:" + S1 as 16 hex digits + S0 as 16 hex digits, lower case. An empty tensor is "u1:" and 32 zeros.

The terms can be summed in any order, so a device reduces them in parallel. Two stretches of words compose:

    (n, S0, S1) + (n', S0', S1') = (n + n', S0 + S0', r**n' * S1 + S1')

Each stretch but the last must be a whole number of words. Neither dtype nor shape enters: compare those before you compare fingerprints.
The scheme recognises accidents; it does not resist somebody who builds a collision.

Why powers of r and not the position itself as the weight: tensors of few distinct values (one-hot rows, masks, token ids) often differ by
values that move in pairs, one as far forward as the other back. That leaves the sum of the places unchanged: rows [0 1] [1 0] and
[1 0] [0 1] would agree.

This file is the plain NumPy implementation; the compiled one is in `_kernel.c`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_WORDS", "EMPTY", "Sums", "block_sums", "fingerprint_blocks"]

BLOCK_WORDS = 1 << 12  # 32 KiB: the float64 temporaries of a block stay below the size at which malloc asks the kernel for fresh pages
_MASK = (1 << 64) - 1
_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_RATIO = 0xD1342543DE82EF95
# r**(BLOCK_WORDS - 1), ..., r, 1: the weights of a full block; a shorter one takes the end of them.
_WEIGHTS = np.cumprod(np.array([1] + [_RATIO] * (BLOCK_WORDS - 1), np.uint64), dtype=np.uint64)[::-1].copy()


class Sums(NamedTuple):
    """The sums over a stretch of words; `+` is concatenation."""

    words: int
    s0: int
    s1: int

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(
            self.words + other.words,
            (self.s0 + other.s0) & _MASK,
            (self.s1 * pow(_RATIO, other.words, 1 << 64) + other.s1) & _MASK,
        )

    def __str__(self) -> str:
        return f"u1:{self.s1:016x}{self.s0:016x}"


EMPTY = Sums(0, 0, 0)


def block_sums(block: npt.NDArray[np.uint8]) -> Sums:
    """Sum at most `BLOCK_WORDS` words; only the last stretch of a tensor may hold a fraction of a word."""
    mixed = _mix(_words(block))
    weighted = mixed * _WEIGHTS[BLOCK_WORDS - mixed.size :]
    return Sums(mixed.size, int(mixed.sum(dtype=np.uint64)), int(weighted.sum(dtype=np.uint64)))


def fingerprint_blocks(data: npt.NDArray[np.uint8]) -> str:
    """Take the fingerprint of raw bytes, block by block."""
    sums = EMPTY
    for start in range(0, data.size, 8 * BLOCK_WORDS):
        sums += block_sums(data[start : start + 8 * BLOCK_WORDS])
    return str(sums)


def _words(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    missing = -block.size % 8
    if missing:
        block = np.concatenate([block, np.zeros(missing, np.uint8)])
    words: npt.NDArray[Any] = block.view("<u8")
    return words


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = words * _MULTIPLIER_1
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> _SHIFT
    return mixed
