# SPDX-License-Identifier: Apache-2.0
"""A value differs that no recorded call made: data before the first call, or something between two calls that was not recorded."""

from __future__ import annotations

from ulpscope.explain.batch import ADVICE
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, call_text, difference_line, finding_at
from ulpscope.model import Finding

__all__ = ["explain_entering"]

_UNSEEN = (
    "record more of what lies between (level both or op, no --select), and look for code that writes to this tensor outside torch calls"
)


def explain_entering(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "entered" or found.lone:
        return None
    record = found.call.pair.record
    place = f"{call_text(record, found.slot.pair.slot)}, {at_place(record)}"
    evidence = [difference_line(found.slot), "no recorded call made this difference"]
    if found.is_first_call:
        return finding_at("fault", "batch", f"inputs differ before the first call: {place}", found.call, found.slot, evidence, ADVICE)
    kind = {"backward": "backward", "optimizer": "optimizer"}.get(record.phase, "calls")
    return finding_at("fault", kind, f"a value changes between calls: {place}", found.call, found.slot, evidence, _UNSEEN)
