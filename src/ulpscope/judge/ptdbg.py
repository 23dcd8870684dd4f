# SPDX-License-Identifier: Apache-2.0
"""The rule set `ptdbg`: the verdict of ptdbg_ascend by cosine and largest absolute error, whatever the dtype and the inputs."""

from __future__ import annotations

from ulpscope.judge.allowance.allowances import Allowance
from ulpscope.judge.derived import verdict_without_numbers
from ulpscope.judge.thresholds import threshold
from ulpscope.model import Measurement, SlotPair, TensorMeasurement, Undefined, Verdict

__all__ = ["ptdbg"]


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
