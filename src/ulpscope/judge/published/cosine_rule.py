# SPDX-License-Identifier: Apache-2.0
"""The rule set `ptdbg`: the verdict of ptdbg_ascend by cosine and largest absolute error, whatever the dtype and the inputs.

`accuracy_word` gives the same as the word in the tables of ptdbg_ascend and of msprobe 1.x.
"""

from __future__ import annotations

from ulpscope.judge.allowance.allowances import Allowance
from ulpscope.judge.derived import verdict_without_numbers
from ulpscope.judge.thresholds import threshold
from ulpscope.model import Measurement, SlotPair, TensorMeasurement, Undefined, Verdict
from ulpscope.model.written import OldNumbers

__all__ = ["accuracy_word", "ptdbg"]


def ptdbg(pair: SlotPair, measurement: Measurement, allowance: Allowance) -> Verdict:
    settled = verdict_without_numbers("ptdbg", pair, measurement)
    if settled is not None:
        return settled
    if not isinstance(measurement, TensorMeasurement):
        return Verdict("unmeasured", "ptdbg", "these rules need the values; only statistics were kept")
    if measurement.num_nan_disagree or measurement.num_inf_disagree:
        return Verdict("differs", "ptdbg", "NaN or infinities stand at different places")
    cosine, largest = measurement.cosine, measurement.max_abs
    if isinstance(cosine, Undefined):
        return Verdict("unmeasured", "ptdbg", cosine.reason)
    if isinstance(largest, Undefined):
        return Verdict("unmeasured", "ptdbg", largest.reason)
    reason = f"cosine {cosine:.6g}, largest error {largest:.3g}"
    return Verdict("differs" if _is_no(cosine, largest) else "rounding", "ptdbg", reason)


def _is_no(cosine: float, largest: float) -> bool:
    if cosine < threshold("ptdbg_cosine") and largest > threshold("ptdbg_max_abs"):
        return True
    return cosine < threshold("ptdbg_cosine_alone") or largest > threshold("ptdbg_max_abs_alone")


def accuracy_word(numbers: OldNumbers) -> str:
    """`Yes`, `No`, `Nan` or `Unmatched`. An error above the last limit is `No` with or without a cosine."""
    if numbers.numel is None:
        return "Nan" if numbers.failure else "Unmatched"
    if numbers.disagreeing:
        return "No"
    cosine, largest = numbers.old_cosine, numbers.max_abs
    if largest is None or cosine is None:
        return "No" if largest is not None and largest > threshold("ptdbg_max_abs_alone") else "Nan"
    return "No" if _is_no(cosine, largest) else "Yes"
