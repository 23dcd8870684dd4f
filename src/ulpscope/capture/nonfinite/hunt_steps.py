# SPDX-License-Identifier: Apache-2.0
"""Keep what happened in a step of the hunt: events, and the storages that values are traced to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ulpscope.capture.nonfinite.hunt_records import Place, SeenCall
from ulpscope.model import Phase
from ulpscope.numerics.nonfinite_rule import Kinds, Origin, Passage
from ulpscope.numerics.nonfinite_steps import BegunKind, BegunStep

__all__ = [
    "Event",
    "KeptKind",
    "Step",
    "Trace",
    "is_around",
    "sentence",
    "site_of",
]

KeptKind = Literal["made", "given", "received", "soft", "passed", "masked"]


class Trace(NamedTuple):
    """Non-finite values in one storage: their origin, and the event that began them."""

    storage: Any
    step: int
    origin: Origin
    event: Event | None


@dataclass(slots=True)
class Event:
    """An event of a step at which non-finite values began; whether it is a fault is decided when the step is over."""

    kind: BegunKind
    place: Place
    phase: Phase
    kinds: Kinds
    is_half: bool
    text: str
    num_passed: int = 0
    num_briefly: int = 0
    last_touch: Passage = "passed"
    is_told: bool = False


@dataclass(slots=True)
class Step(BegunStep[Event]):
    """The events of one step so far."""

    number: int
    order: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    kept: set[tuple[str, int, Phase]] = field(default_factory=set)


def is_around(event: Event, earlier: Event) -> bool:
    """Tell whether an event is only a module passing on an event inside it."""
    if event.place.level != "module" or event.phase != earlier.phase:
        return False
    return event.place.module == earlier.place.module or not event.place.module or earlier.place.module.startswith(f"{event.place.module}.")


def site_of(place: Place) -> tuple[str, str, Any]:
    return place.module, place.op, place.stack[:1]


def sentence(call: SeenCall, kind: KeptKind, leaving: Kinds) -> str:
    what = " and ".join(name for kind, name in _WORDS.items() if kind in leaving)
    where = f"{call.place.module or 'the top level'}: {call.place.op}.{call.place.number}, {call.phase}, step {call.step}"
    line = call.place.stack[0] if call.place.stack else None
    source = f" ({line.file}:{line.line})" if line is not None else ""
    began = _BEGAN.get(kind, "was made by")
    return f"{what} {began} {where}{source}; ulpscope was asked to stop here, and the call is recorded with its inputs"


_BEGAN = {"given": "came in with an input of", "received": "came from another rank into"}
_WORDS = {Kinds.NAN: "NaN", Kinds.POSINF: "+inf", Kinds.NEGINF: "-inf", Kinds.LIMIT: "the dtype's largest number"}
