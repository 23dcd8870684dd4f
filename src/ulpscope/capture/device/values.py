# SPDX-License-Identifier: Apache-2.0
"""Hold the values of a tensor as far as they are known. On an accelerator they come later than the record that names the tensor, and in
place.

These objects are many and live for a step. They stay outside of Python's garbage collector, which would go over them again and again; none
refers to another in a circle.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ulpscope.capture.native.compiled import COMPILED
from ulpscope.model import Summary, view_content

__all__ = ["LOST", "NOT_KEPT", "Form", "Kept", "Values", "View", "settle_rows", "view_of"]

View = tuple[str, tuple[int, ...], "tuple[int, ...] | None", int]
"""How a tensor looks at kept bytes: dtype, shape, strides and offset in elements; no strides where it is all of the bytes."""

LOST = "written to before it was read: values are not known"
NOT_KEPT = "values not kept: the size limit of this run is reached"


class Form(msgspec.Struct, gc=False):
    """The traits that tensors of one shape, dtype and device share; made once for each.

    `numel` counts the reals of complex numbers, `size` is the bytes of one element, `extent` the bytes of memory from the first element to
    the last. Tensors whose forms share an `order`, at one address, are the same elements in the same order, in other shapes.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: str
    is_on_host: bool
    type: Any
    note: str = ""
    numel: int = 0
    size: int = 0
    extent: int = 0
    is_contiguous: bool = False
    is_complex: bool = False
    layouts: dict[int, Any] = {}
    order: int = 0
    take_aligned: Any = None  # takes a tensor at an address that is a multiple of 8, once its device has made this function

    @property
    def is_dense(self) -> bool:
        """Tell whether the elements fill their memory, in any order."""
        return self.extent == math.prod(self.shape) * self.size and not any(
            stride == 0 and size > 1 for stride, size in zip(self.strides or (), self.shape, strict=True)
        )


class Kept(msgspec.Struct, gc=False):
    """Memory whose bytes are in the store, or on their way to it: where it was, and the key of the bytes. Bytes without a key are not
    kept.
    """

    address: int
    num_bytes: int
    key: str | None = None
    is_under_way: bool = False
    note: str = ""


class Values(msgspec.Struct, gc=False):
    """Summary, fingerprint, the kept bytes and a note; `waits` while the summary is still to come.

    The other fields identify the tensor: version, address and form, whether its values are mirrored (conjugate, negative), and the next
    values of the same storage. `view` says how the tensor looks at the kept bytes, unless it is all of them.
    """

    summary: Summary | None = None
    fingerprint: str | None = None
    note: str = ""
    waits: bool = False
    kept: Kept | None = None
    view: View | None = None
    version: int = 0
    address: int = 0
    form: Form | None = None
    mirrors: int = 0
    next: Values | None = None

    @property
    def is_complete(self) -> bool:
        return not self.waits and (self.kept is None or not self.kept.is_under_way)

    @property
    def content(self) -> str | None:
        """Return the key of the kept values."""
        if self.kept is None or self.kept.key is None:
            return None
        return self.kept.key if self.view is None else view_content(self.kept.key, *self.view)

    @property
    def remark(self) -> str:
        """Return the note, or why the values are not kept."""
        if self.note or self.kept is None or self.kept.key is not None:
            return self.note
        return self.kept.note or NOT_KEPT

    def summary_object(self) -> Summary | None:
        return self.summary


if COMPILED is not None and not TYPE_CHECKING:
    Form, Values = COMPILED.Form, COMPILED.Values


def view_of(form: Form, offset: int, num_bytes: int) -> View:
    """Describe how a tensor looks at memory that begins `offset` elements before it and holds `num_bytes`."""
    consists_of_it = form.is_contiguous and offset == 0 and form.extent == num_bytes
    return form.dtype, form.shape, None if consists_of_it else form.strides, offset


def settle_rows(rows: npt.NDArray[np.int64], numels: list[int], owners: list[Values], *, statistics: bool) -> None:
    """Hand rows of results from a device to the values that wait for them."""
    if COMPILED is not None:
        COMPILED.settle_rows(rows, numels, owners, statistics)
        return
    text = rows[:, 1::-1].astype(">i8").tobytes().hex()
    for number, values in enumerate(owners):
        values.fingerprint = "u1:" + text[32 * number : 32 * number + 32]
        values.waits = False
    if statistics:
        for values, summary in zip(owners, _summaries(rows, np.array(numels, np.int64)), strict=True):
            values.summary = Summary(*summary)


def _summaries(rows: npt.NDArray[np.int64], numels: npt.NDArray[np.int64]) -> list[Any]:
    floats = rows[:, 2:6].view(np.float64)
    nans, counts = rows[:, 7], rows[:, 7:12]
    finite = numels - rows[:, 7:10].sum(axis=1)
    with np.errstate(all="ignore"):
        low, high = (floats[:, 0] + 0.0).tolist(), (floats[:, 1] + 0.0).tolist()
        mean = np.ldexp(floats[:, 2] / finite, rows[:, 6])
        rms = np.ldexp(np.sqrt(floats[:, 3] / finite), rows[:, 6])
    table = list(zip(numels.tolist(), low, high, mean.tolist(), rms.tolist(), *counts.T.tolist(), strict=True))
    for number in np.flatnonzero((finite == 0) | (nans == numels)).tolist():
        table[number] = _without_values(table[number], is_ordered=bool(nans[number] < numels[number]))
    return table


def _without_values(row: Any, *, is_ordered: bool) -> Any:
    """Return the summary of a tensor without finite numbers."""
    numel, low, high, mean, rms, *counts = row
    mean = None if math.isnan(mean) else mean
    return (numel, low if is_ordered else None, high if is_ordered else None, mean, None if mean is None else rms, *counts)
