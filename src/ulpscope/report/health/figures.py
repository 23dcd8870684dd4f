# SPDX-License-Identifier: Apache-2.0
"""Choose what the pictures of a health comparison show, before any library draws it: which curves, which rows, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ulpscope.model.health import HealthComparison

__all__ = ["Curves", "HeatMap", "heat_maps", "loss_curves", "norm_curves", "similarities_of", "similarity_curves"]

MOST_CURVES = 6
MOST_ROWS = 60
MOST_COLUMNS = 240


class Curves(NamedTuple):
    """Lines over steps; `band` is the range between the lowest and highest of all targets, or None."""

    title: str
    unit: str
    steps: Any
    lines: dict[str, Any]
    band: tuple[Any, Any] | None
    parted_at: int | None


class HeatMap(NamedTuple):
    """A number for each layer and stretch of steps; `middle` is the number at which the sides agree."""

    title: str
    layers: tuple[str, ...]
    first_steps: Any
    values: Any
    low: float
    high: float
    middle: float
    parted_at: int | None


def similarity_curves(comparison: HealthComparison) -> Curves:
    """Return the share of equal signs of the gradients that are furthest apart, and of all together."""
    lines = {"all parameters": _whole(comparison)} | _chosen(comparison, comparison.similarity)
    return Curves(
        "sign similarity of gradients", "share of equal signs", comparison.steps, lines, _band(comparison.similarity), comparison.parted_at
    )


def norm_curves(comparison: HealthComparison) -> Curves:
    """Return the ratio of gradient norms, subject over reference, of the gradients that are furthest apart."""
    ratio = np.exp(np.clip(comparison.log_ratio, -7, 7))
    return Curves(
        "gradient norm, subject over reference", "ratio", comparison.steps, _chosen(comparison, ratio), _band(ratio), comparison.parted_at
    )


def loss_curves(comparison: HealthComparison) -> Curves | None:
    """Return the loss of both sides, where both have one."""
    subject, reference = comparison.subject_scalars.get("loss"), comparison.reference_scalars.get("loss")
    if subject is None or reference is None:
        return None
    return Curves("loss", "loss", comparison.steps, {"subject": subject, "reference": reference}, None, comparison.parted_at)


def heat_maps(comparison: HealthComparison) -> tuple[HeatMap, ...]:
    """Return heat maps of sign similarity and norm ratio by layer and step."""
    found = []
    for title, values, low, high, middle in (
        ("sign similarity by layer", comparison.similarity, 0.0, 1.0, 1.0),
        ("ln of the norm ratio by layer", comparison.log_ratio, -2.3, 2.3, 0.0),
    ):
        layers, rows = _by_layer(comparison.names, values, is_worst_small=middle == 1.0)
        columns, first_steps = _binned(rows, comparison.steps, is_worst_small=middle == 1.0)
        found.append(HeatMap(title, layers, first_steps, columns, low, high, middle, comparison.parted_at))
    return tuple(found)


def _chosen(comparison: HealthComparison, values: Any) -> dict[str, Any]:
    """Choose the targets that left first, then those that are furthest apart at the end."""
    names = list(dict.fromkeys(each.name for each in comparison.departures if each.name in comparison.names))
    size = np.nan_to_num(np.abs(comparison.log_ratio)).mean(axis=0) + np.nan_to_num(1 - comparison.similarity).mean(axis=0)
    names += [comparison.names[place] for place in np.argsort(-size, kind="stable") if comparison.names[place] not in names]
    places = {name: place for place, name in enumerate(comparison.names)}
    return {name: values[:, places[name]] for name in names[:MOST_CURVES]}


def _whole(comparison: HealthComparison) -> Any:
    """Return the similarity of all gradients together, each weighted by its size."""
    known = ~np.isnan(comparison.similarity)
    weights = np.where(known, np.asarray(comparison.numels, dtype=float), 0.0)
    total = weights.sum(axis=1)
    equal = (np.where(known, comparison.similarity, 0.0) * weights).sum(axis=1)
    return np.where(total > 0, equal / np.maximum(total, 1), np.nan)


def _band(values: Any) -> tuple[Any, Any] | None:
    if not values.size or np.isnan(values).all():
        return None
    return np.fmin.reduce(values, axis=1), np.fmax.reduce(values, axis=1)


def _by_layer(names: Sequence[str], values: Any, *, is_worst_small: bool) -> tuple[tuple[str, ...], Any]:
    """Return one row for each layer, the worst of its parameters; neighbouring layers share a row where there are too many."""
    layers: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0] or name, []).append(place)
    groups = list(layers.items())
    size = -(-len(groups) // MOST_ROWS)
    joined = [groups[first : first + size] for first in range(0, len(groups), size)] if size else []
    titles = tuple(each[0][0] if len(each) == 1 else f"{each[0][0]} ... {each[-1][0]}" for each in joined)
    rows = [_worst(values[:, [place for _, places in each for place in places]], is_worst_small) for each in joined]
    return titles, np.array(rows).reshape(len(rows), values.shape[0])


def _worst(values: Any, is_worst_small: bool) -> Any:
    if is_worst_small:
        return np.fmin.reduce(values, axis=1)
    low, high = np.fmin.reduce(values, axis=1), np.fmax.reduce(values, axis=1)
    return np.where(np.abs(low) > np.abs(high), low, high)


def _binned(rows: Any, steps: Any, *, is_worst_small: bool) -> tuple[Any, Any]:
    """Join steps into at most MOST_COLUMNS columns, each the worst of its steps."""
    size = max(1, -(-len(steps) // MOST_COLUMNS))
    firsts = range(0, len(steps), size)
    columns = [_worst(rows[:, first : first + size], is_worst_small) for first in firsts]
    return np.array(columns).T.reshape(len(rows), len(columns)), np.array([steps[first] for first in firsts])


def similarities_of(comparison: HealthComparison) -> dict[str, Any]:
    """Return sign similarity by parameter, and of all together under `summary`, as the older tables have it."""
    found = {name: comparison.similarity[:, place] for place, name in enumerate(comparison.names)}
    return found | {"summary": _whole(comparison)}
