# SPDX-License-Identifier: Apache-2.0
"""Describe live tensors as records do.

A tensor seen again unchanged (same storage, version and view) is neither read nor stored again. A weak reference keeps the address of a
storage from being reused, so that the address identifies it; an address alone would credit a new tensor with an old one's values.

A tensor on an accelerator is read there, later: its `Values` are filled in place, and `Devices` says when.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ulpscope.capture.device.queue import Devices
from ulpscope.capture.device.values import Form, Kept, Values, view_of
from ulpscope.capture.device.word_layouts import merged
from ulpscope.capture.intercept.naming import makes_no_values, may_grow, writes_by_name
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.flights import PARTLY, Flight, Flights
from ulpscope.capture.record.taking import FIRST_SWEEP, MOST_STORAGES, PLAIN, Taken, Taking, unlink
from ulpscope.capture.record.unwritten import Unwritten
from ulpscope.capture.torch_internals import (
    asynchronous_memory,
    blind,
    dense_values,
    detached,
    foreign_facts,
    free_weak_reference,
    is_coalescing,
    is_fake,
    is_foreign,
    is_gone,
    is_stream_capturing,
    is_traced,
    is_work_registered,
    is_zero_by_definition,
    storage_identity,
    weak_reference,
)
from ulpscope.model import DTYPES, Slot, TensorRecord
from ulpscope.model.layouts import as_dense
from ulpscope.model.operations.unwritten import MAY_CARRY, NOTHING_WRITTEN, partly_written
from ulpscope.numerics.kernel import KERNEL
from ulpscope.numerics.summary.summary import PreparedView, fingerprint_address, summarize_address, summarize_view
from ulpscope.numerics.summary.summary_kernel import addresses_of

if TYPE_CHECKING:
    from ulpscope.capture.record.unwritten import FollowedCall
    from ulpscope.capture.walk import Found

__all__ = ["Keep", "Taken", "TensorReader", "record_of"]

Keep: TypeAlias = Literal["fingerprint", "statistics", "tensors"]

_MOST_DENSE = 2**30
"""The most bytes that a sparse tensor may unfold into to be read."""
_HOST = 0  # of a form's layouts: the others are by alignment


def record_of(taken: Taken) -> TensorRecord:
    return TensorRecord(
        slot=taken.slot,
        dtype=taken.dtype,
        shape=taken.shape,
        strides=taken.strides,
        device=taken.device,
        requires_grad=taken.requires_grad,
        summary=taken.summary,
        fingerprint=taken.fingerprint,
        content=taken.content,
        note=taken.note,
    )


class TensorReader(Taking):
    """Reads tensors and remembers, within a step, what it has read. Without `devices` everything is read at once, by the host.

    With `keeps_views`, the store can be told that a tensor is a view of bytes that it holds.
    """

    def __init__(
        self,
        keep: Keep,
        store: Callable[[str, tuple[int, ...], Any], str | None],
        devices: Devices | None = None,
        *,
        keeps_views: bool = False,
    ) -> None:
        super().__init__()
        self._keep = keep
        self._store = store
        self._devices = devices
        self._keeps_views = keeps_views
        self._unwritten = Unwritten()
        self.unwritten = self._unwritten.memories
        self._orders: dict[Any, int] = {}
        self._new_order = itertools.count(1).__next__
        self.flights = Flights()
        self._in_flight = self.flights.by_storage
        if COMPILED is not None and KERNEL is not None and keep != "tensors":
            self._host_kernel = COMPILED.HostKernel(*addresses_of(KERNEL), keep == "statistics")

    def __del__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget every tensor, as at the end of a step: values may change unseen while nothing is recorded."""
        unlink(self._seen.values())
        self._seen.clear()
        references, self._references = self._references, []
        self._next_sweep = FIRST_SWEEP
        for reference in references:
            free_weak_reference(reference)

    def sweep(self) -> None:
        """Forget storages that are gone: nobody can see them again, and the remains of one keep the memory around it apart."""
        kept: list[int] = []
        gone: list[int] = []
        for reference in self._references:
            (gone if is_gone(reference) else kept).append(reference)
        self._references = kept
        self._next_sweep = 2 * len(self._references) + FIRST_SWEEP
        unlink([self._seen.pop(reference, None) for reference in gone])
        for reference in gone:
            free_weak_reference(reference)

    def forget_storage(self, tensor: torch.Tensor) -> None:
        """Forget all views of a storage that was written to, also through an alias with a version of its own."""
        if type(tensor) in PLAIN and tensor.layout is torch.strided:
            unlink([self._seen.pop(storage_identity(tensor), None)])

    def renew(self, tensor: torch.Tensor) -> None:
        """Treat a tensor's memory as new: forget its values, and count it as unwritten."""
        self.forget_storage(tensor)
        self._unwritten.add(tensor)

    def prepare(self, found: list[Found]) -> None:
        """Prepare tensors with unwritten elements: those elements are not read when the tensor is taken down."""
        for _, tensor in found:
            is_kept_in_mind = type(tensor) in PLAIN and not tensor.is_inference()
            missing = self._unwritten.missing(tensor) if is_kept_in_mind else None
            if missing is not None:
                self._note(tensor, partial(self._values_where_written, tensor, missing=missing))

    def _note(self, tensor: torch.Tensor, values_of: Callable[[Form], Values]) -> None:
        """Let a tensor be taken down with these values, until somebody writes to it."""
        form = self._form(tensor)
        if form.note:  # a meta tensor has no values to be undefined
            return
        identity = storage_identity(tensor)
        version, address, mirrors = tensor._version, _address(tensor), tensor.is_neg() + 2 * tensor.is_conj()
        known = values = self._seen.get(identity)
        while values is not None:
            is_same = values.form.order == form.order  # type: ignore[union-attr]
            if is_same and values.address == address and values.version == version and values.mirrors == mirrors:
                return
            values = values.next
        if known is None:
            self._references.append(weak_reference(tensor))
        values = values_of(form)
        values.version, values.address, values.form, values.mirrors, values.next = version, address, form, mirrors, known
        self._seen[identity] = values

    def _values_where_written(self, tensor: torch.Tensor, form: Form, *, missing: torch.Tensor) -> Values:
        """Read values with zero in place of unwritten elements; none if all elements are unwritten."""
        with blind():
            num_missing = int(missing.sum())
            if num_missing == missing.numel():
                return Values(note=NOTHING_WRITTEN)
            plain = tensor.detach().resolve_conj().resolve_neg()
            written = torch.where(missing.to(plain.device), torch.zeros((), dtype=plain.dtype, device=plain.device), plain).contiguous()
            values = self._read(written, self._form(written))
        values.note = partly_written(num_missing, missing.numel())
        return values

    def follow(self, opened: FollowedCall, results: list[Found]) -> None:
        """Follow a call where unwritten memory is known, or where the call makes some: decide what is unwritten now."""
        if opened.level == "module":  # the calls inside were followed
            return
        made = [tensor for _, tensor in results]
        if makes_no_values(opened.op):
            for tensor in made:
                self._unwritten.add(tensor)
            return
        if opened.inputs and may_grow(opened.op):
            self._unwritten.see(made, is_below_autograd=opened.level == "op")
            for tensor in made:
                if type(tensor) in PLAIN and not is_traced(tensor) and tensor.untyped_storage().nbytes() > opened.inputs[0].form.extent:
                    self._unwritten.grow(tensor, opened.inputs[0].form.extent)
            return
        if not self.unwritten or opened.given is None:
            return
        written = [
            tensor
            for (slot, tensor), version in zip(opened.found, opened.versions, strict=True)
            if slot.path[0] in opened.written or (writes_by_name(opened.op, slot.path) if version is None else tensor._version != version)
        ]
        is_below = opened.level == "op"
        for tensor in self._unwritten.follow(opened.op, opened.given, opened.found, written, made, is_below_autograd=is_below):
            if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_inference():
                self._note(tensor, partial(self._values_that_may_carry, tensor))

    def _values_that_may_carry(self, tensor: torch.Tensor, form: Form) -> Values:
        values = self._read(tensor, form)
        values.note = values.note or MAY_CARRY
        return values

    def lend(self, tensors: list[torch.Tensor]) -> None:
        """Treat memory as written: it was handed to code that may write to it unseen."""
        if self.unwritten:
            for tensor in tensors:
                self._unwritten.forget(tensor)
                self.forget_storage(tensor)  # including the note that it was unwritten

    def record(self, slot: Slot, tensor: torch.Tensor, *, is_undefined: bool = False) -> TensorRecord:
        """Describe one tensor. Call it where no function mode is active."""
        return record_of(self.take(slot, tensor, is_undefined=is_undefined))

    @staticmethod
    def _base(known: Values | None, version: int, address: int, form: Form) -> Kept | None:
        """Return kept bytes of the same storage and version, if the tensor is a view of them with no more elements."""
        while known is not None:
            kept = known.kept
            if (
                kept is not None
                and known.version == version
                and kept.address <= address
                and address + form.extent <= kept.address + kept.num_bytes
                and known.form.size == form.size  # type: ignore[union-attr]
                and (address - kept.address) % form.size == 0
                and prod(form.shape) * form.size <= kept.num_bytes
            ):
                return kept
            known = known.next
        return None

    def _look(self, slot: Slot, tensor: torch.Tensor, is_undefined: bool) -> Taken:
        """Take down a tensor of a rare kind."""
        is_plain = type(tensor) in PLAIN
        if not is_plain and is_lazy(tensor):
            form = self._bare_form(tensor, "a lazy parameter that has no shape yet")
            return Taken(slot, form, Values(note=form.note), False)
        if is_foreign(tensor):
            return self._look_past_class(slot, tensor, is_undefined)
        if tensor.is_nested:
            shape = tuple(tensor.shape) if tensor.layout is torch.jagged else "?"
            form = self._bare_form(tensor, f"nested tensor of shape {shape}: values are not read")
            return Taken(slot, form, Values(note=form.note), tensor.requires_grad)
        form = self._form(tensor)
        if is_undefined:
            values = Values(note=NOTHING_WRITTEN)
        elif is_traced(tensor):
            values = Values(note="inside a torch.func transform: values are not read")
        elif form.note:
            values = self._read_sparse(tensor, form) if form.strides is None and tensor.device.type != "meta" else Values(note=form.note)
        elif self.unwritten and (missing := self._unwritten.missing(tensor)) is not None:
            values = self._values_where_written(tensor, form, missing=missing)
        elif not is_plain:
            return self._look_inside(slot, tensor, form)
        else:
            values = self._read(tensor, form)
        return Taken(slot, form, values, tensor.requires_grad)

    def _look_past_class(self, slot: Slot, tensor: torch.Tensor, is_undefined: bool) -> Taken:
        """Take down a tensor of a foreign class without running its code; on a device it is read at once, since calls that write to it are
        not known.
        """
        facts = foreign_facts(tensor)
        if facts.alias is not None:
            form = self._form(facts.alias)
            flying = None if is_undefined else self._take_in_flight(slot, facts.alias)
            if flying is not None:
                flying.requires_grad = tensor.requires_grad
                return flying
            note = NOTHING_WRITTEN if is_undefined else form.note
            values = Values(note=note) if note else self._read(facts.alias, form, now=True)
        else:
            name, kind = str(tensor.dtype).removeprefix("torch."), type(tensor).__name__
            note = f"{kind} has no memory of its own: values are not read" if facts.shape is not None else f"{kind} alone knows its shape"
            device = facts.device or torch.device("cpu")
            form = Form(name, facts.shape or (), facts.strides, str(device), device.type == "cpu", tensor.dtype, note)
            values = Values(note=note)
        return Taken(slot, form, values, tensor.requires_grad)

    def _form(self, tensor: torch.Tensor) -> Form:
        strides = tensor.stride() if tensor.layout is torch.strided else None
        if type(tensor) not in PLAIN:
            return self._new_form(tensor, strides)
        key = (tensor.dtype, tensor.shape, strides, tensor.device) if strides is not None else (tensor.dtype, tensor.shape, tensor.layout)
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= MOST_STORAGES:
                self._forms.clear()
                self._orders.clear()
            form = self._forms[key] = self._new_form(tensor, strides)
        return form

    def _new_form(self, tensor: torch.Tensor, strides: tuple[int, ...] | None) -> Form:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(map(int, tensor.shape))
        form = Form(dtype, shape, strides, str(tensor.device), tensor.device.type == "cpu", tensor.dtype, layouts={})
        if strides is None:
            form.note = f"layout {tensor.layout}: values are not read"
        elif dtype not in DTYPES:
            form.note = f"dtype {dtype}: values are not read"
        elif tensor.device.type == "meta" and type(tensor) in PLAIN:
            form.note = "meta tensor: it has no values"
        else:
            form.size = tensor.element_size()
            form.numel = prod(shape) * (2 if tensor.is_complex() else 1)
            form.extent = form.size * (1 + sum((size - 1) * int(stride) for size, stride in zip(shape, strides, strict=True)))
            form.is_contiguous = tensor.is_contiguous()
            form.is_complex = tensor.is_complex()
        form.order = self._order(form)
        return form

    def _order(self, form: Form) -> int:
        """Return the number shared by forms with the same elements in the same order; kept tensors have a shape, so each form gets its
        own.
        """
        if form.note or form.strides is None or self._keep == "tensors":
            return self._new_order()
        sizes, steps = merged(form.shape, form.strides, form.size)
        key = (form.dtype, form.device, *sizes, *steps)
        if key not in self._orders:
            self._orders[key] = self._new_order()
        return self._orders[key]

    @staticmethod
    def _bare_form(tensor: torch.Tensor, note: str) -> Form:
        name = str(tensor.dtype).removeprefix("torch.")
        return Form(name, (), None, str(tensor.device), tensor.device.type == "cpu", tensor.dtype, note)

    def _look_inside(self, slot: Slot, tensor: torch.Tensor, form: Form) -> Taken:
        """Take down a tensor of a class of its own: its local shard, if it has one, or the result of a collective, once it has arrived."""
        if is_fake(tensor):
            return Taken(slot, form, Values(note="fake tensor: it has no values"), tensor.requires_grad)
        to_local, inner, note = getattr(tensor, "to_local", None), tensor, ""
        if to_local is not None:
            with blind():
                inner = to_local()
            note = f"values of the local shard {tuple(inner.shape)}, placements {getattr(tensor, 'placements', None)}"
        memory = asynchronous_memory(inner)
        if memory is not None:
            inner, is_there = memory
            if not is_there and not self.flights.over(inner) and is_work_registered():
                self.flights.begin("a functional collective", [inner])  # its call was not seen
        taken = self._take_in_flight(slot, inner, form, note)
        if taken is None and is_foreign(inner):
            taken = Taken(slot, form, self._look_past_class(slot, inner, False).values, False)
            taken.values.note = taken.values.note or note
        if taken is None:
            taken = Taken(slot, form, self._read(inner, form if inner is tensor else self._form(inner)), False)
            taken.values.note = note or taken.values.note
        taken.requires_grad = tensor.requires_grad
        return taken

    def _take_in_flight(self, slot: Slot, tensor: torch.Tensor, form: Form | None = None, note: str = "") -> Taken | None:
        """Take down a tensor whose memory a collective still writes to, without its values; None if none does."""
        flights = self.flights.over(tensor)
        if not flights or (form or self._form(tensor)).note:
            return None
        landed = [flight for flight in flights if _has_landed(flight, tensor)]
        if landed:
            self.land(self.flights.end(landed))
        flying = [flight for flight in flights if flight not in landed]
        if not flying:
            return None
        taken = Taken(slot, form or self._form(tensor), Values(waits=True), tensor.requires_grad)
        if not self.flights.holds(flying[0], tensor):
            taken.values = Values(note=PARTLY)
            return taken
        flying[0].awaiting.append((taken, detached(tensor), note))
        return taken

    def land(self, flights: list[Flight]) -> None:
        """Read the tensors that waited for these collectives, and forget the old values of their memory."""
        for flight in flights:
            for *_, alias in flight.memory:
                self.forget_storage(alias)
        for flight in flights:
            awaiting, flight.awaiting = flight.awaiting, []
            for taken, alias, note in awaiting:
                taken.values = self._read(alias, self._form(alias))
                taken.values.note = note or taken.values.note

    def _read(self, tensor: torch.Tensor, form: Form, base: Kept | None = None, *, now: bool = False) -> Values:
        """Read the values of a tensor, in the store as a view of `base` if there is one; with `now` at once, not later by its device."""
        if not form.is_on_host and self._devices is not None and not now:
            values = self._devices.take(tensor, form, base)
            if values is not None:
                return values
        if form.is_on_host and not form.is_contiguous and self._keep != "tensors":
            values = self._read_in_place(tensor, form)
            if values is not None:
                return values
        plain = _on_cpu(tensor)
        size_bytes = plain.numel() * plain.element_size()
        address = _address(plain)
        if address == 0 and size_bytes and is_zero_by_definition(plain):
            with blind():
                plain = torch.zeros(plain.shape, dtype=plain.dtype)
            address = _address(plain)
        if address == 0 and size_bytes:
            return Values(note=f"{type(tensor).__name__} has no memory of its own: values are not read")
        values = Values()
        if self._keep == "tensors":
            self._store_bytes(tensor, form, values, base, address, size_bytes)
        if self._keep == "fingerprint":
            values.fingerprint = fingerprint_address(address, size_bytes)
        else:
            values.summary, values.fingerprint = summarize_address(form.dtype, address, size_bytes)
        return values

    def _read_sparse(self, tensor: torch.Tensor, form: Form) -> Values:
        """Read the values of the dense tensor that a sparse one stands for, if that is small enough."""
        if form.dtype not in DTYPES or (tensor.is_cuda and is_stream_capturing()):
            return Values(note=form.note)
        num_bytes = prod(form.shape) * tensor.dtype.itemsize
        if num_bytes > _MOST_DENSE:
            return Values(note=f"{form.note}, since as a dense tensor it has {num_bytes / 2**30:.1f} GiB")
        try:
            dense = dense_values(tensor)
        except RuntimeError as error:
            return Values(note=f"{form.note} ({str(error).splitlines()[0]})")
        values = self._read(dense, self._form(dense), now=True)
        values.note = values.note or as_dense(str(tensor.layout))
        return values

    @staticmethod
    def _read_in_place(tensor: torch.Tensor, form: Form) -> Values | None:
        """Read the values of a tensor that is not in one piece, as it lies; None where it has to be copied first."""
        if type(tensor) not in PLAIN or form.strides is None or tensor.is_conj() or tensor.is_neg():
            return None
        if _HOST not in form.layouts:
            form.layouts[_HOST] = PreparedView(form.dtype, form.shape, form.strides)
        view = form.layouts[_HOST]
        found = summarize_view(view, tensor.data_ptr()) if view.is_worthwhile else None
        if found is None:
            return None
        summary, fingerprint = found
        return Values(summary=summary, fingerprint=fingerprint)

    def _store_bytes(self, tensor: torch.Tensor, form: Form, values: Values, base: Kept | None, address: int, size_bytes: int) -> None:
        """Store a tensor whose values, in order, lie at `address`; or the memory that it is a view of."""
        own = _address(tensor) if self._keeps_views and type(tensor) in PLAIN else 0
        if base is not None:
            values.kept = base
        elif own and form.is_on_host and not form.is_contiguous and form.is_dense and not (tensor.is_conj() or tensor.is_neg()):
            values.kept = Kept(own, size_bytes, self._store(form.dtype, (size_bytes // form.size,), _buffer(own, size_bytes)))
        else:
            is_memory = own != 0 and form.is_contiguous and not (tensor.is_conj() or tensor.is_neg())
            shape = form.shape if type(tensor) in PLAIN else tuple(tensor.shape)
            key = self._store(form.dtype, shape, _buffer(address, size_bytes))
            values.kept = Kept(own, size_bytes if is_memory else -1, key)
            return
        values.view = view_of(form, (own - values.kept.address) // form.size, values.kept.num_bytes)


def _has_landed(flight: Flight, tensor: torch.Tensor) -> bool:
    """Tell whether a collective is done that somebody may have waited for unseen, as far as that can be asked without disturbing a
    device.
    """
    if flight.group is not None:
        return not is_coalescing(flight.group)
    if not flight.asks or not tensor.is_cpu:
        return False
    is_done = getattr(flight.handle, "is_completed", None) or getattr(flight.handle, "done", None)
    return bool(is_done is not None and is_done())


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, contiguous in the memory of the CPU; the tensor itself if it is that already."""
    if type(tensor) in PLAIN and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with blind():
        return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the values; 0 if they have none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _buffer(address: int, size_bytes: int) -> Any:
    return (ctypes.c_char * size_bytes).from_address(address) if size_bytes else b""
