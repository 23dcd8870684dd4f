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

__all__ = ["Keep", "TensorReader", "fingerprint_of"]

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
        data = _bytes_of(array_of(tensor))
        summary: Summary | None = None
        if self._keep == "fingerprint":
            text = fingerprint(data)
        else:
            summary, text = summarize(dtype, data)
        content = self._store(dtype, shape, data.data) if self._keep == "tensors" else None
        note = _NOT_KEPT if self._keep == "tensors" and content is None else ""
        return TensorRecord(slot=slot, dtype=dtype, shape=shape, summary=summary, fingerprint=text, content=content, note=note, **told)

    def fingerprint(self, tensor: Any) -> str | None:
        """The fingerprint alone; None where values of that dtype are not read."""
        return fingerprint_of(array_of(tensor)) if dtype_name(tensor) in DTYPES else None


def fingerprint_of(array: npt.NDArray[Any]) -> str:
    return fingerprint(_bytes_of(array))


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
