# SPDX-License-Identifier: Apache-2.0
"""Take a tensor down the common way: it was seen before, or its device reads it later. `tensor_reader` does all others.

This is the hottest path of a recording. Two classes with the same interface, `PythonTaking` and the compiled `Reader` (`_compiled.pyx`),
give the same results; `Taking` is the one that this machine has. Both leave the rare kinds to `RareTaking`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from ulpscope.capture.device.values import Form, Kept, Values
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.model import Slot, Summary

__all__ = ["FIRST_SWEEP", "MOST_STORAGES", "PLAIN", "PythonTaking", "RareTaking", "Taken", "Taking", "unlink"]

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
MOST_STORAGES = 50_000
FIRST_SWEEP = 512


class Taken(msgspec.Struct, gc=False):
    """One tensor in one slot of a call: a `DraftTensor`, whose values may come later."""

    slot: Slot
    form: Form
    values: Values
    requires_grad: bool

    @property
    def dtype(self) -> str:
        return self.form.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.form.shape

    @property
    def strides(self) -> tuple[int, ...] | None:
        return self.form.strides

    @property
    def device(self) -> str:
        return self.form.device

    @property
    def summary(self) -> Summary | None:
        return self.values.summary

    @property
    def fingerprint(self) -> str | None:
        return self.values.fingerprint

    @property
    def content(self) -> str | None:
        return self.values.content

    @property
    def note(self) -> str:
        return self.values.remark


class RareTaking(Protocol):
    """Takes down tensors of the rare kinds: `TensorReader` has all of this."""

    _seen: dict[int, Values]
    _references: list[int]
    _next_sweep: int
    _forms: dict[Any, Form]
    _keeps_views: bool
    _host_kernel: Any
    _in_flight: dict[int, Any]
    unwritten: dict[int, Any]

    def forget(self) -> None: ...

    def sweep(self) -> None: ...

    def _form(self, tensor: torch.Tensor) -> Form: ...

    def prepare(self, found: list[tuple[Slot, torch.Tensor]]) -> None: ...

    def _look(self, slot: Slot, tensor: torch.Tensor, is_undefined: bool) -> Taken: ...

    def _take_in_flight(self, slot: Slot, tensor: torch.Tensor) -> Taken | None: ...

    def _base(self, known: Values | None, version: int, address: int, form: Form) -> Kept | None: ...

    def _read(self, tensor: torch.Tensor, form: Form, base: Kept | None = None) -> Values: ...


class PythonTaking(RareTaking):
    """The values seen in this step, by the identity of their storage, and the forms of all tensors so far."""

    def __init__(self) -> None:
        self._seen = {}
        self._references = []
        self._next_sweep = FIRST_SWEEP
        self._forms = {}
        self._keeps_views = False
        self._host_kernel = None
        self._in_flight = {}
        self.unwritten = {}
        """Storages with elements that were never written (see `unwritten`); empty nearly always."""

    def take(self, slot: Slot, tensor: torch.Tensor, *, is_undefined: bool = False) -> Taken:
        """Take down one tensor; its values may come later. Call it where no function mode is active."""
        if type(tensor) not in PLAIN or is_undefined:
            return self._look(slot, tensor, is_undefined)
        if self._in_flight:
            taken = self._take_in_flight(slot, tensor)
            if taken is not None:
                return taken
        try:
            storage = tensor.untyped_storage()
            known = values = self._seen.get(storage._cdata)
            version, address = tensor._version, tensor.data_ptr()
            key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        except RuntimeError:  # no memory, no version or no shape: a rare kind
            return self._look(slot, tensor, is_undefined)
        form = self._forms[key] if key in self._forms else self._form(tensor)
        mirrors = tensor.is_neg() + 2 * tensor.is_conj() if form.is_complex else tensor.is_neg()
        while values is not None:
            is_same = values.form.order == form.order  # type: ignore[union-attr]
            if is_same and values.address == address and values.version == version and values.mirrors == mirrors:
                return Taken(slot, form, values, tensor.requires_grad)
            values = values.next
        if not address or form.note:
            return self._look(slot, tensor, is_undefined)
        if form.take_aligned is not None and not mirrors and not address & 7:
            values = form.take_aligned(tensor, form, address)
        if values is None:
            base = self._base(known, version, address, form) if self._keeps_views and known is not None and not mirrors else None
            values = self._read(tensor, form, base)
        values.version, values.address, values.form, values.mirrors, values.next = version, address, form, mirrors, known
        if known is None:
            if len(self._seen) >= MOST_STORAGES:
                self.forget()
            elif len(self._references) >= self._next_sweep:
                self.sweep()
            self._references.append(storage._weak_ref())  # type: ignore[arg-type]
        self._seen[storage._cdata] = values
        return Taken(slot, form, values, tensor.requires_grad)


def unlink(chains: Iterable[Values | None]) -> None:
    """Take chains of values apart, from the front: freeing a long chain would recurse as deep as it is long."""
    for values in chains:
        while values is not None:
            following, values.next = values.next, None
            values = following


if TYPE_CHECKING or COMPILED is None:
    Taking = PythonTaking
else:
    Taken, Taking, unlink = COMPILED.Taken, COMPILED.Reader, COMPILED.unlink
