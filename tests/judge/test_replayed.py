# SPDX-License-Identifier: Apache-2.0
"""Verdicts by replay: each side by its own inputs, whatever the distance of the two."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch

from tests.judge.test_calls import call
from ulpscope.judge import Trail, foresee_call, is_beyond_doubt, judge_call, replay_limits, threshold
from ulpscope.judge.replayed import errs, multiple_of
from ulpscope.measure.tensors import measure_tensors
from ulpscope.model import CallReplay, JudgedCall, JudgedSlot, PairReplay, Slot, SlotPair, SlotReplay, TensorData, TensorRecord, Verdict

OUT = Slot.parse("output.0")
X = np.linspace(-1, 1, 256, dtype=np.float32)


def side(ratio: float = 0.5, **rest: object) -> CallReplay:
    found = SlotReplay(slot=OUT, dtype="float32", numel=256, max_ratio=ratio, rms_ratio=ratio, **rest)  # type: ignore[arg-type]
    return CallReplay(slots=(found,))


def judged(out: np.ndarray, replay: PairReplay, x: np.ndarray = X, op: str = "functional.gelu", trail: Trail | None = None) -> JudgedCall:
    pair, measured = call(op, {"input.0": x, "output.0": out}, {"input.0": X, "output.0": X})
    return judge_call(pair, measured, trail=trail, replay=replay)


def made(found: JudgedCall) -> JudgedSlot:
    return next(slot for slot in found.slots if slot.pair.slot == OUT)


def test_the_subject_errs_alone() -> None:
    slot = made(judged(X * np.float32(1.0001), PairReplay(subject=side(2000), reference=side(0.9))))
    assert (slot.verdict.level, slot.verdict.rule, slot.verdict.side) == ("differs", "replayed", "subject")
    assert "errs 2000x what an honest float32 kernel" in slot.verdict.reason
    assert "the reference errs 0.9x" in slot.verdict.reason
    assert slot.subject is not None
    assert slot.subject.max_ratio == 2000


def test_the_reference_may_be_the_one_that_errs() -> None:
    assert made(judged(X + 1, PairReplay(subject=side(), reference=side(500)))).verdict.side == "reference"


def test_a_large_difference_of_two_honest_sides_is_amplified() -> None:
    nudged = X + np.float32(1e-7)
    found = judged(X * 3, PairReplay(subject=side(), reference=side()), x=nudged)
    assert (made(found).verdict.level, made(found).verdict.rule) == ("rounding", "amplified")


@pytest.mark.parametrize(("op", "level"), [("torch.linalg.qr", "rounding"), ("functional.gelu", "differs")])
def test_factors_of_other_signs_are_no_riddle_though_each_side_did_what_it_was_given(op: str, level: str) -> None:
    """Each side is held against the signs that it chose; where nothing is free, equal inputs cannot give both."""
    honest = side(error=1e-8)
    verdict = made(judged(-X, PairReplay(subject=honest, reference=honest), op=op)).verdict
    assert verdict.level == level


def test_integers_that_flip_by_honest_sides_are_a_fork() -> None:
    picks = np.arange(256)
    pair, measured = call("torch.argmax", {"input.0": X + np.float32(1e-7), "output.0": picks}, {"input.0": X, "output.0": picks[::-1]})
    verdict = made(judge_call(pair, measured, replay=PairReplay(subject=side(), reference=side()))).verdict
    assert (verdict.level, verdict.rule) == ("rounding", "fork")


def test_what_an_honest_call_made_is_honest_input_of_the_next() -> None:
    trail = Trail()
    judged(X * 3, PairReplay(subject=side(), reference=side()), x=X + np.float32(1e-7), trail=trail)
    pair, measured = call("functional.relu", {"input.0": X * 3, "output.0": X}, {"input.0": X, "output.0": X})
    assert judge_call(pair, measured, trail=trail).slots[0].verdict.level == "rounding"


def test_arguments_that_matter_are_a_difference_of_arguments() -> None:
    replay = PairReplay(subject=side(), reference=side(), arguments=side(4000))
    verdict = made(judged(X + 1, replay)).verdict
    assert (verdict.level, verdict.rule, verdict.side) == ("differs", "arguments", None)


def test_arguments_without_effect_are_none() -> None:
    replay = PairReplay(subject=side(), reference=side(), arguments=side(0.0))
    assert made(judged(np.nextafter(X, np.float32(9)), replay)).verdict.level == "rounding"


def test_arguments_that_cannot_be_exchanged_leave_it_to_the_distance() -> None:
    replay = PairReplay(subject=side(), reference=side(), arguments=CallReplay(why_not="another operation"))
    verdict = made(judged(X + 1, replay)).verdict
    assert (verdict.level, verdict.rule) == ("differs", "derived")


def test_without_a_replay_of_the_subject_the_distance_decides() -> None:
    replay = PairReplay(subject=CallReplay(why_not="needs its other ranks"), reference=side())
    assert made(judged(X + 1, replay)).verdict.rule == "derived"


@pytest.mark.parametrize("field", ["num_nonfinite", "num_flipped"])
def test_wrong_places_are_beyond_all_measure(field: str) -> None:
    found = side(0.1, **{field: 1}).slots[0]
    assert multiple_of(found) == inf
    assert errs(found) == "beyond all measure"


def test_a_figure_names_its_yardstick() -> None:
    """What stands in a sentence is rms or the worst element; what stands in tables is a multiple of the limit, and both are told."""
    verdict = made(judged(X * 2, PairReplay(subject=side(2000), reference=side()))).verdict
    assert verdict.multiple == multiple_of(side(2000).slots[0])
    assert f"are {verdict.multiple:.3g}x the limit for honest kernels" in verdict.reason
    assert "2000x what an honest float32 kernel errs" in verdict.reason
    assert "rms over its elements" in verdict.reason


def test_low_precision_has_limits_of_its_own() -> None:
    assert replay_limits("bfloat16") < replay_limits("float32")
    assert replay_limits("float64") == replay_limits("float32") == replay_limits("int64")


@pytest.mark.parametrize(("share", "level"), [(0.1, "rounding"), (0.3, "differs")])
def test_other_numbers_are_judged_by_their_distribution(share: float, level: str) -> None:
    rng = np.random.default_rng(0)
    x = np.ones(100_000, dtype=np.float32)
    ours, theirs = (x * (rng.random(x.size) >= p) for p in (share, 0.1))
    pair, measured = call(
        "functional.dropout", {"input.0": x, "output.0": ours.astype(np.float32)}, {"input.0": x, "output.0": theirs.astype(np.float32)}
    )
    replay = PairReplay(subject=CallReplay(is_random=True), reference=CallReplay(is_random=True))
    verdict = made(judge_call(pair, measured, replay=replay)).verdict
    assert (verdict.level, verdict.rule) == (level, "random")


def foreseen(out: np.ndarray, x: np.ndarray = X) -> JudgedSlot:
    trail = Trail()
    pair, measured = call("functional.gelu", {"input.0": x, "output.0": out}, {"input.0": X, "output.0": X})
    found = foresee_call(pair, measured, trail)
    assert trail == Trail()
    return made(found)


def off_by(relative: float) -> np.ndarray:
    """Each element off by so much of itself, to either side in turn, so that the scale stays."""
    sides = np.where(np.arange(X.size) % 4 < 2, 1.0, -1.0) * np.where(np.arange(X.size) % 2, 1.0, -1.0)
    return (X * (1 + relative * sides)).astype(np.float32)


@pytest.mark.parametrize(
    ("off", "x_off", "beyond_doubt"),
    [(0, 0, True), (2e-6, 0, True), (1e-4, 0, False), (1.5e-5, 7e-6, True), (1e-4, 1e-3, False), (np.nan, 0, False)],
)
def test_what_is_near_needs_no_replay(off: float, x_off: float, beyond_doubt: bool) -> None:
    """128 units of float32 are 7.6e-6; up to 512 where the inputs explain twice as much."""
    assert is_beyond_doubt(foreseen(off_by(off), off_by(x_off))) is beyond_doubt


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 0.9972), ("bfloat16", 1.006), ("float16", 1.0003), ("float32", 1 + 5e-7)])
def test_what_a_limit_of_replay_would_catch_is_replayed(dtype: str, scale: float) -> None:
    """A change of scale that every element shares, each no farther off than rounding puts it."""
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = getattr(torch, dtype)
    sides = {name: value.to(known) for name, value in (("subject", exact * scale), ("reference", exact))}
    assert abs(scale - 1) / (torch.finfo(known).eps / 2) > threshold("replay_bias_low" if dtype != "float32" else "replay_bias")

    data = [TensorData(dtype, (4096,), memoryview(value.view(torch.uint8).numpy())) for value in sides.values()]
    records = [TensorRecord(slot=OUT, dtype=dtype, shape=(4096,)) for _ in data]
    slot = JudgedSlot(SlotPair(OUT, *records), measure_tensors(*data), Verdict("rounding", "derived", "", 0.1))
    assert not is_beyond_doubt(slot)
