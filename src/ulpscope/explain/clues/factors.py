# SPDX-License-Identifier: Apache-2.0
"""A clue: the subject's value is the reference's times one number, in every element: a factor that was forgotten or applied twice.

A number is named only if it is simple, or follows from the shape of the tensor (means against sums, biased against unbiased, attention
scales), and the elements agree with it to within rounding. For the gradients that enter an optimizer any common number is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, prod, sqrt

from ulpscope.explain.suspects import Suspect, is_varied
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import count, number, slot_text
from ulpscope.model import DTYPES, Finding, JudgedSlot, Summary, TensorMeasurement, Undefined

__all__ = ["clue_gradients", "clue_ratio", "common_ratio", "ratio_of"]

_SHARE = 0.9


def clue_ratio(suspect: Suspect, views: Sequence[StepView]) -> list[str]:
    ratio = ratio_of(suspect.slot)
    text = _named(ratio, suspect.slot) if ratio is not None else ""
    return [f"exact ratio: the subject's {slot_text(suspect.slot.pair.slot)} is {text} times the reference's"] if text else []


def clue_gradients(fault: Finding, views: Sequence[StepView]) -> list[str]:
    """All gradients that enter the optimizer in the step of the fault are off by one factor, on each rank its own."""
    ranks = {view.rank: found for view in views if view.step == fault.step and (found := common_ratio(view)) is not None}
    if not ranks:
        return []
    ratios, many = [ratio for ratio, _ in ranks.values()], sum(many for _, many in ranks.values())
    if max(ratios) - min(ratios) <= 1e-4 * max(map(abs, ratios)):
        return [f"all {count(many, 'gradient')} that enter the optimizer are {_plain(ratios[0])} times the reference's"]
    parts = ", ".join(f"{_plain(ratio)} on rank {rank}" for rank, (ratio, _) in sorted(ranks.items()))
    return [f"each rank's gradients are scaled by a number of its own: {parts} (clipped by a local norm?)"]


def common_ratio(view: StepView) -> tuple[float, int] | None:
    """The number by which the gradients that enter the optimizer are scaled, and how many gradients those are."""
    slots = [slot for call in view.calls if call.pair.record.phase == "optimizer" for slot in call.slots]
    gradients = [slot for slot in slots if slot.pair.slot.role == "gradient" and slot.verdict.level != "unmatched"]
    known = [(slot, ratio) for slot in gradients if (ratio := ratio_of(slot)) is not None]
    if len(gradients) < 2 or len(known) < _SHARE * len(gradients):
        return None
    middle = sorted(ratio for _, ratio in known)[len(known) // 2]
    alike = [slot for slot, ratio in known if abs(ratio - middle) <= _tolerance(slot) * abs(middle)]
    is_scaled = len(alike) >= _SHARE * len(gradients) and all(abs(middle - 1) > 8 * _tolerance(slot) for slot in alike)
    return (middle, len(alike)) if is_scaled else None


def ratio_of(slot: JudgedSlot) -> float | None:
    """Subject over reference where that is one number for all elements, to within rounding; None where it is not or is 1."""
    found = _of_values(slot.measurement, slot) if isinstance(slot.measurement, TensorMeasurement) else _of_statistics(slot)
    return found if found is not None and isfinite(found) and abs(found - 1) > _tolerance(slot) else None


def _of_values(measured: TensorMeasurement, slot: JudgedSlot) -> float | None:
    if measured.num_nan_disagree or measured.num_inf_disagree or not measured.rms_reference or not measured.rms_subject:
        return None
    ratio = measured.rms_subject / measured.rms_reference
    if measured.numel == 1:
        is_flipped = (measured.worst_subject or 0.0) * (measured.worst_reference or 0.0) < 0
        return -ratio if is_flipped else ratio
    if isinstance(measured.cosine, Undefined):
        return None
    apart = sqrt(max(1 - measured.cosine**2, 0.0))
    return ratio * (1 if measured.cosine > 0 else -1) if apart <= _tolerance(slot) else None


def _of_statistics(slot: JudgedSlot) -> float | None:
    """All statistics moved by the same factor."""
    ours, theirs = (record.summary if record else None for record in (slot.pair.subject, slot.pair.reference))
    if ours is None or theirs is None or not theirs.rms or not ours.rms or (not is_varied(slot.pair.reference) and theirs.numel > 1):
        return None
    ratio = ours.rms / theirs.rms
    return next((one for one in (ratio, -ratio) if _fits(ours, theirs, one, _tolerance(slot))), None)


def _fits(ours: Summary, theirs: Summary, ratio: float, tolerance: float) -> bool:
    low, high = (theirs.min, theirs.max) if ratio > 0 else (theirs.max, theirs.min)
    pairs = [(ours.min, low), (ours.max, high), (ours.mean, theirs.mean)]
    scale = tolerance * max(ours.rms or 0.0, 1e-300) * 8
    return all(a is not None and b is not None and abs(a - ratio * b) <= scale for a, b in pairs)


def _tolerance(slot: JudgedSlot) -> float:
    records = (slot.pair.subject, slot.pair.reference)
    eps = [DTYPES[one.dtype].eps for one in records if one is not None and one.dtype in DTYPES]
    return max(4 * max(eps, default=0.0), 1e-7)


def _named(ratio: float, slot: JudgedSlot) -> str:
    """The number in words; empty where it means nothing."""
    tolerance = _tolerance(slot)
    for value, text in _telling_numbers(slot):
        if abs(abs(ratio) - value) <= tolerance * value:
            return f"-{text}" if ratio < 0 else text
    return ""


def _telling_numbers(slot: JudgedSlot) -> Iterator[tuple[float, str]]:
    """Ordered: plain numbers first, then what the shape suggests."""
    yield 1.0, "1"
    for whole in (*range(2, 17), 32, 64, 128, 256, 512, 1024):
        yield float(whole), str(whole)
        yield 1 / whole, f"1/{whole}"
    yield sqrt(2), "the root of 2"
    yield sqrt(0.5), "1 over the root of 2"
    for length in _lengths(slot):
        yield sqrt(length), f"the root of {length}"
        yield 1 / sqrt(length), f"1 over the root of {length}"
        yield float(length), str(length)
        yield 1 / length, f"1/{length}"
        if 2 < length <= 4096:
            yield length / (length - 1), f"{length}/{length - 1}"
            yield (length - 1) / length, f"{length - 1}/{length}"


def _lengths(slot: JudgedSlot) -> list[int]:
    record = slot.pair.reference
    return sorted({*record.shape, prod(record.shape)} - {0, 1}) if record is not None else []


def _plain(ratio: float) -> str:
    nearest = round(ratio)
    if nearest and abs(ratio - nearest) <= 1e-5 * abs(nearest):
        return str(nearest)
    inverse = round(1 / ratio) if ratio else 0
    return f"1/{inverse}" if abs(inverse) > 1 and abs(ratio * inverse - 1) <= 1e-5 else number(ratio, 5)
