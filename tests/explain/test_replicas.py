# SPDX-License-Identifier: Apache-2.0
"""Replicas that part: on two real gloo ranks, and by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.explain.programs import views_of
from tests.match.building import Where, train
from ulpscope.explain.entries.replicas import clue_replicas, explain_replicas
from ulpscope.explain.views import StepView
from ulpscope.model import Finding
from ulpscope.workflows.compare.comparing import compare_runs

WORKER = Path(__file__).with_name("on_two_ranks.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(WORKER.parents[2]), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for worker in workers:
        _, complaints = worker.communicate(timeout=300)
        assert worker.returncode == 0, complaints
    return folder


def views(runs: Path, subject: str, reference: str) -> list[StepView]:
    return views_of(compare_runs(runs / subject, runs / reference, replay="none"))


def parted(runs: Path, name: str) -> Finding | None:
    return explain_replicas([view for view in views(runs, f"{name}-subject", f"{name}-reference") if view.step == 0])


def test_a_wrapper_that_was_bypassed(runs: Path) -> None:
    found = parted(runs, "wrapper")
    assert found is not None
    assert (found.level, found.kind, found.slot, found.module) == ("fault", "replicas", "gradient.embed.weight", "")
    assert found.headline == "replicas part: all 6 parameters, first embed.weight, in the optimizer's step 0, ranks 0, 1"
    assert "each is what the backward calls of its own rank made: nothing reduced it" in found.evidence


def test_a_norm_whose_gradients_are_not_reduced(runs: Path) -> None:
    found = parted(runs, "norm")
    assert found is not None
    assert (found.module, found.slot) == ("norm", "gradient.norm.weight")
    assert any(line.startswith("2 groups of copies part") and line.endswith(": norm.weight, norm.bias") for line in found.evidence)
    assert any("distributed.all_reduce" in line for line in found.evidence)


def test_tied_weights_on_two_stages(runs: Path) -> None:
    found = parted(runs, "stages")
    assert found is not None
    assert found.headline == "tied weights part: words.weight and scores.weight, in the optimizer's step 0, ranks 0, 1"


def test_a_rank_with_a_fault_of_its_own_is_not_hidden(runs: Path) -> None:
    assert parted(runs, "kernel") is None


@pytest.mark.parametrize("name", ["wrapper", "norm", "kernel", "stages"])
def test_honest_runs_have_no_such_finding(runs: Path, name: str) -> None:
    for step in (0, 1):
        assert explain_replicas([view for view in views(runs, f"{name}-reference", f"{name}-reference") if view.step == step]) is None


def test_which_rank_left_the_others() -> None:
    def leave(where: Where, value: np.ndarray) -> np.ndarray:
        is_it = where.rank == 2 and where.slot == "parameter.layers.1.weight"
        return value * np.float32(1.01) if is_it else value

    comparison = compare_runs(train(ranks=(0, 1, 2), change=leave), train(ranks=(0, 1, 2)), replay="none")
    assert comparison.faults[0].kind == "parameters"
    assert clue_replicas(comparison.faults[0], views_of(comparison)) == [
        "replicas disagree: rank 2 of the subject left the others; in the reference all 3 ranks agree"
    ]
