# SPDX-License-Identifier: Apache-2.0
"""What a row of the old result knows about two rows of a dump: numbers where there are some, words where there are none.

Numbers of tensors come from the one measurement of two tensors. Statistics are subtracted as they stand in the dumps; their relative
errors are shares of the golden one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ulpscope.compat.file_pairs import MeasuredPair
from ulpscope.compat.msprobe.compare.dump_rows import Role, Row
from ulpscope.compat.msprobe.compare.row_matching import RowPair
from ulpscope.compat.ptdbg.compare.columns import Numbers, no_numbers, numbers

__all__ = ["NO_PARTNER", "Compared", "TensorNumbers", "nothing_measured", "tensor_numbers"]

NO_PARTNER = {"target": "No bench data matched.", "golden": "No NPU data matched."}
_UNSUPPORTED = "unsupported"
_ROUNDED_ABOVE = 0.9999
_NUMBER = (bool, int, float)
_NOTHING = (None, None, None, None)
_ZEROS = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """The six numbers of two tensors; `old` are those that 1.x and its forerunner judge by, with why something is missing."""

    cosine: float | str
    distance: float | str
    max_abs: float | str
    max_rel: float | str
    within_1e3: float | str
    within_5e3: float | str
    old: Numbers

    @property
    def disagrees(self) -> bool:
        """Whether NaN or infinities stand at different places."""
        return self.cosine == "N/A"


def nothing_measured(word: str, message: str = "") -> TensorNumbers:
    """One word instead of all numbers."""
    return TensorNumbers(word, word, word, word, word, word, no_numbers(message))


def tensor_numbers(pair: MeasuredPair) -> TensorNumbers:
    """Two tensors in numbers, or the word that says why there are none."""
    if pair.failure:
        return nothing_measured(_UNSUPPORTED, pair.failure)
    old = numbers(pair.shapes, pair.found, pair.at_zeros)
    found = pair.found
    if found is None or found.num_nan_disagree or found.num_inf_disagree or not found.numel:
        return TensorNumbers(old.cosine, old.cosine, _number(old.max_abs), _number(old.max_rel), old.cosine, old.cosine, old)
    if found.numel == 1:
        return TensorNumbers(old.cosine, _UNSUPPORTED, _number(old.max_abs), _number(old.max_rel), _UNSUPPORTED, _UNSUPPORTED, old)
    distance = found.rms_error * math.sqrt(pair.num_finite) if isinstance(found.rms_error, float) else 0.0
    is_near = isinstance(found.cosine, float) and found.cosine > _ROUNDED_ABOVE
    cosine = round(found.cosine, 6) if is_near and isinstance(found.cosine, float) else _number(old.cosine)
    thousandth, five = (_share(share, pair) for share in (found.within_1e3, found.within_5e3))
    return TensorNumbers(cosine, distance, _number(old.max_abs), _number(old.max_rel), thousandth, five, old)


def _number(text: str) -> float | str:
    """A cell of twelve decimals as the number that it is; words stay."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if math.isnan(value) else value


def _share(share: object, pair: MeasuredPair) -> float | str:
    if isinstance(share, float):
        return float(f"{share:.12f}")
    return 1.0 if pair.found is not None and pair.found.equal else _UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Compared:
    """Two rows side by side, with the numbers of their tensors where there are files.

    `statistics` are max, min, mean and norm of target and golden, None where there is none; `differences` target less golden, None where
    either is no number; `relative` the same as shares of the golden one, infinite where that is zero and the target is not.
    """

    pair: RowPair
    numbers: TensorNumbers | None
    statistics: tuple[tuple[Any, Any], ...]
    differences: tuple[float | None, ...]
    relative: tuple[float | None, ...]

    @classmethod
    def of(cls, pair: RowPair, numbers: TensorNumbers | None = None) -> Compared:
        """The rows of a pair with what can be said about their statistics."""
        target, golden = (row.statistics if row else _NOTHING for row in (pair.target, pair.golden))
        statistics = tuple(zip(target, golden, strict=True))
        if target == golden and None not in target and not pair.row.is_plain:
            return cls(pair, numbers, statistics, _ZEROS, _ZEROS)
        differences = tuple(subtracted(*both) for both in statistics)
        relative = tuple(_relative(difference, other) for difference, other in zip(differences, golden, strict=True))
        return cls(pair, numbers, statistics, differences, relative)

    @property
    def row(self) -> Row:
        return self.pair.row

    @property
    def role(self) -> Role:
        return self.pair.row.role

    @property
    def is_matched(self) -> bool:
        return self.pair.target is not None and self.pair.golden is not None

    @property
    def no_partner(self) -> str:
        """Why nothing could be compared; empty where both sides have the row."""
        if self.is_matched:
            return ""
        return NO_PARTNER["golden" if self.pair.target is None else "target"]


def subtracted(target: Any, golden: Any) -> float | None:
    """The difference of two numbers; None where one is none, or the difference has no value."""
    if not isinstance(target, _NUMBER) or not isinstance(golden, _NUMBER):
        return None
    if target == golden:
        return 0.0
    try:
        difference = float(target) - float(golden)
    except OverflowError:
        return None
    return None if math.isnan(difference) else difference


def _relative(difference: float | None, golden: Any) -> float | None:
    if not difference:
        return difference
    return abs(difference / golden) if golden else math.inf
