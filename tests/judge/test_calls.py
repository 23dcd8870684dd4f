# SPDX-License-Identifier: Apache-2.0
"""Verdicts of single calls: what rounding explains, what inputs explain, and what nothing explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.errors import InputError
from ulpscope.judge import Trail, judge_call, rules_named
from ulpscope.measure import measure_slot
from ulpscope.model import (
    Arguments,
    CallName,
    CallRecord,
    FingerprintMeasurement,
    JudgedCall,
    Modes,
    NotMeasured,
    Pair,
    Slot,
    SlotPair,
    SummaryMeasurement,
    TensorData,
    TensorRecord,
    Verdict,
)
from ulpscope.model.operations.unwritten import NOTHING_WRITTEN
from ulpscope.numerics.summary.summary import summarize

U = 2.0**-24


def call(op: str, subject: dict[str, Any], reference: dict[str, Any], phase: str = "forward", **rest: Any) -> tuple[Pair, list[Any]]:
    """A pair with arrays in its slots, and their measurements."""
    arrays: dict[str, np.ndarray] = {}
    sides = [_record(op, values, phase, side, arrays, rest) for side, values in (("s", subject), ("r", reference))]
    slots = []
    for name in dict.fromkeys([*subject, *reference]):
        ours, theirs = (next((one for one in side.slots if str(one.slot) == name), None) for side in sides)
        slots.append(SlotPair(Slot.parse(name), ours, theirs))
    pair = Pair(subject=sides[0], reference=sides[1], matched_by="name", slots=tuple(slots))
    read = lambda content: TensorData(str(arrays[content].dtype), arrays[content].shape, arrays[content])  # noqa: E731
    return pair, [measure_slot(slot, read, read) for slot in slots]


def _record(op: str, values: dict[str, Any], phase: str, side: str, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> CallRecord:
    slots = []
    for name, value in values.items():
        array = np.ascontiguousarray(value)
        summary, fingerprint = summarize(str(array.dtype), array.reshape(-1).view(np.uint8))
        content = f"{side}:{name}:{fingerprint}"
        arrays[content] = array
        slots.append(
            TensorRecord(
                slot=Slot.parse(name),
                dtype=str(array.dtype),
                shape=array.shape,
                summary=summary,
                fingerprint=fingerprint,
                content=content,
                device="cpu",
            )
        )
    return CallRecord(rank=0, step=0, order=0, call=CallName(op, 0), phase=phase, slots=tuple(slots), **rest)  # type: ignore[arg-type]


def judged(op: str, subject: dict[str, Any], reference: dict[str, Any], trail: Trail | None = None, **rest: Any) -> JudgedCall:
    return judge_call(*call(op, subject, reference, **rest), trail=trail)


def verdict(one: JudgedCall, slot: str = "output.0") -> Verdict:
    return next(each.verdict for each in one.slots if str(each.pair.slot) == slot)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def off(value: np.ndarray, relative: float, seed: int = 1) -> np.ndarray:
    return (value * (1 + relative * np.random.default_rng(seed).standard_normal(value.shape))).astype(value.dtype)


X, Y = normal(64, 32), normal(64, 32, seed=5)


@pytest.mark.parametrize(
    ("relative", "level"), [(0.0, "same"), (16 * U, "rounding"), (100 * U, "rounding"), (150 * U, "differs"), (1e-2, "differs")]
)
def test_an_output_on_equal_inputs_may_err_by_128_units(relative: float, level: str) -> None:
    one = judged("functional.gelu", {"input.0": X, "output.0": off(Y, relative)}, {"input.0": X, "output.0": Y})
    assert verdict(one).level == level
    assert verdict(one, "input.0").level == "same"
    assert one.level == level


def test_the_multiple_is_the_distance_over_what_is_allowed() -> None:
    one = judged("functional.gelu", {"input.0": X, "output.0": (Y * np.float32(1.01))}, {"input.0": X, "output.0": Y})
    assert one.multiple == pytest.approx(0.01 / (128 * U), rel=0.05)


@pytest.mark.parametrize(("relative", "level"), [(7e-6, "rounding"), (30e-6, "rounding"), (1e-3, "differs")])
def test_inputs_that_differ_allow_eight_times_as_much(relative: float, level: str) -> None:
    one = judged("functional.gelu", {"input.0": off(X, 1e-6), "output.0": off(Y, relative)}, {"input.0": X, "output.0": Y})
    assert verdict(one).level == level


def test_between_eight_and_sixty_four_times_noise_is_amplified_but_a_scale_is_not() -> None:
    slightly = {"input.0": off(X, 5e-6)}
    noisy = judged("torch.exp", slightly | {"output.0": off(Y, 1e-4)}, {"input.0": X, "output.0": Y})
    scaled = judged("torch.exp", slightly | {"output.0": Y * np.float32(1.0001)}, {"input.0": X, "output.0": Y})
    assert (verdict(noisy).level, verdict(noisy).rule) == ("rounding", "amplified")
    assert verdict(scaled).level == "differs"


def test_low_precision_allows_32_of_its_units() -> None:
    y = Y.astype(np.float16)
    reference = {"input.0": X, "output.0": y}
    assert verdict(judged("functional.gelu", {"input.0": X, "output.0": off(y, 1e-3)}, reference)).level == "rounding"
    assert verdict(judged("functional.gelu", {"input.0": X, "output.0": off(y, 5e-2)}, reference)).level == "differs"


def test_a_module_under_autocast_computes_in_the_narrower_dtype() -> None:
    sides = {"input.0": X, "output.0": off(Y, 1e-3)}, {"input.0": X, "output.0": Y}
    modes = Modes(autocast="bfloat16")
    assert verdict(judged("module.Block", *sides, level="module", modes=modes)).level == "rounding"
    assert verdict(judged("module.Block", *sides, level="module")).level == "differs"


def test_integers_are_exact_unless_inputs_differ() -> None:
    index = np.arange(64)
    flipped = index.copy()
    flipped[3] = 40
    equal = judged("torch.argmax", {"input.0": X, "output.0": flipped}, {"input.0": X, "output.0": index})
    near = judged("torch.argmax", {"input.0": off(X, 1e-6), "output.0": flipped}, {"input.0": X, "output.0": index})
    all_wrong = judged("torch.argmax", {"input.0": off(X, 1e-6), "output.0": index[::-1]}, {"input.0": X, "output.0": index})
    assert [verdict(one).level for one in (equal, near, all_wrong)] == ["differs", "rounding", "differs"]


def test_other_indices_explain_any_output() -> None:
    ours, theirs = {"input.1": np.array([1, 2])}, {"input.1": np.array([3, 4])}
    one = judged("functional.embedding", ours | {"output.0": X}, theirs | {"output.0": Y})
    assert verdict(one, "input.1").level == "differs"
    assert (verdict(one).level, verdict(one).multiple) == ("differs", 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_on_one_side_differ_whatever_the_inputs(bad: float) -> None:
    spoiled = Y.copy()
    spoiled[0, 0] = bad
    one = judged("torch.exp", {"input.0": off(X, 1e-3), "output.0": spoiled}, {"input.0": X, "output.0": Y}, trail=Trail(drift=1e-3))
    assert verdict(one).level == "differs"
    assert one.multiple == np.inf


def test_nonfinite_values_on_both_sides_agree() -> None:
    spoiled = Y.copy()
    spoiled[0, 0] = np.nan
    assert judged("torch.exp", {"input.0": X, "output.0": spoiled}, {"input.0": X, "output.0": spoiled}).level == "same"


def test_shapes_that_differ() -> None:
    reference = {"input.0": X, "output.0": Y}
    other = judged("torch.cat", {"input.0": X, "output.0": Y[:3]}, reference)
    flat = judged("torch.cat", {"input.0": X, "output.0": off(Y, 0.1).reshape(-1)}, reference)
    same = judged("torch.cat", {"input.0": X, "output.0": Y.reshape(-1)}, reference)
    assert [verdict(one).level for one in (other, flat, same)] == ["differs", "unmeasured", "same"]


def test_cancellation_is_allowed_for_by_what_was_summed() -> None:
    """The gradient of a bias whose true value is zero: rounding on both sides, a hundred per cent apart."""
    g = normal(256, 32) * np.float32(1e-3)
    w, x = normal(32, 32, seed=3), normal(256, 32, seed=4)
    trail = Trail()
    forward = {"input.0": x, "input.1": w, "input.2": np.zeros(32, "f4"), "output.0": x @ w.T}
    judged("functional.linear", forward, forward, trail)
    zeros = normal(32) * np.float32(1e-3 * U * 16)
    ours = {"input.0": off(g, U), "output.2": zeros}
    theirs = {"input.0": g, "output.2": -zeros}
    assert verdict(judged("functional.linear", ours, theirs, trail, phase="backward"), "output.2").level == "rounding"
    wrong = {"input.0": g, "output.2": g.sum(0)}
    assert verdict(judged("functional.linear", wrong, theirs, trail, phase="backward"), "output.2").level == "differs"


def test_a_difference_of_near_equal_terms_is_judged_by_the_terms() -> None:
    a = normal(64, 32) + 100
    b = a + normal(64, 32, seed=2) * np.float32(1e-3)
    ours, theirs = {"input.0": off(a, U), "input.1": b}, {"input.0": a, "input.1": b}
    one = judged("torch.sub", ours | {"output.0": ours["input.0"] - b}, theirs | {"output.0": a - b})
    assert verdict(one).level == "rounding"
    assert verdict(judged("torch.mul", ours | {"output.0": ours["input.0"] - b}, theirs | {"output.0": a - b})).level == "differs"


def test_a_jump_is_allowed_where_the_operation_jumps() -> None:
    jumped = Y.copy()
    jumped[5, 5] *= 10
    trail = Trail()
    forward = {"input.0": X, "output.0": X}
    sides = {"input.0": off(Y, 1e-6), "output.0": jumped}, {"input.0": Y, "output.0": Y}
    for op, level in (("functional.relu", "rounding"), ("functional.gelu", "differs")):
        judged(op, forward, forward, trail)
        assert verdict(judged(op, *sides, trail, phase="backward")).level == level
    equal = {"input.0": Y, "output.0": jumped}, {"input.0": Y, "output.0": Y}
    assert verdict(judged("functional.relu", *equal, trail, phase="backward")).level == "differs"


def test_backward_is_explained_by_its_forward_call() -> None:
    trail = Trail()
    judged("functional.gelu", {"input.0": off(X, 1e-3), "output.0": off(Y, 1e-3)}, {"input.0": X, "output.0": Y}, trail)
    sides = {"input.0": Y, "output.0": off(X, 4e-3)}, {"input.0": Y, "output.0": X}
    inherited = judged("functional.gelu", *sides, trail, phase="backward")
    alone = judged("functional.gelu", *sides, phase="backward")
    assert inherited.multiple is not None
    assert alone.multiple is not None
    assert inherited.multiple < 1 < alone.multiple


def test_a_value_made_by_an_honest_call_is_honest_as_an_input() -> None:
    trail = Trail()
    near = off(Y, 100 * U)
    judged("functional.gelu", {"input.0": X, "output.0": near}, {"input.0": X, "output.0": Y}, trail)
    one = judged("torch.exp", {"input.0": near, "output.0": near}, {"input.0": Y, "output.0": Y}, trail)
    assert {slot.verdict.level for slot in one.slots} == {"rounding"}
    assert trail.drift == pytest.approx(100 * U, rel=0.1)


def _gradient_of(parts: Sequence[tuple[np.ndarray, np.ndarray]], summed: tuple[Any, Any], drift: float = 0.0) -> JudgedCall:
    """The backward record of the call that made `x`, whose consumers have each contributed a part (subject, reference) of its gradient."""
    trail = Trail(drift=drift)
    x, y = np.linspace(1, 2, 64, dtype=np.float32), np.linspace(3, 4, 64, dtype=np.float32)
    judged("torch.maximum", {"input.0": y, "output.0": x}, {"input.0": y, "output.0": x}, trail)
    for index, (ours, theirs) in enumerate(parts):
        name = CallName("Tensor.sub", index)
        for phase, slots in (("forward", {"input.0": y, "input.1": x, "output.0": y}), ("backward", {})):
            sides = ({**slots, "input.0": ours, "output.1": ours}, {**slots, "input.0": theirs, "output.1": theirs})
            pair, found = call("Tensor.sub", *((slots, slots) if slots else sides), phase=phase)
            named = replace(pair, **{side: replace(getattr(pair, side), call=name) for side in ("subject", "reference")})
            judge_call(named, found, trail=trail)
    return judged("torch.maximum", {"input.0": summed[0]}, {"input.0": summed[1]}, trail, phase="backward")


@pytest.mark.parametrize("noise", [2.0**-24, 2.0**-11, 2.0**-8])
@pytest.mark.parametrize("reference", ["other", "zero"])
def test_a_gradient_that_is_zero_but_for_rounding_is_judged_by_what_was_summed(noise: float, reference: str) -> None:
    rng = np.random.default_rng(0)
    part = rng.standard_normal(64).astype(np.float32)
    other = (part * (1 + noise * rng.standard_normal(64))).astype(np.float32)
    third = (part * (1 + noise * rng.standard_normal(64))).astype(np.float32) if reference == "other" else part
    honest = _gradient_of([(other, part), (-part, -third)], (other - part, part - third), drift=noise)
    assert verdict(honest, "input.0").level == "rounding"


def test_a_part_that_is_missing_from_a_sum_is_no_rounding() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(64).astype(np.float32) * size for size in (1.0, 1.0, 0.01)]
    whole = np.sum(parts, axis=0)
    found = _gradient_of([(one, one) for one in parts], (whole - parts[2], whole))
    assert verdict(found, "input.0").level == "differs"
    found = _gradient_of([(one, one) for one in parts], (whole + np.float32(1e-6), whole))
    assert verdict(found, "input.0").level == "rounding"


def test_an_input_that_nothing_explains_differs() -> None:
    one = judged("torch.exp", {"input.0": off(X, 1e-3), "output.0": Y}, {"input.0": X, "output.0": Y})
    assert verdict(one, "input.0").level == "differs"
    assert verdict(one).level == "same"


def test_optimizer_results_look_at_their_own_gradient() -> None:
    gradients = {"gradient.a": X, "gradient.b": Y}
    before = {"mutated.a": X, "mutated.b": Y, "state.b.exp_avg": X}
    ours = {"gradient.a": off(X, 0.1), "gradient.b": Y, "mutated.a": off(X, 0.2), "mutated.b": off(Y, 0.2), "state.b.exp_avg": off(X, 0.2)}
    one = judged("optimizer.SGD", ours, gradients | before, phase="optimizer", level="state")
    multiples = {str(slot.pair.slot): slot.verdict.multiple for slot in one.slots}
    assert multiples["mutated.a"] is not None
    assert multiples["mutated.a"] <= 1
    assert multiples["mutated.b"] is not None
    assert multiples["mutated.b"] > 1
    assert multiples["state.b.exp_avg"] is not None
    assert multiples["state.b.exp_avg"] > 1


def test_fingerprints_and_missing_measurements_are_unmeasured() -> None:
    pair, _ = call("torch.exp", {"input.0": X, "output.0": Y}, {"input.0": X, "output.0": X})
    one = judge_call(pair, [FingerprintMeasurement(equal=True), FingerprintMeasurement(equal=False)])
    assert [slot.verdict.level for slot in one.slots] == ["same", "unmeasured"]
    assert "size unknown" in verdict(one).reason
    assert verdict(judge_call(pair, [NotMeasured("no values"), NotMeasured("no values")])).reason == "no values"


def test_one_sided_calls_and_slots_are_unmatched() -> None:
    one = judged("torch.exp", {"input.0": X, "output.0": Y}, {"output.0": Y})
    assert verdict(one, "input.0").level == "unmatched"
    assert verdict(one, "input.0").reason == "only the subject has this slot"
    pair = Pair(subject=None, reference=one.pair.reference, matched_by="nothing")
    assert judge_call(pair, []).level == "unmatched"


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (Y, "same"),
        (off(Y, 1e-4), "rounding"),
        (Y + np.float32(1.5), "differs"),
        (np.float32(1e-3) * off(Y, 1.0, 3), "differs"),
    ],
)
def test_rules_of_ptdbg(value: np.ndarray, level: str) -> None:
    pair, found = call("torch.exp", {"input.0": X, "output.0": value}, {"input.0": X, "output.0": Y})
    assert verdict(judge_call(pair, found, "ptdbg")).level == level


def test_rules_of_ptdbg_ignore_the_inputs_and_need_values() -> None:
    spoiled = Y.copy()
    spoiled[0, 0] = np.nan
    pair, found = call("torch.exp", {"input.0": Y, "output.0": spoiled}, {"input.0": X, "output.0": Y})
    assert verdict(judge_call(pair, found, "ptdbg")).level == "differs"
    bare = [replace(slot, subject=replace(slot.subject, content=None)) for slot in pair.slots if slot.subject]
    summaries = [measure_slot(slot, _unread, _unread) for slot in bare]
    assert verdict(judge_call(pair, summaries, "ptdbg")).level == "unmeasured"


def _unread(content: str) -> TensorData:
    raise AssertionError(f"{content} was read")


def test_unknown_rules_are_named() -> None:
    with pytest.raises(InputError, match="no rules named 'folklore'; choose one of derived, ptdbg"):
        rules_named("folklore")


@given(
    st.lists(st.sampled_from([0.0, 1e-8, 1e-6, 1e-3, 1.0]), min_size=2, max_size=2), st.sampled_from(["torch.exp", "torch.sub", "torch.mm"])
)
def test_a_larger_difference_is_never_judged_better(sizes: Sequence[float], op: str) -> None:
    small, large = sorted(sizes)
    square = normal(16, 16)
    reference = {"input.0": square, "input.1": square, "output.0": square}
    multiples = [judged(op, reference | {"output.0": off(square, size)}, reference).multiple or 0.0 for size in (small, large)]
    assert multiples[0] <= multiples[1]


@pytest.mark.parametrize(("is_known", "level"), [(True, "rounding"), (False, "differs")])
def test_what_leaves_calls_of_one_side_may_differ_by_what_entered_them(is_known: bool, level: str) -> None:
    """Norms of gradients, taken one by one here and all at once there: a gradient of pure rounding has a norm of pure rounding."""
    trail = Trail(drift=1e-6)
    ours, theirs = X, off(X, 1.0)
    if is_known:
        near = judged("functional.linear", {"output.0": ours}, {"output.0": theirs}, Trail(drift=1.0))
        honest = [replace(slot, verdict=Verdict("rounding", "derived", "cancels", 0.5)) for slot in near.slots]
        trail.add(replace(near, slots=tuple(honest), drift=0.0))
    norms = np.float32(2.0), np.float32(1.0)
    for lone, entered, made in (("subject", ours, norms[0]), ("reference", theirs, norms[1])):
        pair, _ = call("torch.norm", {"input.0": entered, "output.0": made}, {"input.0": entered, "output.0": made})
        other = "reference" if lone == "subject" else "subject"
        judge_call(replace(pair, slots=(), **{other: None}), [], trail=trail)
    one = judged("Tensor.to", {"input.0": norms[0], "output.0": norms[0]}, {"input.0": norms[1], "output.0": norms[1]}, trail)
    assert verdict(one, "input.0").level == level


@pytest.mark.parametrize(("module", "level"), [("layers.0", "rounding"), ("layers.1", "differs")])
def test_parameters_enter_a_module_without_being_handed_over(module: str, level: str) -> None:
    trail = Trail()
    trail.begin_step(7)
    judged("state.parameters", {"parameter.layers.0.weight": off(X, 1e-3)}, {"parameter.layers.0.weight": X}, trail, phase="start")
    sides = {"input.0": X, "output.0": off(Y, 2e-3)}, {"input.0": X, "output.0": Y}
    assert verdict(judged("module.Linear", *sides, trail, level="module", module=module)).level == level


@pytest.mark.parametrize(("op", "level"), [("optimizer.AdamW", "rounding"), ("optimizer.SGD", "differs")])
def test_an_optimizer_that_normalises_turns_rounding_into_steps(op: str, level: str) -> None:
    after = X.copy()
    after[:10] += np.float32(1e-3)
    sides = {"gradient.w": off(Y, 1e-6), "mutated.w": after}, {"gradient.w": Y, "mutated.w": X}
    groups = Arguments(kwargs={"groups": [{"lr": 1e-3}]})
    one = judged(op, *sides, phase="optimizer", level="state", arguments=groups)
    assert verdict(one, "mutated.w").level == level
    equal = judged(op, sides[0] | {"gradient.w": Y}, sides[1], phase="optimizer", level="state", arguments=groups)
    assert verdict(equal, "mutated.w").level == "differs"


def test_a_scale_on_noisy_inputs_is_judged_more_strictly_than_noise() -> None:
    reference = {"input.0": X, "output.0": Y}
    noisy = judged("functional.gelu", {"input.0": off(X, 1e-4), "output.0": off(Y, 6e-4)}, reference, trail=Trail(drift=1e-4))
    scaled = judged("functional.gelu", {"input.0": off(X, 1e-4), "output.0": Y * np.float32(1.0006)}, reference, trail=Trail(drift=1e-4))
    assert verdict(noisy).level == "rounding"
    assert verdict(scaled).level == "differs"


def test_subnormal_results_may_differ_by_their_spacing() -> None:
    tiny = np.full((8, 8), 3e-45, "f4")
    one = judged("torch.mul", {"input.0": X, "output.0": tiny}, {"input.0": X, "output.0": np.zeros((8, 8), "f4")})
    assert verdict(one).level == "rounding"


@pytest.mark.parametrize(("equal", "distance", "level"), [(None, 0.0, "rounding"), (False, 0.0, "differs"), (None, 0.5, "differs")])
def test_integers_of_which_only_statistics_are_known(equal: bool | None, distance: float, level: str) -> None:
    index = np.arange(64)
    pair, _ = call("torch.argmax", {"input.0": index, "output.0": index}, {"input.0": index, "output.0": index})
    found = SummaryMeasurement(equal=equal, distance=distance)
    one = judge_call(pair, [SummaryMeasurement(equal=True, distance=0.0), found])
    assert verdict(one).level == level
    assert (one.multiple == 0.0) == (level == "rounding")
    assert verdict(judge_call(pair, [found, FingerprintMeasurement(equal=True)]), "input.0").level == level


def without_values(op: str, slot: str, sides: tuple[str, ...]) -> JudgedCall:
    """A call of which one tensor has no values on some sides, since nobody had written to it."""
    pair, _ = call(op, {"input.0": X, "output.0": Y}, {"input.0": X, "output.0": Y})
    bare = {"summary": None, "fingerprint": None, "content": None, "note": NOTHING_WRITTEN}
    slots = tuple(
        replace(one, **{side: replace(getattr(one, side), **bare) for side in sides}) if str(one.slot) == slot else one
        for one in pair.slots
    )
    return judge_call(replace(pair, slots=slots), [measure_slot(one, _unread, _unread) for one in slots])


def test_memory_that_nobody_wrote_to_on_either_side_is_not_compared() -> None:
    one = without_values("torch.empty_like", "output.0", ("subject", "reference"))
    assert one.level == "same"
    assert verdict(one).reason == "memory that nobody wrote to is not compared"


@pytest.mark.parametrize("side", ["subject", "reference"])
def test_memory_that_only_one_side_wrote_to_differs_unless_it_is_written_over(side: str) -> None:
    assert verdict(without_values("torch.exp", "input.0", (side,)), "input.0").level == "differs"
    assert verdict(without_values("Tensor.fill_", "input.0", (side,)), "input.0").level == "same"
    assert f"on the {side}" in verdict(without_values("torch.exp", "output.0", (side,))).reason


def test_slots_without_values_for_another_reason_stay_unmeasured() -> None:
    pair, _ = call("torch.exp", {"output.0": Y}, {"output.0": Y})
    bare = [replace(pair.slots[0], subject=replace(pair.slots[0].subject, note="sparse"))]  # type: ignore[type-var]
    assert verdict(judge_call(replace(pair, slots=tuple(bare)), [NotMeasured("sparse")])).level == "unmeasured"
