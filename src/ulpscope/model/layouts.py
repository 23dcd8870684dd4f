# SPDX-License-Identifier: Apache-2.0
"""Mark the record of a sparse tensor: its values are those of the dense tensor that it stands for."""

from __future__ import annotations

from ulpscope.model.records import TensorRecord

__all__ = ["as_dense", "is_sparse"]

_AS_DENSE = "values of the dense tensor; its layout is "


def as_dense(layout: str) -> str:
    """Write the note of a sparse tensor whose record holds the values of the dense one."""
    return f"{_AS_DENSE}{layout}"


def is_sparse(record: TensorRecord) -> bool:
    """Tell whether a record of a sparse tensor holds the values of the dense one."""
    return record.note.startswith(_AS_DENSE)
