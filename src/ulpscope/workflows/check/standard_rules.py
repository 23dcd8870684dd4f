# SPDX-License-Identifier: Apache-2.0
"""Judge by the published standards (`ulpscope check --rules NAME`): compare a call's results with the same call in a higher precision.

The reference is computed one precision up (float32 for 16 bits and fewer, else float64), or in float64 throughout. Where a standard
compares two devices, the other one is the CPU in the recorded precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from ulpscope.judge.published.standard_tables import EDITIONS, Edition
from ulpscope.judge.published.standards import figures_of, judge_standard, limits_of
from ulpscope.measure.standards import measure_standard
from ulpscope.model import TensorData
from ulpscope.model.check.checks import CheckedSlot
from ulpscope.model.check.standards import Standard

if TYPE_CHECKING:
    import torch

    from ulpscope.model import CallRecord, Slot
    from ulpscope.replay import Program

__all__ = ["STANDARD_RULES", "golden_results", "judge_by"]


class Judged(Protocol):
    """The part of a call that a rule set sees: the call, to be run again in any precision, and the device's results."""

    @property
    def record(self) -> CallRecord: ...

    @property
    def program(self) -> Program: ...

    @property
    def made(self) -> Mapping[Slot, torch.Tensor]: ...

    @property
    def precision(self) -> Literal["auto", "float64"]: ...

    @property
    def edition(self) -> str: ...


_NEEDS_OTHER: frozenset[Standard] = frozenset({"benchmark", "ulp"})


def judge_by(standard: Standard) -> Callable[[Judged], Iterator[CheckedSlot]]:
    """Return the rule set of one standard, for every result of a call."""

    def judged(call: Judged) -> Iterator[CheckedSlot]:
        golden = golden_results(call)
        other = call.program(call.program.inputs) if standard in _NEEDS_OTHER else {}
        for slot, made in call.made.items():
            if slot in golden:
                yield _judged_slot(standard, call, slot, made, golden[slot], other.get(slot))

    return judged


def _judged_slot(
    standard: Standard, call: Judged, slot: Slot, made: torch.Tensor, golden: torch.Tensor, other: torch.Tensor | None
) -> CheckedSlot:
    dtype, edition = _name(made), EDITIONS[call.edition]
    if made.shape != golden.shape:
        reason = f"its shape is {list(made.shape)} where the reference gives {list(golden.shape)}"
        return CheckedSlot(
            slot=slot,
            dtype=dtype,
            shape=tuple(made.shape),
            status="failed",
            blamed="device",
            reason=reason,
            golden_dtype=_name(golden),
        )
    figures = _figures(made, golden, edition)
    others = None if other is None or other.shape != golden.shape else _figures(other, golden, edition)
    found = judge_standard(standard, figures, op=call.record.call.op, dtype=dtype, other=others, edition=edition)
    return CheckedSlot(
        slot=slot,
        dtype=dtype,
        shape=tuple(made.shape),
        status=found.status,
        multiple=found.multiple,
        blamed="device" if found.status == "failed" else None,
        reason=found.reason,
        metrics={**figures, **{f"ratio_{name}": ratio for name, ratio in found.ratios.items()}},
        golden_dtype=_name(golden),
    )


def _figures(made: torch.Tensor, golden: torch.Tensor, edition: Edition) -> dict[str, float]:
    if _is_floating(made) != _is_floating(golden):
        golden = golden.to(made.dtype)
    return figures_of(measure_standard(_data(made), _data(golden), limits_of(_name(made), edition)))


def golden_results(call: Judged) -> dict[Slot, torch.Tensor]:
    """Run the call in a higher precision, on contiguous copies of its inputs."""
    import torch

    floating = [one for one in (*call.program.inputs.values(), *call.made.values()) if _is_floating(one)]
    is_narrow = bool(floating) and all(one.element_size() // (2 if one.is_complex() else 1) <= 2 for one in floating)
    wide = torch.float32 if is_narrow and call.precision == "auto" else torch.float64
    return call.program(_widened(call.program.inputs, wide))


def _widened(inputs: Mapping[Slot, torch.Tensor], wide: torch.dtype) -> dict[Slot, torch.Tensor]:
    """Widen the inputs; slots that hold the same tensor go on holding the same one."""
    seen: dict[int, torch.Tensor] = {}
    for one in inputs.values():
        if id(one) not in seen:
            to = wide.to_complex() if one.is_complex() else wide
            seen[id(one)] = one.to(to).contiguous() if _is_floating(one) else one
    return {slot: seen[id(one)] for slot, one in inputs.items()}


def _is_floating(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _data(value: torch.Tensor) -> TensorData:
    from ulpscope.replay.calls.arguments import data_of

    return data_of(value.detach().cpu().resolve_conj().resolve_neg())


STANDARD_RULES: dict[str, Callable[[Judged], Iterator[CheckedSlot]]] = {
    name: judge_by(name) for name in ("checker", "benchmark", "ulp", "binary", "absolute")
}
