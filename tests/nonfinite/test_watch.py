# SPDX-License-Identifier: Apache-2.0
"""Test the hunt as its user meets it: the calls that it keeps, when it stops, and what it raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from tests.nonfinite.programs import Net, square, train
from ulpscope.capture.nonfinite.hunt import Hunt
from ulpscope.errors import NonFiniteError
from ulpscope.model import CallRecord, NonFinite
from ulpscope.workflows.nonfinite import find_nonfinite


def run_of(folder: Path, program: Any, **options: Any) -> list[CallRecord]:
    torch.manual_seed(0)
    limits = {name: options.pop(name) for name in ("steps", "select", "max_bytes") if name in options}
    program(lambda model=None, optimizer=None: ulpscope.Capture(folder / "run", model, watch=NonFinite(**options), **limits))
    run = ulpscope.open_run(folder / "run")
    assert [entry.why for entry in run.ledger(0)] == []
    return [record for step in run.steps(0) for record in run.records(0, step)]


def calls_of(records: list[CallRecord]) -> list[CallRecord]:
    return [record for record in records if record.level != "state"]


def overflowing(h: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        h = h * 1.0
    return torch.exp(h * 0 + 100)


def test_a_healthy_run_holds_nothing_but_ranges(tmp_path: Path) -> None:
    records = run_of(tmp_path, lambda record: train(record, Net(), square, steps=3))
    assert [str(record.call) for record in records] == ["state.range.0"]
    assert records[0].slots


def test_the_call_is_kept_wholly_and_the_ring_before_it_as_summaries(tmp_path: Path) -> None:
    records = calls_of(run_of(tmp_path, lambda record: train(record, Net(overflowing), square), ring=4))
    (culprit,) = [record for record in records if record.call.op == "torch.exp" and record.phase == "forward"]
    assert all(slot.content is not None for slot in culprit.slots)
    assert {str(slot.slot) for slot in culprit.slots} == {"input.0", "output.0"}
    assert culprit.arguments is not None
    assert culprit.arguments.args == ({"$tensor": "input.0"},)
    assert culprit.source is not None
    assert culprit.source.code == "return torch.exp(h * 0 + 100)"
    before = [record for record in records if record.order < culprit.order]
    assert [record.call.op for record in before] == ["Tensor.mul", "Tensor.mul", "Tensor.mul", "Tensor.add"]
    for record in before:
        (output,) = record.slots
        assert output.content is None
        assert output.summary is not None
        assert output.summary.max is not None
    data = ulpscope.open_run(tmp_path / "run").tensor(0, culprit.step, culprit.slots[0].content or "")
    assert data.shape == (4, 8)


def test_what_a_call_overwrote_is_said_to_be_gone(tmp_path: Path) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        scores = h * 0 + 3.0
        return scores.div_(torch.zeros(8))

    records = calls_of(run_of(tmp_path, lambda record: train(record, Net(middle), square)))
    (culprit,) = [record for record in records if record.call.op == "Tensor.div_" and record.phase == "forward"]
    gone, divisor = (slot for slot in culprit.slots if slot.slot.role == "input")
    assert gone.summary is None
    assert gone.content is None
    assert gone.note == "overwritten by this call; before it, 3 to 3, as Tensor.add.0 left it"
    assert divisor.content is not None


def count(module: Any) -> Any:
    return module.__dict__["__call__"].__code__


@pytest.mark.parametrize(("limit", "steps"), [(1, {0}), (2, {0, 1}), (None, {0, 1, 2, 3})])
def test_it_stops_after_so_many_or_never(tmp_path: Path, limit: int | None, steps: set[int]) -> None:
    """The loss overflows in every step and no parameter is touched by it."""
    original = count(nn.Module)
    seen: list[Any] = []

    def program(record: Any) -> None:
        model = Net()
        with record(model) as capture:
            for _ in range(4):
                torch.exp(model(torch.randn(4, 8)) * 0 + 100)
                capture.step()
                seen.append(count(nn.Module))

    records = calls_of(run_of(tmp_path, program, limit=limit))
    assert {record.step for record in records if record.call.op == "torch.exp"} == steps
    assert (seen[-1] is original) == (limit is not None)
    assert count(nn.Module) is original


def test_parameters_that_are_lost_are_not_told_again_in_every_step(tmp_path: Path) -> None:
    run_of(tmp_path, lambda record: train(record, Net(overflowing), square, steps=4), limit=None)
    assert len(find_nonfinite(tmp_path / "run").faults) == 1


def test_it_raises_where_the_value_is_made(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"\+inf was made by the top level: torch\.exp\.0, forward, step 0 .*test_watch\.py:"):
        run_of(tmp_path, lambda record: train(record, Net(overflowing), square), raise_error=True)
    first = find_nonfinite(tmp_path / "run").first
    assert first is not None
    assert first.call == "torch.exp.0"


def test_it_raises_before_bad_gradients_are_used(tmp_path: Path) -> None:
    model = Net(lambda h: torch.sqrt(h * 0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"torch\.sqrt\.0, backward"):
        run_of(tmp_path, lambda record: train(record, model, square), raise_error=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_what_the_scaler_skips_is_not_raised(tmp_path: Path) -> None:
    from tests.nonfinite.programs import skipped_by_the_scaler

    torch.manual_seed(0)
    skipped_by_the_scaler(lambda model, optimizer: ulpscope.Capture(tmp_path / "run", model, watch=NonFinite(raise_error=True)))
    report = find_nonfinite(tmp_path / "run")
    assert {event.kind for event in report.events} == {"expected"}
    assert "the scaler skipped the step" in report.events[0].remedy


def test_swallowed_values_name_who_swallowed_them(tmp_path: Path) -> None:
    from tests.nonfinite.programs import hidden_by_nan_to_num

    run_of(tmp_path, hidden_by_nan_to_num)
    (event, *_) = find_nonfinite(tmp_path / "run").events
    assert (event.kind, event.level) == ("swallowed", "note")
    assert event.swallowed_by.startswith("nan_to_num")


def test_what_is_harmless_in_every_step_is_written_a_few_times_only(tmp_path: Path) -> None:
    from tests.nonfinite.programs import Net

    zeros = torch.zeros(3)
    records = run_of(
        tmp_path, lambda record: train(record, Net(), lambda net, step: square(net, step) + (zeros / zeros).nan_to_num().sum(), steps=8)
    )
    assert len({record.step for record in records if record.call.op == "Tensor.div"}) == 3


@pytest.mark.parametrize(("options", "found"), [({"steps": [1]}, {1}), ({"steps": [5]}, set()), ({"select": "!*exp*"}, {0})])
def test_steps_and_patterns_narrow_it(tmp_path: Path, options: dict[str, Any], found: set[int]) -> None:
    def program(record: Any) -> None:
        with record() as capture:
            for _ in range(3):
                torch.exp(torch.full((3,), 100.0))
                torch.zeros(3) / torch.zeros(3)
                capture.step()

    records = calls_of(run_of(tmp_path, program, limit=None if "steps" in options else 1, **options))
    whole = [record for record in records if any(slot.content for slot in record.slots)]
    assert {record.step for record in whole} == found
    if "select" in options:
        assert {record.call.op for record in whole} == {"Tensor.div"}


@pytest.mark.parametrize(("saturation", "is_found"), [(True, True), (None, False), (False, False)])
def test_a_value_at_the_end_of_its_dtype_counts_where_it_is_asked_for(tmp_path: Path, saturation: bool | None, is_found: bool) -> None:
    largest = torch.finfo(torch.float16).max

    def middle(h: torch.Tensor) -> torch.Tensor:
        return (h.half() * 0 + 60000).float().mul(2).clamp(max=largest).half().float()

    run_of(tmp_path, lambda record: train(record, Net(middle), square, steps=1), saturation=saturation)
    events = [event for event in find_nonfinite(tmp_path / "run").events if event.dtype == "float16"]
    assert bool(events) is is_found
    if is_found:
        assert events[0].call == "Tensor.half.1"


def test_a_watch_that_fails_never_stops_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Hunt, "look_now", broken)
    model = Net()
    with pytest.warns(ulpscope.CaptureWarning, match="planted"):
        train(lambda net, optimizer: ulpscope.Capture(tmp_path / "run", net, watch="nonfinite"), model, square)
    assert any("planted" in entry.why for entry in ulpscope.open_run(tmp_path / "run").ledger(0))


def test_an_optimizer_with_a_closure_is_watched(tmp_path: Path) -> None:
    def program(record: Any) -> None:
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        with record(model):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.exp(model(torch.ones(4, 8)).mean() * 0 + 100)
                loss.backward()
                return loss

            optimizer.step(closure)

    records = calls_of(run_of(tmp_path, program))
    assert any(record.call.op == "torch.exp" and record.slots[0].content for record in records)


def test_modules_alone_are_watched_where_that_is_asked_for(tmp_path: Path) -> None:
    def program(record: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
        with torch.no_grad():
            model[1].weight.fill_(6e4)
        train(record, model, lambda net, step: net(torch.ones(4, 8, dtype=torch.float16)).float().mean())

    records = calls_of(run_of(tmp_path, program, calls=False))
    (culprit,) = [record for record in records if record.phase == "forward" and any(slot.content for slot in record.slots)]
    assert (culprit.level, culprit.module, str(culprit.call)) == ("module", "1", "module.Linear.1")
    assert {str(slot.slot) for slot in culprit.slots} == {"input.0", "parameter.weight", "parameter.bias", "output.0"}


def test_every_call_that_passes_it_on_can_be_kept_and_counted(tmp_path: Path) -> None:
    """The overflow check of older tools counts so: the limit is one of calls, and reaching it raises."""

    def middle(h: torch.Tensor) -> torch.Tensor:
        return torch.exp(h * 0 + 100) * 2 + 1

    with pytest.raises(NonFiniteError, match=r"torch\.exp\.0"):
        run_of(tmp_path, lambda record: train(record, Net(middle), square), limit=3, passed_on=True, raise_error=True)
    run = ulpscope.open_run(tmp_path / "run")
    whole = [record for record in run.records(0, 0) if any(slot.content for slot in record.slots)]
    assert [str(record.call) for record in whole] == ["torch.exp.0", "Tensor.mul.1", "Tensor.add.1"]


@pytest.mark.parametrize("options", [{"watch": "nonfinite"}, {"keep": "statistics"}])
def test_what_was_swallowed_is_not_blamed_for_what_another_call_did(tmp_path: Path, options: dict[str, Any]) -> None:
    zeros = torch.zeros(3)

    def middle(h: torch.Tensor) -> torch.Tensor:
        return torch.exp(h * 0 + 100) + (zeros / zeros).nan_to_num().sum()

    train(lambda model, optimizer: ulpscope.Capture(tmp_path / "run", model, **options), Net(middle), square, steps=1)
    found = {event.call: (event.kind, event.level) for event in find_nonfinite(tmp_path / "run").events}
    assert found == {"torch.exp.0": ("made", "fault"), "Tensor.div.0": ("swallowed", "note")}


def test_a_model_is_converted_while_its_graph_still_lives(tmp_path: Path) -> None:
    """Torch swaps no parameter with a weak reference to it; the hunt's memory of a call refers to its parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ulpscope.Capture(tmp_path / "run", model, watch="nonfinite") as capture:
            for _ in range(2):
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                capture.step()
            model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert loss.isfinite()
    assert model[0].weight.dtype == torch.float64


# ---- what a sum tells


@pytest.fixture
def at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step take ranges, so that the hunt has only sums in each."""
    monkeypatch.setattr("ulpscope.capture.nonfinite.hunt.takes_ranges", lambda step: False)


@pytest.mark.usefixtures("at_a_glance")
def test_values_so_large_that_their_sum_overflows_are_no_event(tmp_path: Path) -> None:
    def program(record: Any) -> None:
        with record() as capture:
            torch.full((64,), 3e38) * 1.0
            torch.full((64,), 60000.0, dtype=torch.float16) * 1.0
            capture.step()

    assert calls_of(run_of(tmp_path, program)) == []


@pytest.mark.usefixtures("at_a_glance")
def test_infinities_that_cancel_in_a_sum_are_found(tmp_path: Path) -> None:
    def program(record: Any) -> None:
        with record() as capture:
            torch.tensor([1.0, -1.0]) / torch.zeros(2)
            capture.step()

    assert [str(record.call) for record in calls_of(run_of(tmp_path, program))][-1] == "Tensor.div.0"


@pytest.mark.usefixtures("at_a_glance")
def test_the_ring_remembers_means_of_what_is_gone(tmp_path: Path) -> None:
    records = calls_of(run_of(tmp_path, lambda record: train(record, Net(overflowing), square), ring=4))
    *before, culprit = records[:5]
    assert culprit.call.op == "torch.exp"
    gone = [slot for record in before for slot in record.slots if "alone is known" in slot.note]
    assert gone
    assert all(slot.summary is not None and slot.summary.mean is not None and slot.summary.max is None for slot in gone)


def by_version(gradient: torch.Tensor) -> None:
    gradient.mul_(1e38).mul_(1e38)


def silently(gradient: torch.Tensor) -> None:
    torch._foreach_mul_([gradient], 1e38)
    torch._foreach_mul_([gradient], 1e38)


def by_another(gradient: torch.Tensor) -> None:
    gradient.data = torch.full_like(gradient, float("inf"))


@pytest.mark.usefixtures("at_a_glance")
@pytest.mark.parametrize("spoil", [by_version, silently, by_another])
def test_a_gradient_that_was_clean_in_backward_is_read_again_if_somebody_wrote_to_it(tmp_path: Path, spoil: Any) -> None:
    """Large gradients are not read again if nobody wrote to them."""
    model = nn.Linear(128, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ulpscope.Capture(tmp_path / "run", model, watch="nonfinite") as capture:
        model(torch.ones(4, 128)).square().mean().backward()
        assert model.weight.grad is not None
        with torch.no_grad():
            spoil(model.weight.grad)
        optimizer.step()
        capture.step()
    report = find_nonfinite(tmp_path / "run")
    assert report.first is not None
    assert "gradients" in report.first.reached


@pytest.mark.usefixtures("at_a_glance")
def test_a_large_gradient_that_is_clean_in_backward_is_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    remembered = Hunt._is_remembered

    def counting(hunt: Hunt, tensor: torch.Tensor) -> bool:
        answer = remembered(hunt, tensor)
        asked.append(tensor.numel() if answer else 0)
        return answer

    monkeypatch.setattr(Hunt, "_is_remembered", counting)
    model = nn.Linear(128, 128)
    train(lambda net, optimizer: ulpscope.Capture(tmp_path / "run", net, watch="nonfinite"), model, _mean_square, steps=2)
    assert asked.count(128 * 128) == 2


def _mean_square(net: nn.Module, step: int) -> torch.Tensor:
    return net(torch.ones(4, 128)).square().mean()


def test_operators_keep_their_own_names_where_asked(tmp_path: Path) -> None:
    from ulpscope.capture import HuntSession
    from ulpscope.model import RunInfo
    from ulpscope.store import DirectorySink, create_run

    path = create_run(tmp_path / "run", RunInfo())
    session = HuntSession(DirectorySink(path, 0), NonFinite(), operators=True)
    session.start()
    torch.ones(2).add(1)
    torch.ones(2) / torch.zeros(2)
    session.stop()
    (record,) = calls_of(list(ulpscope.open_run(path).records(0, 0)))[-1:]
    assert str(record.call) == "Tensor.__truediv__.0"
