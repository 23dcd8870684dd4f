# SPDX-License-Identifier: Apache-2.0
"""Define training state over many steps: the targets, one step, whole series, alerts, and two series compared.

A target is one quantity that capture reads every step: the gradient, the value, the update or an optimizer moment of a parameter (or of a
layer, or of a parameter group), or the result of a module. A step holds six numbers for each target, in the order of `STATISTICS`. They
compose: the numbers of two shards give those of the whole. Arrays are typed `Any` here, since this folder knows the standard library only;
they are NumPy's.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, TypeAlias

from ulpscope.model.comparison.findings import Finding
from ulpscope.model.nouns import dataclass
from ulpscope.model.runs import RunInfo

__all__ = [
    "STATISTICS",
    "Alert",
    "Departure",
    "Drift",
    "Granularity",
    "HealthComparison",
    "HealthLayout",
    "HealthSeries",
    "HealthStep",
    "HealthTarget",
    "HealthVerdict",
    "SeriesPair",
    "Signal",
]

STATISTICS = ("min", "max", "mean", "rms", "zero", "nonfinite")
"""`min` and `max` are over everything but NaN, `mean` and `rms` over the finite elements, NaN where no element is finite; `zero` and
`nonfinite` are shares."""

Granularity: TypeAlias = Literal["parameter", "layer", "group"]
HealthVerdict: TypeAlias = Literal["same", "together", "unrelated", "diverges"]
Signal: TypeAlias = Literal["presence", "finiteness", "setting", "repetition", "stillness", "norm", "signs", "loss", "replicas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTarget:
    """The target of one row of every step.

    `kind` is gradient, unclipped (the gradient before clipping), parameter, update, activation, or moment.<key>. `numel` counts the
    elements that this rank holds (1 for an activation, whose size may change), `global_numel` those that all ranks hold together.
    `is_counted` is False on a rank that holds a copy of a shard that another rank counts. The signs at `num_samples` positions of the whole
    tensor are kept; on a rank that holds only some of the positions, `owned` has a bit for each of them that it holds.
    """

    kind: str
    name: str
    numel: int
    global_numel: int
    dtype: str = ""
    layer: str = ""
    is_counted: bool = True
    num_samples: int = 0
    owned: bytes = b""

    @property
    def is_sharded(self) -> bool:
        return self.numel != self.global_numel


@dataclass(frozen=True, slots=True)
class HealthLayout:
    """The rows of a step, and the bounds of its histograms."""

    targets: tuple[HealthTarget, ...]
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthStep:
    """One step of one rank: `statistics` is float64 [targets, 6], `histograms` int64 [targets, bounds + 1] or None.

    `signs` holds one bit for each sampled position, set where the value is positive; each target begins at a whole byte.
    """

    step: int
    time: float
    layout: HealthLayout
    statistics: Any
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: Any = None
    signs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSeries:
    """Many steps of one rank, or of all ranks together, as columns.

    `values` is float64 [steps, targets, 6] with NaN where a step has no such target; `signs` is uint8 [steps, targets, bytes] or None.
    `present` says which steps have which targets. `num_left_out` steps were thinned out to stay within memory.
    """

    rank: int | None
    steps: Any
    times: Any
    targets: tuple[HealthTarget, ...]
    values: Any
    present: Any
    scalars: dict[str, Any] = field(default_factory=dict)
    signs: Any = None
    bounds: tuple[float, ...] = ()
    histograms: Any = None
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A change in a live run that its own past does not explain.

    `kind` is nonfinite, exploding, vanishing, dead, stuck, repeated, ratio or replicas; `names` are the targets, worst first.
    """

    kind: str
    step: int
    rank: int
    headline: str
    names: tuple[str, ...] = ()
    value: float | None = None
    usual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPair:
    """The steps and targets of two series side by side.

    Arrays are [steps, targets]: `subject` and `reference` hold the rms, `similarity` the share of equal signs, `equal` whether all known
    numbers agree bitwise, and `repeats_*` whether a side repeats the row of the step before exactly. `num_samples` is [targets].
    """

    steps: Any
    targets: tuple[HealthTarget, ...]
    subject: Any
    reference: Any
    present_subject: Any
    present_reference: Any
    nonfinite_subject: Any
    nonfinite_reference: Any
    similarity: Any
    equal: Any
    repeats_subject: Any
    repeats_reference: Any
    num_samples: Any
    scalars: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drift:
    """A parameter that two ranks hold copies of, equal at first: `rank` differs from the first rank from `step` on."""

    step: int
    rank: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The step at which one target of the subject leaves the reference, seen in `signal`, at `multiple` times what the rule allows."""

    step: int
    signal: Signal
    kind: str
    name: str
    layer: str
    multiple: float
    subject: float
    reference: float
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthComparison:
    """Two health runs, step by step. It holds no formatting; each renderer is a function of it.

    `names` are the gradients in the order of the model and `numels` their sizes. `similarity` is the share of equal signs, float64 [steps,
    names]; `log_ratio`, of the same shape, the natural logarithm of the subject's gradient norm over the reference's; NaN where a side
    lacks the gradient. `chance` is the share of equal signs of unrelated runs, whose gradients agree no better than by chance from the
    first step on.
    """

    subject: RunInfo
    reference: RunInfo
    subject_path: str
    reference_path: str
    findings: tuple[Finding, ...]
    departures: tuple[Departure, ...]
    steps: Any
    names: tuple[str, ...]
    numels: tuple[int, ...]
    similarity: Any
    log_ratio: Any
    subject_scalars: dict[str, Any] = field(default_factory=dict)
    reference_scalars: dict[str, Any] = field(default_factory=dict)
    is_equal: bool = False
    alerts: tuple[Alert, ...] = ()
    chance: float | None = None

    @property
    def verdict(self) -> HealthVerdict:
        if any(finding.level == "fault" for finding in self.findings):
            return "diverges"
        if self.chance is not None:
            return "unrelated"
        return "same" if self.is_equal else "together"

    @property
    def parted_at(self) -> int | None:
        """Return the first step at which the runs are apart by more than their own noise."""
        return min((departure.step for departure in self.departures), default=None)
