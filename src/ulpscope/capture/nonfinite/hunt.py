# SPDX-License-Identifier: Apache-2.0
"""Hunt for inf and NaN: what each call did with them, where they began, and what they reached.

The hunt looks at a call once, by the extremes of its results. Only when these are not finite does it look at its inputs too, and only then
does it write anything. Whether an event is a fault is known when the step is over: values that never reached the loss, a gradient or a
parameter are harmless.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ulpscope.capture.nonfinite.extremes import is_readable, local_values, read_extremes
from ulpscope.capture.nonfinite.headroom import Ranges
from ulpscope.capture.nonfinite.hunt_records import EventWriter, Glimpse, Place, SeenCall, recalled, reference_to, remains_of, version_of
from ulpscope.capture.nonfinite.hunt_steps import (
    Event,
    KeptKind,
    Step,
    Trace,
    is_around,
    sentence,
    site_of,
)
from ulpscope.capture.torch_internals import Quiet, has_dispatch_modes, saved_tensors, set_grad_enabled, storage_identity
from ulpscope.capture.walk import Found, encode_arguments
from ulpscope.errors import NonFiniteError
from ulpscope.model import DTYPES, Arguments, NonFinite, NonFiniteCall, Phase
from ulpscope.numerics.nonfinite_rule import CLEAN, Kinds, Origin, Passage, asks_for, is_move, kinds_of_range, pass_through
from ulpscope.numerics.nonfinite_steps import BegunKind, given_at_the_end, origin_after, reached_by

__all__ = ["Hunt"]

_MOST_TIMES_AT_ONE_PLACE = 3
_LONGEST_WALK = 16
_STEPS_BETWEEN_RANGES = 16
_SMALL = 4096
_INFINITY = float("inf")


class Hunt:
    """Follows non-finite values through the calls of one rank. It installs nothing, and its caller guards it.

    `alarm` is the error to raise in the user's code, if that was asked for. `glances` says whether a sum is enough to know a clean result
    on the CPU; it is not once values have begun in the step, nor where the range is wanted. `suspects` are modules whose calls are seen
    although otherwise only modules are.
    """

    def __init__(
        self, options: NonFinite, writer: EventWriter, *, world_size: int = 1, wants: Callable[[Place], bool] = lambda _: True
    ) -> None:
        self._options = options
        self._writer = writer
        self._world_size = world_size
        self._wants = wants
        self._ring: deque[SeenCall | Glimpse] = deque(maxlen=max(options.ring, 1))
        self._traces: dict[int, Trace] = {}
        self._harmless: dict[tuple[str, str, Any], int] = {}
        self._ranges = Ranges()
        self._saturates: dict[str, bool] = {}
        self._steps = {0: Step(0)}
        self._step = self._steps[0]
        self._lock = threading.RLock()
        self._finite: dict[int, tuple[StorageWeakRef, int]] = {}
        self._is_poisoned = False
        self.num_faults = 0
        self.glances = False
        self.suspects: set[str] = set()
        self.alarm: Exception | None = None

    # ---- steps

    @property
    def is_done(self) -> bool:
        return self._options.limit is not None and self.num_faults >= self._options.limit

    def begin_step(self, step: int) -> None:
        with self._lock:
            self._step = self._steps[step] = Step(step)
            self._finite.clear()
            self.glances = not takes_ranges(step) and self._options.saturation is not True

    def end_step(self, number: int) -> None:
        """Decide which events of a step were faults, and write that down; everything seen in the step is known by now."""
        with self._lock:
            step = self._steps.pop(number, None)
            if step is None:
                return
            faults = [event for event in step.beginnings if step.is_fault(event) and not (self._is_poisoned and event.kind == "given")]
            self._is_poisoned |= "parameters" in step.reached
            if not self._options.passed_on:
                told = [event for number, event in enumerate(faults) if not any(is_around(event, other) for other in faults[:number])]
                self.num_faults += sum([not self._suspect(event) for event in told])
            for event in step.beginnings:
                if event not in faults:
                    site = site_of(event.place)
                    self._harmless[site] = self._harmless.get(site, 0) + 1
            if step.beginnings and self._writer.has_written(number):
                self._write_outcome(step, len(faults))
            self._writer.end_step(number)
            self._traces = {key: trace for key, trace in self._traces.items() if self._is_current(trace)}

    def _suspect(self, event: Event) -> bool:
        """Tell whether a fault is known only by its module, for the first time, and may happen again.

        Then the calls of that module, and of the one around it, are seen from now on, so that the next fault names its call; the limit
        waits for that."""
        module = event.place.module
        if self._options.calls is not None or event.place.level != "module" or module in self.suspects or self._is_poisoned:
            return False
        self.suspects |= {module, module.rpartition(".")[0]}
        return True

    def _is_current(self, trace: Trace) -> bool:
        return trace.step in self._steps or (trace.origin == "masked" and not trace.storage.expired())

    def _write_outcome(self, step: Step, num_faults: int) -> None:
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
        """Write the calls that came nearest to the end of their dtype, with the last step."""
        slots = self._ranges.nearest()
        if slots:
            self._writer.write_state("state.range", self._step.number, self._step.order, slots, None)

    # ---- calls

    def name(self, op: str) -> int:
        """Count an operation, and return how many times it was called before in this step."""
        counts = self._step.counts
        index = counts.get(op, 0)
        counts[op] = index + 1
        return index

    def seen(self, place: Place, phase: Phase) -> SeenCall:
        step = self._step
        step.order += 1
        return SeenCall(step.order - 1, step.number, place, phase)

    def next_order(self) -> int:
        """Return the place of a call in the order of its step, before anything else is made of it."""
        self._step.order += 1
        return self._step.order - 1

    @property
    def step_number(self) -> int:
        return self._step.number

    @property
    def is_tripped(self) -> bool:
        """Tell whether non-finite values began in this step: from then on every call is looked at closely."""
        return bool(self._step.beginnings)

    def glance(self, place: Place, phase: Phase, results: Sequence[Found]) -> bool:
        """Tell from sums whether the results of a call are finite; then they are done. Call it where no function mode sees it."""
        if has_dispatch_modes():
            return False
        known = []
        total = 0.0
        is_grad_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            for slot, tensor in results:
                own = tensor.sum().item()
                total += own
                known.append((slot, reference_to(tensor), version_of(tensor), tensor.dtype, tensor.shape, own))
        finally:
            set_grad_enabled(is_grad_enabled)
        if total - total != 0.0:  # inf or NaN
            return False
        step = self._step
        self._ring.append((step.order, step.number, place, phase, known))
        step.order += 1
        return True

    def are_finite(self, tensors: list[torch.Tensor]) -> bool:
        """Tell from sums whether tensors are finite. Call it where no function mode sees it."""
        alone: list[torch.Tensor] = []
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.dim() == 1 and tensor.numel() <= _SMALL:
                small.setdefault(tensor.dtype, []).append(tensor)
            elif not self._is_remembered(tensor):
                alone.append(tensor)
        if has_dispatch_modes():
            return False
        with Quiet():
            together = [torch.cat(group) for group in small.values()]
            total = sum(tensor.sum().item() for tensor in (*alone, *together))
        return bool(total - total == 0.0)

    def remember_finite(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember large gradients that are finite now: they need not be read again before they are used, if nobody writes to them."""
        for tensor in tensors:
            if tensor.numel() > _SMALL:
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._finite[_identity(tensor)] = (storage, version_of(tensor))

    def _is_remembered(self, tensor: torch.Tensor) -> bool:
        known = self._finite.get(_identity(tensor))
        return known is not None and known[1] == version_of(tensor) >= 0

    def forget_finite(self) -> None:
        """Forget the gradients known to be finite: somebody may have written to them without a trace."""
        self._finite.clear()

    def look_now(self, call: SeenCall) -> None:
        """Look at the results of a call on the CPU."""
        with self._lock, Quiet():
            self._learn(call, [read_extremes(tensor) for _, tensor in call.results])

    def learn(self, entries: list[SeenCall | int], owners: list[int], magnitudes: torch.Tensor) -> None:
        """Take the largest magnitudes of calls' results from an accelerator; a number among the entries says that its step is over."""
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
        if any(self._saturates.values()) or any(step.beginnings for step in self._steps.values()):
            return False
        return bool(magnitudes.max() < _INFINITY)

    def _pass_by(self, entries: list[SeenCall | int], owners: list[int], magnitudes: torch.Tensor) -> None:
        """Pass by clean calls: the last few go to the ring, and ranges are taken from one step in several."""
        is_noted = bool(owners) and not isinstance(entries[0], int) and takes_ranges(entries[0].step)
        tail = 0 if is_noted else -self._options.ring or len(owners)
        for owner, magnitude in sorted(zip(owners[tail:], magnitudes[tail:].tolist(), strict=True)):
            call = entries[owner]
            if isinstance(call, int) or call.place.level == "state" or len(call.results) != 1:
                continue
            slot, tensor = call.results[0]
            if is_noted:
                self._ranges.note(call, tensor, None, magnitude)
            call.remains = [remains_of(slot, tensor, None, magnitude)]
            call.let_go()
            self._ring.append(call)
        for call in entries:
            if isinstance(call, int):
                self.end_step(call)

    def probe(self, device: torch.device) -> None:
        """Learn whether a device stops at the end of a dtype; this waits for the device, once."""
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
                    self._ranges.note(call, tensor, low, high)
        if deferred and self._steps[call.step].has_update:
            call.are_parameters_gone = True
        if leaving and deferred:  # a magnitude does not distinguish inf from -inf
            leaving = self._kinds(tensor for _, tensor in call.results) or leaving
        if leaving:
            for earlier in call.before:
                earlier.results = [(slot, tensor) for slot, tensor in earlier.results if not earlier.is_gone(tensor)]
                self._learn(earlier, [read_extremes(tensor) for _, tensor in earlier.results])
        if leaving or (is_call and self._steps[call.step].beginnings):
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
        """Return the dtype's largest number if it counts as an overflow."""
        device = tensor.device
        if device.type not in self._saturates:
            self.probe(device)
        return torch.finfo(tensor.dtype).max if self._saturates[device.type] else None

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
            passage, events = step.in_backward(passage, bool(entering) or not call.entering, events)
        if passage in ("made", "given", "soft"):
            events = [self._begin_event(call, step, passage, leaving)]
        elif passage in ("passed", "swallowed"):
            self._follow(call, passage, events)
        elif passage == "masked" and self._options.passed_on:
            self._keep(call, "masked", {}, sentence(call, "masked", leaving))
        if passage not in ("clean", "swallowed"):
            self._trace(call, passage, entering, events)
        if any(slot.role == "gradient" for slot, tensor in call.results if self._kinds([tensor])):
            step.reach("gradients")

    def _look_at_state(self, call: SeenCall, step: Step) -> None:
        """Handle a loss, gradients, parameters or an optimizer's state that are not finite."""
        call.results = [(slot, tensor) for slot, tensor in call.results if self._kinds([tensor])]
        what = reached_by(call.results[0][0].role if call.results else "")
        step.reach(what)
        if step.beginnings:
            self._follow(call, "passed", step.at_large)
            return
        names = {slot.path for slot, _ in call.results}
        call.entering = [
            (slot, tensor) for slot, tensor in call.entering if slot.path in names or slot.path in {name[:-1] for name in names}
        ]
        roles = {slot.role for slot, _ in call.results}
        kind: BegunKind = "given" if call.phase == "start" else given_at_the_end(roles, world_size=self._world_size)
        self._locate(call)
        self._begin_event(call, step, kind, self._kinds(tensor for _, tensor in call.results))

    def _locate(self, call: SeenCall) -> None:
        """Attribute gradients that no recorded call made to a module's backward, where the order of modules shows which."""
        found = call.locate([slot for slot, _ in call.results]) if call.locate is not None else None
        if found is not None:
            call.place, note = found
            call.phase, call.entering, call.kwargs = "backward", (), {}
            call.results = sorted(call.results, key=lambda item: ".".join(map(str, item[0].path[:-1])) != call.place.module)
            call.note = note

    def _entering(self, call: SeenCall, step: Step, leaving: Kinds) -> tuple[dict[Origin | None, Kinds], list[Event]]:
        """Return the kinds in a call's inputs, by origin, and the events behind them. An overwritten input counts as it was before."""
        entering: dict[Origin | None, Kinds] = {}
        events: list[Event] = []
        written = {id(tensor) for _, tensor in call.results} if call.phase == "forward" else set()
        for _, tensor in _inputs(call):
            if not is_readable(tensor) or call.is_gone(tensor):
                continue
            trace = self._traces.get(_identity(tensor))
            if trace is None and (not leaving or id(tensor) in written):
                continue
            kinds = self._kinds([tensor])
            if kinds:
                origin, event = self._origin(trace, call, step, kinds)
                entering[origin] = entering.get(origin, CLEAN) | kinds
                if event is not None and event not in events:
                    events.append(event)
        return entering, events

    def _origin(self, trace: Trace | None, call: SeenCall, step: Step, kinds: Kinds) -> tuple[Origin | None, Event | None]:
        """Return where a value came from; not every call is seen in time on an accelerator, nor where only modules are seen."""
        if trace is not None:
            return trace.origin, trace.event
        return step.unseen_origin(kinds) if call.is_late or call.place.level == "module" else (None, None)

    def _trace(self, call: SeenCall, passage: Passage, entering: dict[Origin | None, Kinds], events: list[Event]) -> None:
        origin = origin_after(passage, entering)
        for _, tensor in call.results:
            if self._kinds([tensor]):
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._traces[_identity(tensor)] = Trace(storage, call.step, origin, events[0] if events else None)

    def _begin_event(self, call: SeenCall, step: Step, kind: BegunKind, leaving: Kinds) -> Event:
        is_half = any(tensor.dtype is torch.float16 for _, tensor in call.results)
        event = Event(kind, call.place, call.phase, leaving, is_half, sentence(call, kind, leaving))
        if not self._wants(call.place):
            return event
        step.beginnings.append(event)
        self.glances &= step is not self._step
        if self._options.passed_on or self._is_worth_writing(event):
            self._writer.forget()
            forward = call.forward(call.step) if call.forward is not None else None
            if forward is not None:
                self._writer.write_wholly(forward, {}, {})
            for earlier in self._recalled():
                is_known = forward is not None and (earlier.place, earlier.phase) == (forward.place, "forward")
                if earlier.step == call.step and earlier is not call and not is_known:
                    self._writer.write_remains(earlier)
            self._keep(call, kind, self._notes(call, kind), event.text)
        else:
            event.num_briefly = self._options.ring
        if kind != "soft" and call.phase == "forward" and self._options.raise_error and not self._options.passed_on:
            self._sound(event)
        return event

    def _keep(self, call: SeenCall, kind: KeptKind, notes: dict[int, str], text: str) -> None:
        """Write a call wholly, and tell the user's `on_event`; where every call counts, a call counts once, however many nodes it has."""
        step = self._steps[call.step]
        name = (call.place.op, call.place.number, call.phase)
        if name in step.kept and self._options.passed_on:
            return
        step.kept.add(name)
        self._writer.forget()
        record, tensors = self._writer.write_wholly(call, self._replaced(call), notes)
        if self._options.passed_on:
            self.num_faults += 1
            if self.is_done and self._options.raise_error:
                self._raise_later(NonFiniteError(text))
        if self._options.on_event is not None:
            try:
                self._options.on_event(NonFiniteCall(kind=kind, record=record, tensors=tensors))
            except Exception as error:
                self._raise_later(error)

    def _is_worth_writing(self, event: Event) -> bool:
        """Tell whether an event is worth writing: not if the same place was harmless before, nor if lost parameters already explain it."""
        return self._harmless.get(site_of(event.place), 0) < _MOST_TIMES_AT_ONE_PLACE and not (self._is_poisoned and event.kind == "given")

    def _replaced(self, call: SeenCall) -> dict[int, str]:
        """Note the inputs whose values are gone, with what the ring remembers of them."""
        own = list(call.owner.parameters(recurse=False)) if call.owner is not None else []
        inputs = [tensor for _, tensor in _inputs(call)] + own
        notes = {id(tensor): "written to since: what the call was given is gone" for tensor in inputs if call.is_gone(tensor)}
        if call.phase == "forward":
            for _, tensor in call.results:
                notes[id(tensor)] = f"overwritten by this call; before it, {self._remembered(tensor)}"
        return notes

    def _notes(self, call: SeenCall, kind: BegunKind) -> dict[int, str]:
        """Note the makers of inputs that no recorded call made, as far as the graph shows them; and the note of a call, if it has one."""
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
        """Return the operation behind a node: the nearest one that had finite inputs, judging by the inputs that it saved."""
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
        for earlier in reversed(self._recalled()):
            for result in earlier.remains:
                if result.tensor() is tensor:
                    return f"{result}, as {earlier.place.op}.{earlier.place.number} left it"
        return "what it held is not known"

    def _recalled(self) -> list[SeenCall]:
        """Return the calls of the ring."""
        calls = [seen if isinstance(seen, SeenCall) else recalled(seen) for seen in self._ring]
        self._ring.clear()
        self._ring.extend(calls)
        return calls

    def _follow(self, call: SeenCall, passage: Passage, events: list[Event]) -> None:
        """Count the calls that values went through, and write the first of them as statistics."""
        for event in events:
            self._steps[call.step].touch(event, passage)
        if self._options.passed_on and passage == "passed" and events and call.place.level != "state" and not self.is_done:
            self._keep(call, "passed", {}, events[0].text)
        for event in events:
            if event.num_briefly < self._options.ring and not call.is_written:
                event.num_briefly += 1
                self._writer.forget()
                self._writer.write_briefly(call)

    def _sound(self, event: Event) -> None:
        if not event.is_told and self.alarm is None:
            event.is_told = True
            self._raise_later(NonFiniteError(event.text))

    def _raise_later(self, error: Exception) -> None:
        """Have an error raised in the user's code as soon as that is possible."""
        if self.alarm is None:
            self.alarm = error

    # ---- the backward pass, the optimizer, the scaler

    def backward_begins(self) -> None:
        self._step.has_backward = True

    def skipped(self, scale: float | None) -> None:
        """Note that GradScaler found gradients that are not finite, and left the weights alone."""
        self._step.is_skipped, self._step.scale = True, scale

    def before_update(self) -> None:
        """Raise an alarm if asked to: gradients were read and are about to be used, the last moment before they do harm."""
        self._step.has_update = True
        if self._options.raise_error and not self._options.passed_on:
            for event in self._step.beginnings:
                if self._step.is_fault(event):
                    self._sound(event)

    def received(self, call: SeenCall, before: Kinds) -> None:
        """Judge the result of a collective: non-finite values from other ranks are not this rank's doing."""
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


def takes_ranges(step: int) -> bool:
    """Tell whether a step needs the smallest and largest values of clean results, not only whether they are finite."""
    return step % _STEPS_BETWEEN_RANGES == 0


def _op_of(node: str) -> str:
    """Name the operation of a node: `gelu` for GeluBackward0, `native_layer_norm` for NativeLayerNormBackward0."""
    name = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _inputs(call: SeenCall) -> list[Found]:
    return [*encode_arguments(call.args, dict(call.kwargs))[1], *call.entering]


def _identity(tensor: torch.Tensor) -> int:
    try:
        return storage_identity(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor without a storage of its own
        return id(tensor)


def _stops_at_the_limit(device: torch.device) -> bool:
    """Tell whether a device gives the largest number instead of inf; asked once."""
    try:
        return bool((torch.full((1,), 60000.0, dtype=torch.float16, device=device) * 2).item() == DTYPES["float16"].max)
    except RuntimeError:
        return False
