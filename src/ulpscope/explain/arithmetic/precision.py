# SPDX-License-Identifier: Apache-2.0
"""A side that computes a whole family of calls in a narrower format: said once, not a thousand times."""

from __future__ import annotations

from ulpscope.explain.wording import count, listed
from ulpscope.model import DTYPES, Finding, SystemicPrecision

__all__ = ["precision_note"]

_ADVICE = "for full precision set torch.set_float32_matmul_precision('highest'), or the like of the device, on both sides"
_NAMES = {"float16": "float16", "tf32": "TF32", "bfloat16": "bfloat16"}


def precision_note(found: SystemicPrecision) -> Finding:
    bits = DTYPES["bfloat16" if found.operands == "bfloat16" else "float16"].mantissa + 1
    name = _NAMES[found.operands] if found.side else "float16 or TF32" if found.operands == "float16" else _NAMES[found.operands]
    who = f"the {found.side}" if found.side else "one side"
    if found.calls:
        return _note_of_calls(found, f"{name} operands", who)
    return Finding(
        level="note",
        kind="precision",
        headline=f"{found.family}s of {who} compute with about {bits} significant bits ({name} operands)",
        evidence=(f"every {found.family} errs as such operands do; they are judged by that, and one that errs more is still seen",),
        next=_ADVICE,
    )


def _note_of_calls(found: SystemicPrecision, operands: str, who: str) -> Finding:
    many = len(found.calls)
    headline = f"{count(many, 'call')} of {who} {'computes' if many == 1 else 'compute'} with {operands}: {listed(found.calls)}"
    exact = max(found.num_family - many, 0)
    others = f"; {count(exact, f'other {found.family}')} of this side {'does' if exact == 1 else 'do'} not show it" if exact else ""
    evidence = f"what was recorded is what operands rounded so give, on the same inputs{others}"
    return Finding(level="note", kind="precision", headline=headline, evidence=(evidence,), next=_ADVICE)
