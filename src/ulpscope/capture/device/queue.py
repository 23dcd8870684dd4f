# SPDX-License-Identifier: Apache-2.0
"""Take tensors on accelerators: their own device reads each later, and fills its values in place.

`flush` has to come before anything writes to a tensor that was taken; `num_pending` counts such tensors. `send` at the end of a step and
`collect` from time to time bring the results to the host. A device that fails is read by slower means from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ulpscope.capture.device.dumps import DeviceDumps, Store
from ulpscope.capture.device.summaries import CudaSummaries, Pending, PendingSummaries, TorchSummaries, summaries_for
from ulpscope.capture.device.values import Form, Kept, Values, view_of
from ulpscope.capture.device.word_layouts import Layout, layout_of
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.torch_internals import blind, detached, is_zero_by_definition

__all__ = ["Devices"]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_IN_GRAPH = "inside the capture of a CUDA graph: values are not read"


class _Counter:
    """Counts the tensors that were taken and that their device has not been told to read."""

    num_pending = 0


if COMPILED is not None and not TYPE_CHECKING:
    _Counter = COMPILED.Counter


class Devices(_Counter):
    """Every accelerator of a process. `complain` writes to the ledger; `make` returns the object that summarises tensors on a device, or
    None.

    With `store`, which several threads may call at a time, tensors are stored too where their device is one of CUDA's.
    """

    def __init__(
        self,
        *,
        statistics: bool,
        complain: Callable[[str, str], None],
        store: Store | None = None,
        keeps_views: bool = False,
        make: Callable[..., PendingSummaries | TorchSummaries | None] = summaries_for,
    ) -> None:
        self._statistics = statistics
        self._complain = complain
        self._make = make
        self._store = store
        self._keeps_views = keeps_views
        self._dumps: dict[torch.device, DeviceDumps] = {}
        self._devices: dict[torch.device, PendingSummaries | TorchSummaries | None] = {}

    @property
    def has_any(self) -> bool:
        """Tell whether a tensor of an accelerator was seen."""
        return bool(self._devices)

    @property
    def is_waiting(self) -> bool:
        """Tell whether the values of a tensor are still to come."""
        parts = [*self._dumps.values(), *(device for device in self._devices.values() if device is not None)]
        return any(part.is_waiting for part in parts)

    def take(self, tensor: torch.Tensor, form: Form, base: Kept | None = None) -> Values | None:
        """Return values that will come; None where the host has to read the tensor. With `base` it is kept as a view of those bytes."""
        place = tensor.device
        device = self._devices[place] if place in self._devices else self._add(place)
        if device is None or not form.numel or is_zero_by_definition(tensor):
            return None
        if not device.can_take():
            return Values(note=_IN_GRAPH)
        values = Values()
        if self._store is not None and not self._dump(device, tensor, values, form, base):
            return None
        if isinstance(device, TorchSummaries):
            device.take(tensor, values, form.numel, form.dtype)
            return values
        address = tensor.data_ptr() if type(tensor) in _PLAIN else 0
        if not address:
            return None
        alignment = 8 if not address & 7 else address & -address
        layout = form.layouts[alignment] if alignment in form.layouts else self._layout(form, alignment)
        if layout is None or tensor.is_conj() or tensor.is_neg():
            self._take_copy(device, tensor, values, form)
        else:
            device.take(tensor, values, form.numel, layout, address)
            if alignment == 8 and self._store is None:
                form.take_aligned = self._aligned(place, device, layout, form)
        self.num_pending += 1
        if device.is_full or device.unread or tensor.is_inference():  # an inference tensor has no version that would show a write
            self._flush(place, device)
        return values

    def _aligned(self, place: torch.device, device: PendingSummaries, layout: Layout, form: Form) -> Any:
        """Return a function that takes further tensors of this form in fewer steps."""
        if COMPILED is not None:
            return COMPILED.Aligned(self, device, layout, form, functools.partial(self._flush, place, device))
        return functools.partial(self._take_aligned, device, layout)

    def _take_aligned(self, device: PendingSummaries, layout: Layout, tensor: torch.Tensor, form: Form, address: int) -> Values | None:
        if not device.is_at_hand():
            return None
        values = Values(waits=True)
        alias = detached(tensor)
        self.num_pending += 1
        if device.add(Pending(values, form.numel, layout, address, alias, alias._version)):
            self._flush(tensor.device, device)
        return values

    def _dump(self, device: PendingSummaries | TorchSummaries, tensor: torch.Tensor, values: Values, form: Form, base: Kept | None) -> bool:
        """Send the bytes of a tensor to the store, unless they are there; return False where the host has to."""
        if not isinstance(device, CudaSummaries) or type(tensor) not in _PLAIN or not tensor.data_ptr():
            return False
        if base is not None:
            values.kept = base
            values.view = view_of(form, (tensor.data_ptr() - base.address) // form.size, base.num_bytes)
            return True
        dumps = self._dumps.get(tensor.device)
        if dumps is None:
            assert self._store is not None
            with blind():
                dumps = self._dumps[tensor.device] = DeviceDumps(tensor.device, self._store)
        if not dumps.can_take(tensor.numel() * form.size):
            return False
        values.kept = dumps.take(tensor, form, as_memory=self._keeps_views and form.is_dense and not (tensor.is_conj() or tensor.is_neg()))
        if values.kept.num_bytes > 0:
            values.view = view_of(form, 0, values.kept.num_bytes)
        return True

    @staticmethod
    def _layout(form: Form, alignment: int) -> Layout | None:
        assert form.strides is not None
        layout = form.layouts[alignment] = layout_of(form.dtype, form.shape, form.strides, alignment)
        return layout

    @staticmethod
    def _take_copy(device: PendingSummaries, tensor: torch.Tensor, values: Values, form: Form) -> None:
        with blind():
            copy = tensor.detach().resolve_conj().resolve_neg().contiguous()
        layout = layout_of(form.dtype, form.shape, copy.stride(), 8)
        assert layout is not None
        device.take_copy(copy, values, form.numel, layout)

    def _add(self, place: torch.device) -> PendingSummaries | TorchSummaries | None:
        with blind():  # a recording mode would record the tensors made here
            self._devices[place] = self._make(place, statistics=self._statistics, complain=self._complain)
        return self._devices[place]

    def flush(self) -> None:
        """Let every device read the tensors it was given, before somebody writes to them."""
        for place, device in list(self._devices.items()):
            if isinstance(device, PendingSummaries) and device.num_pending:
                self._flush(place, device)

    def _flush(self, place: torch.device, device: PendingSummaries) -> None:
        self.num_pending -= device.num_pending
        device.flush()
        if not device.unread:
            return
        self._complain(
            f"summarise tensors on {place} by our kernels", f"{device.failure}; plain operations of torch do it, which is slower"
        )
        device.collect(wait=True)
        slower = self._devices[place] = TorchSummaries(place, statistics=self._statistics)
        device.is_given_up = True
        for entry in device.unread:
            entry.values.waits = False
            slower.take(entry.alias, entry.values, entry.numel, entry.layout.dtype)

    def send(self) -> None:
        """Let every device read the tensors it was given and send its results."""
        self.flush()
        for device in self._devices.values():
            if device is not None:
                device.send()

    def collect(self, *, wait: bool = False) -> bool:
        """Fill in the results that have arrived, or with `wait` all that were sent; return whether any were."""
        come = [device.collect(wait=wait) for device in self._devices.values() if device is not None]
        come += [dumps.collect(wait=wait) for dumps in self._dumps.values()]
        return any(come)

    def close(self) -> None:
        """End every thread after its work is done."""
        for dumps in self._dumps.values():
            dumps.close()
        self._dumps.clear()
