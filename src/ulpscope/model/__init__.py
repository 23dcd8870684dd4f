# SPDX-License-Identifier: Apache-2.0
"""Define the nouns that travel between the stages: frozen, typed, standard library only."""

from typing import TYPE_CHECKING, Any

from ulpscope.model.comparison.bands import BandKey, Bands
from ulpscope.model.comparison.coverage import PART_KINDS, Coverage, Gap, PartKind, joined_gaps
from ulpscope.model.comparison.findings import Comparison, ComparisonVerdict, CondensedSteps, Finding, FindingLevel, Histogram
from ulpscope.model.comparison.measurements import (
    FingerprintMeasurement,
    Measurement,
    Metric,
    NotMeasured,
    SummaryMeasurement,
    TensorMeasurement,
    Undefined,
)
from ulpscope.model.comparison.pairs import MatchedBy, Pair, SlotPair
from ulpscope.model.comparison.replays import REPLAY_MODES, CallReplay, OperandFormat, PairReplay, ReplayMode, SlotReplay, SystemicPrecision
from ulpscope.model.comparison.verdicts import (
    RULE_NAMES,
    Amplification,
    ArgumentDifference,
    Behind,
    Contribution,
    JudgedCall,
    JudgedSlot,
    Side,
    Verdict,
    VerdictLevel,
)
from ulpscope.model.dtypes import DTYPES, DType, Kind, dtype
from ulpscope.model.names import INPUT_ROLES, OUTPUT_ROLES, ROLES, CallName, Role, Slot
from ulpscope.model.protocols import AbleSink, DraftCall, DraftTensor, FrameSink, Renderer, Run, Sink, SinkAbilities, abilities_of
from ulpscope.model.records import (
    Arguments,
    CallRecord,
    Frame,
    Level,
    Modes,
    Phase,
    Summary,
    TensorData,
    TensorRecord,
    view_content,
)
from ulpscope.model.runs import FORMAT_VERSION, LedgerEntry, RunInfo

if TYPE_CHECKING:
    from ulpscope.model.nonfinite import NearMiss, NonFinite, NonFiniteCall, NonFiniteEvent, NonFiniteKind, NonFiniteReport

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "INPUT_ROLES",
    "OUTPUT_ROLES",
    "PART_KINDS",
    "REPLAY_MODES",
    "ROLES",
    "RULE_NAMES",
    "AbleSink",
    "Amplification",
    "ArgumentDifference",
    "Arguments",
    "BandKey",
    "Bands",
    "Behind",
    "CallName",
    "CallRecord",
    "CallReplay",
    "Comparison",
    "ComparisonVerdict",
    "CondensedSteps",
    "Contribution",
    "Coverage",
    "DType",
    "DraftCall",
    "DraftTensor",
    "Finding",
    "FindingLevel",
    "FingerprintMeasurement",
    "Frame",
    "FrameSink",
    "Gap",
    "Histogram",
    "JudgedCall",
    "JudgedSlot",
    "Kind",
    "LedgerEntry",
    "Level",
    "MatchedBy",
    "Measurement",
    "Metric",
    "Modes",
    "NearMiss",
    "NonFinite",
    "NonFiniteCall",
    "NonFiniteEvent",
    "NonFiniteKind",
    "NonFiniteReport",
    "NotMeasured",
    "OperandFormat",
    "Pair",
    "PairReplay",
    "PartKind",
    "Phase",
    "Renderer",
    "ReplayMode",
    "Role",
    "Run",
    "RunInfo",
    "Side",
    "Sink",
    "SinkAbilities",
    "Slot",
    "SlotPair",
    "SlotReplay",
    "Summary",
    "SummaryMeasurement",
    "SystemicPrecision",
    "TensorData",
    "TensorMeasurement",
    "TensorRecord",
    "Undefined",
    "Verdict",
    "VerdictLevel",
    "abilities_of",
    "dtype",
    "joined_gaps",
    "view_content",
]


def __getattr__(name: str) -> Any:
    """Import the nouns of the hunt for infinities when somebody asks for one of them: every other command does without."""
    if name not in ("NearMiss", "NonFinite", "NonFiniteCall", "NonFiniteEvent", "NonFiniteKind", "NonFiniteReport"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ulpscope.model import nonfinite

    return getattr(nonfinite, name)
