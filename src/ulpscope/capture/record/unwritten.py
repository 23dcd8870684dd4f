# SPDX-License-Identifier: Apache-2.0
"""Follow memory that was never written: which elements of which storages, from the call that made one until it is whole or gone.

Memory fresh from `torch.empty` has a mask, one bool for each element, made when a part of it is written: a view of the storage is the same
view of the mask. Calls that write are followed by name, and a call that only moves elements is run on the mask too. A result that takes in
unwritten elements, at places that no rule gives, is marked as one that may carry them, and judged by what it leads to.

Only storages that were born unwritten are here. Nothing reads their elements, and nothing here waits for a device, except for an index that
lies on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from ulpscope._torch_private import OpOverloadPacket, spare_device
from ulpscope.capture.record.taking import PLAIN
from ulpscope.capture.torch_internals import blind, free_weak_reference, is_foreign, is_gone, is_traced, storage_identity, weak_reference
from ulpscope.capture.walk import Found
from ulpscope.model import Arguments
from ulpscope.model.operations.unwritten import is_overwritten, plain_name

__all__ = ["FollowedCall", "Memory", "Unwritten"]

_MOST_ELEMENTS = 1 << 28
"""No mask is made of a larger storage: it counts as unwritten until it is written as a whole."""
_MOST_STORAGES = 10_000

# For operations that only move elements, the places of their values; the other arguments say where to.
_MOVING = {
    **dict.fromkeys(
        """
        index_select gather take_along_dim take flip roll repeat tile repeat_interleave reshape flatten rot90 fliplr flipud tril triu
        diag_embed diag masked_select cat concat concatenate stack hstack vstack dstack column_stack __getitem__ pad unfold
        """.split(),
        (0,),
    ),
    **dict.fromkeys(("slice_scatter", "select_scatter", "diagonal_scatter", "constant_pad_nd"), (0, 1)),
    **dict.fromkeys(("masked_fill", "masked_scatter", "index_put", "__setitem__", "_index_put_impl_"), (0, 2)),
    **dict.fromkeys(("index_copy", "index_fill", "scatter"), (0, 3)),
    "where": (1, 2),
    "put": (0, 2),
    "fill_diagonal": (0, 1),
}
_VALUE_NAMES = frozenset(("input", "self", "tensor", "tensors", "source", "src", "value", "values", "other", "fill_value"))
_KEEPING_PLACES = frozenset(
    """
    clone contiguous to type type_as float double half bfloat16 int long short char bool cpu cuda npu _to_copy copy_ pin_memory detach_copy
    alias_copy lift_fresh_copy expand_copy
    """.split()
)
_ADDING_UP = frozenset("index_add_ scatter_add_ _foreach_add_ _foreach_mul_".split())
_REDUCING = frozenset(("scatter_reduce", "index_reduce"))


class FollowedCall(Protocol):
    """The facts asked of a recorded call: `OpenCall` has them."""

    op: str
    level: Any
    given: Any
    found: list[Found]
    versions: list[int | None]
    inputs: list[Any]
    written: frozenset[int | str]


class Memory:
    """One storage that was born unwritten. `mask` says of each element of `size` bytes whether it still is; None if all are."""

    def __init__(self, tensor: torch.Tensor, num_bytes: int) -> None:
        self.reference = weak_reference(tensor)
        self.size = tensor.element_size()
        self.num_elements = num_bytes // self.size
        self.mask: torch.Tensor | None = None
        self.version = _version(tensor)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the mask that a tensor lies over, in its shape; a byte or more for each element, on the host."""
        if self.mask is None:
            self.mask = torch.ones(self.num_elements, dtype=torch.bool, device="cpu")
        size = tensor.element_size()
        if size < self.size:
            self.mask = self.mask.repeat_interleave(self.size // size)
            self.size = size
        shape, strides, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        if size > self.size:
            parts = size // self.size
            shape, strides, offset = [*shape, parts], [*(parts * stride for stride in strides), 1], parts * offset
        return self.mask.as_strided(shape, strides, offset)

    def missing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the elements of a tensor that were never written."""
        view = self.view(tensor)
        return view.any(-1) if view.dim() > tensor.dim() else view

    def settle(self, tensor: torch.Tensor, missing: torch.Tensor | bool) -> None:
        """Set, for each element of a tensor, whether it is still unwritten."""
        view = self.view(tensor)
        if isinstance(missing, torch.Tensor) and view.dim() > tensor.dim():
            missing = missing.unsqueeze(-1)
        narrow = [dim for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)) if stride == 0 and size > 1]
        for dim in narrow:  # the same element many times
            view = view.narrow(dim, 0, 1)
            if isinstance(missing, torch.Tensor):
                missing = missing.expand(tensor.shape).narrow(dim, 0, 1)
        view.copy_(missing) if isinstance(missing, torch.Tensor) else view.fill_(missing)

    @property
    def is_whole(self) -> bool:
        return self.mask is not None and not bool(self.mask.any())

    def covers(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is all of the storage, each element once."""
        return tensor.numel() * tensor.element_size() >= self.num_elements * self.size and tensor.is_contiguous()


class Unwritten:
    """The storages with unwritten elements, by identity (`memories`, which is empty nearly always)."""

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}

    def __del__(self) -> None:
        for identity in list(self.memories):
            self._forget(identity)

    def missing(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Mark the elements of a tensor that were never written; None if all were, or if that is unknown."""
        memory = self._memory_of(tensor)
        if memory is None:
            return None
        if memory.mask is None and memory.num_elements > _MOST_ELEMENTS:
            return torch.ones((), dtype=torch.bool, device="cpu").expand(tensor.shape)
        with blind():
            missing = memory.missing(tensor)
            return missing if bool(missing.any()) else None

    def add(self, tensor: torch.Tensor, missing: torch.Tensor | None = None) -> None:
        """Begin to follow a tensor whose memory is new: all of it unwritten, or the part that a mask marks."""
        if not _has_memory(tensor) or tensor.device.type == "meta":
            return
        num_bytes = tensor.untyped_storage().nbytes()
        identity = storage_identity(tensor)
        self._forget(identity)
        if not num_bytes or not tensor.numel():
            return
        if len(self.memories) >= _MOST_STORAGES:
            self._sweep()
        if len(self.memories) >= _MOST_STORAGES:
            return
        memory = self.memories[identity] = Memory(tensor, num_bytes)
        if missing is not None:
            memory.settle(tensor, missing)

    def forget(self, tensor: torch.Tensor) -> None:
        """Treat a tensor as written: its memory was handed to code that may write unseen."""
        if _has_memory(tensor):
            self._forget(storage_identity(tensor))

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        if not _has_memory(tensor):
            return None
        identity = storage_identity(tensor)
        memory = self.memories.get(identity)
        if memory is not None and _version(tensor) > memory.version:  # somebody wrote to it unseen
            self._forget(identity)
            return None
        return memory

    def _forget(self, identity: int) -> None:
        memory = self.memories.pop(identity, None)
        if memory is not None:
            free_weak_reference(memory.reference)

    def _sweep(self) -> None:
        for identity in [identity for identity, memory in self.memories.items() if is_gone(memory.reference)]:
            self._forget(identity)

    # ---- what calls do

    def follow(
        self,
        op: str,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        found: list[Found],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
        *,
        is_below_autograd: bool = False,
    ) -> list[torch.Tensor]:
        """Follow a call that returned; `written` are the arguments that it wrote to. Return its results that may carry unwritten elements.

        Below autograd the version of a written tensor rises only afterwards.
        """
        self.see(written, is_below_autograd=is_below_autograd)
        with blind():
            return list(_Followed(self, op, given, found, written, results))

    def see(self, written: Iterable[torch.Tensor], *, is_below_autograd: bool = False) -> None:
        """Remember the versions that recorded calls gave to these tensors; below autograd a version rises only afterwards."""
        for tensor in written:
            if _has_memory(tensor) and (memory := self.memories.get(storage_identity(tensor))) is not None:
                memory.version = max(memory.version, _version(tensor) + is_below_autograd)

    def grow(self, tensor: torch.Tensor, num_bytes: int) -> None:
        """Mark what lies beyond the first bytes of a resized tensor as unwritten."""
        with blind():
            known = self._memory_of(tensor)
            size = tensor.element_size()
            before = num_bytes // size
            missing = torch.ones(tensor.untyped_storage().nbytes() // size, dtype=torch.bool, device="cpu")
            missing[:before] = False
            if known is not None and known.size == size:
                old = known.mask if known.mask is not None else missing.new_ones(known.num_elements)
                missing[: len(old)] = old[: len(missing)]
            self.add(tensor)
            memory = self.memories.get(storage_identity(tensor))
            if memory is not None:
                memory.mask = missing
                memory.version += 1  # below autograd it rises afterwards
                if memory.is_whole:
                    self._forget(storage_identity(tensor))


class _Followed:
    """One call and its effect on the masks of its arguments; iterate over it for the tensors that may carry unwritten elements."""

    def __init__(
        self,
        unwritten: Unwritten,
        op: str,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        found: list[Found],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        self._unwritten = unwritten
        self._op, self._name = op, plain_name(op)
        self._args, self._kwargs = given
        self._targets = _once(written)
        self._results = results
        scale = Arguments(kwargs={"beta": self._kwargs["beta"]} if "beta" in self._kwargs else None)
        unread = {id(tensor) for slot, tensor in found if is_overwritten(op, slot.path, scale)}
        if _is_foreign(op):  # functions of other libraries are assumed to fill what they write to
            unread |= {id(target) for target in self._targets}
        masks = {id(tensor): unwritten.missing(tensor) for _, tensor in found}
        self._masks = {key: mask.clone() for key, mask in masks.items() if mask is not None}
        self._read = {key: mask for key, mask in self._masks.items() if key not in unread}

    def __iter__(self) -> Iterator[torch.Tensor]:
        for target in self._targets:
            if self._memory(target) is not None:
                yield from self._write(target)
        if not self._read:
            return
        for result in self._results:
            if self._memory(result) is None and not any(result is target for target in self._targets):
                yield from self._make(result)

    def _memory(self, tensor: torch.Tensor) -> Memory | None:
        return self._unwritten.memories.get(storage_identity(tensor)) if _has_memory(tensor) else None

    def _write(self, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Update the mask of a target in a storage with unwritten elements."""
        memory = self._memory(target)
        assert memory is not None
        if not self._read and memory.covers(target):
            self._unwritten._forget(storage_identity(target))
            return
        if memory.mask is None and memory.num_elements > _MOST_ELEMENTS:
            return
        missing = self._missing_in(target)
        memory.settle(target, False if missing is None else missing)
        if missing is None:
            yield target
        if memory.is_whole:
            self._unwritten._forget(storage_identity(target))

    def _missing_in(self, target: torch.Tensor) -> torch.Tensor | bool | None:
        """Decide which elements of a target are unwritten now: none, some, or None if no rule tells which."""
        moved = self._moved(target)
        if moved is not None:
            return moved
        if not self._read:
            return False
        if self._name in _KEEPING_PLACES or _is_pointwise(self._name):
            return _joined(self._read.values(), target.shape)
        return self._read.get(id(target)) if self._name in _ADDING_UP and len(self._read) == 1 else None

    def _make(self, result: torch.Tensor) -> Iterator[torch.Tensor]:
        """Follow a result with memory of its own that is made of elements not all of which were written."""
        if not result.numel():
            return
        missing = self._moved(result)
        if missing is None and (self._name in _KEEPING_PLACES or _is_pointwise(self._name)):
            missing = _joined(self._read.values(), result.shape)
        if missing is None:
            yield result
        elif bool(missing.any()):
            self._unwritten.add(result, missing)

    def _moved(self, made: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a result of moving elements: run the call once more, on masks; None if the call does something else."""
        name = self._name
        if name.rstrip("_") in _REDUCING:
            return self._reduced(made)
        is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        places = _MOVING.get(name if name in _MOVING else name.removesuffix("_"))
        if places is None or self._kwargs.get("reduce") or self._kwargs.get("accumulate") or self._is_accumulating():
            return None
        function = _function(self._op)
        if function is None:
            return None
        try:
            args = [self._masked(value) if place in places else self._pointing(value) for place, value in enumerate(self._args)]
            kwargs = {
                key: self._masked(value) if key in _VALUE_NAMES else self._pointing(value)
                for key, value in self._kwargs.items()
                if key != "out"
            }
            if is_in_place:
                args[0] = args[0].clone()
            result = function(*args, **kwargs)
            mask = args[0] if is_in_place else result
            return mask if isinstance(mask, torch.Tensor) and mask.shape == made.shape else None
        except Exception:  # the operation does not take bools, or the index is not to be read now
            return None

    def _reduced(self, made: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of a reduction into a target: unwritten where any element that it takes in is."""
        given = {**dict(zip(("self", "dim", "index", "src", "reduce"), self._args, strict=False)), **self._kwargs}
        target, source = given.get("self", given.get("input")), given.get("src", given.get("source"))
        if not (isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor)) or target.shape != made.shape:
            return None
        try:
            mask, parts = (self._masked(one).expand(one.shape).to(torch.uint8).contiguous() for one in (target, source))
            reduce = getattr(mask, f"{self._name.rstrip('_')}_")
            reduce(given["dim"], self._pointing(given["index"]), parts, "amax", include_self=given.get("include_self", True))
        except Exception:  # the index is not to be read now, or the call was made otherwise
            return None
        is_missing: torch.Tensor = mask.bool()
        return is_missing

    def _is_accumulating(self) -> bool:
        return self._name in ("index_put_", "index_put", "_index_put_impl_", "put_", "put") and len(self._args) > 3 and bool(self._args[3])

    def _masked(self, value: Any) -> Any:
        """Return the mask in place of a value."""
        if isinstance(value, torch.Tensor):
            mask = self._masks.get(id(value))
            return torch.zeros(value.shape, dtype=torch.bool, device="cpu") if mask is None else mask
        if isinstance(value, (list, tuple)):
            return type(value)(self._masked(item) for item in value) if type(value) in (list, tuple) else value
        return False if isinstance(value, (int, float, complex)) else value

    def _pointing(self, value: Any) -> Any:
        """Return an index unchanged, on the host."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._read or _is_being_captured(value):
                raise ValueError("nobody knows where this points")
            return value.detach().cpu()
        if isinstance(value, (list, tuple)):
            return type(value)(self._pointing(item) for item in value) if type(value) in (list, tuple) else value
        return value


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of memory: a plain one, or one of the class that a backend written in Python gives all of its
    tensors.

    A tensor that a transform or a tracer wraps has no memory that could be told from others.
    """
    if type(tensor) not in PLAIN and (is_foreign(tensor) or tensor.device.type != spare_device() or hasattr(tensor, "to_local")):
        return False
    return tensor.layout is torch.strided and not is_traced(tensor)


def _joined(masks: Iterable[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
    """Join masks element by element: unwritten if any is; None if they do not have that shape."""
    try:
        joined = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for mask in masks:
            joined |= mask.expand(shape)
    except RuntimeError:
        return None
    return joined


def _once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _is_foreign(op: str) -> bool:
    """Tell whether an operation is none of torch's own."""
    return op.partition(".")[0] not in ("torch", "Tensor", "functional", "aten") and not op.startswith("ops.aten.")


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_being_captured(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=4096)
def _is_pointwise(name: str) -> bool:
    """Tell whether each element of the result is made of the elements at its place, by torch's own tag."""
    bare = name.strip("_")
    for candidate in (name, name.rstrip("_"), bare, bare[1:], {"truediv": "div", "rtruediv": "div", "itruediv": "div"}.get(bare, bare)):
        packet = getattr(torch.ops.aten, candidate, None) if candidate and not candidate.startswith("__") else None
        if isinstance(packet, OpOverloadPacket):
            return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())  # type: ignore[no-untyped-call]
    return False


@functools.lru_cache(maxsize=4096)
def _function(op: str) -> Callable[..., Any] | None:
    """Return the function of torch that has this name in a record."""
    namespace, _, name = op.rpartition(".")
    if namespace.startswith("aten"):
        overload: Any = torch.ops.aten
        for part in op.split(".")[1:]:
            overload = getattr(overload, part, None)
        return overload  # type: ignore[no-any-return]
    home: Any = {"torch": torch, "Tensor": torch.Tensor, "functional": torch.nn.functional}.get(namespace)
    return getattr(home, name, None) if home is not None else None
