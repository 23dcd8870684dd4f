# SPDX-License-Identifier: Apache-2.0
"""Turn records into Programs: a recorded call as a pure function of its tensors, forward and backward.

A call that writes to its arguments gets copies. In the native precision a replay uses the recorded autocast. A wider replay turns autocast
off and begins from the values that autocast had rounded. Each gradient edge is one leaf: a tensor that was passed twice has one gradient,
under the slot where it stood first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulpscope.model import DTYPES, Arguments, CallRecord, Slot, TensorRecord
from ulpscope.model.layouts import is_sparse
from ulpscope.model.operations.randomness import draws
from ulpscope.model.operations.unwritten import is_overwritten, is_partly_written, is_unwritten
from ulpscope.replay.calls.arguments import Decoding, decode_arguments, read_tensor, slots_named, tensor_of, with_slots, zeros_like_record
from ulpscope.replay.calls.autocasting import as_autocast_rounds, autocast_of_another_device, cast
from ulpscope.replay.calls.memory_need import check_made, check_recorded_sizes, check_result_sizes, largest_result
from ulpscope.replay.calls.rebuild import Function, function_of, writes_to_arguments
from ulpscope.replay.calls.widening import in_wider_precision, wider_dtype, wider_precision
from ulpscope.replay.program import NotReplayable, Program, Reader

__all__ = ["backward_program", "forward_program", "guarded", "is_random", "recorded_results"]

Tensors = Mapping[Slot, torch.Tensor]

_NO_ARGUMENTS = Arguments()
_LOW_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_DRAWN_ALONE = frozenset("bernoulli binomial cauchy exponential geometric log_normal multinomial normal poisson random uniform".split())


def forward_program(record: CallRecord, read: Reader, *, arguments: Arguments | None = None) -> Program:
    """Build the recorded call as a function of its tensors; `arguments` swaps in another record's non-tensor arguments."""
    if record.phase == "backward" and record.level != "op":
        raise NotReplayable("a backward record is replayed together with its forward record")
    return _Forward(_Call.of(record, arguments), read)


def backward_program(
    forward: CallRecord,
    backward: CallRecord,
    read: Reader,
    *,
    arguments: Arguments | None = None,
    earlier: Iterable[CallRecord] = (),
) -> Program:
    """Build the gradients of the recorded call's inputs as a function of its inputs and of the gradients of its results.

    `earlier` are the backward records of the same call before this one: after a pass whose gradients are themselves differentiated,
    what reaches the call's inputs has parts of second order, which no replay of the call alone gives.
    """
    if forward.level == "op" or backward.phase != "backward":
        raise NotReplayable("it has no backward record of its own")
    if any(slot.requires_grad for record in earlier for slot in record.slots):
        raise NotReplayable("it was differentiated twice, so that its gradient has parts of second order")
    call = _Call.of(forward, arguments, limit=largest_result((forward, backward)))
    return _Backward(call, read, _gradients(call, backward), _edges(call, backward))


def recorded_results(record: CallRecord, read: Reader) -> dict[Slot, torch.Tensor]:
    """Read what a side recorded of a call's results, where the values were kept: `output.*`, `mutated.*` and `state.*`."""
    kept = (slot for slot in record.slots if slot.slot.is_output and slot.content is not None)
    return {slot.slot: tensor_of(read(slot.content)) for slot in kept if slot.content is not None}


def is_random(program: Program) -> bool:
    """Tell whether a call draws random numbers: its name and arguments say so, or running it takes numbers from the generator.

    Its results cannot tell: draws of few elements, or of a probability near 0 or 1, are often equal. A gradient through a draw alone is 0,
    whatever was drawn.
    """
    call = getattr(program, "call", None)
    if isinstance(program, _Backward) and program.call.record.call.short.rstrip("_") in _DRAWN_ALONE:
        return False
    if isinstance(call, _Call) and draws(call.record.call.op, call.arguments):
        return True
    if getattr(program, "has_drawn", None) is None:
        program(program.inputs)
    return bool(getattr(program, "has_drawn", None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A recorded call that can be run on any tensors for its slots."""

    record: CallRecord
    function: Function
    arguments: Arguments
    slots: dict[Slot, TensorRecord]
    is_writing: bool
    default_dtype: torch.dtype | None
    limit: int
    device: str = "cpu"

    @classmethod
    def of(cls, record: CallRecord, arguments: Arguments | None = None, limit: int | None = None) -> _Call:
        op = record.call.op
        function = function_of(op, record.level)
        if record.arguments is None:
            raise NotReplayable("its arguments were not recorded")
        limit = largest_result((record,)) if limit is None else limit
        check_recorded_sizes(record, limit)
        slots = _input_slots(record)
        chosen = record.arguments if arguments is None else with_slots(arguments, tuple(slots))
        args, kwargs = decode_arguments(chosen, Decoding(dict.fromkeys(slots)))
        if record.call.short.startswith("as_strided") and not _is_within_itself(slots, args, kwargs):
            raise NotReplayable("it looks at memory beyond its input, which was not recorded")
        return cls(
            record=record,
            function=function,
            arguments=chosen,
            slots=slots,
            is_writing=_may_write(record, function),
            default_dtype=_default_dtype(record, slots),
            limit=limit,
        )

    @property
    def is_bitwise(self) -> bool:
        """Tell whether the call looks at bits, or at the next number of a format: a wider value has other ones."""
        if self.record.call.short.rstrip("_") == "nextafter":
            return True
        return self.record.call.short == "view" and any(isinstance(value, dict) and "$dtype" in value for value in self.arguments.args)

    def read(self, read: Reader) -> dict[Slot, torch.Tensor]:
        inputs = {slot: read_tensor(record, read) if record.content else zeros_like_record(record) for slot, record in self.slots.items()}
        if not self.is_writing:
            check_result_sizes(self.record.call.op, self.arguments, self.slots, inputs, self.limit, self._results_on_meta)
        return as_autocast_rounds(self.record, inputs)

    def run(self, given: Tensors, wide: torch.dtype | None) -> dict[Slot, torch.Tensor]:
        """Run the call and return all results by slot, with their graph where the given tensors have one."""
        versions = {slot: tensor._version for slot, tensor in given.items()} if not self.is_writing else {}
        target = autocast_of_another_device(self.record) if wide is None and self.device == "cpu" else None
        with _surroundings(self.record, wide, self.default_dtype, with_autocast=target is None, device=self.device):
            taken = given if target is None else cast(given, target)
            result = self._invoke(Decoding(taken, partial(wider_dtype, wide=wide), self.device), wide)
        if any(given[slot]._version != version for slot, version in versions.items()):
            raise NotReplayable("it writes to its arguments, which its record does not say")
        results = _tensors_in(result)
        check_made(sum(tensor.numel() for tensor in results.values()), self.limit)
        written = (slot.slot.path for slot in self.record.slots if slot.slot.role == "mutated")
        return results | {Slot("mutated", path): given[Slot("input", path)] for path in written if Slot("input", path) in given}

    def _invoke(self, decoding: Decoding, wide: torch.dtype | None) -> Any:
        op, function = self.record.call.op, self.function
        args, kwargs = decode_arguments(self.arguments, decoding)
        if isinstance(options := kwargs.get("options"), dict):
            kwargs["options"] = _as_options(op, options)
        if op in ("Tensor.__getitem__", "Tensor.__setitem__"):
            args[1:2] = [_as_index(each) for each in args[1:2]]
        if wide is not None:
            native = next((slot.dtype for slot in self.slots.values() if DTYPES[slot.dtype].is_floating), "")
            function, args, kwargs = in_wider_precision(op, function, args, kwargs, native)
        return function(*args, **kwargs)

    def _results_on_meta(self, given: Tensors) -> list[torch.Tensor]:
        args, kwargs = decode_arguments(self.arguments, Decoding(given, device="meta"))
        if not given:
            kwargs["device"] = "meta"
        with guarded(), _surroundings(self.record, None, self.default_dtype), torch.no_grad():
            return list(_tensors_in(self.function(*args, **kwargs)).values())


@dataclass(kw_only=False)
class _Forward:
    call: _Call
    read: Reader
    has_drawn: bool | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return str(self.call.record.call)

    @cached_property
    def inputs(self) -> Tensors:
        return self.call.read(self.read)

    def __call__(self, inputs: Tensors) -> dict[Slot, torch.Tensor]:
        wide = wider_precision(inputs, self.call.slots)
        if wide is not None and self.call.is_bitwise:
            inputs, wide = {slot: tensor.to(self.inputs[slot].dtype) for slot, tensor in inputs.items()}, None
        given = {slot: tensor.clone() if self.call.is_writing else tensor for slot, tensor in inputs.items()}
        with guarded(self), torch.no_grad():
            results = {slot: _plain(tensor) for slot, tensor in self.call.run(given, wide).items()}
        if not results:
            raise NotReplayable("its result is no plain tensor")
        return results


@dataclass(frozen=True, slots=True)
class _Edge:
    """A recorded gradient: the input slots that it sums over, and its shape."""

    slots: tuple[Slot, ...]
    shape: tuple[int, ...]


@dataclass(kw_only=False)
class _Backward:
    call: _Call
    read: Reader
    gradients: dict[Slot, TensorRecord]
    edges: dict[Slot, _Edge]
    has_drawn: bool | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"{self.call.record.call} backward"

    @cached_property
    def inputs(self) -> Tensors:
        return self.call.read(self.read) | {slot: read_tensor(record, self.read) for slot, record in self.gradients.items()}

    def __call__(self, inputs: Tensors) -> dict[Slot, torch.Tensor]:
        if self.call.is_bitwise and self.call.record.call.short == "view":
            raise NotReplayable("it looks at bits, which have no gradient")
        wide = wider_precision(inputs, self.call.slots | self.gradients)
        with guarded(self), torch.enable_grad():
            leaves = {slot: self._leaf(slot, inputs[slot]) for slot in self.call.slots}
            given = {slot: leaf.clone() if self.call.is_writing else leaf.view_as(leaf) for slot, leaf in leaves.items()}
            results = self.call.run(given, wide)
            return self._differentiate(results, leaves, inputs)

    def _leaf(self, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
        is_differentiable = self.call.slots[slot].requires_grad or any(slot in edge.slots for edge in self.edges.values())
        return tensor.detach().requires_grad_(is_differentiable and (tensor.is_floating_point() or tensor.is_complex()))

    def _differentiate(self, results: Tensors, leaves: Tensors, inputs: Tensors) -> dict[Slot, torch.Tensor]:
        entering = [(_result_at(results, slot.path), inputs[slot]) for slot in self.gradients]
        pairs = [(result, gradient) for result, gradient in entering if result is not None and result.requires_grad]
        wanted = [slot for edge in self.edges.values() for slot in edge.slots if leaves[slot].requires_grad]
        if not pairs or not wanted:
            raise NotReplayable("none of its results depends on its inputs here")
        pairs = [(result, gradient.reshape(result.shape).to(result.dtype)) for result, gradient in pairs]
        _take_as_whole(pairs)
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [leaves[slot] for slot in wanted],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        by_slot = {slot: None if each is None else _dense(each) for slot, each in zip(wanted, found, strict=True)}
        return {slot: _summed(edge, by_slot, leaves) for slot, edge in self.edges.items()}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor as a dense one, as capture records it."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _take_as_whole(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let the gradient recorded at a result be the whole gradient there.

    One result may be made from another (an LSTM cell makes h from c). The gradient recorded at c already holds what the call itself sent
    there; autograd would add that once more.
    """
    distinct = {id(result): (result, gradient) for result, gradient in pairs if not result.is_leaf}
    if 1 < len(distinct) == len(pairs):
        for result, gradient in pairs:
            result.register_hook(lambda _, whole=gradient: whole)  # type: ignore[no-untyped-call]


@contextmanager
def guarded(program: Any = None) -> Iterator[None]:
    """Restore the generator, silence warnings, and turn every error into NotReplayable.

    The program's `has_drawn` notes whether the run drew from the generator.
    """
    generator = torch.default_generator
    state = generator.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except NotReplayable:
        raise
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise NotReplayable(f"it fails on the CPU ({type(error).__name__}: {text[:120]})") from error
    finally:
        has_drawn = generator.get_state().numpy().tobytes() != state.numpy().tobytes()
        if has_drawn:
            generator.set_state(state)
        if program is not None:
            program.has_drawn = has_drawn


@contextmanager
def _surroundings(
    record: CallRecord,
    wide: torch.dtype | None,
    default_dtype: torch.dtype | None,
    *,
    with_autocast: bool = True,
    device: str = "cpu",
) -> Iterator[None]:
    """Enter the modes under which the call ran, as far as they decide what it computes."""
    recorded = _LOW_PRECISION.get((record.modes.autocast if record.modes else None) or "")
    autocast = recorded if wide is None and with_autocast else None
    before = torch.get_default_dtype()
    kind = device.partition(":")[0]
    with ExitStack() as stack:
        if autocast is not None:
            stack.enter_context(torch.autocast(kind, autocast, cache_enabled=False))
        elif torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if wide is not None and "attention" in record.call.op:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if default_dtype is not None and default_dtype is not before:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(default_dtype)
        yield


def _input_slots(record: CallRecord) -> dict[Slot, TensorRecord]:
    """Find the tensors that the arguments name; refuse a call if one of them was not kept."""
    recorded = {slot.slot: slot for slot in record.slots if slot.slot.role == "input"}
    slots: dict[Slot, TensorRecord] = {}
    for slot in slots_named(record.arguments or _NO_ARGUMENTS):
        found = recorded.get(slot)
        if found is None:
            raise NotReplayable(f"{slot} was not recorded before the call")
        if found.dtype not in DTYPES:
            raise NotReplayable(f"the dtype {found.dtype[:20]} of {slot} is not replayed")
        if is_sparse(found):
            raise NotReplayable(f"{slot} is sparse")
        if is_partly_written(found) and not is_overwritten(record.call.op, slot.path, record.arguments):
            raise NotReplayable(f"nobody wrote to a part of {slot}")
        if found.content is None and not (is_unwritten(found) and is_overwritten(record.call.op, slot.path, record.arguments)):
            raise NotReplayable(f"the values of {slot} were not kept" + (f" ({found.note})" if found.note else ""))
        slots[slot] = found
    return slots


def _is_within_itself(slots: Mapping[Slot, TensorRecord], args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether `as_strided` stays within the input's own elements: a contiguous input, without an offset."""
    given = next(iter(slots.values()), None)
    offset = args[-1] if len(args) > 3 else kwargs.get("storage_offset")
    return given is not None and offset is None and given.strides == _contiguous_strides(given.shape)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape)))


def _may_write(record: CallRecord, function: Function) -> bool:
    """Tell whether the call must get copies: it is known to write, or an argument `True` may stand for `inplace`."""
    arguments = record.arguments or _NO_ARGUMENTS
    named = arguments.kwargs or {}
    return (
        any(slot.slot.role == "mutated" for slot in record.slots)
        or writes_to_arguments(function, record.call.op)
        or "out" in named
        or named.get("inplace") is True
        or (record.call.op.startswith("functional.") and any(value is True for value in arguments.args))
    )


def _default_dtype(record: CallRecord, slots: Mapping[Slot, TensorRecord]) -> torch.dtype | None:
    """Infer torch's default dtype when the call ran, from a floating result that comes from no floating tensor."""
    if any(DTYPES[slot.dtype].is_floating for slot in slots.values()):
        return None
    made = (slot.dtype for slot in record.slots if slot.slot.role == "output" and slot.dtype in DTYPES)
    floating = next((name for name in made if DTYPES[name].is_floating), None)
    if floating is None or floating.startswith("float8"):
        return None
    dtype: torch.dtype = getattr(torch, floating)
    return dtype.to_real()


def _as_index(index: Any) -> Any:
    """Make a list a tuple where it can only have been one (it holds a slice, None or `...`); other tools write tuples as lists."""
    is_tuple = isinstance(index, list) and any(part is None or part is Ellipsis or isinstance(part, slice) for part in index)
    return tuple(index) if is_tuple else index


def _as_options(op: str, fields: dict[str, Any]) -> Any:
    """Build the options object of a fused loss, which a record holds field by field."""
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", None) if op == "functional.linear_cross_entropy" else None
    if kind is None:
        raise NotReplayable("an argument that is a set of options is not known here")
    return kind(**fields)


def _tensors_in(result: Any) -> dict[Slot, torch.Tensor]:
    """Collect the results by slot, as capture names them: a lone tensor is item 0."""
    found: dict[Slot, torch.Tensor] = {}
    items = enumerate(result) if isinstance(result, (tuple, list)) else [(0, result)]
    for index, item in items:
        _collect(item, (index,), found)
    return found


def _collect(value: Any, path: tuple[int, ...], found: dict[Slot, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            found[Slot("output", path)] = _dense(value)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _collect(item, (*path, index), found)


def _gradients(call: _Call, backward: CallRecord) -> dict[Slot, TensorRecord]:
    """Find the recorded gradients of the results. Where a view was written to, the gradient is that of its base tensor."""
    entering = {slot.slot.path: slot for slot in backward.slots if slot.slot.role == "input"}
    found: dict[Slot, TensorRecord] = {}
    for path, slot in entering.items():
        if path[-1:] == ("base",):
            result = next((each for each in call.record.slots if each.slot.is_output and each.slot.path == path[:-1]), None)
            if result is None or not _is_reshaped(slot.shape, result.shape):
                raise NotReplayable("it writes into a view, and the gradient is that of the whole tensor")
            path = path[:-1]
        elif (*path, "base") in entering:
            continue
        if slot.content is None:
            raise NotReplayable(f"the gradient of its result {slot.slot} was not kept" + (f" ({slot.note})" if slot.note else ""))
        found[Slot("gradient", path)] = slot
    if not found:
        raise NotReplayable("the gradient of its results was not recorded")
    return found


def _edges(call: _Call, backward: CallRecord) -> dict[Slot, _Edge]:
    """Match each recorded gradient with its input slots: a tensor that stands in several slots has its gradient under the first.

    Equal contents tell which slots hold one tensor. Where two gradients might claim a slot, neither is replayed.
    """
    wanted = {slot.slot: slot for slot in backward.slots if slot.slot.role == "output"}
    silent = [slot for slot in call.slots if Slot("output", slot.path) not in wanted and call.slots[slot].requires_grad]
    edges: dict[Slot, _Edge] = {}
    claims: dict[Slot, list[Slot]] = {}
    for slot, gradient in wanted.items():
        if gradient.content is None:
            continue
        first = Slot("input", slot.path)
        record = call.slots.get(first)
        if record is None:
            raise NotReplayable(f"the gradient {slot} belongs to no recorded input")
        if not _is_reshaped(gradient.shape, record.shape):
            raise NotReplayable(f"{first} is a view, and its gradient is that of the whole tensor")
        same = tuple(each for each in silent if _is_same_tensor(call.slots[each], record))
        for each in same:
            claims.setdefault(each, []).append(slot)
        edges[slot] = _Edge((first, *same), gradient.shape)
    doubtful = {slot for several in claims.values() if len(several) > 1 for slot in several}
    edges = {slot: edge for slot, edge in edges.items() if slot not in doubtful}
    if not edges:
        note = next((f" ({slot.note})" for slot in wanted.values() if slot.note), "")
        raise NotReplayable(f"no gradient of its inputs was kept, or it is not clear to which it belongs{note}")
    return edges


def _is_same_tensor(one: TensorRecord, other: TensorRecord) -> bool:
    return one.requires_grad and (one.content, one.shape, one.strides, one.dtype) == (
        other.content,
        other.shape,
        other.strides,
        other.dtype,
    )


def _is_reshaped(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Tell whether one shape only joins neighbouring dimensions of the other, so that elements keep their order."""
    if shape == other:
        return True
    ends, other_ends = ({math.prod(each[at:]) for at in range(len(each) + 1)} for each in (shape, other))
    return math.prod(shape) == math.prod(other) and (ends <= other_ends or other_ends <= ends)


def _result_at(results: Tensors, path: tuple[int | str, ...]) -> torch.Tensor | None:
    found = results.get(Slot("output", path))
    return found if found is not None else results.get(Slot("mutated", path))


def _summed(edge: _Edge, gradients: Mapping[Slot, torch.Tensor | None], leaves: Tensors) -> torch.Tensor:
    parts = [gradient for slot in edge.slots if (gradient := gradients.get(slot)) is not None]
    if not parts:
        return torch.zeros_like(leaves[edge.slots[0]]).reshape(edge.shape)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return _plain(total).reshape(edge.shape)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor and apply its pending conjugate and negative, so that memory holds the values."""
    return tensor.detach().resolve_conj().resolve_neg()
