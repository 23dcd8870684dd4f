# SPDX-License-Identifier: Apache-2.0
"""One watch for inf and NaN under way: it installs what sees the calls, and hands them to the watch.

On the CPU every call is seen through the function mode, and each of its autograd nodes through a hook. On an accelerator, where the mode
alone would cost a tenth of a step, modules are seen instead, and the gradients at their outputs. The user's call always runs, exactly
once, outside of everything that can fail here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope.capture import active
from ulpscope.capture.calls import caller, is_own_business, makes_no_values
from ulpscope.capture.extremes import FLOATS, DeferredExtremes, is_plain_here, is_readable, local_values
from ulpscope.capture.modes import ApiMode, remove_mode
from ulpscope.capture.modules import ModuleStack
from ulpscope.capture.patching import Patches
from ulpscope.capture.safety import Safety
from ulpscope.capture.selection import Selection
from ulpscope.capture.stacks import StackReader
from ulpscope.capture.state import OptimizerProbe
from ulpscope.capture.torch_internals import (
    ACCUMULATE_GRAD,
    current_node,
    graph_task,
    inside_transform,
    is_jit_tracing,
    next_sequence_number,
    saved_tensors,
    sequence_number,
)
from ulpscope.capture.walk import Found, tensors_in
from ulpscope.capture.watch import Watch
from ulpscope.capture.watch_records import EventWriter, Place, SeenCall, version_of
from ulpscope.model import CallName, LedgerEntry, Level, NonFinite, Sink, Slot
from ulpscope.numerics.nonfinite import Kinds, gives_data, is_move, makes_nothing_new

__all__ = ["WatchSession"]

_STACK_DEPTH = 12
_ROTATION = 8
_MOST_DULL = 16
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
# What these return is finite where what they are given is.
_BOUNDED_MODULES = frozenset(
    """
    Identity Dropout Dropout1d Dropout2d ReLU ReLU6 GELU SiLU Sigmoid Tanh LeakyReLU ELU SELU Softplus Hardtanh Hardswish Mish Flatten
    Unflatten LayerNorm RMSNorm GroupNorm MaxPool1d MaxPool2d MaxPool3d PixelShuffle
    """.split()
)
_UNKNOWN = Place("", 0, "", "module", ())
_LOSS = Place("state.loss", 0, "", "state", ())
_FIRST_INPUT, _FIRST_OUTPUT = Slot("input", (0,)), Slot("output", (0,))


class _Begun(NamedTuple):
    """A call that has begun and not returned."""

    op: str
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first_node: int
    is_looked_at: bool
    is_dull: bool


class WatchSession:
    """Watches what one process does between `start` and `stop`.

    With `find_steps` a step ends with each step of the first optimizer that steps; otherwise when `step` is called.
    """

    def __init__(
        self,
        sink: Sink,
        options: NonFinite,
        *,
        rank: int = 0,
        world_size: int = 1,
        models: list[torch.nn.Module] | None = None,
        optimizers: list[Any] | None = None,
        selection: Selection | None = None,
        find_steps: bool = False,
    ) -> None:
        self._sink = sink
        self._options = options
        self._rank = rank
        self._selection = selection or Selection()
        self._find_steps = find_steps
        self._modules = ModuleStack(models or [])
        self._safety = Safety(sink)
        self._watch = Watch(options, EventWriter(sink, rank), world_size=world_size, wants=self._wants)
        self._optimizers = OptimizerProbe(self._modules, optimizers)
        self._parameters: weakref.WeakKeyDictionary[Any, list[tuple[Slot, Slot, Any]]] = weakref.WeakKeyDictionary()
        self._deferred: dict[torch.device, DeferredExtremes] = {}
        self._stacks = StackReader(_STACK_DEPTH)
        self._places: weakref.WeakKeyDictionary[torch.nn.Module, Place] = weakref.WeakKeyDictionary()
        self._patches = Patches()
        self._mode: ApiMode | None = None
        self._handles: list[Any] = []
        self._clock: weakref.ref[Any] | None = None
        self._dull: list[SeenCall] = []
        self._last_result: Callable[[], Any] = lambda: None
        self._watches_modules = options.calls is False
        self._hooks_modules = world_size > 1
        self._has_begun = False
        self._has_updated = False
        self._is_active = self._is_recording = self._is_paused = False
        self._thread = 0
        self._step = 0

    # ---- life

    def start(self) -> None:
        """Begin to watch on this thread."""
        if self._is_active:
            return
        self._thread = threading.get_ident()
        self._is_active = True
        self._begin(0)
        active.join(self)
        try:
            self._install()
        except BaseException:
            self.stop(complete=False)
            raise

    def _install(self) -> None:
        self._patches.module_calls(self._around_module)
        self._patches.functions(self._around_function)
        self._patches.backward_passes(self._around_backward)
        self._patches.collectives(self._around_collective)
        self._patches.scaler_steps(self._around_scaler)
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer))
        self._handles.append(register_optimizer_step_post_hook(self._after_optimizer))
        if not self._watches_modules:
            self._mode = ApiMode(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, *, complete: bool = True) -> None:
        """Put back everything; the step under way is closed as complete unless the user's code failed in it."""
        if not self._is_active:
            return
        self._is_active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._see_nothing_more()
        active.leave(self)
        self._safety.run("close the run", self._close, complete)

    def _see_nothing_more(self) -> None:
        self._is_recording = False
        self._patches.undo()
        if self._mode is not None:
            remove_mode(self._mode)
            self._mode = None

    def _close(self, complete: bool) -> None:
        if not self._safety.is_broken:
            self._read_all()
            self._watch.write_ranges()
            self._watch.end_step(self._step)
        for deferred in self._deferred.values():
            deferred.forget()
        self._sink.close(complete=complete)

    def step(self) -> None:
        """End the step under way and begin the next."""
        if not self._is_active:
            return
        self._safety.run("close the step", self._end_step)
        self._begin(self._step + 1)
        self._raise_alarm()

    def _end_step(self) -> None:
        if len(self._deferred) == 1 and not self._options.raise_error:
            (deferred,) = self._deferred.values()
            deferred.end_step(self._step)
            return
        self._read_all()
        self._watch.end_step(self._step)

    def _read_all(self) -> None:
        for deferred in self._deferred.values():
            deferred.poll(wait=True)

    def _begin(self, step: int) -> None:
        self._step = self._safety.step = step
        self._dull.clear()
        self._watch.begin_step(step)
        if self._watch.is_done:
            self._see_nothing_more()
            return
        self._is_recording = self._wants_to_record(step)

    def _wants_to_record(self, step: int) -> bool:
        if self._is_paused or self._safety.is_broken:
            return False
        return self._selection.wants_step(step) and self._selection.wants_rank(self._rank)

    def pause(self) -> None:
        """Look at nothing until `resume`; the step under way stays open."""
        self._is_paused = True
        self._is_recording = False

    def resume(self) -> None:
        self._is_paused = False
        self._is_recording = self._is_active and self._wants_to_record(self._step)

    def deactivate(self) -> None:
        self._is_active = self._is_recording = False

    @property
    def num_faults(self) -> int:
        return self._watch.num_faults

    @property
    def is_recording(self) -> bool:
        """Whether calls of this thread are looked at right now."""
        return self._is_recording and (threading.get_ident() == self._thread or graph_task() != -1) and not is_jit_tracing()

    def _wants(self, place: Place) -> bool:
        return self._selection.wants_call(place.module, CallName(place.op, place.number))

    def _raise_alarm(self) -> None:
        alarm, self._watch.alarm = self._watch.alarm, None
        if alarm is not None:
            raise alarm

    # ---- calls

    def open_call(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        level: Level = "api",
        depth: int = 2,
        written: frozenset[int | str] = frozenset(),
    ) -> _Begun | None:
        """Take down what is known before a call; None where its result need not be looked at."""
        if not self.is_recording or is_own_business(caller(depth)):
            return None
        in_backward = graph_task() != -1
        number = -1 if in_backward else self._watch.name(op)
        is_dull = makes_nothing_new(op) and not self._options.passed_on
        if makes_no_values(op) or gives_data(op) or (in_backward and is_move(op)):
            return None
        hooks = torch.is_grad_enabled() and (self._options.passed_on or not is_move(op))
        is_looked_at = not in_backward and (not is_dull or self._watch.is_tripped)
        return _Begun(op, number, args, kwargs, next_sequence_number() if hooks else -1, is_looked_at, is_dull)

    def close_call(self, begun: _Begun, result: Any) -> None:
        """Look at what a call returned."""
        self._safety.run(f"look at the outputs of {begun.op}", self._look_at_call, begun, result)
        if self._watch.is_done:
            self._is_recording = False
        if self._watch.alarm is not None:
            self._raise_alarm()

    def _look_at_call(self, begun: _Begun, result: Any) -> None:
        if inside_transform():
            return
        results = _results(begun, result)
        if not results:
            return
        place = Place(begun.op, max(begun.number, 0), self._modules.current, "api", self._stacks.read())
        if begun.is_looked_at or begun.is_dull:
            call = self._watch.seen(place, "forward")
            call.args, call.kwargs, call.results = begun.args, begun.kwargs, results
            if begun.is_looked_at:
                call.before, self._dull = self._dull, []
                self._look(call)
            else:  # looked at only if the next call that is looked at has something to tell
                call.versions = {id(tensor): version_of(tensor) for _, tensor in results}
                self._dull = [*self._dull[1 - _MOST_DULL :], call]
        if begun.first_node >= 0:
            self._hook_nodes(place, results, begun.first_node, is_dull=begun.is_dull)

    def _look(self, call: SeenCall) -> None:
        """Have the results of a call looked at: at once on the CPU, whenever the device is ready elsewhere."""
        device = call.results[0][1].device
        if device.type == "cpu" or self._options.at_once:
            self._watch.look_now(call)
            return
        deferred = self._deferred.get(device)
        if deferred is None:
            deferred = self._deferred[device] = DeferredExtremes(device, self._watch)
            self._watch.probe(device)
        call.is_late = True
        if call.phase == "forward":
            call.versions = {id(value): version_of(value) for value in call.args if isinstance(value, torch.Tensor)}
        elif call.phase == "backward":  # by the time it is looked at the node is gone
            call.more = call.name_results = None
        if call.phase in ("start", "optimizer"):  # parameters and gradients are about to be written to
            deferred.read_now(call, [tensor for _, tensor in call.results])
        else:
            deferred.add(call, [tensor for _, tensor in call.results])

    # ---- the backward side of calls

    def _hook_nodes(self, place: Place, results: list[Found], first: int, *, is_dull: bool) -> None:
        """Look at what each autograd node of a call passes on; at that of a dull one only if the next has something to tell."""
        last = next_sequence_number()
        waiting = {tensor.grad_fn for _, tensor in results if tensor.grad_fn is not None}
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            number = sequence_number(node)
            if not first <= number < last or number == ACCUMULATE_GRAD:
                continue
            node.register_hook(self._guard(place, is_dull))
            if last - first > 1:
                waiting |= {following for following, _ in node.next_functions if following is not None} - seen
                seen |= waiting

    def _guard(self, place: Place, is_dull: bool) -> Callable[..., None]:
        session = weakref.ref(self)

        def hook(passed_on: tuple[Any, ...], received: tuple[Any, ...]) -> None:
            alive = session()
            if alive is not None and alive._is_recording:
                alive._safety.run("look at a backward call", alive._look_at_node, place, is_dull, passed_on, received)
                if alive._watch.alarm is not None:
                    alive._raise_alarm()

        return hook

    def _look_at_node(self, place: Place, is_dull: bool, passed_on: tuple[Any, ...], received: tuple[Any, ...]) -> None:
        known = {_address(gradient) for gradient in received if gradient is not None} - {0}
        results = [(slot, gradient) for slot, gradient in _numbered("output", passed_on) if _address(gradient) not in known]
        if is_dull or any(not gradient.is_cpu for _, gradient in results):
            results = _without_leaves(results)
        if not results:  # nothing but what came in, handed on or seen in another shape
            return
        call = self._watch.seen(place, "backward")
        call.results, call.entering = results, _numbered("input", received)
        if is_dull and not self._watch.is_tripped:
            self._dull = [*self._dull[1 - _MOST_DULL :], call]
            return
        call.before, self._dull = self._dull, []
        call.more, call.name_results = _saved_by_this_node, self._name_gradients
        self._look(call)

    def _name_gradients(self, results: Sequence[Found]) -> list[Found]:
        """What the node that is being run passes on to parameters, by their names."""
        node = current_node()
        if node is None:
            return list(results)
        leaves = [getattr(following, "variable", None) for following, _ in node.next_functions]
        names = {id(p): name for root in self._modules.roots() for name, p in self._modules.named_parameters(root)}
        named = []
        for slot, tensor in results:
            leaf = leaves[int(slot.path[0])]
            named.append((slot if leaf is None else Slot.parse(f"gradient.{names.get(id(leaf), slot.path[0])}"), tensor))
        return named

    def _look_at_gradient(self, place: Place, gradients: tuple[Any, ...], number: int) -> None:
        gradient = gradients[number] if number < len(gradients) else None
        if gradient is not None and is_plain_here(gradient):
            call = self._watch.seen(place, "backward")
            call.results = [(_FIRST_INPUT, gradient)]
            self._look(call)

    # ---- what the patches call

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_recording:
            return original(module, *args, **kwargs)
        place = self._places.get(module, _UNKNOWN)
        if place is not _UNKNOWN and self._watches_modules:  # the hot path of accelerators
            result = original(module, *args, **kwargs)
            if place.op and result is not self._last_result():
                self._after_module(module, place, args, kwargs, result)
            return result
        if not self.is_recording:
            return original(module, *args, **kwargs)
        if not self._has_begun and self._modules.is_empty():
            self._safety.run("look at a model", self._begin_with, module)
        is_opaque = self._mode is not None and (_is_compiled(module) or _has_fast_path(module))
        path = self._modules.enter(module)
        place = _UNKNOWN
        if self._watches_modules or is_opaque:
            place = self._places[module] = self._safety.run("name a module", self._place_of_module, module, path) or _UNKNOWN
        try:
            result = self._call_unseen(original, module, args, kwargs) if is_opaque else original(module, *args, **kwargs)
        finally:
            self._modules.leave(module)
        if place.op and result is not self._last_result():
            self._after_module(module, place, args, kwargs, result)
        return result

    def _place_of_module(self, module: torch.nn.Module, path: str) -> Place:
        """Where a module stands; without an operation where its results need not be looked at."""
        name = type(module).__name__
        return Place("" if name in _BOUNDED_MODULES else f"module.{name}", 0, path, "module", self._stacks.read())

    def _after_module(self, module: torch.nn.Module, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.is_recording and not inside_transform():
            self._safety.run("look at a module", self._look_at_module, module, place, args, kwargs, result)
            if self._watch.alarm is not None:
                self._raise_alarm()

    def _begin_with(self, module: torch.nn.Module) -> None:
        """Watch modules instead of calls where the model is on an accelerator, and look at its parameters before anything changes them."""
        parameter = next(module.parameters(), None)
        if parameter is None:
            return
        self._has_begun = True
        if parameter.device.type in ("cpu", "meta"):
            return
        if self._options.calls is None:
            self._watches_modules = True
            if self._mode is not None:
                remove_mode(self._mode)
                self._mode = None
        named = self._modules.named_parameters(module)
        call = self._watch.seen(Place("state.parameters", 0, "", "state", ()), "start")
        call.results = [(Slot.parse(f"parameter.{name}"), p) for name, p in named if is_plain_here(p) and p.device == parameter.device]
        if call.results:
            self._look(call)

    def _call_unseen(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module without our mode, where the mode's presence alone would change what it computes."""
        mode = self._mode
        was_recording, self._is_recording = self._is_recording, False
        removed = remove_mode(mode) if mode is not None else False
        try:
            return original(module, *args, **kwargs)
        finally:
            if removed and mode is not None and self._is_active:
                mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_recording = was_recording and self._is_active

    def _look_at_module(self, module: torch.nn.Module, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._last_result = weakref.ref(result)
            results: Sequence[Found] = ((_FIRST_OUTPUT, result),) if _is_simple(result) or is_plain_here(result) else ()
        else:
            results = [(slot, tensor) for slot, tensor in tensors_in(result, "output") if is_plain_here(tensor)]
        if not results:
            return
        if graph_task() == -1:
            call = self._watch.seen(place, "forward")
            call.number, call.args, call.kwargs, call.results, call.owner = self._watch.name(place.op), args, kwargs, results, module
            self._look(call)
        if self._hooks_modules and module._modules and torch.is_grad_enabled():
            self._hook_gradients(place, results)

    def _hook_gradients(self, place: Place, results: Sequence[Found]) -> None:
        """Look at the gradients of the outputs of a module that has others inside, before other ranks' are added to them.

        Which module it was is told better by the gradients of its parameters, but only after all ranks have contributed.
        """
        for _, tensor in results:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._gradient_hook(place, tensor.output_nr))

    def _gradient_hook(self, place: Place, number: int) -> Callable[..., None]:
        session = weakref.ref(self)

        def hook(gradients: tuple[Any, ...]) -> None:
            alive = session()
            if alive is not None and alive._is_recording:
                alive._safety.run("look at a gradient", alive._look_at_gradient, place, gradients, number)

        return hook

    def _around_function(self, apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._mode is None or cls.__module__.startswith("torch."):
            return apply(*args, **kwargs)
        begun = self.open_call(f"Function.{cls.__qualname__}", args, kwargs)
        result = apply(*args, **kwargs)
        if begun is not None:
            self.close_call(begun, result)
        return result

    def _around_collective(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording or is_own_business(caller(2)):
            return original(*args, **kwargs)
        opened = self._safety.run(f"look at the inputs of {name}", self._before_collective, name, args, kwargs)
        result = original(*args, **kwargs)
        if opened is not None and not hasattr(result, "wait"):
            self._safety.run(f"look at the outputs of {name}", self._watch.received, *opened)
        return result

    def _before_collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SeenCall, Kinds] | None:
        """What a collective is given; it writes over its arguments. Those of an accelerator are looked at where they are used."""
        found = tensors_in((*args, *kwargs.values()), "mutated")
        results = [(slot, tensor) for slot, tensor in found if is_plain_here(tensor) and tensor.is_cpu]
        if not results:
            return None
        op = f"distributed.{name}"
        call = self._watch.seen(Place(op, self._watch.name(op), self._modules.current, "api", self._stacks.read()), "forward")
        call.results = results
        return call, self._watch.kinds_now(tensor for _, tensor in results)

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(*args, **kwargs)
        if graph_task() == -1:
            self._safety.run("look at the loss", self._look_at_loss, args)
        if self._mode is not None and not self._mode.is_on():
            with self._mode:
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    def _look_at_loss(self, args: tuple[Any, ...]) -> None:
        self._watch.backward_begins()
        roots = [tensor for _, tensor in tensors_in(args[0], "output") if is_plain_here(tensor)] if args else []
        if roots:
            call = self._watch.seen(_LOSS, "forward")
            call.results = [(Slot("output", (number,)), tensor) for number, tensor in enumerate(roots)]
            self._look(call)

    # ---- optimizers and scalers

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_updated = True
        if not self.is_recording or not self._optimizers.wants(optimizer):
            return
        self._safety.run("look at gradients", self._look_at_gradients, optimizer)
        if self._options.raise_error:
            self._safety.run("look at gradients", self._read_all)
        self._watch.before_update()
        self._raise_alarm()
        if self._watch.is_done:
            self._is_recording = False
        if self._mode is not None and len(args) < 2 and not kwargs and self._mode.is_on_top():
            remove_mode(self._mode)  # an optimizer makes many calls of its own, and none of them is looked at

    def _look_at_gradients(self, optimizer: Any) -> None:
        found = getattr(optimizer, "found_inf", None)  # set by GradScaler for optimizers that skip the step themselves
        if found is not None and self._watch.is_tripped and bool(found.item()):
            self._watch.skipped(None)
        self._look_at_state(optimizer, [(slot, p.grad) for slot, _, p in self._named(optimizer) if p.grad is not None])

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._mode is not None and self._is_active and not self._mode.is_on():
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        if self.is_recording and self._optimizers.wants(optimizer):
            self._safety.run("look at an optimizer", self._look_at_update, optimizer)
        if self._find_steps and self._is_active and threading.get_ident() == self._thread:
            if self._clock is None:
                self._clock = weakref.ref(optimizer)
            if self._clock() is optimizer:
                self.step()

    def _look_at_update(self, optimizer: Any) -> None:
        """Parameters and the optimizer's state; of much that follows from gradients a part in each step, in turn."""
        found: list[Found] = []
        for number, (_, slot, parameter) in enumerate(self._named(optimizer)):
            is_turn = (number + self._step) % _ROTATION == 0
            if is_turn or parameter.is_cpu:
                found.append((slot, parameter))
            if is_turn:
                state = optimizer.state.get(parameter, {}) if isinstance(optimizer.state, dict) else {}
                found += [(Slot("state", (*slot.path, key)), value) for key, value in state.items() if _is_moment(value)]
        self._look_at_state(optimizer, found)

    def _look_at_state(self, optimizer: Any, found: list[Found]) -> None:
        """One look at many tensors of one optimizer, device by device."""
        for group in [found] if _is_one_group(found) else _by_device(found):
            call = self._watch.seen(Place(f"optimizer.{type(optimizer).__name__}", 0, "", "state", ()), "optimizer")
            call.results, call.more = group, lambda: [(slot, p.grad) for slot, _, p in self._named(optimizer) if p.grad is not None]
            call.describe = lambda: (self._optimizers.hyper_parameters(optimizer), self._stacks.read())
            call.locate = self._locate if self._watches_modules else None
            self._look(call)

    def _locate(self, slots: Sequence[Slot]) -> tuple[Place, str] | None:
        """The module in whose backward gradients went bad: the last one, in the order of the forward pass, whose parameters show it."""
        names = [".".join(map(str, slot.path[:-1])) for slot in slots if slot.role == "gradient"]
        order = {place.module: (module, place) for module, place in self._places.items() if module._parameters}
        modules = list(order)
        bad = [number for number, path in enumerate(modules) if path in names]
        if not bad:
            return None
        module, place = order[modules[bad[-1]]]
        after = modules[bad[-1] + 1] if bad[-1] + 1 < len(modules) else ""
        if len(bad) == 1 and len(modules) > 1 and bad[-1] > 0:
            note = "no other module's gradients are bad: they were made with its own parameters' gradients"
        elif after:
            note = (
                f"the gradients of '{after}', which comes next, are finite: made in the backward of what lies between the two, or its own"
            )
        else:
            note = "it is the last module: made in the backward of the loss, or its own"
        return Place(f"module.{type(module).__name__}", 0, place.module, "module", place.stack), note

    def _named(self, optimizer: Any) -> list[tuple[Slot, Slot, Any]]:
        known = self._parameters.get(optimizer)
        if known is None or len(known) != sum(len(group["params"]) for group in optimizer.param_groups):
            names = self._optimizers.names_of(optimizer)
            known = [(Slot.parse(f"gradient.{name}"), Slot.parse(f"mutated.{name}"), parameter) for name, parameter in names]
            self._parameters[optimizer] = known
        return known

    def _around_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        step, self._has_updated = self._step, False
        result = original(scaler, optimizer, *args, **kwargs)
        if self._is_active and not self._has_updated:
            self._safety.run("write a note", self._note_skipped, scaler)
            if self._find_steps and self._step == step and (self._clock is None or self._clock() is optimizer):
                self.step()
        return result

    def _note_skipped(self, scaler: Any) -> None:
        scale = scaler.get_scale()
        self._watch.skipped(float(scale))
        self._sink.note(LedgerEntry(what="see an optimizer step", why="GradScaler skipped it", step=self._step))


def _results(begun: _Begun, result: Any) -> list[Found]:
    if isinstance(result, torch.Tensor):
        return [(_FIRST_OUTPUT, result)] if is_plain_here(result) else []
    if result is None:  # x[...] = y, and the like
        result = begun.args[0] if begun.args else None
    return [(slot, tensor) for slot, tensor in tensors_in(result, "output") if is_plain_here(tensor)]


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether a tensor is readable, by a glance that settles it for nearly all on an accelerator."""
    return type(tensor) in _PLAIN and tensor.is_cuda and tensor.dtype in FLOATS and tensor.layout is torch.strided and tensor.numel() > 0


def _is_one_group(found: list[Found]) -> bool:
    return bool(found) and all(_is_simple(tensor) for _, tensor in found) and len({tensor.get_device() for _, tensor in found}) == 1


def _by_device(found: Iterable[Found]) -> list[list[Found]]:
    groups: dict[torch.device, list[Found]] = {}
    for slot, tensor in found:
        values = tensor if type(tensor) in _PLAIN else local_values(tensor)
        if values is not None and is_readable(values):
            groups.setdefault(values.device, []).append((slot, values))
    return list(groups.values())


def _numbered(role: Any, gradients: tuple[Any, ...]) -> list[Found]:
    return [(Slot(role, (number,)), value) for number, value in enumerate(gradients) if value is not None and is_plain_here(value)]


def _without_leaves(results: list[Found]) -> list[Found]:
    """Without what goes to parameters: whoever holds on to that makes autograd copy it. It is looked at before an optimizer uses it."""
    node = current_node()
    if node is None:
        return results
    leaves = [following is not None and sequence_number(following) == ACCUMULATE_GRAD for following, _ in node.next_functions]
    return [(slot, gradient) for slot, gradient in results if not leaves[int(slot.path[0])]]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0


def _saved_by_this_node() -> list[Found]:
    """What the node that is being run kept of its forward call."""
    node = current_node()
    return [(Slot("buffer", ("saved", name)), tensor) for name, tensor in saved_tensors(node)] if node is not None else []


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _has_fast_path(module: torch.nn.Module) -> bool:
    """Whether a module would use a fused kernel that it gives up when any torch function mode is active."""
    if module.training or not isinstance(module, _FUSED):
        return False
    return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in module.parameters())


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
