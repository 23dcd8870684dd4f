# SPDX-License-Identifier: Apache-2.0
"""The hunt for inf and NaN and the health recording have names of their own; the older names do the same, without a warning."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ulpscope
from ulpscope.cli import cli


@pytest.mark.parametrize(
    ("new", "older"),
    [
        ({"nonfinite": True}, {"watch": "nonfinite"}),
        ({"nonfinite": ulpscope.NonFinite(limit=3)}, {"watch": ulpscope.NonFinite(limit=3)}),
    ],
    ids=["by name", "with options"],
)
def test_a_hunt_by_both_names_records_the_same(tmp_path: Path, new: dict[str, object], older: dict[str, object]) -> None:
    found = []
    for folder, options in (("new", new), ("older", older)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with ulpscope.Capture(tmp_path / folder, **options):  # type: ignore[arg-type]
                torch.full((2,), 1e38).mul(1e3)
        report = ulpscope.find_nonfinite(tmp_path / folder)
        asked = json.loads((tmp_path / folder / "run.json").read_text())["options"]
        found.append((asked, report.num_calls, report.first.headline if report.first is not None else ""))
    assert found[0] == found[1]
    assert found[0][0]["watch"]["nonfinite"]["ring"] == 32
    assert "+inf made by" in found[0][2]


@pytest.mark.parametrize("wrong", ["nonfinite", "everything", 1.5])
def test_what_is_no_hunt_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ulpscope.InputError, match=r"nonfinite=.* is not known; write nonfinite=True"):
        ulpscope.Capture(tmp_path / "run", nonfinite=wrong)  # type: ignore[arg-type]


def test_health_by_both_names_is_one_function() -> None:
    assert ulpscope.watch is ulpscope.record_health
    assert ulpscope.HealthWatch is ulpscope.HealthRecording


def test_the_older_command_draws_the_same(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ulpscope.record_health(model, optimizer, into=tmp_path / "run", quiet=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    drawn = [CliRunner().invoke(cli, [command, "--once", str(tmp_path / "run")]) for command in ("health", "watch")]
    assert [one.exit_code for one in drawn] == [0, 0]
    assert "rank 0 of 1" in drawn[0].stdout
    assert drawn[0].stdout == drawn[1].stdout


def test_a_script_is_recorded_one_way_at_a_time(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["run", "--into", str(tmp_path / "run"), "--health", "--watch", "nonfinite", "train.py"])
    assert refused.exit_code == 2
    assert "run the script once with each" in refused.stderr
    assert not (tmp_path / "run").exists()
