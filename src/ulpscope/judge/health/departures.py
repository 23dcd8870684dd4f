# SPDX-License-Identifier: Apache-2.0
"""Where two watched runs part.

Two honest runs are never far apart at once: rounding makes them leave each other slowly, other random numbers make them differ
by the noise that each has anyway. So nothing is judged by its size alone. A departure is

- a jump: what was nearly equal until the step before is not any more, by a factor that rounding does not grow by in one step; or
- a change against noise: outside of the range of the steps before by many times their own spread, further than two independent
  runs would be by the noise of the reference itself, and it stays there; or
- something that has no noise: a learning rate that differs, a gradient that is exactly the one of the step before, a parameter
  that is never updated or never gets a gradient, values that are not finite, on one side only.

Every limit is in `LIMITS`, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ulpscope.model.health import Departure, SeriesPair, Signal

__all__ = ["LIMITS", "Limit", "chance_agreement", "find_departures"]


class Limit(NamedTuple):
    """A number at which a judgement changes, and where it comes from."""

    value: float
    why: str


LIMITS = {
    "jump": Limit(30.0, "how much further apart than in the steps before; rounding differences grow by a few times a step at most"),
    "close": Limit(0.02, "the median over gradients of unequal signs or ln(norm ratio) up to which two runs are nearly equal"),
    "norm": Limit(0.05, "the smallest jump of ln(norm ratio) worth a word; honest bfloat16 gradients differ by less than 0.01"),
    "signs": Limit(0.10, "the smallest jump of the share of unequal signs; at 0.03, as elsewhere, rounding of small gradients is in it"),
    "flips": Limit(4.0, "and the fewest unequal signs, so that a parameter of ten elements needs more than one"),
    "loss": Limit(0.05, "the smallest jump of the loss, over its size"),
    "spread": Limit(6.0, "how many robust standard deviations beyond the range of the window; 10^7 tests of Gaussian noise reach 5.5"),
    "noise": Limit(4.0, "and how many standard deviations of the difference of two independent runs, from the reference's own steps"),
    "drop": Limit(0.15, "and the smallest drop of sign similarity below its recent range"),
    "window": Limit(16, "steps that tell the recent range"),
    "history": Limit(8, "the fewest steps that tell a range"),
    "staying": Limit(4, "steps after a change against noise, of which all but one have to stay beyond half of it"),
    "staying of updates": Limit(
        24, "the same for updates: momentum of 0.9 and 0.999 remembers one large gradient for that long, and longer"
    ),
    "stillness": Limit(5, "steps in a row without an update or a gradient, on one side only; bfloat16 loses a few small updates by itself"),
    "setting": Limit(1e-6, "the relative difference of two learning rates that were meant to be equal"),
    "chance": Limit(
        3.0, "standard errors beyond a half up to which equal signs are chance; two independent runs are beyond it once in 700"
    ),
    "repetition": Limit(16, "the fewest elements of a gradient that is taken to be repeated rather than constant"),
}
_FAR = 20.0  # stands for an infinite ratio, where one side is zero


def find_departures(pair: SeriesPair) -> tuple[Departure, ...]:
    """The first departure of each target in each signal, the earliest first; of unrelated runs only what needs no noise to be told from."""
    rules = [rule for rule in _RULES if rule is not _noisy] if chance_agreement(pair) is not None else _RULES
    found = [departure for rule in rules for departure in rule(pair)]
    return tuple(sorted(found, key=lambda each: (each.step, _rank_of_cause(each), -min(each.multiple, 1e300))))


def chance_agreement(pair: SeriesPair) -> float | None:
    """The share of equal signs where gradients agree no better than by chance from the first step on; None where they do.

    Signs within a gradient go together, so a gradient counts once, by how many standard errors its share is from a half, and the spread
    of that over all gradients tells how far their mean may be by chance.
    """
    rows = [row for row, target in enumerate(pair.targets) if target.kind == "gradient" and pair.num_samples[row] > 0]
    similarity = pair.similarity[:, rows]
    known = ~np.isnan(similarity).all(axis=0)
    if not known.any() or bool(pair.equal[:, rows].any()):
        return None
    similarity, counts = similarity[:, known], np.asarray(pair.num_samples, dtype=float)[rows][known]
    first = next(row for row in similarity if not np.isnan(row).all())
    over_time = np.nanmean(similarity, axis=0)
    if not all(_is_chance(shares, counts) for shares in (first, over_time)):
        return None
    return float(np.nansum(over_time * counts) / counts.sum())


def _is_chance(shares: Any, counts: Any) -> bool:
    """Whether the shares of equal signs are no farther from a half than those of independent gradients, in errors and as they are.

    Where gradients agree, large ones are far more standard errors from a half than small ones, which is no spread by chance.
    """
    known = ~np.isnan(shares)
    off, expected = shares[known] - 0.5, 0.5 / np.sqrt(counts[known])
    return _is_near_zero(off / expected, 1.0) and _is_near_zero(off, float(np.sqrt(np.square(expected).mean())))


def _is_near_zero(values: Any, least: float) -> bool:
    """Whether the mean of independent values is as near to zero as their spread allows, which is no smaller than `least`.

    The spread of a few values is itself a guess: the limit is wider for them, as the quantiles of Student's t are (to first order).
    """
    limit, freedom = LIMITS["chance"].value, values.size - 1
    found = float(values.std(ddof=1)) if freedom else 0.0
    if found > least:
        limit *= 1 + (limit**2 + 1) / (4 * freedom)
    return bool(abs(float(values.mean())) * np.sqrt(values.size) <= limit * max(found, least))


_EXACT: tuple[Signal, ...] = ("setting", "finiteness", "repetition", "presence", "stillness")
_KINDS = ("learning_rate", "gradient", "update", "parameter", "loss")


def _rank_of_cause(departure: Departure) -> tuple[int, int]:
    """Within a step, what is exact comes first, then what causes the rest: gradients, updates, parameters, the loss."""
    exact = _EXACT.index(departure.signal) if departure.signal in _EXACT else len(_EXACT)
    return exact, _KINDS.index(departure.kind) if departure.kind in _KINDS else len(_KINDS)


# ---- what has no noise


def _settings(pair: SeriesPair) -> Iterator[Departure]:
    for name, (subject, reference) in pair.scalars.items():
        if not name.startswith("learning_rate"):
            continue
        scale = np.maximum(np.abs(subject), np.abs(reference))
        apart = np.abs(subject - reference) / np.where(scale > 0, scale, 1.0)
        yield from _first(pair, apart > LIMITS["setting"].value, "setting", "learning_rate", name, subject, reference, "exact")


def _finiteness(pair: SeriesPair) -> Iterator[Departure]:
    one, other = np.nan_to_num(pair.nonfinite_subject) > 0, np.nan_to_num(pair.nonfinite_reference) > 0
    is_scaled = "scale" in pair.scalars  # a scaler looks for its scale by overflowing now and then
    for place, target in enumerate(pair.targets):
        apart = (one[:, place] != other[:, place]) & pair.present_subject[:, place] & pair.present_reference[:, place]
        if is_scaled:
            apart = _lasting(apart, 3)
        yield from _first(
            pair,
            apart,
            "finiteness",
            target.kind,
            target.name,
            pair.nonfinite_subject[:, place],
            pair.nonfinite_reference[:, place],
            "exact",
            target.layer,
        )


def _repetition(pair: SeriesPair) -> Iterator[Departure]:
    for place, target in enumerate(pair.targets):
        if target.kind != "gradient" or target.global_numel < LIMITS["repetition"].value:
            continue
        apart = pair.repeats_subject[:, place] != pair.repeats_reference[:, place]
        repeats = pair.repeats_subject[:, place].astype(float), pair.repeats_reference[:, place].astype(float)
        yield from _first(pair, apart, "repetition", target.kind, target.name, *repeats, "exact", target.layer)


def _presence(pair: SeriesPair) -> Iterator[Departure]:
    gradients = [place for place, target in enumerate(pair.targets) if target.kind == "gradient"]
    are_watched = all(side[:, gradients].any() for side in (pair.present_subject, pair.present_reference))
    for place, target in enumerate(pair.targets):
        one, other = pair.present_subject[:, place], pair.present_reference[:, place]
        if (target.kind == "gradient" and are_watched) or (target.kind == "parameter" and one.any() != other.any()):
            apart = _lasting(one & ~other, int(LIMITS["stillness"].value)) | _lasting(other & ~one, int(LIMITS["stillness"].value))
            yield from _first(
                pair, apart, "presence", target.kind, target.name, one.astype(float), other.astype(float), "lasting", target.layer
            )


def _stillness(pair: SeriesPair) -> Iterator[Departure]:
    for place, target in enumerate(pair.targets):
        if target.kind != "update":
            continue
        one, other = pair.subject[:, place], pair.reference[:, place]
        length = int(LIMITS["stillness"].value)
        apart = _lasting((one == 0) & (other > 0), length) | _lasting((other == 0) & (one > 0), length)
        yield from _first(pair, apart, "stillness", target.kind, target.name, one, other, "lasting", target.layer)


def _lasting(apart: Any, length: int) -> Any:
    """Where a stretch of at least `length` steps begins or goes on; three do at the end of a run."""
    result = np.zeros(len(apart), dtype=bool)
    start = None
    for step, is_apart in enumerate([*apart.tolist(), False]):
        if is_apart and start is None:
            start = step
        elif not is_apart and start is not None:
            if step - start >= (length if step < len(apart) else min(length, 3)):
                result[start:step] = True
            start = None
    return result


def _first(
    pair: SeriesPair, apart: Any, signal: Signal, kind: str, name: str, subject: Any, reference: Any, rule: str, layer: str = ""
) -> Iterator[Departure]:
    if apart.any():
        step = int(np.argmax(apart))
        yield Departure(
            step=int(pair.steps[step]),
            signal=signal,
            kind=kind,
            name=name,
            layer=layer,
            multiple=float("inf"),
            subject=float(subject[step]),
            reference=float(reference[step]),
            rule=rule,
        )


# ---- what has noise


class _Curve(NamedTuple):
    """One signal of many targets: `distance` is 0 where the sides agree; `noise` its spread between independent runs."""

    signal: Signal
    rows: Any
    distance: Any
    noise: Any
    sampling: Any
    floor: Any
    drop: float
    staying: int


def _noisy(pair: SeriesPair) -> Iterator[Departure]:
    was_close = _was_close(pair)
    for curve in _curves(pair):
        for rule, multiples in (("jump", _jumps(curve) * was_close[:, None]), ("change", _changes(curve))):
            for column, row in enumerate(curve.rows):
                steps = np.flatnonzero(multiples[:, column] >= 1)
                if steps.size:
                    yield _departure(pair, curve, rule, int(steps[0]), column, int(row), float(multiples[steps[0], column]))


def _departure(pair: SeriesPair, curve: _Curve, rule: str, step: int, column: int, row: int, multiple: float) -> Departure:
    if row < 0:
        subject, reference = pair.scalars["loss"]
        kind = name = "loss"
        layer = ""
    else:
        target = pair.targets[row]
        kind, name, layer = target.kind, target.name, target.layer
        subject, reference = pair.subject[:, row], pair.reference[:, row]
        if curve.signal == "signs":
            subject = reference = pair.similarity[:, row]
    return Departure(
        step=int(pair.steps[step]),
        signal=curve.signal,
        kind=kind,
        name=name,
        layer=layer,
        multiple=multiple,
        subject=float(subject[step]),
        reference=float(reference[step]),
        rule=rule,
    )


def _curves(pair: SeriesPair) -> Iterator[_Curve]:
    for kind in ("gradient", "update", "parameter"):
        rows = np.array([place for place, target in enumerate(pair.targets) if target.kind == kind], dtype=np.int64)
        if not rows.size:
            continue
        distance = _log_ratio(pair.subject[:, rows], pair.reference[:, rows])
        logs = np.log(np.where(pair.reference[:, rows] > 0, pair.reference[:, rows], np.nan))
        noise = np.full(len(rows), np.inf) if kind == "parameter" else _own_noise(logs)
        staying = LIMITS["staying"].value
        if kind == "update":  # moments carry one large gradient on for many steps
            noise, staying = np.maximum(noise, _spread(logs)), LIMITS["staying of updates"].value
        floor = np.full(len(rows), LIMITS["norm"].value)
        yield _Curve("norm", rows, distance, noise, np.full(distance.shape, 0.02), floor, 0.0, int(staying))
    rows = np.flatnonzero(pair.num_samples > 0)
    rows = rows[[pair.targets[row].kind == "gradient" for row in rows]] if rows.size else rows
    if rows.size:
        counts = pair.num_samples[rows]
        unequal = 1 - pair.similarity[:, rows]
        sampling = np.sqrt(np.clip(unequal * (1 - unequal), 0.0, 0.25) / counts) + 0.5 / counts
        floor = np.maximum(LIMITS["signs"].value, LIMITS["flips"].value / counts)
        yield _Curve("signs", rows, unequal, np.zeros(len(rows)), sampling, floor, LIMITS["drop"].value, int(LIMITS["staying"].value))
    if "loss" in pair.scalars:
        yield _loss_curve(*pair.scalars["loss"])


def _loss_curve(subject: Any, reference: Any) -> _Curve:
    size = np.maximum(np.nanmedian(np.abs(reference)) if np.isfinite(reference).any() else 1.0, 1e-30)
    distance = np.clip(np.nan_to_num((subject - reference) / size, nan=np.nan, posinf=_FAR, neginf=-_FAR), -_FAR, _FAR)[:, None]
    noise = _own_noise((reference / size)[:, None])
    floor, staying = np.array([LIMITS["loss"].value]), int(LIMITS["staying"].value)
    return _Curve("loss", np.array([-1]), distance, noise, np.full(distance.shape, 0.02), floor, 0.0, staying)


def _log_ratio(subject: Any, reference: Any) -> Any:
    """ln(subject / reference), 0 where both are zero, NaN where one is absent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(subject) - np.log(reference)
    ratio = np.where((subject == 0) & (reference == 0), 0.0, ratio)
    return np.where(np.isnan(subject) | np.isnan(reference), np.nan, np.clip(np.nan_to_num(ratio, posinf=_FAR, neginf=-_FAR), -_FAR, _FAR))


def _own_noise(levels: Any) -> Any:
    """How far two independent runs with the noise of this one would be apart, robustly, from its steps."""
    changes = np.abs(np.diff(levels, axis=0))
    return 1.4826 * _median(changes) if len(changes) else np.full(levels.shape[1], np.inf)


def _spread(levels: Any) -> Any:
    """The same from how far its steps are from their median, which momentum and trends make larger."""
    return 1.4826 * np.sqrt(2) * _median(np.abs(levels - _median(levels)))


def _median(values: Any) -> Any:
    """The median over steps, passing over NaN; infinite where there is nothing."""
    result = np.full(values.shape[1], np.inf)
    for column in range(values.shape[1]):
        known = values[:, column][np.isfinite(values[:, column])]
        if known.size:
            result[column] = np.median(known)
    return result


def _was_close(pair: SeriesPair) -> Any:
    """Whether the runs were nearly equal until each step: most gradients, and at the first step most gradients of that very step."""
    rows = np.flatnonzero([target.kind == "gradient" for target in pair.targets])
    if not rows.size:
        rows = np.arange(len(pair.targets))
    with np.errstate(invalid="ignore"):
        apart = np.abs(_log_ratio(pair.subject[:, rows], pair.reference[:, rows]))
        apart = np.fmax(apart, 1 - pair.similarity[:, rows])
    middle = np.array([np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else 0.0 for row in apart])
    before = np.concatenate([middle[:1], middle[:-1]])
    length = int(LIMITS["history"].value)
    recent = np.array([before[max(0, step - length + 1) : step + 1].max() for step in range(len(before))])
    return recent < LIMITS["close"].value


def _jumps(curve: _Curve) -> Any:
    """How many times beyond the limit each step is from what it was just before; before the first step, from what the others are."""
    size = np.abs(curve.distance)
    result = np.zeros(size.shape)
    length = int(LIMITS["history"].value)
    for step in range(len(size)):
        if step:
            recent = np.nan_to_num(size[max(0, step - length) : step], nan=0.0).max(axis=0)
            has_history = (~np.isnan(size[max(0, step - length) : step])).any(axis=0)
        else:
            known = size[0][~np.isnan(size[0])]
            recent = np.full(size.shape[1], np.median(known) if known.size > 2 else np.inf)
            has_history = np.ones(size.shape[1], dtype=bool)
        allowed = np.maximum(LIMITS["jump"].value * recent, curve.floor)
        result[step] = np.where(has_history, np.nan_to_num(size[step]) / allowed, 0.0)
    return result


def _changes(curve: _Curve) -> Any:
    """How many times beyond the noise each step is, where it stays there."""
    distance = curve.distance
    result = np.zeros(distance.shape)
    window, shortest = int(LIMITS["window"].value), int(LIMITS["history"].value)
    for step in range(shortest, len(distance)):
        past = distance[max(0, step - window) : step]
        is_known = (~np.isnan(past)).sum(axis=0) >= shortest
        if not is_known.any():
            continue
        filled = np.where(np.isnan(past), np.nanmedian(np.where(is_known, past, 0.0), axis=0), past)
        middle = np.median(filled, axis=0)
        spread = 1.4826 * np.median(np.abs(filled - middle), axis=0)
        wobble = 1.4826 * np.median(np.abs(np.diff(filled, axis=0)), axis=0) / np.sqrt(2)
        scale = np.maximum(np.maximum(spread, wobble), np.maximum(curve.sampling[step], curve.sampling[step - 1]))
        now = np.where(np.isnan(distance[step]), middle, distance[step])
        beyond = np.maximum(now - filled.max(axis=0), filled.min(axis=0) - now)
        if curve.drop:
            beyond = now - filled.max(axis=0)
        multiple = beyond / np.maximum(LIMITS["spread"].value * scale, curve.drop)
        with np.errstate(invalid="ignore"):
            multiple = np.where(np.abs(now - middle) > LIMITS["noise"].value * curve.noise, multiple, 0.0)
        result[step] = np.where(is_known & _stays(distance, step, middle, now, curve.staying), multiple, 0.0)
    return result


def _stays(distance: Any, step: int, middle: Any, now: Any, staying: int) -> Any:
    """Whether nearly all of the next steps are beyond half of the change, on the same side."""
    after = distance[step + 1 : step + 1 + staying]
    if len(after) < min(staying, 2 if staying < 8 else 8):
        return np.zeros(distance.shape[1], dtype=bool)
    change = now - middle
    beyond = np.where(np.isnan(after), 0.0, (after - middle) * np.sign(change)) > np.abs(change) / 2
    return beyond.sum(axis=0) >= len(after) - 1 - len(after) // 8


_RULES: tuple[Callable[[SeriesPair], Iterator[Departure]], ...] = (_settings, _finiteness, _repetition, _presence, _stillness, _noisy)
