# SPDX-License-Identifier: Apache-2.0
"""What a live run does that its own past does not explain, in both directions.

The past is a window of steps, described by its median and the median change from step to step, so that neither one outlier nor a
steady decline hides the next. Each target is reported once for each kind of alert, and all targets that a step reports for one
kind come as one alert. Memory is the window, whatever the length of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ulpscope.model.health import Alert, HealthLayout, HealthStep

__all__ = ["Vigil"]

WINDOW = 32
HISTORY = 16  # steps before anything is called unusual
REFRESH = 8  # steps between two looks at the window
SPREADS = 10.0  # robust standard deviations
FACTOR = 10.0  # and times the median: a batch of its own makes a few times
STUCK = 20  # steps without any change
NEVER = 10  # and at the beginning of a run
DEAD = 10  # steps in a row
DEAD_SHARE = 0.5
DEAD_RISE = 0.3
SMALLEST = 16  # elements of a gradient that is taken to be repeated rather than constant
_RMS, _ZERO, _NONFINITE = 3, 4, 5


class _Past:
    """The logarithm of one positive number a target, over the window."""

    def __init__(self, num_targets: int) -> None:
        self._ring = np.full((WINDOW, num_targets), np.nan)
        self._count = 0
        self.median = np.full(num_targets, np.nan)
        self.spread = np.full(num_targets, np.nan)

    def unusual(self, values: Any) -> tuple[Any, Any]:
        """Which values are far above and which far below what was usual."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(values)
        allowed = np.maximum(SPREADS * self.spread, np.log(FACTOR))
        with np.errstate(invalid="ignore"):
            high, low = logs - self.median > allowed, self.median - logs > allowed
        self._add(np.where(np.isfinite(logs), logs, np.nan))
        return high, low

    def _add(self, logs: Any) -> None:
        self._ring[self._count % WINDOW] = logs
        self._count += 1
        if self._count >= HISTORY and (self._count % REFRESH == 0 or self._count == HISTORY):
            known = np.roll(self._ring, -self._count, axis=0)[-min(self._count, WINDOW) :]
            enough = (~np.isnan(known)).sum(axis=0) >= HISTORY // 2
            filled = np.where(enough, known, 0.0)
            median = np.nanmedian(filled, axis=0)
            filled = np.where(np.isnan(filled), median, filled)
            changes = np.median(np.abs(np.diff(filled, axis=0)), axis=0)
            self.median = np.where(enough, median, np.nan)
            self.spread = np.where(enough, 1.4826 / np.sqrt(2) * changes, np.nan)


class Vigil:
    """Looks at each step as it comes and says what is unusual about it."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._layout: HealthLayout | None = None
        self._told: set[tuple[str, str]] = set()
        self._num_overflows = 0

    def observe(self, step: HealthStep) -> list[Alert]:
        """The alerts of one step, which has to come after those before."""
        if step.layout is not self._layout:
            self._begin(step.layout)
        rows = step.statistics
        found = [
            *self._nonfinite(step, rows),
            *self._gradients(step, rows[self._gradient_rows]),
            *self._updates(step, rows),
            *self._dead_activations(step, rows),
        ]
        self._num_seen += 1
        return found

    def _begin(self, layout: HealthLayout) -> None:
        """Learn a layout; another one starts a new past."""
        self._layout = layout
        self._num_seen = 0
        kinds = np.array([target.kind for target in layout.targets])
        self._names = [target.name for target in layout.targets]
        self._gradient_rows = np.flatnonzero(kinds == "gradient")
        self._activation_rows = np.flatnonzero(kinds == "activation")
        update_rows, parameter_rows = np.flatnonzero(kinds == "update"), np.flatnonzero(kinds == "parameter")
        of_parameter = {self._names[row]: row for row in parameter_rows}
        self._ratio_rows = np.array(
            [(row, of_parameter[self._names[row]]) for row in update_rows if self._names[row] in of_parameter], dtype=np.int64
        ).reshape(-1, 2)
        num_gradients = len(self._gradient_rows)
        self._norms, self._ratios = _Past(num_gradients), _Past(len(self._ratio_rows))
        self._still = np.zeros(len(self._ratio_rows), dtype=np.int64)
        self._has_moved = np.zeros(len(self._ratio_rows), dtype=bool)
        self._dead = np.zeros(num_gradients, dtype=np.int64)
        self._silent = np.zeros(len(self._activation_rows), dtype=np.int64)
        self._first_zeros: list[Any] = []
        self._usual_zeros = np.zeros(num_gradients)
        self._last_row: Any = None
        self._is_bias = np.array([self._names[row].rpartition(".")[2] == "bias" for row in self._gradient_rows], dtype=bool)
        self._is_large = np.array([layout.targets[row].numel >= SMALLEST for row in self._gradient_rows], dtype=bool)

    # ---- one kind after another

    def _nonfinite(self, step: HealthStep, rows: Any) -> Iterable[Alert]:
        bad = np.nan_to_num(rows[:, _NONFINITE]) > 0
        if not bad.any():
            self._num_overflows = 0
            return
        self._num_overflows += 1
        if "scale" in step.scalars and self._num_overflows < HISTORY:  # a scaler looks for its scale by overflowing now and then
            return
        yield from self._tell("nonfinite", step, np.flatnonzero(bad), rows[:, _NONFINITE], None, "values that are not finite in")

    def _gradients(self, step: HealthStep, rows: Any) -> Iterable[Alert]:
        if not len(rows):
            return
        usual = np.exp(self._norms.median)
        high, low = self._norms.unusual(rows[:, _RMS])
        at = self._gradient_rows
        values, past = _scattered(len(self._names), at, rows[:, _RMS]), _scattered(len(self._names), at, usual)
        yield from self._tell("exploding", step, at[high], values, past, "gradients much larger than usual in")
        yield from self._tell("vanishing", step, at[low], values, past, "gradients much smaller than usual in", smallest=True)
        yield from self._dead_units(step, rows[:, _ZERO])
        repeats = np.zeros(len(rows), dtype=bool)
        if self._last_row is not None:
            repeats = (rows == self._last_row).all(axis=1) & (rows[:, _RMS] > 0) & self._is_large
        if repeats.any() and repeats.sum() * 2 <= len(rows):
            yield from self._tell("repeated", step, at[repeats], values, None, "exactly the gradient of the step before in")
        self._last_row = rows

    def _dead_units(self, step: HealthStep, zeros: Any) -> Iterable[Alert]:
        if len(self._first_zeros) < HISTORY:
            self._first_zeros.append(zeros)
            self._usual_zeros = np.median(self._first_zeros, axis=0)
        has_past = self._num_seen >= HISTORY
        is_dead = (self._is_bias & (zeros >= DEAD_SHARE)) | (has_past & (zeros - self._usual_zeros >= DEAD_RISE))
        self._dead = np.where(is_dead & (zeros < 1), self._dead + 1, 0)
        at = self._gradient_rows
        values = _scattered(len(self._names), at, zeros)
        yield from self._tell(
            "dead", step, at[self._dead == DEAD], values, None, f"for {DEAD} steps a large share of the gradient is zero in"
        )

    def _dead_activations(self, step: HealthStep, rows: Any) -> Iterable[Alert]:
        if len(self._activation_rows):
            zeros = rows[self._activation_rows, _ZERO]
            self._silent = np.where(zeros >= 0.9, self._silent + 1, 0)
            chosen = self._activation_rows[self._silent == DEAD]
            yield from self._tell(
                "dead", step, chosen, rows[:, _ZERO], None, f"for {DEAD} steps nearly everything is zero in the output of"
            )

    def _updates(self, step: HealthStep, rows: Any) -> Iterable[Alert]:
        if not len(self._ratio_rows):
            return
        at, weights = self._ratio_rows[:, 0], rows[self._ratio_rows[:, 1], _RMS]
        updates = rows[at, _RMS]
        ratio = updates / np.where(weights > 0, weights, np.nan)
        usual = np.exp(self._ratios.median)
        high, low = self._ratios.unusual(np.where(ratio > 0, ratio, np.nan))
        values, past = _scattered(len(self._names), at, ratio), _scattered(len(self._names), at, usual)
        yield from self._tell("ratio", step, at[high | low], values, past, "the ratio of update to weight has changed in")
        is_still = updates == 0
        self._still = np.where(is_still, self._still + 1, 0)
        self._has_moved |= ~is_still & ~np.isnan(updates)
        stuck = np.where(self._has_moved, self._still == STUCK, self._still == NEVER)
        yield from self._tell("stuck", step, at[stuck], values, None, "no element changes any more in")

    def _tell(
        self, kind: str, step: HealthStep, rows: Any, values: Any, usual: Any, what: str, *, smallest: bool = False
    ) -> Iterable[Alert]:
        """One alert for all rows that were not told before, worst first."""
        fresh = [int(row) for row in rows if (kind, self._names[row]) not in self._told]
        if not fresh:
            return
        fresh.sort(key=lambda row: _severity(values[row], None if usual is None else usual[row], smallest), reverse=True)
        self._told.update((kind, self._names[row]) for row in fresh)
        worst = fresh[0]
        value, before = float(values[worst]), None if usual is None else float(usual[worst])
        number = "" if kind in ("stuck", "repeated") else f": {value:.3g}" + ("" if before is None else f", usually {before:.3g}")
        more = f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
        yield Alert(
            kind=kind,
            step=step.step,
            rank=self._rank,
            headline=f"{what} {self._names[worst]}{more}{number}",
            names=tuple(dict.fromkeys(self._names[row] for row in fresh)),
            value=value,
            usual=before,
        )


def _severity(value: float, usual: float | None, smallest: bool) -> float:
    size = value if usual is None or not usual > 0 else value / usual
    return float(np.nan_to_num(-size if smallest else max(size, 1 / size) if usual is not None and size > 0 else size))


def _scattered(length: int, at: Any, values: Any) -> Any:
    result = np.full(length, np.nan)
    result[at] = values
    return result
