# SPDX-License-Identifier: Apache-2.0
"""Replay an optimizer's step as one call: from parameters, gradients and state before it to parameters and state after it.

torch's own class runs the step in its plain form, neither fused nor foreach. Only classes that treat each parameter by itself are known
here, so that parameters can be replayed one at a time. Step counters are constants of the replay, not inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ulpscope.model import Arguments, CallRecord, Slot, TensorRecord
from ulpscope.replay.calls.arguments import Decoding, decode_arguments, read_tensor
from ulpscope.replay.calls.evaluate import guarded
from ulpscope.replay.calls.widening import wider_precision
from ulpscope.replay.program import NotReplayable, Program, Reader

__all__ = ["optimizer_program", "stepped_parameters"]

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    name: vars(torch.optim)[name]
    for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
    if name in vars(torch.optim)  # Adafactor from torch 2.5 on
}
_VENDOR_CLASSES = {"NpuFusedAdam": "Adam", "NpuFusedAdamW": "AdamW", "NpuFusedSGD": "SGD"}
_PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
_NEWER_SETTINGS = frozenset({"capturable", "decoupled_weight_decay", "fused"})
_COUNTERS = frozenset({"eta", "mu", "mu_product", "step"})
_FIRST_BUFFER = 0.01  # how far the first momentum buffer may be from its gradient


def stepped_parameters(step: CallRecord) -> tuple[str, ...]:
    """Return the names of the parameters that had a gradient in this step."""
    gradients = {slot.slot for slot in step.slots if slot.slot.role == "gradient"}
    return tuple(name for name, _ in _named_groups(step) if Slot.parse(f"gradient.{name}") in gradients)


def optimizer_program(
    step: CallRecord,
    read: Reader,
    *,
    parameters: Iterable[CallRecord],
    previous: CallRecord | None = None,
    read_previous: Reader | None = None,
    names: Collection[str] | None = None,
) -> Program:
    """Build the step of an optimizer as a program: `parameter.*`, `gradient.*` and `state.*` to `mutated.*` and `state.*`.

    `parameters` are the records of parameters (`state.parameters`) of the same step. `previous` is the record of the same optimizer's step
    before this one, with the reader of its own step; None if there was none, or if it was not recorded. With `names` only these parameters
    are stepped.
    """
    cls = _class_of(step)
    found: dict[str, _Parameter] = {}
    reasons: list[str] = []
    before = _Before.of(step, read, parameters, previous, read_previous or read)
    for name, settings in _named_groups(step):
        if names is None or name in names:
            try:
                found[name] = before.parameter(name, _settings(cls, step, settings))
            except NotReplayable as error:
                reasons.append(str(error))
    if not found:
        raise NotReplayable(reasons[0] if reasons else "none of its parameters had a gradient")
    return _Step(step, cls, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One parameter before the step; each tensor comes with the reader that has its bytes."""

    settings: dict[str, Any]
    tensors: dict[Slot, tuple[TensorRecord, Reader]]
    counters: dict[str, torch.Tensor]


@dataclass
class _Step:
    record: CallRecord
    cls: type[torch.optim.Optimizer]
    parameters: dict[str, _Parameter]
    has_drawn: bool | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return str(self.record.call)

    @cached_property
    def inputs(self) -> Mapping[Slot, torch.Tensor]:
        return {slot: read_tensor(*kept) for each in self.parameters.values() for slot, kept in each.tensors.items()}

    def __call__(self, inputs: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        recorded = {slot: record for each in self.parameters.values() for slot, (record, _) in each.tensors.items()}
        is_wider = wider_precision(inputs, recorded) is not None
        results: dict[Slot, torch.Tensor] = {}
        with guarded(self):
            for name, parameter in self.parameters.items():
                results |= self._stepped(name, parameter, inputs, is_wider)
        return results

    def _stepped(self, name: str, parameter: _Parameter, inputs: Mapping[Slot, torch.Tensor], is_wider: bool) -> dict[Slot, torch.Tensor]:
        own = Slot.parse(f"parameter.{name}")
        leaf = torch.nn.Parameter(inputs[own].clone())
        leaf.grad = inputs[Slot.parse(f"gradient.{name}")].clone()
        settings = parameter.settings
        if is_wider and self.cls.__name__ == "Adafactor" and settings["eps"][0] is None:
            settings = {**settings, "eps": (torch.finfo(getattr(torch, parameter.tensors[own][0].dtype)).eps, settings["eps"][1])}
        optimizer = self.cls([{"params": [leaf], **settings}])  # type: ignore[call-arg]
        state = {str(slot.path[-1]): inputs[slot].clone() for slot in parameter.tensors if slot.role == "state"}
        state |= {key: value.clone() for key, value in parameter.counters.items()}
        if state:
            optimizer.state[leaf] = state
        optimizer.step()
        left = {Slot.parse(f"state.{name}.{key}"): value for key, value in optimizer.state[leaf].items() if isinstance(value, torch.Tensor)}
        return {Slot.parse(f"mutated.{name}"): leaf.detach(), **left}


@dataclass(frozen=True, slots=True)
class _Before:
    """Finds the values of parameters, gradients and state before a step."""

    step: dict[Slot, TensorRecord]
    read: Reader
    values: dict[Slot, tuple[TensorRecord, Reader]]
    previous: dict[Slot, TensorRecord]
    read_previous: Reader

    @classmethod
    def of(
        cls, step: CallRecord, read: Reader, parameters: Iterable[CallRecord], previous: CallRecord | None, read_previous: Reader
    ) -> _Before:
        if previous is not None and previous.step not in (step.step, step.step - 1):
            previous = None
        writers = [(record, read) for record in parameters if record.order < step.order]
        if previous is not None and previous.step == step.step:
            writers.append((previous, read_previous))
        values: dict[Slot, tuple[TensorRecord, Reader]] = {}
        for record, reader in sorted(writers, key=lambda writer: writer[0].order):
            found = (slot for slot in record.slots if slot.slot.role in ("parameter", "mutated"))
            values |= {Slot("parameter", slot.slot.path): (slot, reader) for slot in found}
        return cls(_by_slot(step), read, values, _by_slot(previous), read_previous)

    def parameter(self, name: str, settings: dict[str, Any]) -> _Parameter:
        gradient = self.step.get(Slot.parse(f"gradient.{name}"))
        if gradient is None:
            raise NotReplayable(f"the parameter {name} had no gradient")
        own = Slot.parse(f"parameter.{name}")
        if own not in self.values:
            raise NotReplayable(f"the parameter {name} was not recorded before the step")
        tensors = {own: self.values[own], gradient.slot: (gradient, self.read)}
        counters: dict[str, torch.Tensor] = {}
        for slot, record in self._state(name, settings):
            if slot.path[-1] in _COUNTERS:
                counters[str(slot.path[-1])] = read_tensor(record, self.read_previous)
            else:
                tensors[slot] = record, self.read_previous
        for record, _ in tensors.values():
            if record.content is None:
                raise NotReplayable(f"the values of {record.slot} were not kept" + (f" ({record.note})" if record.note else ""))
        return _Parameter(settings=settings, tensors=tensors, counters=counters)

    def _state(self, name: str, settings: dict[str, Any]) -> list[tuple[Slot, TensorRecord]]:
        """Find the state before the step; nothing where the step was the first."""
        after = {slot: record for slot, record in self.step.items() if _is_state_of(slot, name)}
        before = [(slot, record) for slot, record in self.previous.items() if _is_state_of(slot, name)]
        counter = Slot.parse(f"state.{name}.step")
        if counter in after:
            count = _number(after[counter], self.read) - 1
            counted = next((_number(record, self.read_previous) for slot, record in before if slot == counter), 0)
            if count != counted:
                raise NotReplayable("the state before this step was not recorded")
        elif after and not before and not self._is_first(name, settings, after):
            raise NotReplayable("the state before this step was not recorded")
        return before

    def _is_first(self, name: str, settings: dict[str, Any], after: dict[Slot, TensorRecord]) -> bool:
        """Tell whether a momentum buffer holds a single gradient, as it does after the first step."""
        gradient = read_tensor(self.step[Slot.parse(f"gradient.{name}")], self.read).double()
        decay = settings.get("weight_decay", 0) * read_tensor(*self.values[Slot.parse(f"parameter.{name}")]).double()
        single = (-gradient if settings.get("maximize") else gradient) + decay
        buffers = (read_tensor(record, self.read).double() for record in after.values())
        return all(buffer.shape == single.shape and bool((buffer - single).norm() <= _FIRST_BUFFER * single.norm()) for buffer in buffers)


def _class_of(step: CallRecord) -> type[torch.optim.Optimizer]:
    name = step.call.op.removeprefix("optimizer.")
    cls = _CLASSES.get(_VENDOR_CLASSES.get(name, name))
    if cls is None or step.phase != "optimizer":
        raise NotReplayable(f"the optimizer {name[:60]} is not known here")
    return cls


def _named_groups(step: CallRecord) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter's name with the settings of its group; a parameter that capture could not name is called by its place."""
    groups = ((step.arguments.kwargs if step.arguments else None) or {}).get("groups")
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        params = group.get("params") if isinstance(group, dict) else None
        for position, name in enumerate(params if isinstance(params, list) else []):
            yield (f"group{number}.{position}" if name == "?" else str(name)), group


def _settings(cls: type[torch.optim.Optimizer], step: CallRecord, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings for torch's class in its plain form."""
    defaults = cls([torch.nn.Parameter(torch.zeros(1))]).defaults  # type: ignore[call-arg]
    is_torchs = step.call.op.removeprefix("optimizer.") in _CLASSES
    missing = [key for key in defaults if key not in group and key not in _NEWER_SETTINGS]
    if missing and is_torchs:
        raise NotReplayable(f"its settings lack {missing[0]}, so it is another class than torch's")
    known = {key: value for key, value in group.items() if key in defaults and key not in _PLAIN}
    _, decoded = decode_arguments(Arguments(kwargs=known), Decoding({}))
    return {**decoded, **{key: value for key, value in _PLAIN.items() if key in defaults}}


def _by_slot(record: CallRecord | None) -> dict[Slot, TensorRecord]:
    return {slot.slot: slot for slot in record.slots} if record is not None else {}


def _is_state_of(slot: Slot, name: str) -> bool:
    return slot.role == "state" and slot.path[:-1] == Slot.parse(f"state.{name}").path


def _number(record: TensorRecord, read: Reader) -> float:
    value = read_tensor(record, read)
    return float(value) if value.numel() == 1 else -1.0
