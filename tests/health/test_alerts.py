# SPDX-License-Identifier: Apache-2.0
"""Alerts: each kind is raised once, for the right target, at the right step, and not by ordinary noise or a steady decline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ulpscope.judge.health.alerts import Vigil
from ulpscope.model.health import Alert, HealthLayout, HealthStep, HealthTarget

NAMES = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
KINDS = ("gradient", "update", "parameter")
TARGETS = tuple(HealthTarget(kind=kind, name=name, numel=64, global_numel=64) for kind in KINDS for name in NAMES)
ACTIVATION = HealthTarget(kind="activation", name="relu", numel=1, global_numel=1)
LAYOUT = HealthLayout((*TARGETS, ACTIVATION))
ROWS = {(target.kind, target.name): row for row, target in enumerate(LAYOUT.targets)}
RMS, ZERO, NONFINITE = 3, 4, 5


def steps(count: int, seed: int = 0) -> list[Any]:
    """Return statistics of an ordinary run: noise of 20 %, and gradients that decline by a factor of e in 100 steps."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        rows = np.zeros((len(LAYOUT.targets), 6))
        rows[:, RMS] = np.exp(0.2 * chance.standard_normal(len(rows)) - 0.01 * number)
        rows[:, 2] = chance.standard_normal(len(rows))
        for name in NAMES:
            rows[ROWS["update", name], RMS] *= 1e-3
            rows[ROWS["parameter", name], RMS] = 1.0
        found.append(rows)
    return found


def alerts(found: list[Any], scalars: dict[str, float] | None = None) -> list[Alert]:
    vigil = Vigil()
    return [
        alert
        for number, rows in enumerate(found)
        for alert in vigil.observe(HealthStep(step=number, time=0.0, layout=LAYOUT, statistics=rows, scalars=scalars or {}))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_run_raises_nothing(seed: int) -> None:
    assert alerts(steps(400, seed)) == []


@pytest.mark.parametrize(("kind", "factor"), [("exploding", 100.0), ("vanishing", 0.001), ("vanishing", 0.0)])
def test_gradients_out_of_proportion(kind: str, factor: float) -> None:
    found = steps(60)
    for rows in found[50:]:
        rows[ROWS["gradient", "fc2.weight"], RMS] *= factor
    (alert,) = alerts(found)
    assert (alert.kind, alert.step, alert.names) == (kind, 50, ("fc2.weight",))
    assert alert.usual == pytest.approx(0.8, rel=0.5)


def test_many_at_once_are_one_alert_worst_first() -> None:
    found = steps(60)
    found[50][[ROWS["gradient", name] for name in NAMES], RMS] *= 50
    found[50][ROWS["gradient", "fc1.bias"], RMS] *= 50
    (alert,) = alerts(found)
    assert alert.names[0] == "fc1.bias"
    assert set(alert.names) == set(NAMES)
    assert "fc1.bias and 3 more" in alert.headline


def test_values_that_are_not_finite() -> None:
    found = steps(3)
    found[1][ROWS["gradient", "fc1.weight"], NONFINITE] = 0.5
    assert [(alert.kind, alert.step) for alert in alerts(found)] == [("nonfinite", 1)]
    assert alerts(found, {"scale": 65536.0}) == [], "a scaler looks for its scale by overflowing"


def test_a_parameter_that_is_never_updated() -> None:
    found = steps(40)
    for rows in found:
        rows[ROWS["update", "fc1.weight"], RMS] = 0.0
    for rows in found[15:]:
        rows[ROWS["update", "fc2.bias"], RMS] = 0.0
    assert [(alert.kind, alert.step, alert.names) for alert in alerts(found)] == [
        ("stuck", 9, ("fc1.weight",)),
        ("stuck", 34, ("fc2.bias",)),
    ]


def test_the_ratio_of_update_to_weight() -> None:
    found = steps(60)
    for rows in found[40:]:
        rows[ROWS["update", "fc1.weight"], RMS] *= 30
    (alert,) = alerts(found)
    assert (alert.kind, alert.step, alert.names) == ("ratio", 40, ("fc1.weight",))


def test_a_gradient_that_is_repeated() -> None:
    found = steps(30)
    found[20][ROWS["gradient", "fc2.weight"]] = found[19][ROWS["gradient", "fc2.weight"]]
    (alert,) = alerts(found)
    assert (alert.kind, alert.step, alert.names) == ("repeated", 20, ("fc2.weight",))


def test_dead_units() -> None:
    found = steps(60)
    for rows in found[30:]:
        rows[ROWS["gradient", "fc1.bias"], ZERO] = 0.6
        rows[ROWS["activation", "relu"], ZERO] = 0.95
    assert [(alert.kind, alert.step, alert.names) for alert in alerts(found)] == [
        ("dead", 39, ("fc1.bias",)),
        ("dead", 39, ("relu",)),
    ]


def test_an_embedding_that_is_mostly_zero_is_not_dead() -> None:
    found = steps(60)
    for rows in found:
        rows[ROWS["gradient", "fc1.weight"], ZERO] = 0.95
    assert alerts(found) == []
