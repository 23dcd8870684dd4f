# SPDX-License-Identifier: Apache-2.0
"""Planted faults of each kind: the right finding comes first, and nothing else is blamed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.match.building import Change, Where, at, noise, scale, train
from ulpscope.explain import explain
from ulpscope.explain.wording import against, inputs_line
from ulpscope.model import Comparison, Finding, JudgedCall, NotMeasured, RunInfo, Verdict
from ulpscope.report.comparison.counts import count_calls
from ulpscope.workflows.compare.comparing import compare_runs


def compared(keep: str = "tensors", **subject: Any) -> Comparison:
    common = {name: subject.pop(name) for name in ("ranks", "steps", "layers") if name in subject}
    return compare_runs(train(keep=keep, **common, **subject), train(keep=keep, **common))


def fault(comparison: Comparison) -> Finding:
    assert [finding.level for finding in comparison.findings].count("fault") == 1, comparison.findings
    assert comparison.findings[0].level == "fault"
    return comparison.findings[0]


def call(comparison: Comparison, name: str, phase: str = "forward", step: int = 0) -> JudgedCall:
    return next(
        one for one in comparison.calls if (one.pair.record.name, one.pair.record.phase, one.pair.record.step) == (name, phase, step)
    )


@pytest.mark.parametrize("keep", ["tensors", "statistics", "fingerprint"])
def test_identical_runs_are_the_same_and_have_no_findings(keep: str) -> None:
    comparison = compared(keep, ranks=(0, 1))
    assert comparison.verdict == "same"
    assert comparison.findings == ()
    assert {one.contribution for one in comparison.calls} == {"clean"}


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("relative", [1e-7, 1e-6])
def test_honest_rounding_is_no_fault(keep: str, seed: int, relative: float) -> None:
    comparison = compared(keep, change=noise(relative, seed), steps=(0, 1, 2))
    assert comparison.verdict == "rounding"
    assert comparison.faults == ()


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("factor", [1.01, 1.001, 0.0])
def test_a_wrong_forward_call_is_named(keep: str, factor: float) -> None:
    comparison = compared(keep, change=scale(factor, phase="forward", module="layers.1", op="functional.leaky_relu"))
    found = fault(comparison)
    assert (found.kind, found.module, found.call, found.slot) == ("contributed", "layers.1", "functional.leaky_relu.1", "output.0")
    assert found.headline == "first contributed error: layers.1  leaky_relu (call 1, forward, output 0), step 0, rank 0"
    assert (found.step, found.rank, found.phase) == (0, 0, "forward")
    assert found.source is not None
    assert found.source.code == "y = functional.leaky_relu(x)"
    assert "inputs agree bitwise" in found.evidence
    assert any("later differences are inherited" in line for line in found.evidence)
    assert call(comparison, "layers.1/functional.leaky_relu.1").contribution == "contributed"
    assert call(comparison, "layers.2/functional.linear.2").contribution == "inherited"
    assert call(comparison, "layers.1/functional.linear.1").contribution == "clean"


def test_evidence_has_the_size_the_multiple_and_the_worst_element() -> None:
    def spike(value: np.ndarray) -> np.ndarray:
        value = value.copy()
        value[3, 7] += 1
        return value

    found = fault(compared(change=at(spike, phase="forward", module="layers.1", op="functional.linear", step=0)))
    assert found.call == "functional.linear.1"
    assert "x what float32 rounding explains; worst at [3, 7]:" in found.evidence[0]
    assert [one.what for one in found.histograms] == ["subject", "reference", "difference"]


def test_statistics_give_a_lower_bound_and_say_so() -> None:
    found = fault(compared("statistics", change=scale(1.01, phase="forward", module="layers.1", op="functional.linear")))
    assert "at least" in found.evidence[0]
    assert "only statistics were kept" in found.evidence[0]
    assert "--keep tensors" in found.next
    assert found.histograms == ()


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("slot", ["output.0", "output.1"])
def test_a_wrong_backward_call_is_named(keep: str, slot: str) -> None:
    found = fault(compared(keep, change=scale(1.01, phase="backward", module="layers.1", op="functional.linear", slot=slot)))
    assert (found.kind, found.phase, found.module, found.call, found.slot) == (
        "backward",
        "backward",
        "layers.1",
        "functional.linear.1",
        slot,
    )
    assert "gradients that enter agree bitwise" in found.evidence


def test_of_two_wrong_backward_calls_the_later_layer_comes_first() -> None:
    found = fault(compared(change=scale(1.01, phase="backward", module=("layers.0", "layers.2"), op="functional.linear")))
    assert found.module == "layers.2"


def test_a_wrong_forward_call_comes_before_a_wrong_backward_call() -> None:
    found = fault(compared(change=scale(1.01, module="layers.1", op="functional.linear")))
    assert found.phase == "forward"


def test_a_fault_in_a_later_step_is_found_there() -> None:
    found = fault(compared(change=scale(1.01, step=1, phase="forward", module="layers.1", op="functional.linear")))
    assert found.step == 1


def test_a_fault_on_top_of_honest_rounding_is_found() -> None:
    honest, wrong = noise(1e-7), scale(1.01, phase="forward", module="layers.1", op="functional.leaky_relu")
    found = fault(compared(change=lambda where, value: wrong(where, honest(where, value))))
    assert (found.module, found.call) == ("layers.1", "functional.leaky_relu.1")
    assert any("inputs agree within rounding" in line for line in found.evidence)


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_made_by_a_call_with_finite_inputs(keep: str, bad: float) -> None:
    def spoil(value: np.ndarray) -> np.ndarray:
        value = value.copy()
        value[0, 0] = bad
        return value

    found = fault(compared(keep, change=at(spoil, phase="forward", module="layers.1", op="functional.linear")))
    assert found.call == "functional.linear.1"
    assert any("everything that enters the subject's call is finite" in line for line in found.evidence)


def test_another_batch_settles_everything() -> None:
    found = fault(compared(data_seed=5))
    assert (found.kind, found.phase, found.slot) == ("batch", "start", "input.0")
    assert found.headline == "the batches differ: input 0, step 0, rank 0"
    assert "--seed" in found.next


def test_other_parameters_at_the_first_step() -> None:
    found = fault(compared(change=scale(1.01, phase="start", slot="parameter.layers.1.weight", step=0)))
    assert (found.kind, found.slot) == ("parameters", "parameter.layers.1.weight")
    assert any("1 of 3 tensors differ" in line for line in found.evidence)


def test_parameters_a_bit_apart_are_a_note() -> None:
    def nudge(value: np.ndarray) -> np.ndarray:
        return np.nextafter(value, np.float32(9))

    comparison = compared(change=at(nudge, phase="start", slot="parameter.layers.1.weight", step=0))
    assert comparison.faults == ()
    assert [note.kind for note in comparison.findings if note.kind != "coverage"] == ["parameters"]


def test_parameters_written_between_steps() -> None:
    found = fault(compared(change=scale(1.01, phase="start", slot="parameter.layers.1.weight", step=1)))
    assert (found.kind, found.step) == ("parameters", 1)
    assert "the subject's value is not what its optimizer left in step 0" in found.evidence


def test_parameters_drift_over_steps_that_were_not_recorded() -> None:
    def drifted(value: np.ndarray) -> np.ndarray:
        return value * np.float32(1.0005)

    change = at(drifted, phase="start", op="state.parameters")
    assert compare_runs(train(steps=(7,), change=change), train(steps=(7,))).faults == ()
    assert fault(compare_runs(train(steps=(0,), change=change), train(steps=(0,)))).kind == "parameters"
    far = scale(1.5, phase="start", op="state.parameters")
    assert fault(compare_runs(train(steps=(7,), change=far), train(steps=(7,)))).kind == "parameters"


def test_another_argument_that_matters_is_a_fault() -> None:
    found = fault(compared(slope=0.2))
    assert (found.kind, found.call) == ("arguments", "functional.leaky_relu.0")
    assert "argument 1: 0.2 against 0.1" in found.evidence


def test_another_argument_that_leads_to_nothing_is_a_note() -> None:
    comparison = compared(slope=0.1 + 1e-9)
    assert comparison.faults == ()
    assert [note.kind for note in comparison.findings] == ["arguments"]
    assert "argument 1" in comparison.findings[0].evidence[0]


def test_modes_that_differ_without_effect_are_a_note() -> None:
    comparison = compared(training=False)
    assert comparison.faults == ()
    assert "mode training" in comparison.findings[0].evidence[0]


def test_an_extra_call_that_changes_values_is_a_fault() -> None:
    found = fault(compared(extra=True, change=scale(2.0, op="torch.mul", phase="forward")))
    assert (found.kind, found.call, found.module) == ("calls", "torch.mul.0", "layers.1")
    assert found.headline.startswith("calls only in the subject: layers.1  mul")
    assert any("receives something else" in line for line in found.evidence)


def test_an_extra_call_that_changes_nothing_is_a_note() -> None:
    comparison = compared(extra=True)
    assert comparison.faults == ()
    assert [(note.kind, note.headline) for note in comparison.findings] == [
        ("calls", "2 calls only in the subject: layers.1/mul, layers.1/mul")
    ]


def test_a_call_missing_in_the_subject_is_named_after_the_reference() -> None:
    found = fault(compare_runs(train(), train(extra=True, change=scale(2.0, op="torch.mul", phase="forward"))))
    assert found.headline.startswith("calls only in the reference: layers.1  mul")


def test_renamed_modules_compare() -> None:
    comparison = compared(prefix="blocks")
    assert comparison.faults == ()
    assert not [one for one in comparison.calls if one.contribution == "unmatched"]
    found = fault(compared(prefix="blocks", change=scale(1.01, module="blocks.1", op="functional.linear")))
    assert found.module == "blocks.1"


def test_optimizer_settings_that_differ() -> None:
    found = fault(compared(rate=0.2))
    assert (found.kind, found.phase, found.call) == ("optimizer", "optimizer", "optimizer.SGD.0")
    assert found.evidence[0] == "groups.0.lr: 0.2 against 0.1"
    assert "inputs agree bitwise" in found.evidence


def test_an_optimizer_that_computes_something_else() -> None:
    found = fault(compared(change=scale(1.01, phase="optimizer", slot="mutated.layers.1.weight")))
    assert (found.kind, found.slot) == ("optimizer", "mutated.layers.1.weight")
    assert found.headline.startswith("the optimizer's step diverges")


def test_gradients_changed_between_backward_and_optimizer() -> None:
    found = fault(compared(change=scale(0.5, phase="between")))
    assert (found.kind, found.phase) == ("optimizer", "optimizer")
    assert found.headline.startswith("a value changes between calls: SGD")
    assert "no recorded call made this difference" in found.evidence


def test_random_numbers_that_differ_are_the_cause() -> None:
    comparison = compare_runs(train(dropout=1, info=RunInfo(seed=1)), train(dropout=2, info=RunInfo(seed=2)))
    [found] = comparison.faults
    assert (found.kind, found.call) == ("rng", "functional.dropout.0")
    assert "random generators differ at the start of the step: torch" in found.evidence
    assert "seed 1 against 2" in found.evidence
    assert "--seed 1" in found.next


def test_fingerprints_alone_tell_where_bits_differ_but_not_how_much() -> None:
    wrong = scale(1.01, phase="forward", module="layers.1", op="functional.linear")
    comparison = compared("fingerprint", change=wrong)
    assert (comparison.verdict, comparison.faults) == ("unknown", ())
    [note] = comparison.findings
    assert (note.level, note.kind) == ("note", "bitwise")
    assert note.headline == "first bitwise difference: layers.1  linear (call 1, forward, output 0), step 0, rank 0"
    assert (note.step, note.rank, note.phase, note.module, note.slot) == (0, 0, "forward", "layers.1", "output.0")
    later = sum(one.level == "unmeasured" for one in comparison.calls) - 1
    assert note.evidence[:2] == (
        "inputs agree bitwise",
        f"{later} later calls differ bitwise too; nothing was kept that tells by how much",
    )
    assert call(comparison, "layers.1/functional.linear.1").contribution == "unknown"


@pytest.mark.parametrize("keep", ["fingerprint", "statistics"])
def test_advice_is_the_command_that_recorded_the_subject_with_values_kept(keep: str) -> None:
    comparison = compared(keep, change=scale(1.01, phase="forward", module="layers.1", op="functional.linear"))
    info = RunInfo(command=("train.py", "--name", "a b"), seed=3, options={"level": "both", "keep": keep})
    _, (found, *_) = explain(comparison.calls, info, RunInfo(), subject_path="runs/npu")
    assert found.next.endswith(
        ": ulpscope run --into runs/npu-closer --keep tensors --level both --steps 0 --seed 3 "
        "--select layers.1/functional.linear.1 train.py --name 'a b'"
    )


def test_parameters_that_differ_bitwise_by_an_unknown_amount() -> None:
    comparison = compared("fingerprint", change=scale(1.01, phase="start", slot="parameter.layers.1.weight", step=0))
    assert comparison.verdict == "unknown"
    assert comparison.findings[0].headline == (
        "first bitwise difference: parameters (call 0, start, parameter layers.1.weight), step 0, rank 0"
    )
    assert "ulpscope run --into memory-closer --keep tensors --steps 0 SCRIPT" in comparison.findings[0].next


def test_a_fault_leaves_no_doubt() -> None:
    """Integers given at the start are a fault even by their fingerprints; then bits of unknown difference are only counted."""
    labels = at(lambda value: (value * 100).astype("i8"), phase="start", op="state.batch")
    others = at(lambda value: (value * 100).astype("i8") + 1, phase="start", op="state.batch")
    comparison = compare_runs(train(keep="fingerprint", change=others), train(keep="fingerprint", change=labels))
    assert comparison.verdict == "diverges"
    assert [one.kind for one in comparison.findings] == ["batch", "coverage"]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (2.2811, 2.2834, "2.2811 against 2.2834"),
        (2.0, 1.0, "2 against 1"),
        (2.25, 2.2500002, "2.25 against 2.2500002"),
        (1.0, 1.0 + 1e-12, "1 against 1"),
        (1e-30, 1.01e-30, "1e-30 against 1.01e-30"),
        (-1.0, 1.0, "-1 against 1"),
        (3.14159265, 0.0, "3.14 against 0"),
        (float("nan"), 1.23456, "NaN against 1.23"),
        (float("inf"), -float("inf"), "inf against -inf"),
    ],
)
def test_numbers_have_the_digits_it_takes(ours: float, theirs: float, expected: str) -> None:
    assert against(ours, theirs) == expected


@given(st.floats(width=32), st.floats(width=32))
def test_different_float32_values_look_different(ours: float, theirs: float) -> None:
    left, right = against(ours, theirs).split(" against ")
    assert (left != right) or ours == theirs or (np.isnan(ours) and np.isnan(theirs))


def test_values_that_differ_slightly_are_shown_so() -> None:
    def nudge(value: np.ndarray) -> np.ndarray:
        value = value.copy()
        value[3, 7] *= np.float32(1.001)
        return value

    for keep in ("tensors", "statistics"):
        change = at(
            nudge if keep == "tensors" else lambda value: value * np.float32(1.001),
            phase="forward",
            module="layers.1",
            op="functional.linear",
        )
        texts = [
            text.split(" against ")
            for text in re.findall(r"(-?[\d.e-]+ against -?[\d.e-]+)", fault(compared(keep, change=change)).evidence[0])
        ]
        assert texts
        assert all(left != right for left, right in texts)


def test_advice_names_the_run() -> None:
    judged = compared(change=scale(1.01, phase="forward", module="layers.1", op="functional.linear")).calls
    _, (found, *_) = explain(judged, RunInfo(), RunInfo(), subject_path="my runs/npu")
    assert "ulpscope show 'my runs/npu' layers.1/functional.linear.1" in found.next


def test_memory_that_nobody_wrote_to_does_not_agree_bitwise() -> None:
    comparison = compared(change=scale(1.01, phase="forward", module="layers.1", op="functional.linear"))
    blamed = call(comparison, "layers.1/functional.linear.1")
    first, *rest = blamed.slots
    unwritten = replace(first, measurement=NotMeasured("uninitialised memory"), verdict=Verdict("same", "derived", "", 0.0))
    assert inputs_line(replace(blamed, slots=(unwritten, *rest))) == "inputs agree bitwise, but for memory that nobody wrote to"


def test_ranks_with_the_same_culprit_are_one_finding() -> None:
    found = fault(compared(ranks=(0, 1, 2), change=scale(1.01, phase="forward", module="layers.1", op="functional.linear")))
    assert found.rank == 0
    assert "also on ranks 1, 2" in found.evidence


def test_the_rank_that_diverges_first_is_blamed() -> None:
    def change(where: Where, value: np.ndarray) -> np.ndarray:
        wrong: Change = scale(1.01, phase="forward", module="layers.2" if where.rank == 0 else "layers.1", op="functional.linear")
        return wrong(where, value)

    found = fault(compared(ranks=(0, 1), change=change))
    assert (found.rank, found.module) == (1, "layers.1")
    assert any("rank 0 from layers.2" in line for line in found.evidence)


def test_no_call_is_blamed_twice_and_counts_add_up() -> None:
    comparison = compared(change=scale(1.01, phase="forward", module="layers.0", op="functional.linear"))
    counts = Counter(one.contribution for one in comparison.calls)
    evidence = fault(comparison).evidence
    assert counts["inherited"] > 10
    assert f"{counts['inherited']} later differences are inherited" in evidence
    assert count_calls(comparison).inherited == counts["inherited"]


def test_calls_that_magnify_or_hide_an_error_are_not_counted_as_inherited() -> None:
    """A difference that enters is magnified a thousandfold in one place and vanishes in another."""
    first = scale(1.01, phase="forward", module="layers.0", op="functional.linear")
    second = scale(1000.0, phase="forward", module="layers.1", op="functional.leaky_relu")
    honest = train(steps=(0,))
    comparison = compare_runs(train(steps=(0,), change=lambda where, value: second(where, first(where, value))), honest)
    counts = Counter(one.contribution for one in comparison.calls)
    assert counts["amplified"] > 0
    found = fault(comparison)
    assert f"{counts['inherited']} later differences are inherited" in found.evidence
    assert any(line.startswith(f"{counts['amplified']} call") and "magnif" in line for line in found.evidence)
