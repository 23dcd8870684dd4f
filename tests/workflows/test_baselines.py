# SPDX-License-Identifier: Apache-2.0
"""A baseline in the place of a reference: one comparison, the same judge, a file that widens only where it has to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.match.building import noise, scale, train
from ulpscope.errors import InputError, NothingComparableError
from ulpscope.model import Comparison
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.baselines import BaselineRun, update_baseline
from ulpscope.workflows.compare.comparing import compare_runs


def against(run: MemoryRun, path: Path) -> Comparison:
    return compare_runs(run, BaselineRun(path, run))


def test_a_run_fits_into_its_own_baseline(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    change = update_baseline(train(keep="statistics"), path)
    assert (change.is_new, change.num_calls) == (True, len([one for step in (0, 1) for one in train().records(0, step)]))
    comparison = against(train(keep="statistics"), path)
    assert (comparison.verdict, comparison.reference.format, comparison.reference_path) == ("same", "baseline", str(path))


@pytest.mark.parametrize("keep", ["statistics", "tensors"])
@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ({"phase": "forward", "module": "layers.1", "op": "functional.linear"}, "contributed"),
        ({"phase": "backward", "module": "layers.1", "op": "functional.linear", "slot": "output.1"}, "backward"),
        ({"phase": "start", "slot": "parameter.layers.1.weight"}, "parameters"),
    ],
)
def test_the_culprit_is_the_one_that_two_runs_would_name(place: dict[str, str], kind: str, keep: str, tmp_path: Path) -> None:
    update_baseline(train(keep="statistics"), tmp_path / "b.jsonl")
    wrong = train(keep=keep, change=scale(1.5, **place))
    [ours] = against(wrong, tmp_path / "b.jsonl").faults
    [theirs] = compare_runs(train(keep="statistics", change=scale(1.5, **place)), train(keep="statistics")).faults
    assert (ours.kind, ours.module, ours.call, ours.slot) == (theirs.kind, theirs.module, theirs.call, theirs.slot)
    assert ours.kind == kind


def test_honest_noise_passes_before_and_after_widening(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    update_baseline(train(keep="statistics"), path)
    noisy = [train(keep="statistics", change=noise(1e-6, seed)) for seed in range(3)]
    assert {against(run, path).verdict for run in noisy} == {"rounding"}
    change = update_baseline(noisy[0], path)
    assert (change.is_new, change.num_added, change.num_removed) == (False, 0, 0)
    assert change.num_widened > 10
    assert {against(run, path).verdict for run in (*noisy, train(keep="statistics"))} == {"rounding"}
    assert against(train(keep="statistics", change=scale(1.5, phase="forward", module="layers.1")), path).verdict == "diverges"


def test_a_wide_band_is_taught_by_several_runs(tmp_path: Path) -> None:
    """A difference between good runs is no fault of a third run that lies between them."""
    path = tmp_path / "b.jsonl"
    place = {"phase": "forward", "module": "layers.2", "op": "functional.leaky_relu"}
    update_baseline(train(keep="statistics", steps=(0,)), path)
    between = train(keep="statistics", steps=(0,), change=scale(1.001, **place))
    assert against(between, path).verdict == "diverges"
    assert update_baseline(train(keep="statistics", steps=(0,), change=scale(1.002, **place)), path).num_widened > 0
    assert against(between, path).verdict == "rounding"
    assert against(train(keep="statistics", steps=(0,), change=scale(1.05, **place)), path).faults[0].module == "layers.2"


def test_a_run_that_fits_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    update_baseline(train(keep="statistics"), path)
    before = path.read_bytes()
    assert update_baseline(train(keep="tensors"), path).is_none
    assert path.read_bytes() == before


def test_calls_follow_the_newest_run(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    update_baseline(train(keep="statistics", steps=(0,)), path)
    longer = train(keep="statistics", steps=(0,), extra=True)
    change = update_baseline(longer, path)
    assert (change.num_added, change.num_removed) == (1, 0)
    assert against(longer, path).verdict in ("same", "rounding")
    change = update_baseline(train(keep="statistics", steps=(0,)), path)
    assert (change.num_added, change.num_removed) == (0, 1)


def test_changed_arguments_are_seen(tmp_path: Path) -> None:
    update_baseline(train(keep="statistics", steps=(0,)), tmp_path / "b.jsonl")
    [fault] = against(train(keep="statistics", steps=(0,), slope=0.3), tmp_path / "b.jsonl").faults
    assert (fault.kind, fault.call) == ("arguments", "functional.leaky_relu.0")


def test_it_keeps_no_tensors_and_has_to_have_the_steps(tmp_path: Path) -> None:
    update_baseline(train(steps=(0,)), tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="keeps statistics and no tensors"):
        BaselineRun(tmp_path / "b.jsonl", train()).tensor(0, 0, "x")
    with pytest.raises(NothingComparableError):
        against(train(steps=(1,)), tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="nothing to write into the baseline"):
        update_baseline(MemoryRun(), tmp_path / "b.jsonl")
