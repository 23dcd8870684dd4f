# SPDX-License-Identifier: Apache-2.0
"""Apply two simple rules to the same pairs: the first bitwise difference, and the verdict column of ptdbg_ascend.

Both look at the outputs of calls, in execution order, and name the first that offends. Neither looks at the inputs. The second says No
where the cosine is below 0.99 and the largest error above 0.001, or the cosine below 0.9, or the error above 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.bugs.scoring import Blame, kinds_of

__all__ = ["BASELINES", "first_bitwise", "first_p173"]


def first_bitwise(comparison: Any) -> list[Blame]:
    """Blame the first call with an output that is not bit for bit the same."""
    return _first(comparison, _is_unequal)


def first_p173(comparison: Any) -> list[Blame]:
    """Blame the first call with an output that the old rule says No to."""
    return _first(comparison, _is_no)


BASELINES: dict[str, Callable[[Any], list[Blame]]] = {"first bitwise difference": first_bitwise, "rules of P173": first_p173}


def _first(comparison: Any, offends: Callable[[Any], bool]) -> list[Blame]:
    for call, slot in _made(comparison):
        if offends(slot.measurement):
            record = call.pair.record
            return [
                Blame(
                    call=str(record.call),
                    module=record.module,
                    slot=str(slot.pair.slot),
                    phase=record.phase,
                    kind=_kind(record),
                    step=record.step,
                    rank=record.rank,
                    headline=f"{record.module} {record.call} {record.phase} {slot.pair.slot}",
                )
            ]
    return []


def _kind(record: Any) -> str:
    """Name a finding's kind: `parameters`, `batch` or `rng` for a record at the start of a step."""
    return str(record.call.op).removeprefix("state.") if record.level == "state" and record.phase == "start" else kinds_of(record.phase)


def _made(comparison: Any) -> Iterator[tuple[Any, Any]]:
    calls = sorted(comparison.calls, key=lambda call: (call.pair.record.step, call.pair.record.order, call.pair.record.rank))
    return ((call, slot) for call in calls for slot in call.slots if not call.pair.record.receives(slot.pair.slot))


def _is_unequal(measurement: Any) -> bool:
    return getattr(measurement, "equal", None) is False


def _is_no(measurement: Any) -> bool:
    if not hasattr(measurement, "cosine") or measurement.equal:
        return False
    if measurement.num_nan_disagree or measurement.num_inf_disagree:
        return True
    cosine, largest = measurement.cosine, measurement.max_abs
    if not isinstance(largest, float):
        return False
    if not isinstance(cosine, float):
        return largest > 1
    return (cosine < 0.99 and largest > 0.001) or cosine < 0.9 or largest > 1
