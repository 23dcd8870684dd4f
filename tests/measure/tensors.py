# SPDX-License-Identifier: Apache-2.0
"""Make small tensors and records for the tests of measure."""

from __future__ import annotations

from typing import Any

import numpy as np

from ulpscope.model import Slot, SlotPair, TensorData, TensorRecord
from ulpscope.numerics.summary.summary import summarize


def data(values: Any, dtype: str = "float32") -> TensorData:
    array = np.ascontiguousarray(values, dtype=np.float32 if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        array = (array.view("<u4") >> 16).astype("<u2")
    return TensorData(dtype, np.shape(values), array.tobytes())


def record(tensor: TensorData, *, summary: bool = True, fingerprint: bool = True, content: str | None = None) -> TensorRecord:
    taken, text = summarize(tensor.dtype, np.frombuffer(tensor.buffer, np.uint8))
    return TensorRecord(
        slot=Slot("output", (0,)),
        dtype=tensor.dtype,
        shape=tensor.shape,
        summary=taken if summary else None,
        fingerprint=text if fingerprint else None,
        content=content,
    )


def pair(subject: TensorRecord | None, reference: TensorRecord | None) -> SlotPair:
    return SlotPair(Slot("output", (0,)), subject, reference)
