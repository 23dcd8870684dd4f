# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes: copies, shards, and what they give together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ulpscope.measure.health_series import drifting_replicas, joined_ranks
from ulpscope.model.health import HealthSeries
from ulpscope.store.series import open_health
from ulpscope.workflows.health_recording import compare_health


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("together")
    script = str(Path(__file__).with_name("on_two_processes.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), str(path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
    return path


def series(path: Path) -> list[HealthSeries]:
    run = open_health(path)
    return [run.series(rank) for rank in run.ranks()]


def test_watching_changes_nothing(folder: Path) -> None:
    for rank in (0, 1):
        assert json.loads((folder / f"{rank}.json").read_text()) == {"data_parallel": True, "fully_sharded": True, "tensor_parallel": True}


def test_copies_are_taken_once_and_do_not_drift(folder: Path) -> None:
    ranks = series(folder / "data_parallel")
    assert len(ranks) == 2
    assert drifting_replicas(ranks) == ()
    assert joined_ranks(ranks).values.shape == ranks[0].values.shape


@pytest.mark.parametrize("way", ["fully_sharded", "tensor_parallel"])
def test_shards_give_the_statistics_of_the_whole(folder: Path, way: str) -> None:
    """The sharded model and that of one process saw the same batches, so the joined statistics have to equal those of the one."""
    joined, alone = joined_ranks(series(folder / way)), series(folder / "alone")[0]
    places = {(target.kind, target.name): place for place, target in enumerate(alone.targets)}
    assert {(target.kind, target.name) for target in joined.targets} == set(places)
    order = [places[target.kind, target.name] for target in joined.targets]
    assert [target.numel for target in joined.targets] == [alone.targets[place].numel for place in order]
    np.testing.assert_allclose(joined.values[:3], alone.values[:3, order], rtol=2e-4, atol=1e-7)


def test_each_rank_measures_its_own_shard(folder: Path) -> None:
    """Shards along either dimension, and a bias that both have whole and one counts."""
    for rank in series(folder / "tensor_parallel"):
        sizes = {target.name: (target.numel, target.global_numel) for target in rank.targets if target.kind == "gradient"}
        assert sizes["0.weight"] == (15 * 12, 30 * 12)
        assert sizes["2.weight"] == (15 * 31, 30 * 31)
        assert sizes["2.bias"] == (31, 31)


def test_the_signs_of_shards_are_those_of_the_whole(folder: Path) -> None:
    joined, alone = joined_ranks(series(folder / "fully_sharded")), series(folder / "alone")[0]
    row = next(place for place, target in enumerate(joined.targets) if (target.kind, target.name) == ("gradient", "2.weight"))
    other = next(place for place, target in enumerate(alone.targets) if (target.kind, target.name) == ("gradient", "2.weight"))
    ones = np.unpackbits(joined.signs[0, row] ^ alone.signs[0, other]).sum()
    assert ones <= 4, "gradients near zero may differ in sign, others may not"


def test_sharded_and_whole_runs_compare(folder: Path) -> None:
    comparison = compare_health(folder / "fully_sharded", folder / "alone")
    assert comparison.verdict == "together"
    assert np.nanmin(comparison.similarity[0]) > 0.9


def test_replicas_that_drift_apart_are_found_with_step_and_parameter(folder: Path) -> None:
    drifts = drifting_replicas(series(folder / "drifting"))
    assert (drifts[0].step, drifts[0].rank, drifts[0].name) == (6, 1, "4.bias")
    found = compare_health(folder / "drifting", folder / "data_parallel").findings[0]
    assert (found.level, found.kind, found.step, found.module) == ("fault", "replicas", 6, "4")
