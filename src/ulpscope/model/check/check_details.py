# SPDX-License-Identifier: Apache-2.0
"""Define what the older tools write of a check: a row for each result, a row for each API, and the tensors of each failed call."""

from __future__ import annotations

from dataclasses import field

from ulpscope.model.check.checks import CheckStatus
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import Phase, TensorData

__all__ = ["CheckDetail", "CheckOutcome", "SavedFailure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDetail:
    """One result of one API, as a row. `key` is the name of the call in the recording, `name` the name of the row.

    `metrics` holds those of `STANDARD_METRICS` that have a value; `golden_dtype` is the dtype of the exact result that the tools compare
    with. A skipped call has one row, without a result.
    """

    key: str
    phase: Phase
    name: str
    index: int | None = None
    golden_dtype: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    status: CheckStatus = "skipped"
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """The statuses of one API, one for each phase; None where the call has no such phase."""

    key: str
    forward: CheckStatus | None = None
    backward: CheckStatus | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFailure:
    """The tensors of a failed call, by name: `input.0`, `gradient.0`, `device.output.0`, `exact.output.0`, `recorded.output.0`."""

    key: str
    phase: str
    reason: str
    tensors: dict[str, TensorData] = field(default_factory=dict)
