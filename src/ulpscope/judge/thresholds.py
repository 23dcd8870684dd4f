# SPDX-License-Identifier: Apache-2.0
"""Every number at which a verdict changes, and where it comes from. docs/verdicts.md shows the same table; a test keeps them equal."""

from __future__ import annotations

from ulpscope.model import DType
from ulpscope.model.nouns import dataclass

__all__ = ["THRESHOLDS", "Threshold", "rounding_units", "threshold"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number, what it decides and why it has this value."""

    name: str
    value: float
    decides: str
    source: str


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "rounding",
        128.0,
        "units of rounding (half an epsilon) that a call may add on agreeing inputs, float32 and wider",
        "next power of two above 77.5, the largest error among 1530 honest implementations of 17 operations in float32",
    ),
    Threshold(
        "rounding_low",
        32.0,
        "the same for dtypes with fewer than 23 fraction bits",
        "honest kernels that accumulate in float32 stay below 18; not yet calibrated on real accelerators",
    ),
    Threshold(
        "rounding_most",
        0.25,
        "the most that rounding alone explains in any dtype, relative to the size of the result",
        "with 2 or 3 fraction bits 32 units are twice the result and no fault could be seen; one rounding errs by an eighth at most",
    ),
    Threshold(
        "amplification",
        8.0,
        "how many times a call may magnify the difference of its inputs",
        "a guess, for calls that cannot be replayed; cancellation is allowed for separately",
    ),
    Threshold(
        "amplified",
        8.0,
        "multiple up to which a call whose inputs differ within rounding counts as amplified; beyond, it contributed",
        "amplification once more: together 64 times the difference of the inputs",
    ),
    Threshold(
        "peak",
        8.0,
        "distance is the larger of the rms error and the largest error over this, both over the rms of the reference",
        "a largest error of 8 rms errors is beyond what rounding gives to any tensor of fewer than 1e15 elements",
    ),
    Threshold(
        "scale",
        4.0,
        "how many times tighter a difference is judged that is mostly a change of scale, where the inputs have none",
        "noise in the inputs, however magnified, scales a result of n elements by its distance over the root of n only",
    ),
    Threshold(
        "flips",
        2.0,
        "elements that may jump for free where an operation is discontinuous and its inputs differ (relu backward, argmax, optimizer)",
        "an input within rounding of the jump lands on either side",
    ),
    Threshold(
        "jump_size",
        2.0,
        "times by which the largest elements of two sides may differ where elements jump, by statistics",
        "a jump hands on what another element had; the largest may be the one that jumped, and the next is hardly smaller by more",
    ),
    Threshold(
        "flip_share",
        16.0,
        "share of integers or booleans that may flip, over the distance of the inputs",
        "amplification times the density of a normal distribution at the jump, rounded up",
    ),
    Threshold(
        "jump",
        0.5,
        "learning rates that a parameter may be off on average where the optimizer normalises a gradient that differs (Adam and its kin)",
        "where a gradient is zero but for rounding, its sign and so the step is chance; a third of the elements (key biases) gives 0.33",
    ),
    Threshold(
        "late_parameters",
        2.0**-7,
        "distance of parameters that is a fault where the first common step is not step 0",
        "a guess: one epsilon of bfloat16; smaller drift over unrecorded steps may be honest",
    ),
    Threshold(
        "systemic_low",
        0.125,
        "smallest error, in units of a narrower format, that is put down to operands in that format",
        "operands rounded to the format err by 0.8 units; smaller errors are explained by a finer format",
    ),
    Threshold(
        "systemic_high",
        2.0,
        "largest error, in units of a narrower format, that is put down to operands in that format",
        "the same 0.8 units with room for correlated operands",
    ),
    Threshold(
        "systemic_share",
        0.75,
        "share of the matrix products on agreeing inputs that have to err like a narrower format",
        "one product that agrees bitwise by luck (tiny operands) does not speak against it; half of them do",
    ),
    Threshold(
        "systemic",
        8.0,
        "times the error of narrower operands that a matrix product may err by once they are recognised",
        "amplification; the error itself is computed from the sizes of the operands",
    ),
    Threshold(
        "replay_max",
        128.0,
        "largest error of one element, in units of an honest kernel's on the same inputs, float32 and wider",
        "honest kernels of the zoo reach 61 on a CPU or an H200 in the calibrating half and 72 in the held-back half (docs/zoo.md)",
    ),
    Threshold(
        "replay_rms",
        32.0,
        "the same for the rms over 64 or more elements",
        "3.8 and 3.3 (a fused optimizer 24), with room for machines whose functions are good to 1e-6 only; `check` asks for 8",
    ),
    Threshold("replay_bias", 4.0, "the same for a change of scale that all elements share", "0.8 and 2.1; optimizers 6.8, as above"),
    Threshold(
        "replay_max_low",
        32.0,
        "the same as replay_max for dtypes with fewer than 23 fraction bits",
        "16-bit kernels of an H200 reach 8.8 in the calibrating half and 17 in the held-back half, but for calls with a leeway",
    ),
    Threshold("replay_rms_low", 4.0, "the same as replay_rms for such dtypes", "1.6 in the calibrating half, 2.2 in the held-back half"),
    Threshold("replay_bias_low", 0.25, "the same as replay_bias for such dtypes", "0.14 and 0.13; attention 0.32, which has a leeway of 2"),
    Threshold(
        "operands_max",
        64.0,
        "largest error of one element, in units of what rounding the operands of products changes, where that format was seen before",
        "products that round on the way reach 4.9 among 524288 elements, 9.1 if columns differ in size by 100, attention backward 31",
    ),
    Threshold(
        "operands_rms",
        3.0,
        "the same for the rms over 64 or more elements",
        "such products reach 0.94, attention backward 2.0; 1 % more is 12 in TF32 and 3.3 in bfloat16",
    ),
    Threshold(
        "operands_bias",
        0.25,
        "the same for a change of scale that all elements share",
        "0.06; 1 % more is 0.5 to 5 in bfloat16, where the rms may not show it",
    ),
    Threshold(
        "foreseen",
        128.0,
        "units of rounding up to which a result that is within its allowance is not replayed, float32 and wider",
        "replay_max: an element that errs beyond its limit errs by no fewer units of its size",
    ),
    Threshold(
        "foreseen_low",
        0.025,
        "the same for dtypes with fewer than 23 fraction bits",
        "replay_bias_low less the 0.14 that honest kernels reach, over 4: an element counts by a quarter of the tensor's size at least",
    ),
    Threshold(
        "foreseen_scale",
        4.0,
        "units of rounding by which the scale of the two sides may differ in a result that is not replayed, float32 and wider",
        "replay_bias: an error of scale alone makes no larger one",
    ),
    Threshold(
        "foreseen_far",
        512.0,
        "the same, float32 and wider, where it is well within its allowance",
        "next power of two above 287, where honest attention comes if weights differ by 1e-6; a function good to 6e-5 only is at 1008",
    ),
    Threshold(
        "foreseen_share",
        0.5,
        "share of its allowance up to which a result counts as well within",
        "a guess: honest attention backward reaches 0.46 there",
    ),
    Threshold(
        "drawn",
        8.0,
        "standard errors that zeros or sizes of two draws of one random call may be apart",
        "beyond it by chance in one of 1e15 draws",
    ),
    Threshold(
        "check_rms",
        8.0,
        "rules of `check`: rms error over 64 or more elements, in units of an honest kernel's; all calls but an optimizer's step",
        "next power of two above the largest of 40 operations but for an optimizer's step (docs/zoo.md), and one more of room",
    ),
    Threshold("check_bias", 1.0, "the same for a change of scale that all elements share", "as check_rms"),
    Threshold("check_few", 64.0, "elements below which neither is judged", "over fewer the one is the largest error, the other chance"),
    Threshold(
        "check_recurrent",
        8.0,
        "times by which the limits of `check` are wider for recurrent layers in 23 and more fraction bits",
        "an H200's float32 LSTM reaches an rms of 36 forward and 20 backward with TF32 off: its functions are good to 1e-5 only",
    ),
    Threshold(
        "check_rounding",
        2.0,
        "factor between the errors of products and what rounding their operands does, for `check` to put them down to that rounding",
        "one that rounds its operands errs by 1.0; 2 leaves room for what an LSTM or an attention rounds on the way",
    ),
    Threshold("ptdbg_cosine", 0.99, "rules ptdbg: below it and above ptdbg_max_abs the slot differs", "ptdbg_ascend documentation, Cosine"),
    Threshold(
        "ptdbg_max_abs", 0.001, "rules ptdbg: above it and below ptdbg_cosine the slot differs", "ptdbg_ascend documentation, MaxAbsErr"
    ),
    Threshold("ptdbg_cosine_alone", 0.9, "rules ptdbg: below it the slot differs", "ptdbg_ascend documentation, Accuracy Reached or Not"),
    Threshold("ptdbg_max_abs_alone", 1.0, "rules ptdbg: above it the slot differs", "ptdbg_ascend documentation, Accuracy Reached or Not"),
)
_VALUES = {entry.name: entry.value for entry in THRESHOLDS}


def threshold(name: str) -> float:
    return _VALUES[name]


def rounding_units(coarsest: DType | None) -> float:
    """What honest arithmetic in a dtype may err by, relative to the size of the result."""
    if coarsest is None:
        return 0.0
    units = threshold("rounding" if coarsest.mantissa >= 23 else "rounding_low")
    return min(units * coarsest.eps / 2, threshold("rounding_most"))
