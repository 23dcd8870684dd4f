# SPDX-License-Identifier: Apache-2.0
"""Measure how much an honest kernel errs on the inputs of one call, and how often that fits into the error of a recorded result.

The work is done in stages, each of which can only make the yardstick longer: the exact result; probes; the native kernel and its
decomposition. So a result that a short yardstick finds good needs no longer one, and its ratios are upper bounds. Where every input is
float64 already, nothing on this machine is more exact: the result is judged against another float64 computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch

from ulpscope.model import DType, OperandFormat, Slot, SlotReplay
from ulpscope.replay.program import NotReplayable, Program
from ulpscope.replay.yardstick.coarseness import is_dropped, leeway, tells_by_scale
from ulpscope.replay.yardstick.honest import Evaluations, Moves
from ulpscope.replay.yardstick.probes import STEP, coarsest_dtype, coarsest_of, is_floating
from ulpscope.replay.yardstick.ratios import Evidence, Ratios, ratios
from ulpscope.replay.yardstick.rounding import ROUNDINGS

__all__ = ["Limits", "Yardstick"]

Limits = Callable[[str], tuple[float, float]]
"""From the name of a dtype to the largest max_ratio and rms_ratio that need no closer look."""
Stage = Literal["exact", "probes", "full", "scattered"]

SCALED = 1 / 8
"""Projection over the root of the number of elements from which on a change of scale is looked at closer."""
ROUNDED_OTHERWISE = 16.0
"""Ratio from which on operands rounded the one way do not explain a call that computes more than products."""
CANCELLED = 4.0
"""Room for noise in units of that rounding where more than products are computed: saturated attention backward errs by 7.1 and 111."""
TIES = 16.0
"""Ratio from which on it is asked whether a tie among inputs explains it."""
ALIKE, NEARLY_ALL = 0.1, 0.9
"""So near to one factor, and so many of the elements, where one factor is the error: cutting off digits spreads by half of its mean."""
FEW = 64
FINE = 23
"""Fraction bits below which it is asked what rounding intermediate results otherwise does, also of machines that round operands: a kernel
of 16 bits computes in formats of its own. Where a result is exactly 0 or hangs on a whole number, no noise in the inputs shows rounding."""
DISPUTE = 64.0
"""Times by which a decomposition has to miss the exact result before that result itself is computed a second way."""


class Yardstick:
    """One call and all results that were evaluated for it so far.

    With `operands`, a result is honest too if products of operands rounded to that format give it. Of products alone it is known what is
    rounded on the way. For calls that compute more, `loosely` asks another question: is a result as near to that as such rounding is large,
    in these units? None asks it only of calls that compute more than products, where the first answer is no.
    """

    def __init__(self, program: Program, *, operands: OperandFormat | None = None, loosely: bool | None = None) -> None:
        self._program = program
        self._loosely_only = bool(loosely)
        self._may_loosen = loosely is None
        self._plain = Evaluations(program)
        self._moves = Moves(program, self._plain)
        self._rounded = [Evaluations(program, one) for one in (ROUNDINGS[operands] if operands else ())]

    def exact(self) -> dict[Slot, torch.Tensor]:
        """Return the call in float64 on contiguous copies of its inputs."""
        return self._plain.exact

    @property
    def has_products(self) -> bool:
        """Tell whether the call computes products, whose operands a machine may round."""
        return self._plain.has_products

    @cached_property
    def _coarsest_input(self) -> list[torch.Tensor]:
        return coarsest_of(self._program.inputs.values())

    def measure(
        self, recorded: Mapping[Slot, torch.Tensor], *, enough: Limits | None = None, has_ties: bool = True
    ) -> tuple[SlotReplay, ...]:
        """Measure every recorded result that the call gives. With `enough`, stop as soon as a result is known to be within these limits.

        Without `has_ties` nothing was rounded on the way to what was recorded: integers and booleans follow exactly from the inputs.
        """
        found = (self._measure(slot, value.detach().cpu(), enough, has_ties) for slot, value in recorded.items() if slot in self.exact())
        return tuple(self._with_leeway(one) for one in found)

    def _with_leeway(self, found: SlotReplay) -> SlotReplay:
        name = self._program.name
        is_excused = bool(self._rounded) and not self._plain.is_composite and is_dropped(found.scale, self._num_terms(found.numel))
        bias = found.bias if tells_by_scale(name, found.dtype) and not is_excused else None
        room = leeway(name, found.dtype, is_rounding=bool(self._rounded))
        if found.is_rounding:  # leave room where a formula cancels what a kernel rounds; a change of scale gets none
            room = CANCELLED if self._plain.is_composite else 1.0
        return replace(found, bias=bias, leeway=room)

    def _num_terms(self, numel: int) -> float:
        """Estimate how many products add up to one element, from the sizes of a matrix product: (m k)(k n) / (m n) = k^2."""
        *_, one, other = (0, 0, *sorted(value.numel() for value in self._program.inputs.values()))
        return math.sqrt(one * other / max(numel, 1))

    def _measure(self, slot: Slot, recorded: torch.Tensor, enough: Limits | None, has_ties: bool) -> SlotReplay:
        exact = self.exact()[slot]
        if exact.shape != recorded.shape:
            raise NotReplayable(
                f"{slot} was recorded with shape {tuple(recorded.shape)}, but running {self._program.name} again gives {tuple(exact.shape)}"
            )
        coarsest = coarsest_dtype([*self._coarsest_input, recorded])
        if is_floating(recorded) and is_floating(exact):
            return self._measure_floating(slot, recorded, coarsest, enough)
        num_flipped = self._moves.num_flipped(slot, recorded, exact, has_ties=has_ties)
        return SlotReplay(slot=slot, dtype=coarsest.name, numel=recorded.numel(), max_ratio=0.0, rms_ratio=0.0, num_flipped=num_flipped)

    def _measure_floating(self, slot: Slot, recorded: torch.Tensor, coarsest: DType, enough: Limits | None) -> SlotReplay:
        if self._loosely_only and self._rounded:
            found = self._loosely(slot, recorded, coarsest)
            if not self._is_one_scale(slot, recorded, found):
                return replace(_slot_replay(slot, recorded, coarsest, found, is_bound=False), is_rounding=True)
        if enough is not None:
            for stage in _BOUNDS:
                found = self._best(slot, recorded, coarsest, stage)
                if _is_within(found, enough(coarsest.name), recorded.numel()):
                    return _slot_replay(slot, recorded, coarsest, found, is_bound=True)
        found = self._best(slot, recorded, coarsest, "full")
        if found.max_ratio > TIES and not self._plain.only_moves and self._moves.has_jumps(slot, self.exact()):
            self._moves.look_for_ties(self.exact())
            found = self._best(slot, recorded, coarsest, "full")
        may_hide = coarsest.mantissa < FINE or not self._rounded
        if found.max_ratio > TIES and may_hide and not self._plain.only_moves:
            found = self._best(slot, recorded, coarsest, "scattered")
        return _slot_replay(slot, recorded, coarsest, found, is_bound=False)

    def _best(self, slot: Slot, recorded: torch.Tensor, coarsest: DType, stage: Stage) -> Ratios:
        """Return the better of full precision and rounded operands: no call has to round, and none errs on purpose.

        Where products are only part of a call, fused kernels round other intermediate results than the formula does. If neither explains
        the recorded result, the size of such rounding is part of the yardstick.
        """
        found = [self._ratios(one, slot, recorded, coarsest, stage) for one in (self._plain, *self._rounded)]
        is_open = self._may_loosen and self._plain.is_composite and min(one.max_ratio for one in found) > ROUNDED_OTHERWISE
        if self._rounded and is_open:
            found.append(self._loosely(slot, recorded, coarsest))
        return min(found, key=_badness)

    def _is_one_scale(self, slot: Slot, recorded: torch.Tensor, found: Ratios) -> bool:
        """Return true if nearly all elements are off by the same factor, which rounding on the way does not make.

        Rounding moves each element on its own; where a few large ones make up the size of a result, they share a factor by chance, and the
        small ones do not.
        """
        numel = recorded.numel()
        if not found.scale or numel < FEW or (not self._plain.is_composite and is_dropped(found.scale, self._num_terms(numel))):
            return False
        for one in self._rounded:
            centre = _real(one.exact[slot]).to(torch.float64)
            moved = _real(recorded).to(torch.float64) - centre
            factor = float((moved * centre).sum() / centre.square().sum())
            is_moved_alike = (moved - factor * centre).abs() <= ALIKE * abs(factor) * centre.abs()
            if float(is_moved_alike.double().mean()) >= NEARLY_ALL:
                return True
        return False

    def _loosely(self, slot: Slot, recorded: torch.Tensor, coarsest: DType) -> Ratios:
        """Measure how far a result is from that of rounded operands, in units of what rounding them to the nearest changes.

        The unit is the rms over a row, or over all elements where more than products are computed: terms may cancel in a formula, and with
        them the change that rounding makes, while they do not in a kernel.
        """
        nearest = _real(self._rounded[0].exact[slot]).to(torch.float64)
        change = torch.nan_to_num(nearest - _real(self.exact()[slot]), nan=0.0, posinf=0.0, neginf=0.0).square()
        usual = change.mean(-1, keepdim=True) if change.dim() else change
        if self._plain.is_composite:
            usual = torch.maximum(usual, change.mean())
        found = []
        for one in self._rounded:
            centre = _real(one.exact[slot]).to(torch.float64)
            evidence = replace(self._evidence(one, slot, "full"), rounded=centre + usual.sqrt().expand_as(centre))
            found.append(ratios(_real(recorded), evidence, coarsest, float(torch.finfo(recorded.dtype).max)))
        return min(found, key=_badness)

    def _ratios(self, evaluations: Evaluations, slot: Slot, recorded: torch.Tensor, coarsest: DType, stage: Stage) -> Ratios:
        evidence = self._evidence(evaluations, slot, stage)
        largest = float(torch.finfo(recorded.dtype).max)
        found = ratios(_real(recorded), evidence, coarsest, largest)
        if found.dispute <= DISPUTE or not evaluations.kernels_disagree(slot):
            return found
        return self._without_agreement(evaluations, slot, recorded, coarsest, evidence)

    def _without_agreement(
        self, evaluations: Evaluations, slot: Slot, recorded: torch.Tensor, coarsest: DType, evidence: Evidence
    ) -> Ratios:
        """Measure against the kernel and against the decomposition, where they are two different functions in any precision.

        Either excuses the result, and the kernel is put down as suspect.
        """
        assert evaluations.exact_decomposed is not None
        largest = float(torch.finfo(recorded.dtype).max)
        other = replace(evidence, exact=_real(evaluations.exact_decomposed[slot]))
        ways = (replace(evidence, decomposed=None), replace(other, kernel=None))
        best = min((ratios(_real(recorded), one, coarsest, largest) for one in ways), key=_badness)
        return replace(best, native_ratio=ratios(_real(recorded), other, coarsest, largest).native_ratio)

    def _evidence(self, evaluations: Evaluations, slot: Slot, stage: Stage) -> Evidence:
        exact = _real(evaluations.exact[slot])
        if stage == "exact" or evaluations.only_moves:
            return Evidence(exact=exact)
        moved = self._moves.of(slot, self.exact(), with_zeros=stage not in _BOUNDS)
        known = Evidence(exact=exact, moved2=_real(moved.square), step=STEP, is_fragile=moved.is_fragile)
        if stage == "probes":
            return known
        kernel, decomposed = (None if one is None else _real(one[slot]) for one in (evaluations.kernel, evaluations.decomposed))
        if stage == "scattered" and decomposed is not None:
            decomposed = evaluations.rounded_otherwise(slot)
        return replace(known, kernel=kernel, decomposed=decomposed)


_BOUNDS: tuple[Stage, ...] = ("exact", "probes")


def _badness(found: Ratios) -> tuple[float, float, float]:
    return found.num_nonfinite, found.rms_ratio, found.max_ratio


def _is_within(found: Ratios, limits: tuple[float, float], numel: int) -> bool:
    most, rms = limits
    is_scaled = (found.bias or 0.0) > max(SCALED * math.sqrt(numel), 1.0)
    return found.num_nonfinite == 0 and found.max_ratio <= most and found.rms_ratio <= rms and not is_scaled


def _slot_replay(slot: Slot, recorded: torch.Tensor, coarsest: DType, found: Ratios, *, is_bound: bool) -> SlotReplay:
    return SlotReplay(
        slot=slot,
        dtype=coarsest.name,
        numel=recorded.numel(),
        max_ratio=found.max_ratio,
        rms_ratio=found.rms_ratio,
        is_bound=is_bound,
        bias=found.bias,
        scale=found.scale,
        num_nonfinite=found.num_nonfinite,
        error=found.error,
        honest_error=found.honest_error,
        native_ratio=found.native_ratio,
        worst_index=None if found.worst is None else _unravel(found.worst, tuple(_real(recorded).shape)),
        worst_recorded=found.worst_recorded,
        worst_exact=found.worst_exact,
    )


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        index.append(here)
    return tuple(reversed(index))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
