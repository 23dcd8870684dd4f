# SPDX-License-Identifier: Apache-2.0
"""Measure how far two health runs are apart, step by step, and how far the ranks of one run are.

Ranks are joined first: shards compose to the whole, of copies only one is taken. A target that only one side has stays in, as absent on the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from ulpscope.errors import NothingComparableError
from ulpscope.model.health import Drift, HealthSeries, HealthTarget, SeriesPair
from ulpscope.numerics.summary.composing import compose, equal_signs

__all__ = ["drifting_replicas", "joined_ranks", "paired_series"]

_RMS, _NONFINITE = 3, 5


def joined_ranks(series: Sequence[HealthSeries]) -> HealthSeries:
    """Join the ranks of a run into one series: shards are put together, and of copies the first rank's are taken."""
    if len(series) == 1:
        return series[0]
    steps = reduce(np.intersect1d, [each.steps for each in series])
    chosen = [np.searchsorted(each.steps, steps) for each in series]
    places: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for number, each in enumerate(series):
        for row, target in enumerate(each.targets):
            places.setdefault((target.kind, target.name), []).append((number, row))
    joined = [_joined_target(series, chosen, parts) for parts in places.values()]
    has_signs = all(each.signs is not None for each in series)
    return HealthSeries(
        rank=None,
        steps=steps,
        times=series[0].times[chosen[0]],
        targets=tuple(target for target, _, _, _ in joined),
        values=np.stack([values for _, values, _, _ in joined], axis=1) if joined else np.empty((len(steps), 0, 6)),
        present=np.stack([present for _, _, present, _ in joined], axis=1) if joined else np.empty((len(steps), 0), dtype=bool),
        scalars=_joined_scalars(series, chosen),
        signs=_stacked_signs([signs for _, _, _, signs in joined], len(steps)) if has_signs else None,
        num_left_out=max(each.num_left_out for each in series),
    )


def _joined_target(
    series: Sequence[HealthSeries], chosen: Sequence[Any], parts: list[tuple[int, int]]
) -> tuple[HealthTarget, Any, Any, Any]:
    """Join a target of all ranks: target, values [steps, 6], present [steps], signs [steps, bytes] or None."""
    number, row = parts[0]
    target = series[number].targets[row]
    columns = [
        (series[n].targets[r], series[n].values[chosen[n], r], series[n].present[chosen[n], r], _signs(series[n], chosen[n], r))
        for n, r in parts
    ]
    if not target.is_sharded:
        return columns[0]
    counted = [column for column in columns if column[0].is_counted]
    if not counted:
        return columns[0]
    numel = np.array([column[0].numel for column in counted], dtype=np.int64)
    values = np.stack([column[1] for column in counted], axis=1)
    whole = HealthTarget(
        kind=target.kind,
        name=target.name,
        numel=int(numel.sum()),
        global_numel=target.global_numel,
        dtype=target.dtype,
        layer=target.layer,
        num_samples=target.num_samples,
    )
    together = [column[3] for column in counted if column[3] is not None]
    signs = reduce(np.bitwise_or, together) if together and len({each.shape for each in together}) == 1 else None
    joined = compose(values, numel, np.zeros(len(counted), dtype=np.int64), 1)[:, 0]
    return whole, joined, np.all([column[2] for column in counted], axis=0), signs


def _signs(series: HealthSeries, chosen: Any, row: int) -> Any:
    return None if series.signs is None else series.signs[chosen, row]


def _stacked_signs(signs: list[Any], num_steps: int) -> Any:
    width = max((each.shape[1] for each in signs if each is not None), default=0)
    result = np.zeros((num_steps, len(signs), width), dtype=np.uint8)
    for row, each in enumerate(signs):
        if each is not None:
            result[:, row, : each.shape[1]] = each
    return result


def _joined_scalars(series: Sequence[HealthSeries], chosen: Sequence[Any]) -> dict[str, Any]:
    """Take the mean over ranks: each rank has the loss of its own batch."""
    names = dict.fromkeys(name for each in series for name in each.scalars)
    result = {}
    for name in names:
        columns = np.stack([each.scalars[name][rows] for each, rows in zip(series, chosen, strict=True) if name in each.scalars])
        known = ~np.isnan(columns)
        total = np.where(known, columns, 0.0).sum(0)
        result[name] = np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)
    return result


def paired_series(subject: HealthSeries, reference: HealthSeries) -> SeriesPair:
    """Pair the common steps of two runs, target by target."""
    steps = np.intersect1d(subject.steps, reference.steps)
    if not len(steps):
        raise NothingComparableError(
            f"the two runs have no step in common: the subject has {_range(subject.steps)}, the reference {_range(reference.steps)}"
        )
    at_subject, at_reference = np.searchsorted(subject.steps, steps), np.searchsorted(reference.steps, steps)
    keys = dict.fromkeys((target.kind, target.name) for each in (reference, subject) for target in each.targets)
    if not {(t.kind, t.name) for t in subject.targets} & {(t.kind, t.name) for t in reference.targets}:
        raise NothingComparableError(
            f"the two runs watched nothing in common: the subject has {_example(subject)}, the reference {_example(reference)}; "
            "watch both with the same granularity and the same model"
        )
    one, other = _aligned(subject, at_subject, keys), _aligned(reference, at_reference, keys)
    sides = zip(one.targets, other.targets, strict=True)
    targets = tuple(target for mine, theirs in sides if (target := mine or theirs) is not None)
    counts = np.array([_num_owned(target) for target in targets], dtype=np.int64)
    both = one.present & other.present
    similarity = np.where(both, equal_signs(one.signs, other.signs, counts), np.nan)
    same_values = ((one.values == other.values) | (np.isnan(one.values) & np.isnan(other.values))).all(-1)
    same_signs = (one.signs == other.signs).all(-1)
    return SeriesPair(
        steps=steps,
        targets=targets,
        subject=one.values[..., _RMS],
        reference=other.values[..., _RMS],
        present_subject=one.present,
        present_reference=other.present,
        nonfinite_subject=one.values[..., _NONFINITE],
        nonfinite_reference=other.values[..., _NONFINITE],
        similarity=similarity,
        equal=same_values & same_signs & (one.present == other.present),
        repeats_subject=_repeats(one),
        repeats_reference=_repeats(other),
        num_samples=counts,
        scalars={
            name: (subject.scalars[name][at_subject], reference.scalars[name][at_reference])
            for name in subject.scalars
            if name in reference.scalars
        },
    )


class _Aligned:
    """One side, with the targets of both sides; None stands for a target that it lacks."""

    def __init__(self, targets: list[HealthTarget | None], values: Any, present: Any, signs: Any) -> None:
        self.targets, self.values, self.present, self.signs = targets, values, present, signs


def _aligned(series: HealthSeries, rows: Any, keys: dict[tuple[str, str], None]) -> _Aligned:
    places = {(target.kind, target.name): place for place, target in enumerate(series.targets)}
    targets = [series.targets[places[key]] if key in places else None for key in keys]
    mine = np.array([places.get(key, -1) for key in keys], dtype=np.int64)
    has = mine >= 0
    width = 128 if series.signs is None else max(128, series.signs.shape[-1])
    values = np.full((len(rows), len(mine), 6), np.nan)
    present = np.zeros((len(rows), len(mine)), dtype=bool)
    signs = np.zeros((len(rows), len(mine), width), dtype=np.uint8)
    values[:, has] = series.values[rows][:, mine[has]]
    present[:, has] = series.present[rows][:, mine[has]]
    if series.signs is not None:
        signs[:, has, : series.signs.shape[-1]] = series.signs[rows][:, mine[has]]
    return _Aligned(targets, values, present, signs)


def _repeats(side: _Aligned) -> Any:
    """Mark the rows that repeat the row before exactly and are not zero."""
    result = np.zeros(side.present.shape, dtype=bool)
    if len(result) > 1:
        now, before = side.values[1:], side.values[:-1]
        is_same = (now == before).all(-1) & (side.signs[1:] == side.signs[:-1]).all(-1)
        result[1:] = is_same & side.present[1:] & side.present[:-1] & (now[..., _RMS] > 0)
    return result


def _num_owned(target: HealthTarget) -> int:
    if not target.owned:
        return target.num_samples
    return int(np.unpackbits(np.frombuffer(target.owned, dtype=np.uint8)).sum())


def drifting_replicas(series: Sequence[HealthSeries]) -> tuple[Drift, ...]:
    """Find copies of a parameter that were equal on all ranks at first and differ later, the earliest first."""
    if len(series) < 2:
        return ()
    steps = reduce(np.intersect1d, [each.steps for each in series])
    first = series[0]
    places = [{(t.kind, t.name): row for row, t in enumerate(each.targets)} for each in series]
    found = []
    for row, target in enumerate(first.targets):
        if target.kind != "parameter" or target.is_sharded:
            continue
        mine = first.values[np.searchsorted(first.steps, steps), row]
        for each, known in zip(series[1:], places[1:], strict=True):
            other = known.get((target.kind, target.name))
            if other is None:
                continue
            theirs = each.values[np.searchsorted(each.steps, steps), other]
            differs = ~((mine == theirs) | (np.isnan(mine) & np.isnan(theirs))).all(-1)
            if differs.any() and not differs[0]:
                found.append(Drift(int(steps[np.argmax(differs)]), each.rank or 0, target.name))
    return tuple(sorted(found, key=lambda drift: (drift.step, drift.rank)))


def _range(steps: Any) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no steps"


def _example(series: HealthSeries) -> str:
    return ", ".join(f"'{target.kind} {target.name}'" for target in series.targets[:2]) or "nothing"
