# SPDX-License-Identifier: Apache-2.0
"""Compare two devices (`compare_devices`): the ratio of their errors in one recording, each against the same higher precision.

The document's list says by which standard a call is judged. A table that has no figures of that standard is judged by `benchmark`, and a
table of the rules `derived` by those rules: a device fails what it failed alone, and the ratio of the errors stands beside it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from math import isfinite
from pathlib import Path

from ulpscope.errors import InputError, NothingComparableError
from ulpscope.judge.published.standard_tables import EDITIONS, Edition
from ulpscope.judge.published.standards import judge_standard, standard_of
from ulpscope.model import DTYPES
from ulpscope.model.check.checks import CheckStatus
from ulpscope.model.check.standards import DeviceComparison, DevicePair, DeviceRow, Standard, StandardVerdict
from ulpscope.store.foreign.check_table import read_check_table

__all__ = ["compare_devices"]

_Key = tuple[tuple[str, ...], int]
_STATUSES: dict[str, CheckStatus] = {"passed": "passed", "warning": "warning", "failed": "failed"}


def compare_devices(subject: str | os.PathLike[str], reference: str | os.PathLike[str], *, edition: str = "2024") -> DeviceComparison:
    """Compare two tables of `ulpscope check` (or of api_accuracy_checker): the device under test, and the one that it is compared with."""
    if edition not in EDITIONS:
        raise InputError(f"there is no edition {edition!r} of the standards; choose one of {', '.join(EDITIONS)}")
    ours, theirs = (read_check_table(Path(path)) for path in (subject, reference))
    pairs = tuple(_pairs(ours, theirs, EDITIONS[edition]))
    if not any(pair.subject and pair.reference for pair in pairs):
        raise NothingComparableError(
            f"'{subject}' ({len(ours)} rows) and '{reference}' ({len(theirs)} rows) have no result in common; "
            "check the same recording on both devices"
        )
    return DeviceComparison(subject_path=str(subject), reference_path=str(reference), edition=edition, pairs=pairs)


def _pairs(ours: Iterable[DeviceRow], theirs: Iterable[DeviceRow], edition: Edition) -> Iterator[DevicePair]:
    """Pair the rows in the order of the subject; rows that only the reference has come last."""
    others = dict(_numbered(theirs))
    for key, row in _numbered(ours):
        other = others.pop(key, None)
        yield DevicePair(subject=row, reference=other, verdict=_verdict(row, other, edition))
    for row in others.values():
        verdict = _skipped("benchmark", "the subject's table does not have it")
        yield DevicePair(subject=None, reference=row, verdict=verdict)


def _numbered(rows: Iterable[DeviceRow]) -> Iterator[tuple[_Key, DeviceRow]]:
    """Number rows of the same name by their order."""
    seen: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        yield (row.key, seen[row.key]), row
        seen[row.key] += 1


def _verdict(row: DeviceRow, other: DeviceRow | None, edition: Edition) -> StandardVerdict:
    standard = standard_of(row.op, row.dtype)
    if other is None:
        return _skipped(standard, "the reference's table does not have it")
    for side, each in (("subject", row), ("reference", other)):
        if each.status == "skipped" or not (each.metrics or each.error is not None or each.status):
            return _skipped(standard, f"it was skipped on the {side}'s device: {each.reason or 'no figures'}")
    if row.dtype != other.dtype or row.shape != other.shape:
        return _skipped(standard, f"it is {row.dtype} {row.shape} here and {other.dtype} {other.shape} there")
    if not row.metrics:
        return _by_own_rules(row, other)
    chosen = standard if standard == "benchmark" or _has_figures(standard, row) else "benchmark"
    return judge_standard(chosen, row.metrics, op=row.op, dtype=row.dtype, other=other.metrics, edition=edition)


_FIGURES: dict[Standard, str] = {"binary": "mismatch", "absolute": "rel_errors", "ulp": "ulp_beyond", "thousandth": "within_1e3"}


def _has_figures(standard: Standard, row: DeviceRow) -> bool:
    known = DTYPES.get(row.dtype)
    return _FIGURES[standard] in row.metrics or (known is not None and not known.is_floating)


def _by_own_rules(row: DeviceRow, other: DeviceRow) -> StandardVerdict:
    ratios = {}
    if row.error is not None and other.error and isfinite(row.error) and isfinite(other.error):
        ratios["error"] = row.error / other.error
    status = _STATUSES.get(row.status, "skipped")
    reason = row.reason if status != "passed" else ""
    if status == "failed" and other.status == "failed":
        reason = f"it fails on both devices: {reason}"
    return StandardVerdict(standard="derived", status=status, reason=reason, multiple=ratios.get("error"), ratios=ratios)


def _skipped(standard: Standard, reason: str) -> StandardVerdict:
    return StandardVerdict(standard=standard, status="skipped", reason=reason)
