# SPDX-License-Identifier: Apache-2.0
"""A pass says that everything both runs recorded was compared; parts that were not come first, and leave the answer open."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from torch import Tensor, nn

from ulpscope import Capture
from ulpscope.cli import cli
from ulpscope.model import Comparison
from ulpscope.workflows.compare.comparing import compare_runs

Body = Callable[[nn.Module, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def record(
    into: Path,
    body: Body = plain,
    *,
    steps: int = 2,
    crash_at: int | None = None,
    is_trained: bool = True,
    keep: str = "tensors",
    after: Callable[[nn.Module], object] = lambda model: None,
    **options: object,
) -> Path:
    """Train a small model, or only run it, and stop in the middle of a step where that is asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.suppress(ZeroDivisionError), Capture(into, model=model, keep=keep, **options) as capture:  # type: ignore[arg-type]
        for step in range(steps):
            loss = body(model, torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))
            if step == crash_at:
                raise ZeroDivisionError
            if is_trained:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            after(model)
            capture.step()
    return into


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def gaps(comparison: Comparison) -> list[tuple[str, str]]:
    return [(gap.kind, gap.why) for gap in comparison.coverage.gaps]


def test_everything_compared_is_a_pass(tmp_path: Path) -> None:
    comparison = compare_runs(record(tmp_path / "a"), record(tmp_path / "b"))
    assert (comparison.verdict, comparison.coverage.is_whole, comparison.coverage.num_opaque) == ("same", True, 0)
    assert comparison.coverage.totals["step"] == 2
    assert comparison.coverage.totals["call"] == len(comparison.calls)


def test_a_run_that_is_cut_short_is_no_pass(tmp_path: Path) -> None:
    whole, short = record(tmp_path / "whole", steps=4), record(tmp_path / "short", steps=1)
    done = compare(short, whole)
    assert done.exit_code == 2
    assert done.output.startswith("unknown: 3 of 4 steps were not compared (steps 1-3 of rank 0 only in the reference): ")
    assert compare(short, whole, "--partial").exit_code == 0
    assert "3 of 4 steps were not compared" in compare(short, whole, "--partial").output


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("is_subject", [True, False])
def test_a_crashed_run_is_no_pass_against_a_whole_one(tmp_path: Path, is_subject: bool, is_trained: bool) -> None:
    whole = record(tmp_path / "whole", lambda model, x: plain(model, x) * 2, is_trained=is_trained)

    def crashing(model: nn.Module, x: Tensor) -> Tensor:
        loss = plain(model, x)
        if seen.append(1) or len(seen) < 2:
            return loss * 2
        raise ZeroDivisionError

    seen: list[int] = []
    crashed = record(tmp_path / "crashed", crashing, is_trained=is_trained)
    done = compare(*((crashed, whole) if is_subject else (whole, crashed)))
    assert done.exit_code == 2, done.output
    assert done.output.startswith("unknown: ")
    assert compare(whole, crashed, "--partial").exit_code == 0


def test_a_rank_that_is_not_compared_is_no_pass(tmp_path: Path) -> None:
    one, two = record(tmp_path / "one"), record(tmp_path / "two")
    shutil.copytree(two / "rank00000", two / "rank00001")
    comparison = compare_runs(one, two)
    assert (comparison.verdict, gaps(comparison)) == ("unknown", [("rank", "only in the reference")])
    assert comparison.coverage.totals["rank"] == 2


def test_a_fault_is_a_fault_whatever_else_is_missing(tmp_path: Path) -> None:
    whole, wrong = record(tmp_path / "whole", steps=3), record(tmp_path / "wrong", lambda model, x: plain(model, x * 1.5), steps=1)
    done = compare(wrong, whole)
    assert done.exit_code == 1
    assert compare_runs(wrong, whole).coverage.missing("step") == 2


def test_calls_that_compute_the_same_otherwise_are_a_note(tmp_path: Path) -> None:
    """One side squares by a product of its own, which is a call more."""
    ours = record(tmp_path / "ours", lambda model, x: model(x).pow(2).mean())
    theirs = record(tmp_path / "theirs", lambda model, x: torch.mul(y := model(x), y.clone()).mean())
    comparison = compare_runs(ours, theirs)
    assert (comparison.verdict, comparison.coverage.gaps) == ("rounding", ())
    assert any(finding.kind == "calls" for finding in comparison.findings)


def test_a_look_at_values_on_one_side_is_no_gap(tmp_path: Path) -> None:
    def looking(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        assert float(y.detach().abs().max()) >= 0
        return y.square().mean()

    def measuring(model: nn.Module) -> None:
        torch.stack([parameter.detach().norm() for parameter in model.parameters()]).max().item()

    comparison = compare_runs(record(tmp_path / "a", looking, after=measuring), record(tmp_path / "b"))
    assert (comparison.verdict in ("same", "rounding"), comparison.coverage.gaps) == (True, ())


def test_a_result_that_only_one_side_makes_is_a_gap(tmp_path: Path) -> None:
    """Without training the last call is the answer, and nothing after it shows that it is the same."""
    ours = record(tmp_path / "ours", lambda model, x: plain(model, x).sqrt(), is_trained=False)
    comparison = compare_runs(ours, record(tmp_path / "theirs", is_trained=False))
    assert (comparison.verdict, gaps(comparison)) == ("unknown", [("call", "only in the subject")])
    assert comparison.coverage.gaps[0].places[0].startswith("Tensor.sqrt.0 (forward), step 0")


def test_a_phase_that_only_one_side_has_is_a_gap(tmp_path: Path) -> None:
    comparison = compare_runs(record(tmp_path / "ours", steps=1), record(tmp_path / "theirs", steps=1, is_trained=False))
    assert comparison.verdict == "unknown"
    assert {(kind, why) for kind, why in gaps(comparison) if kind == "phase"} == {("phase", "only in the subject")}
    assert comparison.coverage.missing("phase") == 2  # backward and optimizer


@pytest.mark.parametrize("is_used", [True, False])
def test_a_slot_that_could_not_be_measured_is_harmless_where_all_that_is_made_of_it_agrees(tmp_path: Path, is_used: bool) -> None:
    """Capture refuses a sparse tensor whose dense form takes more than 1 GiB; the product with it is small."""

    def body(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        sparse = torch.sparse_coo_tensor(torch.tensor([[0], [0]]), y.flatten()[:1], (2**15, 2**15), check_invariants=True)
        return torch.sparse.mm(sparse, torch.ones(2**15, 1)).mean() if is_used else sparse

    runs = [record(tmp_path / name, body, is_trained=False) for name in "ab"]
    comparison = compare_runs(*runs)
    assert (comparison.verdict, comparison.coverage.is_whole) == (("rounding", True) if is_used else ("unknown", False))


def test_a_compiled_region_is_told_as_a_share_and_leaves_the_code_alone(tmp_path: Path) -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Linear(6, 6), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.inner(x))

    def run(into: Path) -> Path:
        torch.manual_seed(0)
        model = Opaque()
        with Capture(into, model=model, keep="tensors") as capture, torch.no_grad():
            model(torch.ones(2, 6)).sum()
            capture.step()
        return into

    done = compare(run(tmp_path / "a"), run(tmp_path / "b"))
    assert done.exit_code == 0, done.output
    assert "inside 1 of " in done.output.splitlines()[0]


def test_a_baseline_follows_the_same_rule(tmp_path: Path) -> None:
    whole, short = record(tmp_path / "whole", steps=3), record(tmp_path / "short", steps=1)
    baseline = tmp_path / "baseline.jsonl"
    assert compare(whole, "--baseline", baseline, "--update").exit_code == 0
    assert compare(whole, "--baseline", baseline).exit_code == 0
    assert compare(short, "--baseline", baseline).exit_code == 2
    assert compare(short, "--baseline", baseline, "--partial").exit_code == 0


def test_what_is_made_of_other_random_numbers_is_no_pass(tmp_path: Path) -> None:
    """Dropout draws another mask, and the loss is made of it."""

    def body(seed: int) -> Body:
        def drop(model: nn.Module, x: Tensor) -> Tensor:
            torch.manual_seed(seed)
            return F.dropout(model(x), 0.5).square().mean()

        return drop

    comparison = compare_runs(record(tmp_path / "a", body(1)), record(tmp_path / "b", body(2)))
    assert comparison.verdict in ("unknown", "diverges")
    if comparison.verdict == "unknown":
        assert ("slot", "made of other random numbers") in gaps(comparison)


def test_what_is_not_compared_is_not_compared_on_every_surface(tmp_path: Path) -> None:
    """Draws in two dtypes differ; the first line, the table and the JSON say so of the same slots and calls."""

    def body(dtype: torch.dtype) -> Body:
        return lambda model, x: (model(x) + torch.randn(5, 6, dtype=dtype).float()).square().mean()

    runs = [record(tmp_path / str(dtype), body(dtype)) for dtype in (torch.float64, torch.float32)]
    done = compare(*runs, "--json", tmp_path / "found.json", "--csv", tmp_path / "found.csv")
    assert done.exit_code == 2
    comparison = compare_runs(*runs)
    [many] = [gap.many for gap in comparison.coverage.gaps]
    untold = [slot for call in comparison.calls for slot in call.slots if slot.verdict.level == "unmeasured"]
    assert (len(untold), {slot.behind for slot in untold}) == (many, {"random"})
    assert done.output.startswith(f"unknown: {many} of {comparison.coverage.totals['slot']} slots were not compared")
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text(encoding="utf-8").splitlines()))
    assert sum(row["verdict"] == "unmeasured" for row in rows) == many
    counts = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["counts"]
    assert counts["unmeasured"] == sum(call.level == "unmeasured" for call in comparison.calls) > 0


@pytest.mark.parametrize("has_tail", [True, False])
def test_buffers_at_the_end_of_a_step_do_not_hide_a_result_of_one_side(tmp_path: Path, has_tail: bool) -> None:
    """The buffers of a batch norm are compared; a call after them that only one side has is not."""

    def run(into: Path, *, is_longer: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        with Capture(into, model=model, keep="tensors") as capture, torch.no_grad():
            y = model(torch.randn(5, 6))
            if is_longer:
                y.exp().sum()
            capture.step()
        return into

    comparison = compare_runs(run(tmp_path / "a", is_longer=has_tail), run(tmp_path / "b", is_longer=False))
    assert (comparison.verdict, comparison.coverage.is_whole) == (("unknown", False) if has_tail else ("same", True))


@pytest.mark.parametrize("missing_at", [0, 1])
def test_an_average_of_weights_that_was_not_updated_once_is_no_pass(tmp_path: Path, missing_at: int) -> None:
    """The optimizer's steps agree, and nothing in a step receives the average: it was written in place, and stays."""

    def trained(into: Path, is_whole: bool) -> Path:
        steps: list[int] = []
        averages: list[torch.optim.swa_utils.AveragedModel] = []

        def average(model: nn.Module) -> None:
            averages[:] = averages or [torch.optim.swa_utils.AveragedModel(model)]
            if is_whole or len(steps) != missing_at:
                averages[0].update_parameters(model)
            steps.append(len(steps))

        return record(into, steps=3, after=average)

    assert compare_runs(trained(tmp_path / "part", False), trained(tmp_path / "whole", True)).verdict == "diverges"


def test_what_is_lost_in_a_coarser_dtype_later_does_not_excuse_a_missing_call(tmp_path: Path) -> None:
    """A statistic takes a way round every recording on one side; the norm made of it is one per cent off, within bfloat16."""

    def normed(into: Path, is_wrong: bool) -> Path:
        with Capture(into, keep="tensors"):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
            variance = x.float().pow(2).mean(-1, keepdim=True)
            if is_wrong:
                variance = torch.from_numpy(variance.detach().numpy() * np.float32(1.02))
            (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype).sum()
        return into

    [fault] = compare_runs(normed(tmp_path / "wrong", True), normed(tmp_path / "right", False)).faults
    assert (fault.kind, fault.call) == ("calls", "Tensor.detach.0")


def _attention(into: Path, way: str) -> Path:
    torch.manual_seed(0)
    query, key, value = (nn.Linear(16, 16) for _ in range(3))
    model = nn.ModuleList([query, key, value])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(into, model=model, optimizer=optimizer, keep="tensors") as capture:
        x = torch.randn(4, 6, 16)
        ours, theirs, values = query(x), key(x), value(x)
        if way == "scaled before":
            mixed = torch.softmax((ours / 4) @ theirs.transpose(1, 2), -1)
        else:
            scores = ours @ theirs.transpose(1, 2) / (4 if way == "scaled after" else 4.001)
            exponents = (scores - scores.amax(-1, keepdim=True).detach()).exp()
            mixed = exponents / exponents.sum(-1, keepdim=True)
        (mixed @ values).square().mean().backward()
        optimizer.step()
        capture.step()
    return into


def test_terms_in_another_order_are_harmless_where_the_results_agree_by_values(tmp_path: Path) -> None:
    """Scores are scaled before the product on one side and after it on the other: the product differs, and nothing made of it."""
    comparison = compare_runs(_attention(tmp_path / "before", "scaled before"), _attention(tmp_path / "after", "scaled after"))
    assert (comparison.faults, comparison.verdict) == ((), "rounding")
    assert compare_runs(_attention(tmp_path / "other", "scaled otherwise"), tmp_path / "before").verdict == "diverges"


def test_a_call_that_both_sides_have_hides_a_missing_one_and_excuses_it_not(tmp_path: Path) -> None:
    def shares(into: Path, factor: float) -> Path:
        torch.manual_seed(0)
        with Capture(into, keep="tensors"):
            x = torch.randn(4, 2) * 2
            if factor != 1:
                x = x * factor
            (x.softmax(-1) > 0.2).float().mean()
        return into

    [fault] = compare_runs(shares(tmp_path / "wrong", 1.0001), shares(tmp_path / "right", 1.0)).faults
    assert (fault.kind, fault.call) == ("calls", "Tensor.mul.1")


def test_two_operations_that_stand_for_each_other_are_not_held_to_each_other_s_gradients(tmp_path: Path) -> None:
    """A norm and a quotient against `normalize`: the norm passes back a part of the gradient, `normalize` all of it."""

    def trained(into: Path, least: float | None) -> Path:
        torch.manual_seed(0)
        linear = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.01)
        with Capture(into, model=linear, optimizer=optimizer, keep="tensors") as capture:
            made = linear(torch.randn(8, 16))
            made = F.normalize(made, dim=-1) if least is None else made / made.norm(dim=-1, keepdim=True).clamp_min(least)
            made.exp().sum().backward()
            optimizer.step()
            capture.step()
        return into

    whole = trained(tmp_path / "whole", None)
    comparison = compare_runs(trained(tmp_path / "parts", 1e-12), whole)
    assert (comparison.faults, comparison.verdict) == ((), "rounding")
    assert compare_runs(trained(tmp_path / "wrong", 3.0), whole).verdict == "diverges"
