# SPDX-License-Identifier: Apache-2.0
"""How a record tells that a tensor is sparse: it holds the values of the dense tensor that the sparse one stands for."""

from __future__ import annotations

from ulpscope.model.records import TensorRecord

__all__ = ["as_dense", "is_sparse"]

_AS_DENSE = "values of the dense tensor; its layout is "


def as_dense(layout: str) -> str:
    """Note that the values of a sparse tensor are those of the dense one."""
    return f"{_AS_DENSE}{layout}"


def is_sparse(record: TensorRecord) -> bool:
    """Whether the recorded values are those of the dense tensor that a sparse one stands for."""
    return record.note.startswith(_AS_DENSE)
