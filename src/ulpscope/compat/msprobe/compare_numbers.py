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
from ulpscope.compat.msprobe.compare_matching import RowPair
from ulpscope.compat.msprobe.dump_rows import Role, Row
from ulpscope.compat.ptdbg.columns import Numbers, no_numbers, numbers

__all__ = ["NO_PARTNER", "Compared", "TensorNumbers", "nothing_measured", "tensor_numbers"]

NO_PARTNER = {"target": "No bench data matched.", "golden": "No NPU data matched."}
_UNSUPPORTED = "unsupported"
_ROUNDED_ABOVE = 0.9999


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
    shares = (_share(share, pair) for share in (found.within_1e3, found.within_5e3))
    return TensorNumbers(cosine, distance, _number(old.max_abs), _number(old.max_rel), *shares, old)


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
    """Two rows side by side, with the numbers of their tensors where there are files."""

    pair: RowPair
    numbers: TensorNumbers | None = None

    @property
    def row(self) -> Row:
        row = self.pair.target or self.pair.golden
        assert row is not None
        return row

    @property
    def role(self) -> Role:
        return self.row.role

    @property
    def is_matched(self) -> bool:
        return self.pair.target is not None and self.pair.golden is not None

    @property
    def no_partner(self) -> str:
        """Why nothing could be compared; empty where both sides have the row."""
        if self.is_matched:
            return ""
        return NO_PARTNER["golden" if self.pair.target is None else "target"]

    def statistics(self) -> tuple[tuple[Any, Any], ...]:
        """Max, min, mean and norm, target and golden; None where there is none."""
        nothing = (None,) * 4
        target, golden = (row.statistics if row else nothing for row in (self.pair.target, self.pair.golden))
        return tuple(zip(target, golden, strict=True))

    def difference(self, at: int) -> float | None:
        """Target less golden of one statistic; None where either is no number."""
        target, golden = self.statistics()[at]
        return subtracted(target, golden)

    def relative(self, at: int) -> float | None:
        """The difference as a share of the golden statistic; infinite where that is zero and the target is not."""
        target, golden = self.statistics()[at]
        difference = subtracted(target, golden)
        if difference is None:
            return None
        if difference == 0:
            return 0.0
        return abs(difference / golden) if golden else math.inf


def subtracted(target: Any, golden: Any) -> float | None:
    """The difference of two numbers; None where one is none, or the difference has no value."""
    if not all(isinstance(value, (bool, int, float)) for value in (target, golden)):
        return None
    if target == golden:
        return 0.0
    try:
        difference = float(target) - float(golden)
    except OverflowError:
        return None
    return None if math.isnan(difference) else difference
