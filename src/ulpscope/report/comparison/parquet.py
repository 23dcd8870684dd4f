# SPDX-License-Identifier: Apache-2.0
"""Write the pairs as Parquet, in groups of rows.

Floating columns carry no minimum and maximum: readers that skip groups by them would lose NaN. An undefined metric is null, a NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ulpscope._optional import require
from ulpscope.model import Comparison
from ulpscope.report.comparison.rows import COLUMNS, Cell, Kind, pair_rows
from ulpscope.report.escaping import encodable
from ulpscope.report.replacing import replacing

__all__ = ["write_parquet"]

_ROWS_PER_GROUP = 16_384


def write_parquet(comparison: Comparison, path: Path) -> None:
    """Write all pairs."""
    pyarrow = require("pyarrow", extra="parquet", purpose="writing a parquet table")
    parquet = require("pyarrow.parquet", extra="parquet", purpose="writing a parquet table")
    schema = pyarrow.schema([(column.name, _type_of(column.kind, pyarrow)) for column in COLUMNS])
    exact = [column.name for column in COLUMNS if column.kind != "float"]
    rows = pair_rows(comparison)
    with replacing(path) as temporary, parquet.ParquetWriter(str(temporary), schema, write_statistics=exact, compression="zstd") as writer:
        while group := list(islice(rows, _ROWS_PER_GROUP)):
            arrays = [pyarrow.array(values, field.type) for values, field in zip(_by_column(group), schema, strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _type_of(kind: Kind, pyarrow: Any) -> Any:
    types = {"text": pyarrow.string, "int": pyarrow.int64, "float": pyarrow.float64, "bool": pyarrow.bool_}
    return pyarrow.list_(pyarrow.int64()) if kind == "index" else types[kind]()


def _by_column(group: list[tuple[Cell, ...]]) -> Iterator[list[Any]]:
    for column, values in zip(COLUMNS, zip(*group, strict=True), strict=True):
        if column.kind == "text":
            yield [None if value is None else encodable(str(value)) for value in values]
        elif column.kind in ("int", "index"):
            yield [value if _fits(value) else None for value in values]
        else:
            yield list(values)


def _fits(value: Any) -> bool:
    """Tell whether 64 bits hold the value; a foreign dump can claim any size."""
    numbers = value if isinstance(value, tuple) else (value,)
    return all(number is None or -(2**63) <= number < 2**63 for number in numbers)
