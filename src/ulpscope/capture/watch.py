# SPDX-License-Identifier: Apache-2.0
"""The watch for inf and NaN: what each call did with them, where they began, and what they reached.

A call is looked at once, by the extremes of its results. Only when these are not finite are its inputs looked at too, and only then is
anything written. Whether an event is a fault is known when the step is over: what never reached the loss, a gradient or a parameter
is harmless.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ulpscope.capture.extremes import is_readable, local_values, read_extremes
from ulpscope.capture.torch_internals import Quiet, saved_tensors, storage_identity
from ulpscope.capture.walk import Found, encode_arguments
from ulpscope.capture.watch_records import EventWriter, Place, SeenCall, remains_of
from ulpscope.model import DTYPES, Arguments, NonFinite, Phase, Slot, Summary, TensorRecord
from ulpscope.numerics.nonfinite import CLEAN, Kinds, Origin, Passage, asks_for, is_move, kinds_of_range, pass_through

__all__ = ["Watch"]

_MOST_TIMES_AT_ONE_PLACE = 3
_MOST_RANGES = 64
_LONGEST_WALK = 16
_STEPS_BETWEEN_RANGES = 16
_INFINITY = float("inf")
_EventKind = Literal["made", "given", "received", "soft"]


class _Trace(NamedTuple):
    """Non-finite values in one storage: where they came from, and the event that began them."""

    storage: Any
    step: int
    origin: Origin
    event: _Event | None


@dataclass(slots=True)
class _Event:
    """Something that began in a step; whether it is a fault is decided when the step is over."""

    kind: _EventKind
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
class _Range:
    low: float | None
    high: float
    magnitude: float
    step: int
    numel: int


@dataclass(slots=True)
class _Step:
    """What has happened in one step so far."""

    number: int
    order: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    events: list[_Event] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    has_backward: bool = False
    has_update: bool = False
    is_skipped: bool = False
    scale: float | None = None

    def reach(self, what: str) -> None:
        if what not in self.reached:
            self.reached.append(what)

    @property
    def at_large(self) -> list[_Event]:
        """What may be behind something bad later in the step: not what was swallowed, if there is anything else."""
        return [event for event in self.events if event.last_touch != "swallowed"] or self.events


class Watch:
    """Follows non-finite values through the calls of one rank. It installs nothing, and whoever calls it guards it.

    `alarm` is a sentence to raise in the user's code, where that was asked for.
    """

    def __init__(
        self, options: NonFinite, writer: EventWriter, *, world_size: int = 1, wants: Callable[[Place], bool] = lambda _: True
    ) -> None:
        self._options = options
        self._writer = writer
        self._world_size = world_size
        self._wants = wants
        self._ring: deque[SeenCall] = deque(maxlen=max(options.ring, 1))
        self._traces: dict[int, _Trace] = {}
        self._harmless: dict[tuple[str, str, Any], int] = {}
        self._ranges: dict[tuple[str, str, Phase, torch.dtype], _Range] = {}
        self._saturates: dict[str, bool] = {}
        self._steps = {0: _Step(0)}
        self._step = self._steps[0]
        self._lock = threading.RLock()
        self._is_poisoned = False
        self.num_faults = 0
        self.alarm: str | None = None

    # ---- steps

    @property
    def is_done(self) -> bool:
        return self._options.limit is not None and self.num_faults >= self._options.limit

    def begin_step(self, step: int) -> None:
        with self._lock:
            self._step = self._steps[step] = _Step(step)

    def end_step(self, number: int) -> None:
        """Decide what the events of a step were, and write that down; everything seen in it is known by now."""
        with self._lock:
            step = self._steps.pop(number, None)
            if step is None:
                return
            faults = [event for event in step.events if _is_fault(step, event) and not (self._is_poisoned and event.kind == "given")]
            self._is_poisoned |= "parameters" in step.reached
            if not self._options.passed_on:
                self.num_faults += len(faults)
            for event in step.events:
                if event not in faults:
                    site = _site(event.place)
                    self._harmless[site] = self._harmless.get(site, 0) + 1
            if step.events and self._writer.has_written(number):
                self._write_outcome(step, len(faults))
            self._writer.end_step(number)
            self._traces = {key: trace for key, trace in self._traces.items() if self._is_current(trace)}

    def _is_current(self, trace: _Trace) -> bool:
        return trace.step in self._steps or (trace.origin == "masked" and not trace.storage.expired())

    def _write_outcome(self, step: _Step, num_faults: int) -> None:
        facts = {
            "reached": list(step.reached),
            "has_backward": step.has_backward,
            "has_update": step.has_update,
            "is_skipped": step.is_skipped,
            "scale": step.scale,
            "num_faults": num_faults,
        }
        self._writer.write_state("state.watch", step.number, step.order, [], Arguments(kwargs=facts))

    def write_ranges(self) -> None:
        """The calls that came nearest to the end of their dtype, with the last step."""
        nearest = sorted(self._ranges.items(), key=lambda item: _headroom(item[0][3], item[1].magnitude))[:_MOST_RANGES]
        slots = [_range_record(key, found) for key, found in nearest if found.magnitude > 0]
        if slots:
            self._writer.write_state("state.range", self._step.number, self._step.order, slots, None)

    # ---- calls

    def name(self, op: str) -> int:
        """How many times the operation was called before in this step."""
        counts = self._step.counts
        index = counts.get(op, 0)
        counts[op] = index + 1
        return index

    def seen(self, place: Place, phase: Phase) -> SeenCall:
        step = self._step
        step.order += 1
        return SeenCall(step.order - 1, step.number, place, phase)

    @property
    def is_tripped(self) -> bool:
        """Whether something began in this step: from then on every call is looked at closely."""
        return bool(self._step.events)

    def look_now(self, call: SeenCall) -> None:
        """Look at the results of a call on the CPU."""
        with self._lock, Quiet():
            self._learn(call, [read_extremes(tensor) for _, tensor in call.results])

    def learn(self, entries: list[SeenCall | int], owners: list[int], magnitudes: torch.Tensor) -> None:
        """Take the largest magnitudes of calls' results, which an accelerator has sent; a number says that the step is over."""
        with self._lock, Quiet():
            if not owners or self._is_plainly_clean(magnitudes):
                self._pass_by(entries, owners, magnitudes)
                return
            found: dict[int, list[float]] = {}
            for owner, magnitude in zip(owners, magnitudes.tolist(), strict=True):
                found.setdefault(owner, []).append(magnitude)
            for number, call in enumerate(entries):
                if isinstance(call, int):
                    self.end_step(call)
                elif len(found.get(number, ())) == len(call.results):
                    self._learn(call, [(None, magnitude) for magnitude in found.get(number, ())])

    def _is_plainly_clean(self, magnitudes: torch.Tensor) -> bool:
        if any(self._saturates.values()) or any(step.events for step in self._steps.values()):
            return False
        return bool(magnitudes.max() < _INFINITY)

    def _pass_by(self, entries: list[SeenCall | int], owners: list[int], magnitudes: torch.Tensor) -> None:
        """Of most calls nothing is worth a thought: the last few go to the ring, and ranges are taken from one step in several."""
        is_noted = bool(owners) and not isinstance(entries[0], int) and entries[0].step % _STEPS_BETWEEN_RANGES == 0
        tail = 0 if is_noted else -self._options.ring or len(owners)
        for owner, magnitude in sorted(zip(owners[tail:], magnitudes[tail:].tolist(), strict=True)):
            call = entries[owner]
            if isinstance(call, int) or call.place.level == "state" or len(call.results) != 1:
                continue
            slot, tensor = call.results[0]
            if is_noted:
                self._note_range(call, tensor, None, magnitude)
            call.remains = [remains_of(slot, tensor, None, magnitude)]
            call.let_go()
            self._ring.append(call)
        for call in entries:
            if isinstance(call, int):
                self.end_step(call)

    def probe(self, device: torch.device) -> None:
        """Learn whether a device stops at the end of a dtype; it is waited for, once."""
        asked = self._options.saturation
        with Quiet():
            self._saturates[device.type] = asked if asked is not None else device.type != "cpu" and _stops_at_the_limit(device)

    def _learn(self, call: SeenCall, extremes: list[tuple[float | None, float] | None]) -> None:
        leaving = CLEAN
        is_call = call.place.level != "state"
        deferred = bool(extremes) and extremes[0] is not None and extremes[0][0] is None
        for (slot, tensor), found in zip(call.results, extremes, strict=False):
            if found is None:
                continue
            low, high = found
            kinds = kinds_of_range(high if low is None else low, high, self._limit(tensor))
            leaving |= kinds
            if is_call:
                call.remains = [*call.remains, remains_of(slot, tensor, low, high)]
                if not kinds:
                    self._note_range(call, tensor, low, high)
        if deferred and self._steps[call.step].has_update:
            call.are_parameters_gone = True
        if leaving and deferred:  # a magnitude does not tell inf from -inf
            leaving = self._kinds(tensor for _, tensor in call.results) or leaving
        if leaving:
            for earlier in call.before:
                earlier.results = [(slot, tensor) for slot, tensor in earlier.results if not earlier.is_gone(tensor)]
                self._learn(earlier, [read_extremes(tensor) for _, tensor in earlier.results])
        if leaving or (is_call and self._steps[call.step].events):
            self._look_closer(call, leaving)
        call.let_go()
        if is_call:
            self._ring.append(call)

    def _kinds(self, tensors: Iterable[torch.Tensor]) -> Kinds:
        found = CLEAN
        for tensor in tensors:
            values = local_values(tensor) if is_readable(tensor) else None
            if values is not None:
                found |= kinds_of_range(*read_extremes(values), self._limit(tensor))
        return found

    def _limit(self, tensor: torch.Tensor) -> float | None:
        """The dtype's largest number where it counts as an overflow."""
        device = tensor.device
        if device.type not in self._saturates:
            self.probe(device)
        return torch.finfo(tensor.dtype).max if self._saturates[device.type] else None

    def _note_range(self, call: SeenCall, tensor: torch.Tensor, low: float | None, high: float) -> None:
        magnitude = high if low is None else max(-low, high)
        place = call.place
        key = (place.module, place.op, call.phase, tensor.dtype)
        known = self._ranges.get(key)
        if known is None or magnitude > known.magnitude:
            self._ranges[key] = _Range(low, high, magnitude, call.step, tensor.numel())

    # ---- looking closer

    def _look_closer(self, call: SeenCall, leaving: Kinds) -> None:
        step = self._steps[call.step]
        call.look_around()
        if call.place.level == "state":
            self._look_at_state(call, step)
            return
        entering, events = self._entering(call, step, leaving)
        asked = asks_for((*call.args, *call.kwargs.values()), leaving) if leaving else False
        passage = pass_through(call.place.op, entering, leaving, asked=asked)
        if call.phase == "backward":
            passage, events = _in_backward(passage, bool(entering) or not call.entering, events, step)
        if passage in ("made", "given", "soft"):
            events = [self._begin_event(call, step, passage, leaving)]
        elif passage in ("passed", "swallowed"):
            self._follow(call, passage, events)
        if passage not in ("clean", "swallowed"):
            self._trace(call, passage, entering, events)
        if any(slot.role == "gradient" for slot, tensor in call.results if self._kinds([tensor])):
            step.reach("gradients")

    def _look_at_state(self, call: SeenCall, step: _Step) -> None:
        """The loss, gradients, parameters or the state of an optimizer are not finite."""
        call.results = [(slot, tensor) for slot, tensor in call.results if self._kinds([tensor])]
        what = _REACHED.get(call.results[0][0].role, "parameters") if call.results else "parameters"
        step.reach(what)
        if step.events:
            self._follow(call, "passed", step.at_large)
            return
        names = {slot.path for slot, _ in call.results}
        call.entering = [
            (slot, tensor) for slot, tensor in call.entering if slot.path in names or slot.path in {name[:-1] for name in names}
        ]
        kind: _EventKind = "received" if what == "gradients" and self._world_size > 1 else "made"
        if call.phase == "start":
            kind = "given"
        self._locate(call)
        self._begin_event(call, step, kind, self._kinds(tensor for _, tensor in call.results))

    def _locate(self, call: SeenCall) -> None:
        """Gradients that no call was seen to make are those of a module's backward, where the order of modules tells of which."""
        found = call.locate([slot for slot, _ in call.results]) if call.locate is not None else None
        if found is not None:
            call.place, note = found
            call.phase, call.entering, call.kwargs = "backward", (), {}
            call.results = sorted(call.results, key=lambda item: ".".join(map(str, item[0].path[:-1])) != call.place.module)
            call.note = note

    def _entering(self, call: SeenCall, step: _Step, leaving: Kinds) -> tuple[dict[Origin | None, Kinds], list[_Event]]:
        """The kinds of what a call was given, by origin, and the events behind them. What was overwritten counts as it was before."""
        entering: dict[Origin | None, Kinds] = {}
        events: list[_Event] = []
        written = {id(tensor) for _, tensor in call.results} if call.phase == "forward" else set()
        for _, tensor in _inputs(call):
            if not is_readable(tensor) or call.is_gone(tensor):
                continue
            trace = self._traces.get(_identity(tensor))
            if trace is None and (not leaving or id(tensor) in written):
                continue
            kinds = self._kinds([tensor])
            if kinds:
                origin, event = (trace.origin, trace.event) if trace is not None else _unknown(call, step, kinds)
                entering[origin] = entering.get(origin, CLEAN) | kinds
                if event is not None and event not in events:
                    events.append(event)
        return entering, events

    def _trace(self, call: SeenCall, passage: Passage, entering: dict[Origin | None, Kinds], events: list[_Event]) -> None:
        origin: Origin = "made"
        if passage in ("soft", "masked", "given"):
            origin = passage
        elif passage == "passed" and "made" not in entering and "given" in entering:
            origin = "given"
        for _, tensor in call.results:
            if self._kinds([tensor]):
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._traces[_identity(tensor)] = _Trace(storage, call.step, origin, events[0] if events else None)

    def _begin_event(self, call: SeenCall, step: _Step, kind: _EventKind, leaving: Kinds) -> _Event:
        is_half = any(tensor.dtype is torch.float16 for _, tensor in call.results)
        event = _Event(kind, call.place, call.phase, leaving, is_half, _sentence(call, kind, leaving))
        if not self._wants(call.place):
            return event
        step.events.append(event)
        if self._is_worth_writing(event):
            self._writer.forget()
            for earlier in self._ring:
                if earlier.step == call.step and earlier is not call:
                    self._writer.write_remains(earlier)
            self._writer.write_wholly(call, self._replaced(call), self._notes(call, kind))
        else:
            event.num_briefly = self._options.ring
        if self._options.passed_on:
            self._count_at_once(event)
        elif kind != "soft" and call.phase == "forward" and self._options.raise_error:
            self._sound(event)
        return event

    def _count_at_once(self, event: _Event) -> None:
        self.num_faults += 1
        if self.is_done and self._options.raise_error:
            self._sound(event)

    def _is_worth_writing(self, event: _Event) -> bool:
        """Not what was harmless at the same place before, nor what parameters that are lost already bring about."""
        return self._harmless.get(_site(event.place), 0) < _MOST_TIMES_AT_ONE_PLACE and not (self._is_poisoned and event.kind == "given")

    def _replaced(self, call: SeenCall) -> dict[int, str]:
        """Inputs whose values are gone, with what the ring remembers of them."""
        own = list(call.owner.parameters(recurse=False)) if call.owner is not None else []
        inputs = [tensor for _, tensor in _inputs(call)] + own
        notes = {id(tensor): "written to since: what the call was given is gone" for tensor in inputs if call.is_gone(tensor)}
        if call.phase == "forward":
            for _, tensor in call.results:
                notes[id(tensor)] = f"overwritten by this call; before it, {self._remembered(tensor)}"
        return notes

    def _notes(self, call: SeenCall, kind: _EventKind) -> dict[int, str]:
        """Who made the inputs that no call was seen to make, as far as the graph tells; what is known of gradients."""
        if call.note:
            return {id(tensor): call.note for _, tensor in call.results}
        notes: dict[int, str] = {}
        if kind != "given":
            return notes
        for _, tensor in _inputs(call):
            if is_readable(tensor) and not call.is_gone(tensor) and self._kinds([tensor]) & ~Kinds.NEGINF:
                maker = self._maker(tensor.grad_fn)
                if maker:
                    notes[id(tensor)] = f"made by {maker}"
        return notes

    def _maker(self, node: Any) -> str:
        """The operation behind a node: the nearest one that had finite inputs, as far as what it kept of them tells."""
        found = ""
        for _ in range(_LONGEST_WALK):
            if node is None or not hasattr(node, "name"):
                return found
            op = _op_of(node.name())
            saved = [tensor for name, tensor in saved_tensors(node) if "result" not in name and "output" not in name]
            if op != "accumulate_grad" and not is_move(op):
                found = op
                if not self._kinds(saved):
                    return found
            node = next((following for following, _ in node.next_functions if following is not None), None)
        return found

    def _remembered(self, tensor: torch.Tensor) -> str:
        for earlier in reversed(self._ring):
            for result in earlier.remains:
                if result.tensor() is tensor:
                    what = f"{result.low:.9g} to {result.high:.9g}" if result.low is not None else f"magnitudes up to {result.high:.9g}"
                    return f"{what}, as {earlier.place.op}.{earlier.place.number} left it"
        return "no call that was seen had made it"

    def _follow(self, call: SeenCall, passage: Passage, events: list[_Event]) -> None:
        """Count where values went, and write the first of these calls as statistics."""
        for event in events:
            event.last_touch = passage
            event.num_passed += passage == "passed"
            if event.kind == "soft" and passage == "passed":
                event.kind = "made"
        if self._options.passed_on and passage == "passed" and events and not self.is_done:
            self._writer.forget()
            self._writer.write_wholly(call, self._replaced(call), {})
            self._count_at_once(events[0])
        for event in events:
            if event.num_briefly < self._options.ring and not call.is_written:
                event.num_briefly += 1
                self._writer.forget()
                self._writer.write_briefly(call)

    def _sound(self, event: _Event) -> None:
        if not event.is_told and self.alarm is None:
            event.is_told = True
            self.alarm = event.text

    # ---- the backward pass, the optimizer, the scaler

    def backward_begins(self) -> None:
        self._step.has_backward = True

    def skipped(self, scale: float | None) -> None:
        """GradScaler found gradients that are not finite, and left the weights alone."""
        self._step.is_skipped, self._step.scale = True, scale

    def before_update(self) -> None:
        """Gradients have been looked at and are about to be used: the last moment to stop before they do harm."""
        self._step.has_update = True
        if self._options.raise_error and not self._options.passed_on:
            for event in self._step.events:
                if _is_fault(self._step, event):
                    self._sound(event)

    def received(self, call: SeenCall, before: Kinds) -> None:
        """A collective has returned: what comes from others is not this rank's doing."""
        with self._lock, Quiet():
            leaving = self._kinds(tensor for _, tensor in call.results)
            step = self._steps[call.step]
            if leaving and not before:
                event = self._begin_event(call, step, "received", leaving)
                self._trace(call, "made", {}, [event])
            elif leaving:
                call.is_written = True  # what it was given is overwritten, so that nothing is worth a record
                self._follow(call, "passed", step.at_large)
                self._trace(call, "passed", {"made": leaving}, step.at_large)
            call.let_go()
            self._ring.append(call)

    def kinds_now(self, tensors: Iterable[torch.Tensor]) -> Kinds:
        with self._lock, Quiet():
            return self._kinds(tensors)


def _unknown(call: SeenCall, step: _Step, kinds: Kinds) -> tuple[Origin | None, _Event | None]:
    """Where not every call is seen in time, what nobody saw made is laid at the door of what began before."""
    if step.events and not kinds.is_mask and (call.is_late or call.place.level == "module"):
        return "made", step.at_large[0]
    return None, None


def _is_fault(step: _Step, event: _Event) -> bool:
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


def _in_backward(passage: Passage, is_given: bool, events: list[_Event], step: _Step) -> tuple[Passage, list[_Event]]:
    """A gradient is never a mask, and one that was not finite before is explained by what began earlier in the step."""
    if passage in ("masked", "soft", "given", "made") and is_given and step.events:
        return "passed", events or step.at_large
    return ("made" if passage in ("masked", "soft") else passage), events


def _op_of(node: str) -> str:
    """`gelu` of GeluBackward0, `native_layer_norm` of NativeLayerNormBackward0."""
    name = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _inputs(call: SeenCall) -> list[Found]:
    return [*encode_arguments(call.args, dict(call.kwargs))[1], *call.entering]


def _identity(tensor: torch.Tensor) -> int:
    try:
        return storage_identity(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor without a storage of its own
        return id(tensor)


def _site(place: Place) -> tuple[str, str, Any]:
    return place.module, place.op, place.stack[:1]


def _sentence(call: SeenCall, kind: _EventKind, leaving: Kinds) -> str:
    what = " and ".join(name for kind, name in _WORDS.items() if kind in leaving)
    where = f"{call.place.module or 'the top level'}: {call.place.op}.{call.place.number}, {call.phase}, step {call.step}"
    line = call.place.stack[0] if call.place.stack else None
    source = f" ({line.file}:{line.line})" if line is not None else ""
    began = {"given": "came in with an input of", "received": "came from another rank into"}.get(kind, "was made by")
    return f"{what} {began} {where}{source}"


_REACHED = {"output": "loss", "gradient": "gradients"}
_WORDS = {Kinds.NAN: "NaN", Kinds.POSINF: "+inf", Kinds.NEGINF: "-inf", Kinds.LIMIT: "the dtype's largest number"}


def _headroom(dtype: torch.dtype, magnitude: float) -> float:
    return torch.finfo(dtype).max / magnitude if magnitude else float("inf")


def _range_record(key: tuple[str, str, Phase, torch.dtype], found: _Range) -> TensorRecord:
    module, op, phase, dtype = key
    name = str(dtype).removeprefix("torch.")
    summary = Summary(found.numel, found.low, found.high)
    return TensorRecord(slot=Slot("state", (module, op, phase)), dtype=name, shape=(), summary=summary, note=f"step {found.step}")


def _stops_at_the_limit(device: torch.device) -> bool:
    """Whether a device gives the largest number instead of inf; asked once."""
    try:
        return bool((torch.full((1,), 60000.0, dtype=torch.float16, device=device) * 2).item() == DTYPES["float16"].max)
    except RuntimeError:
        return False
