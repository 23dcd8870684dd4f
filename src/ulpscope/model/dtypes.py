# SPDX-License-Identifier: Apache-2.0
"""Look up what each dtype can represent. Names are canonical and without prefix: `bfloat16`, never `torch.bfloat16`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ulpscope.model.nouns import dataclass

__all__ = ["DTYPES", "DType", "Kind", "dtype"]

Kind: TypeAlias = Literal["float", "complex", "int", "uint", "bool"]


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype: its size and, for floating kinds, its arithmetic.

    `mantissa` counts the stored fraction bits, so `eps = 2**-mantissa`. For complex dtypes
    the arithmetic is that of one part.
    """

    name: str
    kind: Kind
    size_bytes: int
    mantissa: int = 0
    max: float = 0.0
    tiny: float = 0.0

    @property
    def is_floating(self) -> bool:
        return self.kind in ("float", "complex")

    @property
    def eps(self) -> float:
        """Return the distance from 1 to the next larger number; 0 where arithmetic is exact."""
        return 2.0**-self.mantissa if self.is_floating else 0.0


_TABLE = (
    DType("float64", "float", 8, 52, 1.7976931348623157e308, 2.0**-1022),
    DType("float32", "float", 4, 23, (2 - 2.0**-23) * 2.0**127, 2.0**-126),
    DType("float16", "float", 2, 10, 65504.0, 2.0**-14),
    DType("bfloat16", "float", 2, 7, (2 - 2.0**-7) * 2.0**127, 2.0**-126),
    DType("float8_e4m3fn", "float", 1, 3, 448.0, 2.0**-6),
    DType("float8_e5m2", "float", 1, 2, 57344.0, 2.0**-14),
    DType("float8_e4m3fnuz", "float", 1, 3, 240.0, 2.0**-7),
    DType("float8_e5m2fnuz", "float", 1, 2, 57344.0, 2.0**-15),
    DType("float8_e8m0fnu", "float", 1, 0, 2.0**127, 2.0**-127),
    DType("complex128", "complex", 16, 52, 1.7976931348623157e308, 2.0**-1022),
    DType("complex64", "complex", 8, 23, (2 - 2.0**-23) * 2.0**127, 2.0**-126),
    DType("complex32", "complex", 4, 10, 65504.0, 2.0**-14),
    DType("int64", "int", 8),
    DType("int32", "int", 4),
    DType("int16", "int", 2),
    DType("int8", "int", 1),
    DType("uint64", "uint", 8),
    DType("uint32", "uint", 4),
    DType("uint16", "uint", 2),
    DType("uint8", "uint", 1),
    DType("bool", "bool", 1),
)
DTYPES: dict[str, DType] = {entry.name: entry for entry in _TABLE}


def dtype(name: str) -> DType:
    """Look a dtype up by its canonical name."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}") from None
