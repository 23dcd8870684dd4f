# SPDX-License-Identifier: Apache-2.0
"""What a repeat of the reference shows: calls that give other bits on the same inputs. Never a fault."""

from __future__ import annotations

from collections import Counter
from math import isfinite

from ulpscope.explain.wording import count, listed, number
from ulpscope.model import BandKey, Bands, Finding

__all__ = ["remark_on_nondeterminism"]


def remark_on_nondeterminism(bands: Bands) -> list[Finding]:
    """One note for all calls that are not deterministic; one where the repeat differs without any."""
    if not bands.slots:
        return []
    widest = max((apart for apart in bands.slots.values() if isfinite(apart)), default=None)
    lines = [f"slots of the repeat are up to {number(widest)} of their size apart"] if widest else []
    lines.append(f"differences up to {number(bands.factor)} times those of the repeat are not blamed on any call")
    if not bands.nondeterministic:
        headline = "the repeat of the reference is not the same run: it differs before any recorded call"
        return [Finding(level="note", kind="nondeterministic", headline=headline, evidence=tuple(lines))]
    first, many = bands.nondeterministic[0], len(bands.nondeterministic)
    names = Counter(_name(key) for key in bands.nondeterministic)
    headline = f"nondeterministic: {count(many, 'call')} of the reference gave other bits on bitwise equal inputs, first {_place(first)}"
    lines.insert(0, listed([f"{name} ({times} times)" if times > 1 else name for name, times in names.most_common()]))
    return [
        Finding(
            level="note",
            kind="nondeterministic",
            headline=headline,
            step=first.step,
            rank=first.rank,
            phase=first.phase,
            module=first.module,
            call=str(first.call),
            evidence=tuple(lines),
            next="for bitwise equal runs use torch.use_deterministic_algorithms(True) (ulpscope run --deterministic)",
        )
    ]


def _name(key: BandKey) -> str:
    return f"{key.module}/{key.call.short}" if key.module else key.call.short


def _place(key: BandKey) -> str:
    module = f"{key.module}  " if key.module else ""
    return f"{module}{key.call.short} (call {key.call.index}, {key.phase}), step {key.step}, rank {key.rank}"
