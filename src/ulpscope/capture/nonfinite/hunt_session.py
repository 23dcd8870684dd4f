# SPDX-License-Identifier: Apache-2.0
"""Run a hunt for inf and NaN: install the mode and the patches that see the calls, and hand the calls to the hunt.

On the CPU the function mode sees every call, and a hook sees each of its autograd nodes (`hunt_calls`). On an accelerator, where the mode
alone would cost a tenth of a step, the hunt sees modules instead, and the gradients at their outputs (`hunt_modules`), until one of them is
suspect: then it sees the calls inside that one too. The user's call always runs, exactly once, outside of everything that can fail here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ulpscope.capture.intercept.naming import caller, is_own_business
from ulpscope.capture.intercept.torch_modes import ApiMode, FunctionMode, OpMode, remove_mode
from ulpscope.capture.lifecycle import Session, has_fast_path, is_compiled
from ulpscope.capture.nonfinite.extremes import DeferredExtremes, is_plain_here
from ulpscope.capture.nonfinite.hunt import Hunt
from ulpscope.capture.nonfinite.hunt_calls import CallHunt, CallMode, traits_of_name
from ulpscope.capture.nonfinite.hunt_modules import ModuleHunt
from ulpscope.capture.nonfinite.hunt_records import EventWriter, Place, SeenCall, version_of
from ulpscope.capture.nonfinite.hunt_state import StateHunt
from ulpscope.capture.record.flights import is_handle
from ulpscope.capture.record.stacks import TORCH_FILES
from ulpscope.capture.torch_internals import device_of, graph_task, inside_transform
from ulpscope.capture.walk import tensors_in
from ulpscope.model import CallName, NonFinite, Sink
from ulpscope.numerics.nonfinite_rule import Kinds
from ulpscope.recording.selection import Selection
from ulpscope.recording.stacks import StackReader

__all__ = ["HuntSession"]

_STACK_DEPTH = 12


class HuntSession(Session):
    """Hunts in one process between `start` and `stop`."""

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
        operators: bool = False,
    ) -> None:
        super().__init__(
            sink, rank=rank, models=models, optimizers=optimizers, selection=selection, find_steps=find_steps, operators=operators
        )
        self._options = options
        self._stacks = StackReader(
            _STACK_DEPTH, foreign=TORCH_FILES, boundary=HuntSession._around_module.__code__, running=self._modules.all_running
        )
        self._hunt = Hunt(options, EventWriter(sink, rank), world_size=world_size, wants=self._wants)
        self._calls = CallHunt(
            self, self._hunt, self._modules, self._safety, self._stacks, all_calls=options.passed_on, operators=operators
        )
        self._seen_modules = ModuleHunt(self, self._hunt, self._stacks, hooks_gradients=world_size > 1)
        self._state = StateHunt(self, self._hunt, self._optimizers, self._stacks)
        self._deferred: dict[torch.device, DeferredExtremes] = {}
        self._hunts_modules = options.calls is False
        self._has_begun = False

    # ---- life

    def _new_mode(self) -> ApiMode | None:
        return None if self._hunts_modules else CallMode(self._calls)

    def _open_step(self, step: int) -> None:
        self._calls.begin_step()
        self._hunt.begin_step(step)
        if self._hunt.is_done:
            self._see_nothing_more()

    def step(self) -> None:
        """End the step under way and begin the next."""
        super().step()
        self.raise_alarm()

    def _end_step(self) -> None:
        if len(self._deferred) == 1 and not self._options.raise_error:
            (deferred,) = self._deferred.values()
            deferred.end_step(self._step)
            return
        self._read_all()
        self._hunt.end_step(self._step)

    def _close(self, complete: bool) -> None:
        if not self._safety.is_broken:
            self._read_all()
            self._hunt.write_ranges()
            self._hunt.end_step(self._step)
        for deferred in self._deferred.values():
            deferred.forget()
        self._sink.close(complete=complete)

    def _read_all(self) -> None:
        for deferred in self._deferred.values():
            deferred.poll(wait=True)

    @property
    def num_faults(self) -> int:
        return self._hunt.num_faults

    def _wants(self, place: Place) -> bool:
        return self._selection.wants_call(place.module, CallName(place.op, place.number))

    # ---- what those who see the calls ask for

    def name_spoken(self, op: str) -> str:
        return self._spoken_name(op)

    def run_safely(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        return self._safety.run(what, function, *args)

    def raise_alarm(self) -> None:
        """Raise the pending alarm in the user's code; see no more calls where the hunt is done."""
        if self._hunt.is_done:
            self._is_recording = False
        alarm, self._hunt.alarm = self._hunt.alarm, None
        if alarm is not None:
            raise alarm

    def look(self, call: SeenCall) -> None:
        """Have the results of a call looked at: at once on the CPU, whenever the device is ready elsewhere."""
        device = call.results[0][1].device
        if device.type == "cpu" or self._options.at_once:
            self._hunt.look_now(call)
            return
        deferred = self._deferred.get(device)
        if deferred is None:
            deferred = self._deferred[device] = DeferredExtremes(device, self._hunt)
            self._hunt.probe(device)
        call.is_late = True
        if call.phase == "forward":
            call.versions = {id(value): version_of(value) for value in call.args if isinstance(value, torch.Tensor)}
        elif call.phase == "backward":  # the node is gone when it is looked at
            call.more = call.name_results = call.forward = None
        if call.phase in ("start", "optimizer"):  # parameters and gradients are about to be written to
            deferred.read_now(call, [tensor for _, tensor in call.results])
        else:
            deferred.add(call, [tensor for _, tensor in call.results])

    # ---- what the patches call

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_recording:
            return original(module, *args, **kwargs)
        if self._hunts_modules:  # the hot path of accelerators
            place = self._seen_modules.place_of(module)
            if place is not None:
                result = (
                    self._call_closely(original, module, place, args, kwargs) if self._hunt.suspects else original(module, *args, **kwargs)
                )
                self._after_module(module, place, args, kwargs, result)
                return result
        if not self.is_recording:
            return original(module, *args, **kwargs)
        if self._modules.is_empty():
            self._see_pipelines()
        if not self._has_begun and self._modules.is_empty():
            self._safety.run("look at a model", self._begin_with, module)
        is_opaque = self._mode is not None and (is_compiled(module) or has_fast_path(module))
        path = self._modules.enter(module)
        place = None
        if self._hunts_modules or is_opaque:
            place = self._safety.run("name a module", self._seen_modules.name, module, path)
        try:
            result = self._call_unseen(original, (module, *args), kwargs) if is_opaque else original(module, *args, **kwargs)
        finally:
            self._modules.leave(module)
        if place is not None:
            self._after_module(module, place, args, kwargs, result)
        return result

    def _after_module(self, module: torch.nn.Module, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not place.op or result is self._seen_modules.last_result() or not self.is_recording or inside_transform():
            return
        self._safety.run("look at a module", self._seen_modules.look_at, module, place, args, kwargs, result)
        if self._hunt.alarm is not None:
            self.raise_alarm()

    def _begin_with(self, module: torch.nn.Module) -> None:
        """Hunt modules instead of calls where the model is on an accelerator, and look at its parameters before anything changes them."""
        parameter = next((tensor for _, tensor in self._modules.named_parameters(module)), None)
        if parameter is None:
            return
        self._has_begun = True
        device = device_of(parameter)
        if device is None or device.type in ("cpu", "meta"):
            return
        if self._options.calls is None:
            self._hunts_modules = True
            if self._mode is not None:
                remove_mode(self._mode)
                self._mode = None
        self._state.look_at_parameters(self._modules.named_parameters(module), device)

    def _call_closely(
        self, original: Callable[..., Any], module: torch.nn.Module, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module; see its own calls only if it is suspect."""
        is_suspect = place.module in self._hunt.suspects and self.is_recording
        if not is_suspect or is_compiled(module) or has_fast_path(module):
            return original(module, *args, **kwargs) if self._mode is None else self._call_with(None, original, module, args, kwargs)
        self._modules.enter(module)
        try:
            return self._call_with(self._mode or CallMode(self._calls), original, module, args, kwargs)
        finally:
            self._modules.leave(module)

    def _call_with(
        self,
        mode: FunctionMode | OpMode | None,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module under this mode and no other of ours, then go back to the mode before."""
        before = self._mode
        if mode is before:
            return original(module, *args, **kwargs)
        if before is not None:
            remove_mode(before)
        if mode is not None:
            mode.__enter__()
        self._mode = mode
        try:
            return original(module, *args, **kwargs)
        finally:
            if mode is not None:
                remove_mode(mode)
            self._mode = before if self._is_active else None
            if self._mode is not None:
                self._mode.__enter__()

    def _around_function(self, apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._mode is None or cls.__module__.startswith("torch."):
            return apply(*args, **kwargs)
        begun = self._calls.open(traits_of_name(f"Function.{cls.__qualname__}"), caller(2))
        result = apply(*args, **kwargs)
        if begun is not None:
            self._calls.close(begun, args, kwargs, result)
        return result

    def _around_collective(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._see_pipelines()
        if not self.is_recording or is_own_business(caller(3)):
            return original(*args, **kwargs)
        opened = self._safety.run(f"look at the inputs of {name}", self._before_collective, name, args, kwargs)
        result = original(*args, **kwargs)
        if opened is not None and not is_handle(result):
            self._safety.run(f"look at the outputs of {name}", self._hunt.received, *opened)
        return result

    def _before_collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SeenCall, Kinds] | None:
        """Open a collective with its arguments, which it writes over. Arguments on an accelerator are looked at where they are used."""
        found = tensors_in((*args, *kwargs.values()), "mutated")
        results = [(slot, tensor) for slot, tensor in found if is_plain_here(tensor) and tensor.is_cpu]
        if not results:
            return None
        op = f"distributed.{name}"
        call = self._hunt.seen(Place(op, self._hunt.name(op), self._modules.current, "api", self._stacks.read()), "forward")
        call.results = results
        return call, self._hunt.kinds_now(tensor for _, tensor in results)

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(*args, **kwargs)
        if graph_task() == -1:
            self._safety.run("look at the loss", self._state.look_at_loss, args)
        if isinstance(self._mode, ApiMode) and not self._mode.is_on():
            with self._mode:
                return original(*args, **kwargs)
        return original(*args, **kwargs)

    # ---- optimizers and scalers

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._before_optimizer(optimizer, args, kwargs)
        if not self.is_recording or not self._state.wants(optimizer):
            return
        self._safety.run("look at gradients", self._state.look_at_gradients, optimizer, self._locate)
        if self._options.raise_error:
            self._safety.run("look at gradients", self._read_all)
        self._hunt.before_update()
        self.raise_alarm()
        if isinstance(self._mode, ApiMode) and len(args) < 2 and not kwargs and self._mode.is_on_top():
            remove_mode(self._mode)  # an optimizer makes many calls of its own, which the hunt ignores

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if isinstance(self._mode, ApiMode) and self._is_active and not self._mode.is_on():
            self._mode.__enter__()
        if self.is_recording and self._state.wants(optimizer):
            self._safety.run("look at an optimizer", self._state.look_at_update, optimizer, self._step, self._locate)
        self._tick(optimizer)

    @property
    def _locate(self) -> Any:
        return self._seen_modules.locate if self._hunts_modules else None

    def _note_skipped(self, scaler: Any) -> None:
        self._hunt.skipped(float(scaler.get_scale()))
        super()._note_skipped(scaler)
