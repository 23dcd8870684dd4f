# SPDX-License-Identifier: Apache-2.0
"""Parts that were not checked come first in the answer: a module with an unrecorded inside is part of the run, and counts as unchecked."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.check.command import invoke
from ulpscope import Capture
from ulpscope.model.check.checks import Check
from ulpscope.report.check.check_rows import write_check_csv, write_check_json
from ulpscope.report.check.console import verdict_line
from ulpscope.report.check.page import check_page
from ulpscope.workflows.check.checking import check_run

pytestmark = [  # of torch's compilers
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def _trained(into: Path, model: nn.Module, level: Any = "api", steps: int = 1) -> Path:
    """Train a classifier for a step, its loss computed outside of the model by a module of its own."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Capture(into, model=model, optimizer=optimizer, keep="tensors", level=level) as capture:
        for _ in range(steps):
            criterion(model(torch.randn(5, 8)), torch.arange(5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into


def _layers() -> list[nn.Module]:
    return [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)]


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("level", ["api", "both", "module"])
def test_a_model_that_is_compiled_as_a_whole_leaves_the_question_open(tmp_path: Path, level: str) -> None:
    check = check_run(_trained(tmp_path / "run", _compiled(nn.Sequential(*_layers())), level), isolated=False)
    assert (check.verdict, check.opaque[0]) == ("unknown", "OptimizedModule")
    assert check.coverage < 1
    assert verdict_line(check).startswith("unknown: ")
    assert "every module is opaque (OptimizedModule" in verdict_line(check)


def test_so_does_a_model_that_is_scripted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(*_layers()))
    check = check_run(_trained(tmp_path / "run", scripted), isolated=False)
    assert (check.verdict, check.opaque) == ("unknown", ("RecursiveScriptModule",))


def test_so_does_a_recording_of_modules_alone(tmp_path: Path) -> None:
    check = check_run(_trained(tmp_path / "run", nn.Sequential(*_layers()), "module"), isolated=False)
    assert check.verdict == "unknown"
    assert check.opaque == ("0 (Linear)", "1 (GELU)", "2 (Linear)", "CrossEntropyLoss")


def test_a_part_that_is_compiled_counts_and_the_share_comes_first(tmp_path: Path) -> None:
    """Forward and backward, three linear layers of five: two that are seen, three that are not."""
    model = nn.Sequential(*_layers(), _compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))))
    path = _trained(tmp_path / "run", model)
    check = check_run(path, isolated=False)
    assert [(call.phase, call.stands_for) for call in check.calls if call.is_opaque] == [("forward", 3), ("backward", 3)]
    seen = [call for call in check.calls if not call.is_opaque]
    assert {call.status for call in seen} == {"passed"}
    assert (check.num_checked, check.num_calls) == (len(seen), len(seen) + 6)
    percent = int(100 * len(seen) / (len(seen) + 6))
    assert verdict_line(check).startswith(f"no failure in {percent} % of what ran; 3 (OptimizedModule) is opaque: ")
    assert check.verdict == "sound"
    assert "at most" in next(finding.headline for finding in check.findings if finding.kind == "coverage")


def test_every_surface_gives_the_same_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(*_layers(), _compiled(nn.Linear(8, 8)))
    check = check_run(_trained(tmp_path / "run", model, "both", steps=2), isolated=False)
    write_check_json(check, tmp_path / "found.json")
    write_check_csv(check, tmp_path / "found.csv")
    page, found = check_page(check), json.loads((tmp_path / "found.json").read_text())
    assert (found["headline"], found["coverage"]) == (verdict_line(check), check.coverage)
    assert verdict_line(check) in page
    assert f"{check.coverage:.1%}" in page
    with (tmp_path / "found.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    calls = {(row["rank"], row["step"], row["order"]): row for row in rows}
    assert sum(int(row["stands_for"]) for row in calls.values()) == check.num_calls
    assert sum(int(row["stands_for"]) for row in calls.values() if row["status"] in ("passed", "failed")) == check.num_checked
    assert sum(row["status"] == "skipped" for row in calls.values()) == check.counts["skipped"] == 4


def test_the_command_ends_with_2_where_all_is_opaque(tmp_path: Path) -> None:
    model = _compiled(nn.Sequential(*_layers()))
    result = invoke(_trained(tmp_path / "run", model), "--json", tmp_path / "found.json")
    assert (result.exit_code, result.stdout[:9]) == (2, "unknown: ")
    assert json.loads((tmp_path / "found.json").read_text())["verdict"] == "unknown"


@pytest.mark.parametrize("level", ["api", "both"])
def test_a_model_that_was_seen_is_sound(tmp_path: Path, level: str) -> None:
    """A module that calls others counts as their calls and no more, and one that hands on its input computed nothing."""
    model = nn.Sequential(nn.Sequential(*_layers()), nn.Identity(), nn.Dropout(0.0))
    check = check_run(_trained(tmp_path / "run", model, level), isolated=False)
    assert (check.coverage, check.opaque, check.verdict) == (1.0, (), "sound")


def test_a_fused_layer_is_opaque(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with Capture(tmp_path / "run", model=layer, keep="tensors") as capture, torch.no_grad():
        F.relu(layer(torch.randn(2, 3, 8)))
        capture.step()
    check = check_run(tmp_path / "run", isolated=False)
    assert (check.verdict, check.opaque) == ("unknown", ("TransformerEncoderLayer",))


def test_calls_that_cannot_be_run_again_stand_in_the_answer(tmp_path: Path) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 2

    with Capture(tmp_path / "run", keep="tensors") as capture:
        F.gelu(Twice.apply(torch.ones(3, requires_grad=True))).sum().backward()
        capture.step()
    check = check_run(tmp_path / "run", isolated=False)
    skipped = [call for call in check.calls if call.status == "skipped"]
    assert [(call.call.op.rpartition(".")[2], call.phase) for call in skipped] == [("Twice", "forward"), ("Twice", "backward")]
    percent = int(100 * (1 - 2 / len(check.calls)))
    assert verdict_line(check).startswith(f"no failure in {percent} % of what ran; 2 were not settled or not checked (Twice): ")


def test_the_selection_is_what_ran(tmp_path: Path) -> None:
    path = _trained(tmp_path / "run", _compiled(nn.Sequential(*_layers())))
    check: Check = check_run(path, isolated=False, select="*cross_entropy*")
    assert (check.verdict, check.coverage) == ("sound", 1.0)
