# SPDX-License-Identifier: Apache-2.0
"""Make arrays of Arrow from NumPy's. pyarrow is given buffers only, since it imports pandas to read anything else. `pa` is pyarrow: it may
be absent, so the caller imports it.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ulpscope.format.packed_values import Flags, Integers, Walk, expect

__all__ = [
    "coded_words",
    "codes_of",
    "cut_out",
    "in_order",
    "integer_array",
    "list_array",
    "plain_array",
    "text_array",
    "told_apart",
    "word_array",
]


def plain_array(pa: Any, values: NDArray[Any], absent: Flags | None = None) -> Any:
    kind = pa.from_numpy_dtype(values.dtype)
    told = None if absent is None else _bits(pa, ~absent)
    buffer = _bits(pa, values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [told, buffer])


def _bits(pa: Any, flags: Flags) -> Any:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def integer_array(pa: Any, walk: Walk, rows: Integers) -> Any:
    values, absent = walk.integers()
    expect(absent is None)
    return plain_array(pa, values[rows])


def word_array(pa: Any, walk: Walk, rows: Integers | None = None) -> Any:
    """Read text that repeats into a dictionary array."""
    begins, absent = walk.texts()
    if (begins == walk.at).all():
        codes = np.zeros(len(begins), np.int64) if absent is None else -absent.astype(np.int64)
        return coded_words(pa, codes if rows is None else codes[rows], [""])
    coded = cut_out(pa, walk.data, begins, walk.at, absent).dictionary_encode()
    codes = codes_of(coded) if absent is None else np.where(absent, -1, codes_of(coded))
    return _coded(pa, codes if rows is None else codes[rows], coded.dictionary.cast(pa.string()))


def coded_words(pa: Any, codes: Integers, words: list[Any]) -> Any:
    """Return the word for each code, null where the code is negative or the word None; each word is stored once, as Parquet expects of
    us.
    """
    places = {word: k for k, word in enumerate(dict.fromkeys(word for word in words if word is not None))}
    if len(places) < len(words):
        codes = np.array([*(places.get(word, -1) for word in words), -1])[codes]
    encoded = [word.encode() for word in places]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(b"".join(encoded))]
    return _coded(pa, codes, pa.Array.from_buffers(pa.string(), len(encoded), buffers))


def _coded(pa: Any, codes: Any, words: Any) -> Any:
    absent = codes < 0
    indices = plain_array(pa, codes.astype(np.int32), absent if absent.any() else None)
    return pa.DictionaryArray.from_arrays(indices, words, safe=False)


def text_array(pa: Any, walk: Walk) -> Any:
    """Read text that seldom repeats; quickest where all of it has one length."""
    begins, absent = walk.texts()
    sizes = walk.at - begins
    size = int(sizes.max(initial=0))
    if absent is not None or size == 0 or (sizes != size).any():
        return cut_out(pa, walk.data, begins, walk.at, absent).cast(pa.string())
    bounds = np.arange(0, size * len(begins) + 1, size, dtype=np.int32)
    codes = walk.lying(begins, f"V{size}").view(np.uint8)
    texts = pa.Array.from_buffers(pa.string(), len(begins), [None, pa.py_buffer(bounds), pa.py_buffer(codes)])
    if codes.max() >= 0x80:
        texts.validate(full=True)
    return texts


def list_array(pa: Any, lists: list[Any]) -> Any:
    bounds = np.cumsum([0, *(len(one or ()) for one in lists)], dtype=np.int32)
    items = np.fromiter(chain.from_iterable(one or () for one in lists), np.int64, int(bounds[-1]))
    told = _bits(pa, np.array([one is not None for one in lists], np.bool_))
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(lists), [told, pa.py_buffer(bounds)], children=[plain_array(pa, items)])


def cut_out(pa: Any, data: bytes, begins: Integers, ends: Integers, absent: Flags | None = None) -> Any:
    """Cut pieces out of the data: take every other element of an array of the pieces and the stretches between them."""
    expect(in_order(begins, ends, min(len(data), 2**31 - 1)))
    if not len(begins):
        return pa.nulls(0, pa.binary())
    offsets = np.empty(2 * len(begins), np.int32)
    offsets[0::2], offsets[1::2] = begins, ends
    pieces = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return pieces.take(plain_array(pa, np.arange(0, len(offsets), 2), absent))


def in_order(begins: Integers, ends: Integers, size: int) -> bool:
    """Tell whether the pieces lie one behind the other within the data: Arrow trusts offsets and would read elsewhere."""
    return not len(begins) or bool(ends[-1] <= size and (begins <= ends).all() and (ends[:-1] <= begins[1:]).all())


def told_apart(pieces: Any) -> tuple[Integers, list[bytes]]:
    """Return the number of each piece, and the distinct pieces by number."""
    coded = pieces.dictionary_encode()
    return codes_of(coded), coded.dictionary.to_pylist()


def codes_of(coded: Any) -> Integers:
    return np.frombuffer(coded.indices.buffers()[1], np.int32, len(coded), 4 * coded.indices.offset).astype(np.int64)
