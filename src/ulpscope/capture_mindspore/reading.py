# SPDX-License-Identifier: Apache-2.0
"""A tensor becomes its record: facts, statistics, a fingerprint and, where they are wanted, its bytes in the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ulpscope.capture_mindspore.framework import array_of, device_of, dtype_name, requires_grad, strides_of
from ulpscope.model import DTYPES, Slot, Summary, TensorRecord
from ulpscope.numerics.summary.summary import fingerprint, summarize

__all__ = ["Keep", "TensorReader"]

Keep: TypeAlias = Literal["fingerprint", "statistics", "tensors"]

_NOT_KEPT = "values not kept: the size limit of this run is reached"


class TensorReader:
    """Reads tensors at once, as they are now. `store` takes the bytes of a tensor and gives the key to find them by."""

    def __init__(self, keep: Keep, store: Callable[[str, tuple[int, ...], Any], str | None]) -> None:
        self._keep = keep
        self._store = store

    def read(self, slot: Slot, tensor: Any) -> TensorRecord:
        dtype, shape = dtype_name(tensor), tuple(tensor.shape)
        told: dict[str, Any] = {"strides": strides_of(tensor), "device": device_of(tensor), "requires_grad": requires_grad(tensor)}
        if dtype not in DTYPES:
            return TensorRecord(slot=slot, dtype=dtype, shape=shape, note=f"values of dtype {dtype} are not read", **told)
        return TensorRecord(slot=slot, dtype=dtype, shape=shape, **told, **self._values(dtype, shape, array_of(tensor)))

    def read_array(self, slot: Slot, array: npt.NDArray[Any]) -> TensorRecord:
        """The same of values that stand in no tensor."""
        dtype, shape = str(array.dtype), array.shape
        return TensorRecord(slot=slot, dtype=dtype, shape=shape, device="cpu", **self._values(dtype, shape, array))

    def _values(self, dtype: str, shape: tuple[int, ...], array: npt.NDArray[Any]) -> dict[str, Any]:
        data = array.reshape(-1).view(np.uint8)
        summary: Summary | None = None
        if self._keep == "fingerprint":
            text = fingerprint(data)
        else:
            summary, text = summarize(dtype, data)
        content = self._store(dtype, shape, data.data) if self._keep == "tensors" else None
        note = _NOT_KEPT if self._keep == "tensors" and content is None else ""
        return {"summary": summary, "fingerprint": text, "content": content, "note": note}
