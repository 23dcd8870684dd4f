# SPDX-License-Identifier: Apache-2.0
"""What the older tools write of a check: a row for each result, a row for each API, and the tensors of one that failed."""

from __future__ import annotations

from dataclasses import field

from ulpscope.model.check.checks import CheckStatus
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import Phase, TensorData

__all__ = ["CheckDetail", "CheckOutcome", "SavedFailure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDetail:
    """One result of one API. `key` is its name in the recording, `name` that of the row.

    `metrics` holds what is defined of `STANDARD_METRICS`; `golden_dtype` is what the result was computed in that they compare with.
    A call that was skipped has a row without a result.
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
    """One API, both phases. None means that there is no such phase."""

    key: str
    forward: CheckStatus | None = None
    backward: CheckStatus | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFailure:
    """The tensors of a failed call by name: `input.0`, `gradient.0`, `device.output.0`, `exact.output.0`, `recorded.output.0`."""

    key: str
    phase: str
    reason: str
    tensors: dict[str, TensorData] = field(default_factory=dict)
