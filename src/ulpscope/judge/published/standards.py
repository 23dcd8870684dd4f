# SPDX-License-Identifier: Apache-2.0
"""The published standards as functions from figures to a verdict; every number they use stands in `standard_tables`.

They are kept for people who know them. A fixed threshold knows neither the inputs nor the operation: `derived` is what we trust.
Three things hold for all of them: the worst figure decides (a failure wins over a warning), NaN and infinities have to agree in place,
and integers and booleans have to be equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite, isnan

from ulpscope.judge.published.standard_tables import (
    API_STANDARDS,
    CHECKER,
    CHECKER_COSINE,
    CHECKER_MAX_ABS,
    EDITION_2024,
    THOUSANDTH,
    ULP,
    Edition,
    RatioLimit,
)
from ulpscope.model import DTYPES, CallName
from ulpscope.model.check.checks import CheckStatus
from ulpscope.model.check.standards import STANDARD_METRICS, Standard, StandardLimits, StandardMeasurement, StandardVerdict
from ulpscope.model.comparison.measurements import Undefined

__all__ = ["figures_of", "judge_standard", "limits_of", "standard_of", "worst_status"]

_OPERATOR = re.compile(r"__[ir]?(add|mul|sub|div|truediv|matmul)__")
_RANKING: tuple[CheckStatus, ...] = ("skipped", "passed", "warning", "failed")
_NEXT_TO_NOTHING = 10_000.0
_REALS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def standard_of(op: str, dtype: str) -> Standard:
    """The standard that the document's list gives to a call with a result of that dtype.

    >>> standard_of("functional.linear", "float16"), standard_of("Tensor.__imul__", "float32"), standard_of("torch.exp", "float32")
    ('ulp', 'absolute', 'benchmark')
    """
    known = DTYPES.get(dtype)
    if known is not None and not known.is_floating:
        return "binary"
    if dtype.startswith("float8"):
        return "ulp"
    return API_STANDARDS.get(_folded(CallName(op, 0).short), "benchmark")


def _folded(name: str) -> str:
    """`mul_`, `__mul__` and `__imul__` are `mul`."""
    operator = _OPERATOR.fullmatch(name)
    if operator:
        return {"truediv": "div"}.get(operator[1], operator[1])
    return name.rstrip("_") if not name.startswith("__") else name


def limits_of(dtype: str, edition: Edition = EDITION_2024) -> StandardLimits | None:
    return edition.limits.get(_REALS.get(dtype, dtype))


def figures_of(measured: StandardMeasurement) -> dict[str, float]:
    """The defined metrics by name, as they stand in a table."""
    values = {name: getattr(measured, name) for name in STANDARD_METRICS}
    return {name: value for name, value in values.items() if not isinstance(value, Undefined)}


def worst_status(statuses: Mapping[str, CheckStatus]) -> CheckStatus:
    return max(statuses.values(), key=_RANKING.index, default="skipped")


def judge_standard(
    standard: Standard,
    figures: Mapping[str, float],
    *,
    op: str = "",
    dtype: str,
    other: Mapping[str, float] | None = None,
    edition: Edition = EDITION_2024,
) -> StandardVerdict:
    """What a standard says about one result; `other` are the figures of the same result on the device that it is compared with."""
    known = DTYPES.get(dtype)
    if known is not None and not known.is_floating:
        return _binary("binary" if standard != "checker" else "checker", figures)
    if figures.get("nonfinite_errors", 0.0) > 0:
        return _verdict(standard, {"nonfinite_errors": "failed"}, "NaN or infinities stand at different places", inf)
    match standard:
        case "checker":
            return _checker(figures, _REALS.get(dtype, dtype))
        case "binary":
            return _binary(standard, figures)
        case "absolute":
            return _absolute(figures)
        case "thousandth":
            return _thousandth(figures)
        case "ulp":
            return _ulp(figures, other, dtype, edition)
        case "benchmark":
            return _benchmark(figures, other, op, dtype, edition)
        case "derived":
            raise ValueError("derived verdicts come from replay, not from these figures")


def _verdict(
    standard: Standard,
    statuses: Mapping[str, CheckStatus],
    reason: str = "",
    multiple: float | None = None,
    ratios: Mapping[str, float] | None = None,
) -> StandardVerdict:
    return StandardVerdict(
        standard=standard,
        status=worst_status(statuses),
        reason=reason,
        multiple=multiple,
        ratios=dict(ratios or {}),
        statuses=dict(statuses),
    )


def _skipped(standard: Standard, reason: str) -> StandardVerdict:
    return StandardVerdict(standard=standard, status="skipped", reason=reason)


def _lacks(standard: Standard, figures: Mapping[str, float], *names: str) -> StandardVerdict | None:
    missing = [name for name in names if name not in figures]
    if not missing:
        return None
    if (
        not any(name in figures for name in STANDARD_METRICS if name not in ("mismatch", "nonfinite_errors"))
        and figures.get("mismatch") == 0
    ):
        return _verdict(standard, {"mismatch": "passed"})
    return _skipped(standard, f"the standard {standard} needs {' and '.join(missing)}, which this dtype or this table does not have")


def _checker(figures: Mapping[str, float], dtype: str) -> StandardVerdict:
    limits = CHECKER.get(dtype)
    if limits is None:
        return _skipped("checker", f"the rules checker say nothing about {dtype}")
    if lacking := _lacks("checker", figures, "max_abs", limits.failed[0], limits.warning[0]):
        return lacking
    cosine = figures.get("cosine")
    if cosine is not None and not cosine > CHECKER_COSINE:
        distance = (1 - cosine) / (1 - CHECKER_COSINE)
        return _verdict("checker", {"cosine": "failed"}, f"cosine {cosine:.6g}, needs more than {CHECKER_COSINE}", distance)
    if figures["max_abs"] < CHECKER_MAX_ABS:
        return _verdict("checker", {"max_abs": "passed"}, multiple=0.0)
    shares: dict[str, CheckStatus] = {}
    reasons: list[str] = []
    multiples: list[float] = []
    for (name, least), status in ((limits.failed, "failed"), (limits.warning, "warning")):
        is_passed = figures[name] > least
        shares[name] = "passed" if is_passed else status  # type: ignore[assignment]
        multiples.append((1 - figures[name]) / (1 - least))
        if not is_passed:
            reasons.append(f"{figures[name]:.6g} of the elements are within {name.replace('within_1e', '1e-')}, needs more than {least}")
    return _verdict("checker", shares, reasons[0] if reasons else "", max(multiples))


def _binary(standard: Standard, figures: Mapping[str, float]) -> StandardVerdict:
    if lacking := _lacks(standard, figures, "mismatch"):
        return lacking
    share = figures["mismatch"]
    if share == 0:
        return _verdict(standard, {"mismatch": "passed"}, multiple=0.0)
    return _verdict(standard, {"mismatch": "failed"}, f"{share:.3g} of the elements differ where none may", inf)


def _absolute(figures: Mapping[str, float]) -> StandardVerdict:
    if lacking := _lacks("absolute", figures, "rel_errors", "abs_errors"):
        return lacking
    texts = {"rel_errors": "normal elements beyond the relative limit", "abs_errors": "small elements beyond the absolute limit"}
    statuses: dict[str, CheckStatus] = {name: "passed" if figures[name] == 0 else "failed" for name in texts}
    reasons = [f"{figures[name]:.3g} of the {text}" for name, text in texts.items() if figures[name]]
    return _verdict("absolute", statuses, "; ".join(reasons), inf if reasons else 0.0)


def _thousandth(figures: Mapping[str, float]) -> StandardVerdict:
    if lacking := _lacks("thousandth", figures, "within_1e3"):
        return lacking
    share = figures["within_1e3"]
    multiple = (1 - share) / (1 - THOUSANDTH)
    if share >= THOUSANDTH:
        return _verdict("thousandth", {"within_1e3": "passed"}, multiple=multiple)
    return _verdict(
        "thousandth", {"within_1e3": "failed"}, f"{share:.6g} of the elements are within a thousandth, needs {THOUSANDTH}", multiple
    )


def _ulp(figures: Mapping[str, float], other: Mapping[str, float] | None, dtype: str, edition: Edition) -> StandardVerdict:
    limits = ULP.get(dtype)
    if limits is None:
        return _skipped("ulp", f"the standard ulp says nothing about {dtype}")
    if lacking := _lacks("ulp", figures, "ulp_beyond", "ulp_mean"):
        return lacking
    share, mean = figures["ulp_beyond"], figures["ulp_mean"]
    ratios = {"ulp_beyond": _ratio(share, other["ulp_beyond"], dtype, edition)} if other and "ulp_beyond" in other else {}
    multiples = [share / limits.beyond, *([mean / limits.mean] if limits.mean else []), *ratios.values()]
    is_passed = share < limits.beyond or (limits.mean is not None and mean < limits.mean) or ratios.get("ulp_beyond", inf) < 1
    if is_passed:
        return _verdict("ulp", {"ulp_beyond": "passed"}, multiple=min(multiples), ratios=ratios)
    counted = edition.limits[dtype].ulp
    compared = f", {ratios['ulp_beyond']:.3g} times the other device's share" if ratios else ""
    reason = f"{share:.3g} of the elements are off by more than {counted:g} units in the last place, {mean:.3g} units on average{compared}"
    return _verdict("ulp", {"ulp_beyond": "failed"}, reason, max(1.0, min(multiples)), ratios)


def _benchmark(figures: Mapping[str, float], other: Mapping[str, float] | None, op: str, dtype: str, edition: Edition) -> StandardVerdict:
    if dtype not in edition.limits:
        return _skipped("benchmark", f"the standard benchmark says nothing about {dtype}")
    if other is None:
        return _skipped("benchmark", "the standard benchmark needs the same result of another device")
    counted = [name for name in edition.ratios if name not in edition.shown]
    if lacking := _lacks("benchmark", figures, *counted) or _lacks("benchmark", other, *counted):
        return lacking
    if other.get("nonfinite_errors", 0.0) > 0:
        return _skipped("benchmark", "the other device has NaN or infinities at wrong places")
    level = edition.levels.get(edition.level_of.get(_folded(CallName(op, 0).short) if op else "", ""), {})
    limits = {**edition.ratios, **level}
    ratios = {name: _ratio(figures[name], other[name], dtype, edition) for name in limits if name in figures and name in other}
    statuses: dict[str, CheckStatus] = {name: _within(ratio, limits[name]) for name, ratio in ratios.items()}
    decisive = {name: statuses[name] for name in counted}
    multiples = {name: ratios[name] / limits[name].passed for name in counted}
    worst = max(counted, key=lambda name: (_RANKING.index(statuses[name]), multiples[name]))
    reason = f"{worst} is {ratios[worst]:.3g} times the other device's" if statuses[worst] != "passed" else ""
    return StandardVerdict(
        standard="benchmark",
        status=worst_status(decisive),
        reason=reason,
        multiple=max(multiples.values()),
        ratios=ratios,
        statuses=statuses,
    )


def _within(ratio: float, limit: RatioLimit) -> CheckStatus:
    if isnan(ratio) or ratio > limit.warning:
        return "failed"
    return "passed" if ratio <= limit.passed else "warning"


def _ratio(subject: float, reference: float, dtype: str, edition: Edition) -> float:
    """Without a floor: 1 where neither errs, and next to infinity where only the subject does."""
    if not (isfinite(subject) and isfinite(reference)):
        return 1.0 if subject == reference else inf
    if edition.floors:
        return abs(subject) / max(abs(reference), edition.floors.get(dtype, edition.floors[""]))
    if reference == 0:
        return 1.0 if subject == 0 else _NEXT_TO_NOTHING
    return abs(subject / reference)
