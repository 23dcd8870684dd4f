# SPDX-License-Identifier: Apache-2.0
"""Read the statistics that Ascend's runtime writes instead of values: a csv for each operator, a row for each tensor."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from ulpscope.errors import DamagedRunError
from ulpscope.model import Slot, Summary, TensorRecord
from ulpscope.store.acl.acl_dtypes import PROTO_DTYPES, bits_of, carried_as
from ulpscope.store.acl.blocked_formats import PLAIN

__all__ = ["is_statistics_file", "read_statistics"]

_HEADINGS = ("Input/Output", "Index", "Data Type", "Shape", "Max Value", "Min Value")
_MAX_BYTES = 16 << 20
_WORDS = {
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "float8_e8m0": "float8_e8m0fnu",
    "float6_e3m2": "float6_e3m2fn",
    "float6_e2m3": "float6_e2m3fn",
    "float4_e2m1": "float4_e2m1fn",
}


def is_statistics_file(path: Path) -> bool:
    """Tell whether the file begins with the headings of such statistics."""
    with path.open("rb") as stream:
        return stream.read(64).startswith(b"Input/Output,Index,Data Size")


def read_statistics(path: Path) -> tuple[TensorRecord, ...]:
    """Read a record with a summary from each row."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise DamagedRunError(f"'{path}' has {size} bytes, more than the statistics of any operator; it is damaged or something else")
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            return tuple(_records(path, stream.read()))
    except csv.Error as error:
        raise DamagedRunError(f"'{path}' is no table of statistics ({error}); copy it again, or dump again") from error


def _records(path: Path, text: str) -> Iterator[TensorRecord]:
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in _HEADINGS if name not in (rows.fieldnames or ())]
    if missing:
        raise DamagedRunError(f"'{path}' has no column '{missing[0]}', so it is no table of statistics; copy it again, or dump again")
    for count, row in enumerate(rows, 2):
        try:
            yield _record({name: value or "" for name, value in row.items() if isinstance(name, str)})
        except ValueError as error:
            raise DamagedRunError(f"line {count} of '{path}' cannot be read ({error}); copy it again, or dump again") from None


def _record(row: dict[str, str]) -> TensorRecord:
    word = row["Data Type"].removeprefix("DT_").lower()
    name = _WORDS.get(word, word)
    dtype = bits_of(PROTO_DTYPES.index(name) if name in PROTO_DTYPES else 0, PROTO_DTYPES)
    shape = tuple(_whole(size) for size in row["Shape"].split("x") if size)
    format = row.get("Format", "")
    return TensorRecord(
        slot=_slot(row["Input/Output"], row["Index"]),
        dtype=carried_as(dtype),
        shape=shape,
        summary=_summary(row, shape),
        note="" if format in ("", "ND", *PLAIN) else f"statistics of the tensor as stored, {format}",
    )


def _slot(word: str, index: str) -> Slot:
    if word.lower() not in ("input", "output"):
        raise ValueError(f"{word[:40]!r} is neither Input nor Output")
    return Slot("input" if word.lower() == "input" else "output", (_whole(index),))


def _summary(row: dict[str, str], shape: tuple[int, ...]) -> Summary:
    low, high, mean = (_number(row.get(name, "")) for name in ("Min Value", "Max Value", "Avg Value"))
    count = row.get("Count", "")
    counts = [_whole(text) if (text := row.get(name, "")) else None for name in ("Nan Count", "Positive Inf Count", "Negative Inf Count")]
    is_some = low is not None and high is not None and not (math.isnan(low) or math.isnan(high))
    return Summary(
        _whole(count) if count else math.prod(shape),
        min=low if is_some else None,
        max=high if is_some else None,
        mean=mean if mean is not None and math.isfinite(mean) else None,
        num_nan=counts[0],
        num_posinf=counts[1],
        num_neginf=counts[2],
    )


def _number(text: str) -> float | None:
    return float(text) if text.strip() else None


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"{text[:40]!r} is no size or count")
    return int(text)
