# SPDX-License-Identifier: Apache-2.0
"""The two runs were given different batches: nothing that follows can be blamed on a call."""

from __future__ import annotations

from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import difference_line, finding_at, slot_text
from ulpscope.model import Finding

__all__ = ["explain_batch"]

ADVICE = "give both runs the same data: fix the seed and the order of the loader (ulpscope run --seed 1 --deterministic)"


def explain_batch(view: StepView) -> Finding | None:
    for call in view.state("state.batch"):
        slot = worst(call.slots)
        if slot is not None and view.leads_to_difference:
            headline = f"the batches differ: {slot_text(slot.pair.slot)}, step {view.step}, rank {view.rank}"
            return finding_at("fault", "batch", headline, call, slot, [difference_line(slot)], ADVICE)
    return None
