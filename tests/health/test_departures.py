# SPDX-License-Identifier: Apache-2.0
"""Find the step at which two runs part, with the layer that left first; runs that only have other noise do not part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from tests.health.training import FAULTS, train
from ulpscope.cli import cli
from ulpscope.errors import NotARunError, NothingComparableError
from ulpscope.judge.health.departures import LIMITS
from ulpscope.store import create_run
from ulpscope.store.series import SeriesSink, open_health
from ulpscope.workflows.health_recording import compare_health, watch


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("references")
    return {optimizer: train(folder / optimizer, optimizer=optimizer) for optimizer in ("adamw", "sgd")}


@pytest.mark.parametrize(
    ("optimizer", "seed"), [("adamw", 1), ("adamw", 2), ("sgd", 2)], ids=["adamw", "adamw, other dropout", "sgd, other dropout"]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_begins(fault: str, optimizer: str, seed: int, references: dict[str, Path], tmp_path: Path) -> None:
    subject = train(tmp_path / "subject", fault=fault, seed=seed, optimizer=optimizer)
    comparison = compare_health(subject, references[optimizer])
    assert comparison.verdict == "diverges"
    assert comparison.parted_at in (20, 21)
    first = comparison.findings[0]
    assert (first.level, first.step) == ("fault", comparison.parted_at)
    assert first.module == ("" if fault == "learning rate" else "layers.1.up")
    assert ("learning_rate is" in first.headline) == (fault == "learning rate")


@pytest.mark.parametrize("at", [1, 3])
def test_a_fault_of_the_first_steps_is_found_too(at: int, references: dict[str, Path], tmp_path: Path) -> None:
    comparison = compare_health(train(tmp_path / "subject", fault="corrupted", at=at), references["adamw"])
    assert (comparison.parted_at, comparison.findings[0].module) == (at, "layers.1.up")
    assert f"up to step {at - 1} both runs are equal bit by bit" in comparison.findings[0].evidence


@pytest.mark.parametrize("lacks", ["subject", "reference"])
def test_a_parameter_that_one_run_never_trains_is_a_departure(lacks: str, tmp_path: Path) -> None:
    """The others stay close to their reference for long, and no rule for noise says anything."""

    def watched(side: str) -> Path:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        net[0].bias.requires_grad_(side != lacks)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with watch(net, optimizer, into=tmp_path / side, quiet=True):
            for _ in range(12):
                optimizer.zero_grad()
                net(torch.randn(16, 6)).square().mean().backward()
                optimizer.step()
        return tmp_path / side

    comparison = compare_health(watched("subject"), watched("reference"))
    assert (comparison.verdict, comparison.parted_at) == ("diverges", 0)
    assert comparison.findings[0].headline == f"the runs part at step 0: gradient of 0.bias is missing in the {lacks}"


def test_steps_that_only_one_run_has_are_told(references: dict[str, Path], tmp_path: Path) -> None:
    comparison = compare_health(train(tmp_path / "short", steps=12), references["adamw"])
    [note] = [finding.headline for finding in comparison.findings if finding.kind == "coverage"]
    assert note == "18 of 30 steps of the reference are not compared: the other side did not watch them"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("seed", range(2, 5))
def test_other_dropout_is_no_departure(seed: int, optimizer: str, references: dict[str, Path], tmp_path: Path) -> None:
    comparison = compare_health(train(tmp_path / "subject", seed=seed, optimizer=optimizer), references[optimizer])
    assert comparison.departures == ()
    assert comparison.verdict == "together"


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("seed", range(10, 40))
def test_other_dropout_is_no_departure_in_longer_runs(seed: int, optimizer: str, tmp_path: Path) -> None:
    one, other = (train(tmp_path / str(each), seed=each, optimizer=optimizer, steps=120) for each in (seed, seed + 1000))
    assert compare_health(one, other).departures == ()


@pytest.mark.parametrize(("weights", "data"), [(1, 7), (2, 8), (3, 9)])
def test_runs_of_other_seeds_are_unrelated(weights: int, data: int, references: dict[str, Path], tmp_path: Path) -> None:
    subject = train(tmp_path / "subject", seed=weights, weights=weights, data=data)
    comparison = compare_health(subject, references["adamw"])
    assert (comparison.verdict, [finding.kind for finding in comparison.findings]) == ("unrelated", ["unrelated"])
    assert comparison.chance == pytest.approx(0.5, abs=0.05)
    done = CliRunner().invoke(cli, ["compare-health", str(subject), str(references["adamw"]), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert done.output.startswith("unrelated: ")
    assert "the runs stay together" not in (tmp_path / "page.html").read_text()


def test_runs_that_share_their_weights_are_not_unrelated(references: dict[str, Path], tmp_path: Path) -> None:
    """Other batches leave two thirds of the signs equal, which no chance does."""
    comparison = compare_health(train(tmp_path / "subject", data=8), references["adamw"])
    assert (comparison.verdict, comparison.chance) == ("together", None)


def test_few_gradients_of_unlike_sizes_that_agree_are_not_unrelated(tmp_path: Path) -> None:
    """Standard errors from a half are far more for the large gradient than for the small ones, which is no spread by chance."""

    def watched(side: str, noise: float) -> Path:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(72, 24), nn.ReLU(), nn.Linear(24, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with watch(net, optimizer, into=tmp_path / side, quiet=True):
            for _ in range(20):
                optimizer.zero_grad()
                (net(torch.randn(16, 72) * (1 + noise)) - 1).square().mean().backward()
                optimizer.step()
        return tmp_path / side

    comparison = compare_health(watched("subject", 1e-5), watched("reference", 0.0))
    assert (comparison.verdict, comparison.chance) == ("together", None)


def test_the_same_run_twice_is_the_same(references: dict[str, Path], tmp_path: Path) -> None:
    comparison = compare_health(train(tmp_path / "again"), references["adamw"])
    assert comparison.verdict == "same"
    assert comparison.findings == ()
    assert np.nanmin(comparison.similarity) == 1.0


def test_every_limit_has_a_reason() -> None:
    assert all(limit.value > 0 and len(limit.why) > 20 for limit in LIMITS.values())


def test_runs_without_a_common_step_cannot_be_compared(references: dict[str, Path], tmp_path: Path) -> None:
    first = next(iter(open_health(references["adamw"]).steps(0)))
    path = create_run(tmp_path / "late", open_health(references["adamw"]).info)
    sink = SeriesSink(path, 0)
    sink.write(replace(first, step=900))
    sink.close()
    with pytest.raises(NothingComparableError, match="no step in common: the subject has steps 900 to 900, the reference steps 0 to 29"):
        compare_health(path, references["adamw"])


@pytest.mark.parametrize(("name", "words"), [("missing", "does not exist"), ("file", "is a file"), ("empty", "holds no series")])
def test_what_is_no_watched_run_is_said_in_words(name: str, words: str, tmp_path: Path, references: dict[str, Path]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARunError, match=words):
        compare_health(tmp_path / name, references["adamw"])
