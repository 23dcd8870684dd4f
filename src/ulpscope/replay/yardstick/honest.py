# SPDX-License-Identifier: Apache-2.0
"""Run one call again in every way that is asked for, each way once and only when asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from ulpscope._torch_private import TorchDispatchMode
from ulpscope.model import Slot
from ulpscope.replay.formulas.decompositions import Decomposed, Traced, is_composite, is_movement, is_normwise, separate_kernels
from ulpscope.replay.program import NotReplayable, Program
from ulpscope.replay.yardstick.picking import picks_the_same
from ulpscope.replay.yardstick.probes import JUMP, STEP, Probes, is_floating, widened
from ulpscope.replay.yardstick.rounding import PRODUCTS, RoundedOperands, Rounding

__all__ = ["Evaluations", "Moved", "Moves"]

Values = dict[Slot, torch.Tensor]

NUM_PROBES = 6
NUM_PROBES_LARGE = 3
LARGE = 1 << 20
"""From this many elements on, fewer probes do: pooling evens out what one element's few probes miss."""
NUM_PROBES_FOR_TIES = 48
NUM_SCATTERED = 4


class Evaluations:
    """Exact, native and decomposed results of one call.

    With `rounding`, they are those of a machine that rounds the operands of matrix products so.
    """

    def __init__(self, program: Program, rounding: Rounding | None = None) -> None:
        self._program = program
        self._rounding = rounding
        self._traced = Traced()

    @cached_property
    def exact(self) -> Values:
        return _run(self._program, widened(self._program.inputs), self._rounding, self._traced)

    @property
    def only_moves(self) -> bool:
        """Tell whether the call computes nothing: it views, copies or picks values."""
        return bool(self.exact) and is_movement(self._traced.names)

    @property
    def is_composite(self) -> bool:
        return bool(self.exact) and is_composite(self._traced.names)

    @property
    def has_products(self) -> bool:
        """Tell whether the call computes products, whose operands a machine may round."""
        return bool(self.exact) and not self._traced.names.isdisjoint(PRODUCTS)

    @property
    def is_normwise(self) -> bool:
        return bool(self.exact) and is_normwise(self._traced.names)

    @cached_property
    def is_widest(self) -> bool:
        floating = [one.dtype for one in self._program.inputs.values() if is_floating(one)]
        return all(one in (torch.float64, torch.complex128) for one in floating)

    @cached_property
    def _is_narrow(self) -> bool:
        return any(one.dtype.itemsize < 4 for one in self._program.inputs.values() if is_floating(one))

    @cached_property
    def kernel(self) -> Values | None:
        """Run this machine's kernels in the native precision, on inputs laid out as recorded; None where it has none."""
        if self.is_widest:
            return None
        try:
            return _run(self._program, self._program.inputs, self._rounding, separate=self._rounding is not None)
        except (RuntimeError, NotReplayable):
            return None

    @cached_property
    def decomposed(self) -> Values | None:
        return self._decomposed({slot: value.contiguous() for slot, value in self._program.inputs.items()})

    @cached_property
    def scattered(self) -> list[Values]:
        """Return the decomposed computation several times more, its intermediate results rounded otherwise each time."""
        plain = {slot: value.contiguous() for slot, value in self._program.inputs.items()}
        found = (self._decomposed(plain, seed) for seed in range(NUM_SCATTERED))
        return [] if self.decomposed is None else [one for one in found if one is not None]

    def rounded_otherwise(self, slot: Slot) -> torch.Tensor | None:
        """Give values that err as much as honest computations do: by their root mean square error, element by element.

        One computation errs by next to nothing in some elements by luck. The largest of several would be a larger yardstick than the one
        that the limits were measured with. An element that is infinite in one of them stays so.
        """
        if self.decomposed is None:
            return None
        exact = _real(self.exact[slot]).to(torch.float64)
        found = [_real(values[slot]).to(torch.float64) for values in (self.decomposed, *self.scattered)]
        square = torch.zeros_like(exact)
        for one in found:
            square += torch.nan_to_num(one - exact, nan=0.0, posinf=math.inf, neginf=-math.inf).square()
        usual = exact + torch.copysign((square / len(found)).sqrt(), found[0] - exact)
        for one in found:
            usual = torch.where(torch.isfinite(usual) | torch.isfinite(one), usual, one)
        return usual

    def spread(self, slot: Slot) -> torch.Tensor | None:
        """Return how far honest computations that round otherwise are from the decomposed one; the native kernel has no part in it."""
        if self.decomposed is None:
            return None
        centre = _real(self.decomposed[slot]).to(torch.float64)
        others = [(_real(values[slot]).to(torch.float64) - centre).abs() for values in self.scattered]
        return torch.stack(others).amax(0) if others else None

    @cached_property
    def exact_decomposed(self) -> Values | None:
        return None if self.is_widest else self._decomposed(widened(self._program.inputs))

    def kernels_disagree(self, slot: Slot) -> bool:
        """Tell whether the decomposed computation differs from the exact one even in float64, so that rounding is not the cause."""
        if self.exact_decomposed is None or self.decomposed is None:
            return False
        exact = self.exact[slot]
        in_float64, natively = (_finite_rms(one[slot] - exact) for one in (self.exact_decomposed, self.decomposed))
        return in_float64 > natively / 32

    def _decomposed(self, inputs: Mapping[Slot, torch.Tensor], seed: int | None = None) -> Values | None:
        mode = Decomposed(seed, is_narrow=self._is_narrow)
        try:
            found = _run(self._program, inputs, self._rounding, mode, separate=False)
        except Exception:  # torch's decompositions are written for tracing; if one fails here, the call has no decomposed result
            return None
        same = all(slot in found and found[slot].shape == value.shape for slot, value in self.exact.items())
        return found if mode.is_covered and same else None


@dataclass(slots=True)
class Moved:
    """How far probes moved one result: the mean square over the square of their noise, and the elements that a probe made finite or not."""

    square: torch.Tensor
    is_fragile: torch.Tensor | None = None

    def add(self, probe: torch.Tensor, exact: torch.Tensor, share: float) -> None:
        is_finite = True
        for total, there, here in _blocks(self.square, probe, exact):
            difference = there.to(torch.float64) - here.to(torch.float64)
            if not math.isfinite(float(difference.sum())):
                is_finite = False
                difference.masked_fill_(~torch.isfinite(difference), 0.0)
            total += difference.square_().mul_(share / STEP**2)
        if is_finite:
            return
        changes = torch.isfinite(probe) != torch.isfinite(exact)
        if bool(changes.any()):
            self.is_fragile = changes if self.is_fragile is None else self.is_fragile | changes

    def widen(self, probe: torch.Tensor, exact: torch.Tensor) -> None:
        alone = Moved(torch.zeros_like(self.square))
        alone.add(probe, exact, 1 / NUM_PROBES)
        self.square = torch.maximum(self.square, alone.square)


def _blocks(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    return zip(*(torch.split(one.view(-1), LARGE) for one in tensors), strict=True) if tensors[0].numel() > LARGE else (tensors,)


class Moves:
    """Measures how far noise in the inputs moves the results of a call."""

    def __init__(self, program: Program, evaluations: Evaluations | None = None) -> None:
        self._program = program
        self._evaluations = evaluations or Evaluations(program)
        self._moved: dict[Slot, Moved] = {}
        self._has_zeros_in = False
        self._has_ties_in = False

    @property
    def evaluations(self) -> Evaluations:
        return self._evaluations

    def of(self, slot: Slot, exact: Values, *, with_zeros: bool) -> Moved:
        if not self._moved:
            self._probe(exact)
        if with_zeros and not self._has_zeros_in:
            self._has_zeros_in = True
            self._probe_zeros(exact)
        return self._moved[slot]

    def _probe(self, exact: Values) -> None:
        self._moved = {slot: Moved(torch.zeros(_real(one).shape, dtype=torch.float64)) for slot, one in exact.items() if is_floating(one)}
        count = self._count(exact)
        for seed in range(count):
            for slot, value in self._probed(seed).items():
                if slot in self._moved:
                    self._moved[slot].add(_real(value).contiguous(), _real(exact[slot]).contiguous(), 1 / count)

    def has_jumps(self, slot: Slot, exact: Values) -> bool:
        """Tell whether a probe moved an element by more than any smooth function would."""
        size2 = _real(exact[slot]).to(torch.float64).square()
        size2 = torch.nan_to_num(size2, nan=0.0, posinf=0.0)
        return bool((self._moved[slot].square * STEP**2 > JUMP**2 * size2.clamp(min=float(size2.mean()) / 16)).any())

    def look_for_ties(self, exact: Values) -> None:
        """Run many more probes, once: each shows only one way in which a tie may go."""
        if self._has_ties_in:
            return
        self._has_ties_in = True
        for values in self._choices(torch.int64):
            for slot, value in _run(self._program, values).items():
                if slot in self._moved:
                    self._moved[slot].widen(_real(value).contiguous(), _real(exact[slot]).contiguous())

    @cached_property
    def _probes(self) -> Probes:
        return Probes(self._program.inputs)

    def _count(self, exact: Values) -> int:
        largest = max((one.numel() for one in [*self._program.inputs.values(), *exact.values()]), default=0)
        return NUM_PROBES_LARGE if largest > LARGE else NUM_PROBES

    def _probe_zeros(self, exact: Values) -> None:
        """Probe ties among zeros, which relative noise cannot break; this probe does not mark elements as fragile."""
        if not self._has_zeros():
            return
        for slot, value in _run(self._program, self._probes.with_nudged_zeros(0)).items():
            if slot in self._moved:
                moved = Moved(self._moved[slot].square)
                moved.add(_real(value).contiguous(), _real(exact[slot]).contiguous(), 1.0)

    def _has_zeros(self) -> bool:
        return any(is_floating(one) and bool((one == 0).any()) for one in self._program.inputs.values())

    def _probed(self, seed: int) -> Values:
        return _run(self._program, self._probes.noisy(seed, is_normwise=self._evaluations.is_normwise))

    def num_flipped(self, slot: Slot, recorded: torch.Tensor, exact: torch.Tensor, *, has_ties: bool = True) -> int:
        """Count integers or booleans that differ from the exact ones; where rounding may break ties, only those that no probe changes."""
        differs = recorded != exact
        if bool(differs.any()) and picks_the_same(self._program.inputs.values(), recorded, exact):
            return 0
        if not (has_ties and bool(differs.any())) or not any(is_floating(one) for one in self._program.inputs.values()):
            return int(differs.sum())
        for values in self._choices(recorded.dtype):
            probed = _run(self._program, values).get(slot)
            if probed is not None and probed.shape == exact.shape:
                differs &= probed == exact
            if not bool(differs.any()):
                return 0
        return int(differs.sum())

    def _choices(self, dtype: torch.dtype) -> Iterator[Values]:
        """Yield inputs that break ties: noise and, for indices, another order of zeros (whether a number is 0 is no tie)."""
        if dtype != torch.bool and self._has_zeros():
            yield from map(self._probes.with_nudged_zeros, range(NUM_PROBES_FOR_TIES))
        yield from map(self._probes.noisy, range(NUM_PROBES_FOR_TIES))


def _run(
    program: Program,
    inputs: Mapping[Slot, torch.Tensor],
    rounding: Rounding | None = None,
    mode: TorchDispatchMode | None = None,
    *,
    separate: bool = True,
) -> Values:
    with ExitStack() as stack:
        if separate and _may_attend(program.name):
            stack.enter_context(separate_kernels())
        if rounding is not None:
            stack.enter_context(RoundedOperands(rounding))
        if mode is not None:
            stack.enter_context(mode)
        return {slot: value.detach() for slot, value in program(inputs).items()}


def _may_attend(name: str) -> bool:
    """Tell whether a call may compute attention: its name tells, unless it is not torch's own."""
    is_torchs = name.startswith(("Tensor.", "functional.", "torch.", "optimizer."))
    return not is_torchs or "atten" in name or "transformer" in name


def _finite_rms(difference: torch.Tensor) -> float:
    return float(torch.nan_to_num(difference, nan=0.0, posinf=0.0, neginf=0.0).abs().square().mean().sqrt())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
