# SPDX-License-Identifier: Apache-2.0
"""Define how calls are checked: the options, and the rule sets beside `derived`, each a function from a call's results to judged slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ulpscope.workflows.check.standard_rules import STANDARD_RULES

if TYPE_CHECKING:
    import torch

    from ulpscope.model import CallRecord, Slot
    from ulpscope.model.check.checks import CheckedSlot
    from ulpscope.replay import Program

__all__ = ["RULES", "CheckOptions", "Judged", "Precision"]

Precision = Literal["auto", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of a check: everything that a worker has to know. `edition` is that of the published standards."""

    device: str = "cpu"
    rules: str = "derived"
    precision: Precision = "auto"
    edition: str = "2024"
    seed: int = 0
    overflow: bool = False
    failures: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The part of a call that a rule set sees: the call, to be run again in any precision, and the device's results."""

    record: CallRecord
    program: Program
    made: Mapping[Slot, torch.Tensor]
    precision: Precision = "auto"
    edition: str = "2024"


RULES: dict[str, Callable[[Judged], Iterable[CheckedSlot]]] = dict(STANDARD_RULES)
