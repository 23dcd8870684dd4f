# SPDX-License-Identifier: Apache-2.0
"""Write diff_analyze_{ns}.json: the calls where two runs part, by ulpscope's findings, each with its numbers and its stack.

{"rank_0": [{"op_name": ..., "finding": ..., "data_info": {"input": {...}, "output": {...}}, "stack_info": [...]}]}
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ulpscope.compat.msprobe.compare.dump_places import Places
from ulpscope.compat.screen import print_info
from ulpscope.model import Comparison, Finding, JudgedCall, JudgedSlot, SummaryMeasurement, TensorMeasurement, TensorRecord
from ulpscope.report.replacing import replacing

__all__ = ["frames_of", "write_first_differences"]

_STATISTICS = ("max", "min", "mean", "rms")


def write_first_differences(comparison: Comparison, places: Places, folder: Path) -> Path:
    """Write the faults of a comparison, the cause first; the folder of the target's rank names the rank."""
    names = {pair.rank: pair.target.parent.name for pair in places.pairs}
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in comparison.faults:
        call = next((call for call in comparison.calls if _is_at(finding, call)), None)
        if finding.rank is not None:
            key = f"rank_{finding.rank}" if names.get(finding.rank, "rank").startswith("rank") else names[finding.rank]
            found.setdefault(key, []).append(_node(finding, call))
    path = folder / f"diff_analyze_{time.time_ns()}.json"
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        json.dump(found, stream, indent=1, ensure_ascii=True)
        temporary.chmod(0o640)
    print_info(f"{sum(map(len, found.values()))} calls where the dumps part are in {path}")
    return path


def _is_at(finding: Finding, call: JudgedCall) -> bool:
    record = call.pair.record
    here = record.rank, record.step, record.phase, record.order, str(record.call)
    return here == (finding.rank, finding.step, finding.phase, finding.order, finding.call)


def _node(finding: Finding, call: JudgedCall | None) -> dict[str, Any]:
    record = call.pair.record if call else None
    slots = call.slots if call else ()
    return {
        "op_name": record.recorded_as if record else finding.call or "",
        "finding": finding.headline,
        "data_info": {
            role: {
                f"{record.recorded_as if record else ''}.{slot.pair.slot}": _numbers(slot) for slot in slots if slot.pair.slot.role in roles
            }
            for role, roles in (("input", ("input", "parameter")), ("output", ("output", "mutated", "gradient")))
        },
        "stack_info": frames_of(record.stack if record else ()),
    }


def frames_of(stack: Any) -> list[str]:
    """Return a stack as the lines of stack.json."""
    return [f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.code}" for frame in stack]


def _numbers(slot: JudgedSlot) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side, tensor in (("NPU", slot.pair.subject), ("Bench", slot.pair.reference)):
        found |= {f"{side} {name}": value for name, value in _statistics(tensor)}
    measured = slot.measurement
    if isinstance(measured, (TensorMeasurement, SummaryMeasurement)):
        found["distance"] = measured.distance if math.isfinite(measured.distance) else str(measured.distance)
    return found | {"verdict": slot.verdict.level, "reason": slot.verdict.reason}


def _statistics(tensor: TensorRecord | None) -> Iterator[tuple[str, Any]]:
    if tensor is None or tensor.summary is None:
        return
    for name in _STATISTICS:
        value = getattr(tensor.summary, name)
        yield name, value if value is None or math.isfinite(value) else str(value)
    if tensor.summary.num_nan:
        yield "num_nan", tensor.summary.num_nan
