# SPDX-License-Identifier: Apache-2.0
"""Test the corpus itself: its machines are honest, its faults strike, its score counts what it says, and the whole reaches the bar."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bench.bugs.__main__ import main  # noqa: E402
from bench.bugs.answering import Answer, answer_all, answer_case  # noqa: E402
from bench.bugs.baselines import BASELINES  # noqa: E402
from bench.bugs.case import Case, Expected, Program, all_cases, build  # noqa: E402
from bench.bugs.machines import Fault, Machine, honest_kernels  # noqa: E402
from bench.bugs.networks import ConvNet, Decoder, Gpt, Recurrent, Vit  # noqa: E402
from bench.bugs.peer import _blame, _folder_of, _fork_and_wait, _read_answers, ask_peer  # noqa: E402
from bench.bugs.recording import run_program  # noqa: E402
from bench.bugs.scoring import Blame, score  # noqa: E402
from bench.bugs.tables import case_list, missed_by_both, print_tables, reaches_bar  # noqa: E402

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
HONEST = ("fp16", "tf32", "bf16", "split-k", "order", "functions", "accelerator", "accelerator-tf32")
UNITS = {"fp16": 2.0**-11, "tf32": 2.0**-11, "bf16": 2.0**-8, "accelerator": 2.0**-11, "accelerator-tf32": 2.0**-11}


def case(expected: Expected | None) -> Case:
    return Case(name="some", source="synthetic", what="", program=lambda side: Program(step=lambda index: None), expected=expected)


def gradients(make: Any, machine: AbstractContextManager[object], dtype: Any = None) -> dict[str, Any]:
    torch.manual_seed(3)
    model = make()
    entering, wanted = model.batch()
    if dtype is not None:
        model, entering = model.to(dtype), entering.to(dtype) if entering.is_floating_point() else entering
        wanted = wanted.to(dtype) if wanted.is_floating_point() else wanted
    with machine:
        model.loss(model(entering), wanted).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


# ---- machines --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", HONEST)
@pytest.mark.parametrize("make", [Gpt, lambda: Gpt(fused=False), ConvNet, Decoder, Recurrent, Vit], ids=lambda make: make.__name__)
def test_an_honest_machine_errs_as_much_as_its_format_explains(machine: str, make: Any) -> None:
    exact = gradients(make, nullcontext(), torch.float64)
    found = gradients(make, Machine(honest_kernels(machine)))
    largest = max(float(gradient.square().mean().sqrt()) for gradient in exact.values())
    unit = UNITS.get(machine, 2.0**-24)
    for name, gradient in exact.items():
        assert float((found[name] - gradient).square().mean().sqrt()) < 40 * unit * largest, name


@pytest.mark.parametrize("machine", HONEST)
def test_an_honest_machine_is_another_machine(machine: str) -> None:
    make = ConvNet if machine == "order" else Vit
    here, there = gradients(make, nullcontext()), gradients(make, Machine(honest_kernels(machine)))
    assert any(not torch.equal(here[name], there[name]) for name in here)


def test_a_fault_strikes_where_it_is_told_to() -> None:
    struck = []
    fault = Fault(op=aten.mul.Tensor, kernel=lambda honest, *args: struck.append(1) or honest(*args), phase="forward", calls=[1], steps=[1])
    machine = Machine({}, fault)
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        with machine():
            ((x * 2.0) * x * x).sum().backward()
    assert struck == [1]
    assert machine.num_hits == 1


def test_a_fault_that_never_strikes_is_an_error() -> None:
    machine = Machine({}, Fault(op=aten.erfinv.default, kernel=lambda honest, *args: honest(*args)))
    with pytest.raises(RuntimeError, match="never struck"):
        run_program(Program(step=lambda index: torch.ones(2) + 1, machine=machine), lambda: None, lambda: None)


# ---- the corpus ------------------------------------------------------------------------------------------------------------------------


def test_every_case_says_what_it_is() -> None:
    cases = all_cases()
    assert len({one.name for one in cases}) == len(cases)
    for one in cases:
        assert one.source == "synthetic" or one.source.startswith("https://"), one.name
        assert one.what, one.name
        assert not one.what.endswith("."), one.name
        assert one.level in ("api", "module", "both"), one.name


def test_the_page_lists_every_case() -> None:
    assert case_list(all_cases()) in (ROOT / "docs" / "bugs.md").read_text(), "paste `python -m bench.bugs --list` into docs/bugs.md"


def test_there_is_enough_of_every_kind() -> None:
    cases = all_cases()
    assert sum(one.is_clean for one in cases) >= 10
    assert sum(one.ranks > 1 and not one.is_clean for one in cases) >= 5
    assert len({one.name.partition("@")[0] for one in all_cases("*@*") if one.machine}) >= 9
    assert sum(one.source != "synthetic" for one in cases) >= 40


def test_both_sides_begin_with_the_same_weights() -> None:
    [one] = all_cases("tanh_gradient@order")
    subject, reference = (build(one, side).model for side in ("subject", "reference"))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(subject.parameters(), reference.parameters(), strict=True))


# ---- the score -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "is_right"),
    [
        (Expected(call="functional.gelu"), True),
        (Expected(call="*.gelu", module="blocks.*", phase="forward", slot="output*", step=1), True),
        (Expected(call="functional.gel"), False),
        (Expected(call="functional.gelu", module="blocks"), False),
        (Expected(call="functional.gelu", phase="backward"), False),
        (Expected(call="functional.gelu", slot="output.1"), False),
        (Expected(call="functional.gelu", step=0), False),
        (Expected(kind="arguments"), False),
        (Expected(any_of=(Expected(call="functional.silu"), Expected(kind="contributed"))), True),
        (Expected(any_of=(Expected(call="functional.silu"), Expected(kind="calls"))), False),
    ],
)
def test_a_culprit_is_recognised_by_everything_that_is_expected_of_it(expected: Expected, is_right: bool) -> None:
    blame = Blame(call="functional.gelu.3", module="blocks.1", slot="output.0", phase="forward", kind="contributed", step=1, rank=0)
    assert expected.matches(blame) is is_right


def test_what_a_tool_does_not_tell_is_not_held_against_it() -> None:
    blame = Blame(call="gelu", phase="forward", kind="contributed|arguments")
    assert Expected(call="functional.gelu", module="blocks.1", slot="output.0", kind="arguments").matches(blame)
    assert not Expected(call="functional.gelu", kind="backward").matches(blame)
    assert not Expected(call="functional.silu").matches(blame)


def test_faults_come_before_remarks_and_the_first_counts() -> None:
    expected = Expected(call="functional.gelu", phase="forward")
    right, wrong = Blame(call="functional.gelu.0", phase="forward"), Blame(call="functional.silu.0", phase="backward", headline="silu")
    remark = Blame(call="functional.gelu.0", phase="forward", is_fault=False)
    first = score(case(expected), [remark, right, wrong])
    assert (first.detected, first.top1, first.top3, first.phase, first.num_wrongly_blamed) == (True, True, True, True, 1)
    second = score(case(expected), [remark, wrong])
    assert (second.detected, second.top1, second.top3, second.phase, second.num_wrongly_blamed) == (True, False, True, False, 1)
    assert second.blamed == "silu"
    missed = score(case(expected), [remark])
    assert (missed.detected, missed.top1, missed.top3, missed.phase) == (False, False, False, False)


def test_blame_on_a_clean_pair_is_a_false_alarm() -> None:
    assert score(case(None), [Blame(call="functional.gelu.0")]).false_alarm
    assert not score(case(None), [Blame(call="functional.gelu.0", is_fault=False)]).false_alarm


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("Functional.layer_norm.3.backward.output.0", ("layer_norm", "norm", "backward")),
        ("Tensor.addcdiv_.0.forward.output.0", (None, None, "optimizer")),
        ("Tensor.__mul__.1.forward.input.0", ("__mul__", None, "forward")),
        ("Module.blocks.1.fc1.Linear.forward.0.output.0", (None, "blocks.1.fc1", "forward")),
    ],
)
def test_the_rows_of_the_peer_are_understood(row: str, expected: tuple[Any, ...]) -> None:
    parents = {"Functional.layer_norm.3.backward": "Module.norm.LayerNorm.backward.0"}
    blame = Blame(**_blame(row, 0, None, parents))
    assert (blame.call, blame.module, blame.phase) == expected


def test_a_peer_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    """All cases are answered already, so the peer need not even be there."""
    cases = all_cases("gelu_by_tanh@*")
    for one in cases:
        _folder_of(tmp_path, one).mkdir()
        (_folder_of(tmp_path, one) / "answer.json").write_text(json.dumps({"statistics": [{"call": "gelu", "phase": "forward"}]}))
    found = ask_peer(cases, sys.executable, tmp_path, ["statistics"], jobs=2)
    assert found == {one.name: {"statistics": [Blame(call="gelu", phase="forward")]} for one in cases}


def test_folders_have_names_that_the_peer_takes(tmp_path: Path) -> None:
    folders = [_folder_of(tmp_path, one) for one in all_cases()]
    assert not [folder for folder in folders if not re.fullmatch(r"[\w.-]+", folder.name)]
    assert len(set(folders)) == len(folders)


def test_a_peer_without_an_answer_says_why(tmp_path: Path) -> None:
    answer = {"statistics": [], "problem": "not finished after 300 s"}
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    assert _read_answers(tmp_path, ["statistics", "tensors"]) == {"statistics": [], "tensors": "not finished after 300 s"}


def _fail() -> None:
    raise ValueError("nothing to compare")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("work", "problem"),
    [(lambda: None, ""), (_fail, "ValueError: nothing to compare"), (lambda: time.sleep(60), "not finished after 0.2 s")],
)
def test_a_case_that_hangs_or_fails_does_not_stop_the_peer(work: Any, problem: str) -> None:
    assert _fork_and_wait(work, 0.2 if "0.2" in problem else 60) == problem


# ---- end to end ------------------------------------------------------------------------------------------------------------------------


def answered(name: str, keeps: tuple[str, ...] = ("tensors",)) -> dict[str, Answer]:
    answers = answer_case(name, keeps, runs=None)
    assert not [answer.problem for answer in answers if answer.problem]
    return {answer.tool: answer for answer in answers}


def test_a_forward_fault_is_named(tmp_path: Path) -> None:
    answers = answered("biased_variance@accelerator", ("tensors", "statistics"))
    assert answers["ulpscope, tensors"].score.top1
    assert answers["ulpscope, statistics"].score.top1
    assert answers["ulpscope, statistics"].num_bytes < answers["ulpscope, tensors"].num_bytes


def test_a_backward_fault_behind_another_machine_is_named_and_the_baselines_miss_it() -> None:
    answers = answered("tanh_gradient@order")
    assert answers["ulpscope, tensors"].score.top1
    assert not any(answers[name].score.top1 for name in BASELINES)


def test_a_clean_pair_is_quiet_though_bits_differ() -> None:
    answers = answered("clean_recurrent")
    assert not answers["ulpscope, tensors"].score.false_alarm
    assert answers["first bitwise difference"].score.false_alarm


def test_the_table_says_whether_the_bar_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    fault, clean = case(Expected(call="functional.gelu")), case(None)
    named = score(fault, [Blame(call="functional.gelu.0")])
    answers = [
        Answer(case="some", tool="ulpscope, tensors", score=named),
        Answer(case="some", tool="rules of P173", score=score(fault, [])),
    ]
    assert reaches_bar([fault], answers)
    assert missed_by_both([fault], answers) == ["some"]
    print_tables([fault], answers)
    assert "top-1 100%, detected 100%" in capsys.readouterr().out
    alarm = score(clean, [Blame(call="functional.gelu.0")])
    assert not reaches_bar([clean], [Answer(case="some", tool="ulpscope, tensors", score=alarm)])
    assert not reaches_bar([fault], [Answer(case="some", tool="ulpscope, tensors", score=None, problem="it broke")])


def test_the_command_answers_and_writes_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.json"
    options = ["--case", "product_off_by_a_little@cpu", "--keep", "statistics", "--jobs", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench.bugs", *options])
    assert main() == 0
    assert "product_off_by_a_little@cpu" in capsys.readouterr().out
    [answer] = json.loads(out.read_text())
    assert answer["tool"] == "ulpscope, statistics"


def test_a_name_that_fits_nothing_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.bugs", "--case", "no_such"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no case is called 'no_such'" in capsys.readouterr().err


@pytest.mark.long
def test_the_whole_corpus_reaches_the_bar() -> None:
    cases = all_cases()
    answers = list(answer_all(cases, ("tensors", "statistics"), peer=None, jobs=2))
    print_tables(cases, answers)
    assert reaches_bar(cases, answers)
    assert len(missed_by_both(cases, answers)) >= 10
