# SPDX-License-Identifier: Apache-2.0
"""Departures become findings: the step at which two runs part, what left first, and what to look at next.

The earliest departures count. Among gradients that leave at the same step the last in the order of the model comes first, since backward
reaches it first; a gradient that leaves far less than another does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ulpscope.model import Finding
from ulpscope.model.health import Alert, Departure, Drift, SeriesPair

__all__ = ["explain_health"]

_MOST_NAMED = 3


def explain_health(
    pair: SeriesPair,
    departures: Sequence[Departure],
    drifts: Sequence[Drift] = (),
    *,
    alerts: Sequence[Alert] = (),
    num_left_out: int = 0,
    lone_steps: tuple[int, int] = (0, 0),
    chance: float | None = None,
) -> tuple[Finding, ...]:
    """Findings in the order of cause: where the runs part, copies that drift apart, what the subject was warned about.

    `chance` is the share of equal signs of unrelated runs, None of related ones. `lone_steps`: how many only the subject and only the
    reference has.
    """
    found: list[Finding] = []
    if drifts:
        found.append(_drifting(drifts))
    if departures:
        found.append(_parting(pair, departures))
    found.sort(key=lambda finding: finding.step or 0)
    if alerts:
        found.append(_warned(alerts))
    if num_left_out:
        text = f"{num_left_out} steps were passed over to stay within memory, so the step is as exact as the ones that are left"
        found.append(Finding(level="note", kind="coverage", headline=text))
    for side, many in zip(("subject", "reference"), lone_steps, strict=True):
        if many:
            text = f"{many} of {len(pair.steps) + many} steps of the {side} are not compared: the other side did not watch them"
            found.append(Finding(level="note", kind="coverage", headline=text))
    if chance is not None:
        found.append(_unrelated(pair, chance))
    elif not departures and not _is_equal(pair):
        found.append(Finding(level="note", kind="noise", headline=_within_noise(pair)))
    return tuple(found)


def _unrelated(pair: SeriesPair, chance: float) -> Finding:
    """Two runs of which one says nothing about the other."""
    step = int(pair.steps[0])
    return Finding(
        level="note",
        kind="unrelated",
        headline=f"the runs are unrelated: from step {step} on the signs of their gradients agree as by chance ({chance:.1%})",
        step=step,
        evidence=("nothing can be said about where they part: other weights, other batches, or another program from the beginning",),
        next="watch both from the same weights on the same batches (ulpscope run --watch health --seed 1)",
    )


def _is_equal(pair: SeriesPair) -> bool:
    return bool(pair.equal.all())


def _within_noise(pair: SeriesPair) -> str:
    equal_until = _equal_until(pair)
    rest = "they differ by no more than their own noise"
    return rest if equal_until is None else f"up to step {equal_until} both runs are equal bit by bit; later {rest}"


def _equal_until(pair: SeriesPair) -> int | None:
    """The last step up to which everything that was watched is equal."""
    equal = pair.equal.all(axis=1)
    if not equal.size or not equal[0]:
        return None
    return int(pair.steps[int(equal.argmin()) - 1]) if not equal.all() else int(pair.steps[-1])


def _parting(pair: SeriesPair, departures: Sequence[Departure]) -> Finding:
    step = departures[0].step
    now = [departure for departure in departures if departure.step == step]
    first = _left_first(pair, now)
    others = list(dict.fromkeys(_called(each) for each in now if (each.kind, each.name) != (first.kind, first.name)))
    later = {(each.kind, each.name) for each in departures if each.step > step}
    evidence = [_evidence(each) for each in now if (each.kind, each.name) == (first.kind, first.name)]
    evidence.append(_before(pair, step))
    if others:
        rest = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        evidence.append(f"at the same step: {', '.join(others[:_MOST_NAMED])}{rest}")
    if later:
        evidence.append(f"{len(later)} more leave later")
    return Finding(
        level="fault",
        kind="parted",
        headline=f"the runs part at step {step}: {_headline(first)}",
        step=step,
        module=first.layer,
        slot=f"{first.kind}.{first.name}" if first.kind != first.name else first.kind,
        evidence=tuple(dict.fromkeys(evidence)),
        next=_next(first, step),
    )


def _left_first(pair: SeriesPair, now: Sequence[Departure]) -> Departure:
    """Of those that leave at one step, the one that the others follow from."""
    gradients = [each for each in now if each.kind == "gradient" and each.signal in ("norm", "signs")]
    if now[0].signal in ("norm", "signs") and gradients:
        strongest = max(min(each.multiple, 1e6) for each in gradients)
        strong = [each for each in gradients if each.multiple >= strongest / 4]
        order = {(target.kind, target.name): place for place, target in enumerate(pair.targets)}
        return max(strong, key=lambda each: order.get((each.kind, each.name), 0))
    return now[0]


def _called(departure: Departure) -> str:
    if departure.kind == "loss":
        return "the loss"
    return departure.name if departure.kind == "learning_rate" else f"{departure.kind} of {departure.name}"


def _headline(departure: Departure) -> str:
    match departure.signal:
        case "setting":
            return f"{departure.name} is {departure.subject:.6g} where the reference has {departure.reference:.6g}"
        case "finiteness":
            side = "subject" if departure.subject > 0 else "reference"
            return f"{_called(departure)} is not finite in the {side} only"
        case "repetition":
            side = "subject" if departure.subject else "reference"
            return f"{_called(departure)} is exactly that of the step before, in the {side} only"
        case "presence":
            side = "subject" if not departure.subject else "reference"
            return f"{_called(departure)} is missing in the {side}"
        case "stillness":
            side = "subject" if departure.subject == 0 else "reference"
            return f"{departure.name} is no longer updated in the {side}"
        case "loss":
            return f"the loss is {departure.subject:.5g} where the reference has {departure.reference:.5g}"
        case _:
            return f"{_called(departure)} leaves the reference"


def _evidence(departure: Departure) -> str:
    match departure.signal:
        case "norm":
            ratio = departure.subject / departure.reference if departure.reference else math.inf
            return f"its rms is {departure.subject:.4g} where the reference has {departure.reference:.4g} ({ratio:.3g}x)"
        case "signs":
            return f"its signs agree with the reference at {departure.subject:.1%} of the sampled positions"
        case "setting" | "loss":
            return f"{departure.subject:.6g} and {departure.reference:.6g}"
        case "finiteness":
            return f"share of values that are not finite: {departure.subject:.3g} and {departure.reference:.3g}"
        case "repetition":
            return "all its statistics and signs are those of the step before: a bucket that was not reduced again, or a buffer not filled"
        case "presence":
            return "the optimizer got no gradient for it from this step on"
        case _:
            return "every sampled element stays what it is from this step on"


def _before(pair: SeriesPair, step: int) -> str:
    equal_until = _equal_until(pair)
    if equal_until is not None and equal_until < step and not any(equal_until < each < step for each in pair.steps):
        return f"up to step {equal_until} both runs are equal bit by bit"
    if step == pair.steps[0]:
        return "this is the first step that both runs have"
    return "before, they differ by no more than their own noise"


def _next(departure: Departure, step: int) -> str:
    if departure.signal == "setting":
        return "compare the schedules of the two runs, and what resumed or restarted them"
    record = f"record step {step} on both sides (ulpscope run --steps {step} --keep tensors --seed 1 ...) and compare the two recordings"
    if departure.signal in ("repetition", "replicas"):
        return f"look at the reduction of the bucket that holds {departure.name}; or {record}"
    if departure.signal in ("presence", "stillness"):
        return f"look for requires_grad, a detached graph or a parameter group without {departure.name}; or {record}"
    return record


def _drifting(drifts: Sequence[Drift]) -> Finding:
    first = drifts[0]
    at_once = [drift for drift in drifts if drift.step == first.step]
    return Finding(
        level="fault",
        kind="replicas",
        headline=f"the copies of {first.name} on rank 0 and rank {first.rank} of the subject are no longer equal from step {first.step} on",
        step=first.step,
        rank=first.rank,
        module=first.name.rpartition(".")[0] or first.name,
        slot=f"parameter.{first.name}",
        evidence=(
            "they were equal bit by bit before",
            f"{len(at_once)} parameters leave at this step, {len(drifts) - len(at_once)} later",
        ),
        next="look at how the gradients of this parameter are reduced, and at what updates it on one rank only",
    )


def _warned(alerts: Sequence[Alert]) -> Finding:
    lines = tuple(f"step {alert.step}, rank {alert.rank}: {alert.headline}" for alert in alerts[:5])
    more = f" and {len(alerts) - 5} more" if len(alerts) > 5 else ""
    return Finding(level="note", kind="alerts", headline=f"the subject was warned {len(alerts)} times while it ran{more}", evidence=lines)
