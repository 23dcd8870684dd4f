# SPDX-License-Identifier: Apache-2.0
"""Everything that enters a call, and how far apart it is on the two sides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field

from ulpscope.judge.allowance.conditioning import Scale, can_flip, jump_of, narrowed_error, scale_backward, scale_forward, scale_plain
from ulpscope.judge.allowance.jumps import keeps_sum
from ulpscope.judge.allowance.sizes import Size, distance, dtypes_of, is_coherent, size_of
from ulpscope.judge.allowance.trail import Trail
from ulpscope.model import DTYPES, CallRecord, DType, JudgedSlot, Pair, Slot
from ulpscope.model.nouns import dataclass

__all__ = ["Entering", "coarsest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    """`given` are the sizes of what the record receives; for a backward record `inputs` and `results` are those of its forward call.

    `behind_module` is how far apart is what enters a module without being handed over. `jump` is how far a parameter may jump in an
    optimizer's step, `can_flip` whether elements may jump for a tiny change of an input, `is_known` whether all of it is on both sides in
    the same shape.
    """

    given: Sequence[Size]
    inputs: dict[tuple[int | str, ...], Size] = field(default_factory=dict)
    results: Sequence[Size] = ()
    dtypes: Sequence[DType] = ()
    agree: bool = True
    is_scaled: bool = False
    by_path: dict[tuple[int | str, ...], JudgedSlot] = field(default_factory=dict)
    drift: float = 0.0
    behind_module: float = 0.0
    jump: float = 0.0
    can_flip: bool = False
    is_known: bool = True

    @classmethod
    def of(cls, pair: Pair, given: Sequence[JudgedSlot], trail: Trail) -> Entering:
        forward = trail.forward_of(pair.record)
        behind = forward.slots if forward else ()
        inputs = [slot for slot in behind if slot.pair.slot.is_input]
        behind_module, parameters_agree = trail.behind_module(pair.record)
        return cls(
            given=_sizes(given, trail.drift),
            inputs={slot.pair.slot.path: size for slot in inputs if (size := _size(slot, trail.drift)) is not None},
            results=_sizes((slot for slot in behind if slot.pair.slot.role == "output"), trail.drift),
            dtypes=[*_dtypes([*given, *behind]), *_autocast(pair)],
            agree=_agree([*given, *behind]) and parameters_agree,
            is_scaled=_is_scaled([*given, *behind]),
            by_path={slot.pair.slot.path: slot for slot in given},
            drift=trail.drift,
            behind_module=behind_module,
            jump=jump_of(pair),
            can_flip=can_flip(pair.record) and keeps_sum(pair),
            is_known=_is_known([*given, *inputs]),
        )

    def narrowed_to(self, slots: Sequence[JudgedSlot]) -> Entering:
        """The same with only some slots entering."""
        return Entering(
            given=_sizes(slots, self.drift),
            dtypes=_dtypes(slots),
            agree=_agree(slots),
            is_scaled=_is_scaled(slots),
            jump=self.jump,
            can_flip=self.can_flip,
            is_known=_is_known(slots),
        )

    @property
    def apart(self) -> float:
        return max([self.behind_module, *(size.distance for size in (*self.given, *self.inputs.values(), *self.results))])

    def scale(self, record: CallRecord, slot: Slot, own: Size) -> Scale:
        scale = self._scale(record, slot, own)
        return Scale(scale.terms, max(scale.carried, self.behind_module * own.rms)) if self.behind_module else scale

    def _scale(self, record: CallRecord, slot: Slot, own: Size) -> Scale:
        if record.phase == "forward":
            return scale_forward(record.call, self.given, own)
        if record.phase == "backward" and self.inputs:
            return scale_backward(record.call, self.given, list(self.inputs.values()), self.results, self.inputs.get(slot.path), own)
        return scale_plain(self.given, own)

    def narrowed_error(self, record: CallRecord, own: Size, narrow: DType) -> float:
        return narrowed_error(record, self.given, list(self.inputs.values()) or self.given, own, narrow)


def coarsest(dtypes: Iterable[DType]) -> DType | None:
    floating = [one for one in {one.name: one for one in dtypes}.values() if one.is_floating]
    return floating[0] if len(floating) == 1 else max(floating, key=lambda one: one.eps, default=None)


def _sizes(slots: Iterable[JudgedSlot], drift: float) -> list[Size]:
    return [size for slot in slots if (size := _size(slot, drift)) is not None]


def _size(slot: JudgedSlot, drift: float) -> Size | None:
    """Statistics do not show how far apart values are that other random numbers made: as far as they are large."""
    at_least = 1.0 if slot.behind in ("random", "unwritten") else drift
    return size_of(slot.pair, slot.measurement, slot.verdict.level, at_least)


def _dtypes(slots: Iterable[JudgedSlot]) -> list[DType]:
    return [one for slot in slots for one in dtypes_of(slot.pair)]


def _agree(slots: Iterable[JudgedSlot]) -> bool:
    return all(slot.verdict.level != "differs" for slot in slots)


def _is_known(slots: Iterable[JudgedSlot]) -> bool:
    sides = ((slot.pair.subject, slot.pair.reference) for slot in slots)
    return all(ours is not None and theirs is not None and ours.shape == theirs.shape for ours, theirs in sides)


def _is_scaled(slots: Iterable[JudgedSlot]) -> bool:
    return any(is_coherent(slot.pair, slot.measurement) for slot in slots if distance(slot.measurement))


def _autocast(pair: Pair) -> list[DType]:
    """What a module may have computed in, whatever enters and leaves it."""
    if pair.record.level != "module":
        return []
    modes = [side.modes.autocast for side in (pair.subject, pair.reference) if side is not None and side.modes is not None]
    return [DTYPES[name] for mode in modes if mode and (name := mode.rpartition(":")[2]) in DTYPES]
