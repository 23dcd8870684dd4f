# SPDX-License-Identifier: Apache-2.0
"""Step all like parameters of an optimizer as one long row: each element is stepped by itself, so many small tensors can be one.

Only exact results and the effect of noise are computed this way, dozens of times. Judged results come from the step as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ulpscope.model import Slot
from ulpscope.replay.calls.evaluate import guarded
from ulpscope.replay.calls.optimizers import _Parameter, _Step
from ulpscope.replay.calls.widening import wider_precision
from ulpscope.replay.program import Program

__all__ = ["joined"]

_BY_ELEMENT = frozenset("ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split())
_ROW = "row"
Tensors = Mapping[Slot, torch.Tensor]


def joined(program: Program) -> Program:
    """Return a faster form of an optimizer's step whose class works element by element; any other program is returned as it is."""
    if not isinstance(program, _Step) or program.cls.__name__ not in _BY_ELEMENT or len(program.parameters) < 2:
        return program
    return _Joined(program)


@dataclass
class _Joined:
    step: _Step

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def inputs(self) -> Tensors:
        return self.step.inputs

    @property
    def has_drawn(self) -> bool | None:
        return self.step.has_drawn

    def __call__(self, inputs: Tensors) -> dict[Slot, torch.Tensor]:
        recorded = {slot: record for each in self.step.parameters.values() for slot, (record, _) in each.tensors.items()}
        is_wider = wider_precision(inputs, recorded) is not None
        results: dict[str, dict[Slot, torch.Tensor]] = {name: {} for name in self.step.parameters}
        with guarded(self.step):
            for names in self._kinds:
                self._step_row(names, inputs, is_wider, results)
        return {slot: value for each in results.values() for slot, value in each.items()}

    @cached_property
    def _kinds(self) -> list[list[str]]:
        """Group the names of parameters that are stepped alike: the same settings, dtypes and counts."""
        kinds: dict[str, list[str]] = {}
        for name, one in self.step.parameters.items():
            dtypes = {_local(name, slot): record.dtype for slot, (record, _) in one.tensors.items()}
            counts = {key: (value.dtype, value.tolist()) for key, value in one.counters.items()}
            kinds.setdefault(repr((sorted(one.settings.items()), sorted(dtypes.items()), sorted(counts.items()))), []).append(name)
        return list(kinds.values())

    def _step_row(self, names: list[str], inputs: Tensors, is_wider: bool, results: dict[str, dict[Slot, torch.Tensor]]) -> None:
        first = self.step.parameters[names[0]]
        slots = {kind: [_slot(kind, name) for name in names] for kind in (_local(names[0], slot) for slot in first.tensors)}
        row = {_slot(kind, _ROW): torch.cat([inputs[slot].reshape(-1) for slot in several]) for kind, several in slots.items()}
        kept = {_slot(_local(names[0], slot), _ROW): one for slot, one in first.tensors.items()}
        parameter = _Parameter(settings=first.settings, tensors=kept, counters=first.counters)
        made = self.step._stepped(_ROW, parameter, row, is_wider)
        shapes = [inputs[_slot(("parameter", ""), name)].shape for name in names]
        for slot, values in made.items():
            kind = _local(_ROW, slot)
            for name, part in zip(names, _parted(values, shapes), strict=True):
                results[name][_slot(kind, name)] = part


def _parted(values: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Split the result row into one result for each parameter; a count is the same for all."""
    if values.dim() == 0:
        return [values.clone() for _ in shapes]
    return [part.view(shape) for part, shape in zip(torch.split(values, [shape.numel() for shape in shapes]), shapes, strict=True)]


@lru_cache(maxsize=4096)
def _path(name: str) -> tuple[int | str, ...]:
    return Slot.parse(f"parameter.{name}").path


def _local(name: str, slot: Slot) -> tuple[str, str]:
    """Name a slot within its parameter: `("state", "exp_avg")`."""
    rest = slot.path[len(_path(name)) :]
    return slot.role, str(rest[0]) if rest else ""


@lru_cache(maxsize=16384)
def _slot(kind: tuple[str, str], name: str) -> Slot:
    role, key = kind
    return Slot.parse(f"{role}.{name}.{key}" if key else f"{role}.{name}")
