# SPDX-License-Identifier: Apache-2.0
"""Turn live calls into records for the hunt: a few calls wholly, the calls around them as summaries of their remaining tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ulpscope.capture.intercept.modules import own_parameters
from ulpscope.capture.record.state import surrounding_modes
from ulpscope.capture.record.tensor_reader import TensorReader
from ulpscope.capture.walk import Found, encode_arguments
from ulpscope.model import Arguments, CallName, CallRecord, Frame, Level, Modes, Phase, Sink, Slot, Summary, TensorRecord
from ulpscope.numerics.nonfinite_rule import MASK_NOTE

__all__ = [
    "EventWriter",
    "Glimpse",
    "Place",
    "Remains",
    "SeenCall",
    "recalled",
    "reference_to",
    "remains_of",
    "strengthened",
    "version_of",
    "weakened",
]


class Place(NamedTuple):
    """The identity of a call, which outlives it: neither tensors nor graph nodes."""

    op: str
    number: int
    module: str
    level: Level
    stack: tuple[Frame, ...]


class Remains(NamedTuple):
    """What is known of a tensor after it was looked at, without keeping it: its range, its largest magnitude (`high` alone), or its sum."""

    slot: Slot
    tensor: Callable[[], torch.Tensor | None]
    version: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    total: float | None = None

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(known) for known in (self.low, self.high, self.total) if known is not None)

    @property
    def mean(self) -> float | None:
        return None if self.total is None else self.total / math.prod(self.shape)

    def __str__(self) -> str:
        if self.mean is not None:
            return f"{self.mean:.9g} on average"
        return f"magnitudes up to {self.high:.9g}" if self.low is None else f"{self.low:.9g} to {self.high:.9g}"


Glimpse: TypeAlias = tuple[
    int, int, Place, Phase, list[tuple[Slot, Callable[[], torch.Tensor | None], int, torch.dtype, torch.Size, float]]
]
"""A clean call, as the ring remembers it: order, step, place, phase, and for each result its slot, the tensor (if it still lives), its
version, dtype, shape and sum. A plain tuple, since one is made for nearly every call."""


@dataclass(slots=True)
class SeenCall:
    """One call that was seen. Its arguments and results are kept only until they are known to be clean.

    `before` are the calls since the last one that was looked at, which were put aside. `versions` are the versions that its tensors had
    when it was made, for a call that is looked at late. Five fields are functions, called only where something is wrong: `more` returns
    further inputs, `name_results` better names, `describe` settings and stack, `locate` the module of these parameters and why it is that
    one, `forward` the forward side of a backward call.
    """

    order: int
    step: int
    place: Place
    phase: Phase
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Found] = ()
    entering: Sequence[Found] = ()
    owner: torch.nn.Module | None = None
    before: Sequence[SeenCall] = ()
    versions: Mapping[int, int] = field(default_factory=dict)
    number: int | None = None
    is_late: bool = False
    are_parameters_gone: bool = False
    note: str = ""
    more: Callable[[], list[Found]] | None = None
    name_results: Callable[[Sequence[Found]], list[Found]] | None = None
    describe: Callable[[], tuple[dict[str, Any], tuple[Frame, ...]]] | None = None
    locate: Callable[[Sequence[Slot]], tuple[Place, str] | None] | None = None
    forward: Callable[[int], SeenCall | None] | None = None
    remains: Sequence[Remains] = ()
    is_written: bool = False

    def let_go(self) -> None:
        self.args, self.kwargs, self.results, self.entering, self.before, self.owner = (), {}, (), (), (), None
        self.more = self.describe = self.name_results = self.locate = self.forward = None

    def is_gone(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was written to after the call, so that it no longer holds the call's input."""
        if self.are_parameters_gone and isinstance(tensor, torch.nn.Parameter):
            return True
        version = self.versions.get(id(tensor))
        return version is not None and version_of(tensor) != version

    def look_around(self) -> None:
        """Take down the facts that are asked for only now."""
        if self.number is not None:
            self.place, self.number = self.place._replace(number=self.number), None
        if self.more is not None:
            self.entering, self.more = [*self.entering, *self.more()], None
        if self.name_results is not None:
            self.results, self.name_results = self.name_results(self.results), None
        if self.describe is not None:
            self.kwargs, stack = self.describe()
            self.place, self.describe = self.place._replace(stack=stack), None


def recalled(glimpse: Glimpse) -> SeenCall:
    order, step, place, phase, results = glimpse
    call = SeenCall(order, step, place, phase)
    call.remains = [
        Remains(slot, tensor, version, dtype, tuple(shape), None, None, total) for slot, tensor, version, dtype, shape, total in results
    ]
    return call


def version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Weak(NamedTuple):
    tensor: Callable[[], torch.Tensor | None]
    version: int


_PLAIN_TYPES = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, type(...))


def weakened(value: Any) -> Any:
    """Replace tensors in arguments by weak references, and objects that might hold a tensor by a weak reference to None.

    Leaves are held themselves: the graph holds them too, and torch refuses to swap a parameter that has a weak reference.
    """
    if isinstance(value, torch.Tensor):
        is_leaf = value.grad_fn is None and (value.requires_grad or isinstance(value, torch.nn.Parameter))
        return _Weak(partial(_itself, value) if is_leaf else weakref.ref(value), version_of(value))
    if isinstance(value, _PLAIN_TYPES):
        return value
    if type(value) in (tuple, list):
        return type(value)(weakened(item) for item in value)
    if type(value) is dict:
        return {key: weakened(item) for key, item in value.items()}
    return _Weak(_nothing, 0)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _nothing() -> None:
    return None


def reference_to(result: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a weak reference to a result that belongs to a graph. For a tensor that may be or become a parameter or a gradient return a
    reference to nothing: torch refuses to swap these while a weak reference to them exists."""
    return _nothing if result.grad_fn is None else weakref.ref(result)


def strengthened(value: Any) -> Any:
    """Restore the arguments that `weakened` was given; LookupError if one of their tensors is gone or was written to since."""
    if isinstance(value, _Weak):
        tensor = value.tensor()
        if tensor is None or version_of(tensor) != value.version:
            raise LookupError
        return tensor
    if type(value) in (tuple, list):
        return type(value)(strengthened(item) for item in value)
    if type(value) is dict:
        return {key: strengthened(item) for key, item in value.items()}
    return value


def remains_of(slot: Slot, tensor: torch.Tensor, low: float | None, high: float) -> Remains:
    return Remains(slot, reference_to(tensor), version_of(tensor), tensor.dtype, tuple(tensor.shape), low, high)


class EventWriter:
    """Writes the records of one rank; the first record of a step opens it in the store. Steps come in order."""

    def __init__(self, sink: Sink, rank: int) -> None:
        self._sink = sink
        self._rank = rank
        self._values = TensorReader("tensors", sink.keep)
        self._statistics = TensorReader("statistics", sink.keep)
        self._open_step: int | None = None

    def end_step(self, step: int) -> None:
        if self._open_step == step:
            self._sink.end_step()
            self._open_step = None

    def has_written(self, step: int) -> bool:
        return self._open_step == step

    def forget(self) -> None:
        """Forget the values of tensors: they may have changed since."""
        self._values.forget()
        self._statistics.forget()

    def write_wholly(self, call: SeenCall, replaced: dict[int, str], makers: dict[int, str]) -> tuple[CallRecord, dict[Slot, torch.Tensor]]:
        """Write arguments, inputs, parameters and results with their values; return the record, and the tensors that are unchanged.

        `replaced` has a note for each input whose values are gone, `makers` for each tensor whose maker is known.
        """
        self._open(call.step)
        arguments, found = encode_arguments(call.args, dict(call.kwargs))
        found += list(call.entering)
        slots = [self._input(slot, tensor, replaced, makers) for slot, tensor in found]
        own: list[Found] = []
        if call.owner is not None:
            own = [(Slot("parameter", (name,)), tensor) for name, tensor in own_parameters(call.owner)]
        slots += [self._input(slot, tensor, replaced, {}) for slot, tensor in own]
        slots += [self._input(slot, tensor, {}, makers) for slot, tensor in call.results]
        modes = surrounding_modes(found, call.owner)
        record = self._write(call, slots, arguments if call.phase != "backward" else None, modes)
        return record, {slot: tensor for slot, tensor in (*found, *own) if id(tensor) not in replaced} | dict(call.results)

    def _input(self, slot: Slot, tensor: torch.Tensor, replaced: dict[int, str], makers: dict[int, str]) -> TensorRecord:
        note = replaced.get(id(tensor))
        if note is None:
            record = self._values.record(slot, tensor)
            return record if id(tensor) not in makers else replace(record, note=makers[id(tensor)])
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorRecord(slot=slot, dtype=dtype, shape=tuple(tensor.shape), device=str(tensor.device), note=note)

    def write_briefly(self, call: SeenCall) -> None:
        """Write inputs and results as statistics; only for calls whose tensors are still held."""
        arguments, found = encode_arguments(call.args, dict(call.kwargs))
        slots = [self._statistics.record(slot, tensor) for slot, tensor in (*found, *call.entering, *call.results)]
        self._write(call, slots, arguments if call.phase == "forward" else None, None)

    def write_remains(self, call: SeenCall) -> None:
        """Write a call of the ring: statistics of results that are still there unchanged, the range of the others."""
        if not call.is_written:
            call.look_around()
            self._write(call, [self._remains(result) for result in call.remains], None, None)

    def _remains(self, result: Remains) -> TensorRecord:
        tensor = result.tensor()
        if tensor is not None and result.version == version_of(tensor) >= 0:
            record = self._statistics.record(result.slot, tensor)
            return record if result.is_finite else replace(record, note=MASK_NOTE)
        summary = Summary(math.prod(result.shape), result.low, result.high, result.mean)
        known = "mean" if result.total is not None else "range" if result.low is not None else "largest magnitude"
        note = f"no longer in memory: its {known} alone is known" if result.is_finite else MASK_NOTE
        return TensorRecord(
            slot=result.slot, dtype=str(result.dtype).removeprefix("torch."), shape=result.shape, summary=summary, note=note
        )

    def write_state(self, op: str, step: int, order: int, slots: list[TensorRecord], arguments: Arguments | None) -> None:
        """Write a state that is no call: the outcome of a step, the ranges of a run."""
        self._write(SeenCall(order, step, Place(op, 0, "", "state", ()), "optimizer"), slots, arguments, None)

    def _write(self, call: SeenCall, slots: list[TensorRecord], arguments: Arguments | None, modes: Modes | None) -> CallRecord:
        self._open(call.step)
        place = call.place
        call.is_written = True
        record = CallRecord(
            rank=self._rank,
            step=call.step,
            order=call.order,
            call=CallName(place.op, place.number),
            phase=call.phase,
            level=place.level,
            module=place.module,
            arguments=arguments,
            modes=modes,
            slots=tuple(slots),
            stack=place.stack,
        )
        self._sink.write(record)
        return record

    def _open(self, step: int) -> None:
        if self._open_step != step:
            self._sink.begin_step(step)
            self._open_step = step
