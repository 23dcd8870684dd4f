# SPDX-License-Identifier: Apache-2.0
"""What has happened in a step of a watched program, and what that makes of it: events, where they are traced to, and which are faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ulpscope.capture.nonfinite.hunt_records import Place, SeenCall
from ulpscope.model import Phase
from ulpscope.numerics.nonfinite_rule import Kinds, Origin, Passage

__all__ = [
    "Event",
    "EventKind",
    "KeptKind",
    "Step",
    "Trace",
    "in_backward",
    "is_around",
    "is_fault",
    "sentence",
    "site_of",
    "unknown_origin",
]

EventKind = Literal["made", "given", "received", "soft"]
KeptKind = Literal["made", "given", "received", "soft", "passed", "masked"]


class Trace(NamedTuple):
    """Non-finite values in one storage: where they came from, and the event that began them."""

    storage: Any
    step: int
    origin: Origin
    event: Event | None


@dataclass(slots=True)
class Event:
    """Something that began in a step; whether it is a fault is decided when the step is over."""

    kind: EventKind
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
class Step:
    """What has happened in one step so far."""

    number: int
    order: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    has_backward: bool = False
    has_update: bool = False
    is_skipped: bool = False
    scale: float | None = None
    kept: set[tuple[str, int, Phase]] = field(default_factory=set)

    def reach(self, what: str) -> None:
        if what not in self.reached:
            self.reached.append(what)

    @property
    def at_large(self) -> list[Event]:
        """What may be behind something bad later in the step: not what was swallowed, if there is anything else."""
        return [event for event in self.events if event.last_touch != "swallowed"] or self.events


def is_around(event: Event, earlier: Event) -> bool:
    """Whether an event is what a module makes of one inside it."""
    if event.place.level != "module" or event.phase != earlier.phase:
        return False
    return event.place.module == earlier.place.module or not event.place.module or earlier.place.module.startswith(f"{event.place.module}.")


def unknown_origin(call: SeenCall, step: Step, kinds: Kinds) -> tuple[Origin | None, Event | None]:
    """Where not every call is seen in time, what nobody saw made is laid at the door of what began before."""
    if step.events and not kinds.is_mask and (call.is_late or call.place.level == "module"):
        return "made", step.at_large[0]
    return None, None


def is_fault(step: Step, event: Event) -> bool:
    is_of_scaling = event.phase in ("backward", "optimizer") and event.is_half and event.kinds is not Kinds.NAN
    if step.is_skipped and is_of_scaling:
        return False
    if step.reached:
        return event in step.at_large
    if step.has_backward and event.phase == "forward":
        return False
    if step.has_update and event.phase == "backward":
        return False
    return event.kind != "soft" and event.last_touch != "swallowed"


def in_backward(passage: Passage, is_given: bool, events: list[Event], step: Step) -> tuple[Passage, list[Event]]:
    """A gradient is never a mask, and one that was not finite before is explained by what began earlier in the step."""
    if passage in ("masked", "soft", "given", "made") and is_given and step.events:
        return "passed", events or step.at_large
    return ("made" if passage in ("masked", "soft") else passage), events


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
