# SPDX-License-Identifier: Apache-2.0
"""Run programs from elsewhere: a sample of them, all of them, and show that each question can be answered with no."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers asks for Python 3.11")
pytest.importorskip("expecttest")

from bench.architectures import ARCHITECTURES, train  # noqa: E402
from bench.programs import asking  # noqa: E402
from bench.programs.__main__ import main  # noqa: E402
from bench.programs.asking import Pair, Row, ask  # noqa: E402
from bench.programs.catalogue import FEW, Program, all_programs, kept_short  # noqa: E402
from bench.programs.known import KNOWN  # noqa: E402
from bench.programs.rows import BEGIN, END, Baseline, fallen, replace_table, summary_table  # noqa: E402
from bench.programs.workers import ask_all  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_a_sample_of_the_programs_is_left_alone_and_compares_with_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["--sample", "--scratch", str(tmp_path), "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert code == 0, capfd.readouterr().out
    assert len(rows) == 60 + 2 * 3 + 2
    assert all(row["num_checked"] > 200 for row in rows if not row["key"].startswith("operator/"))
    assert sum(row["num_checked"] for row in rows if row["key"].startswith("operator/")) > 200
    assert all(row["num_calls"]["op"] for row in rows)


@pytest.mark.long
def test_every_program_is_left_alone_and_compares_with_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--scratch", str(tmp_path)]) == 0, capfd.readouterr().out


# ---- what they are ---------------------------------------------------------------------------------------------------------------------


def test_there_are_as_many_programs_as_we_say() -> None:
    found = all_programs()
    assert len(ARCHITECTURES) == 36
    assert len([one for one in found if one.kind == "architecture"]) == 72
    assert len([one for one in found if one.kind == "operator"]) > 1000
    sample = {one.name for one in kept_short(found)}
    assert sample == {name for names in FEW.values() for name in names}
    assert len(FEW["operator"]) == 60
    assert len(FEW["architecture"]) == 3


def test_an_architecture_trains_the_same_way_twice_and_another_with_another_seed() -> None:
    one, same, other = train("bert"), train("bert"), train("bert", seed=1)
    assert asking.differences(one, same) == []
    assert one["loss 0"] != other["loss 0"]
    assert one["loss 0"] != one["loss 1"]
    assert train("bert", autocast="bfloat16")["loss 0"] != one["loss 0"]


# ---- every question can be answered with no --------------------------------------------------------------------------------------------


def answer(program: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Row:
    """Ask about a program that is a function of this test."""
    monkeypatch.setattr(asking, "run", program)
    return ask(Program("operator", "made up"), "cpu", folder)


def recorded(record: Any, work: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    with record(None, None) as capture:
        result = work()
        capture.step()
    return {"result": result}


def test_a_program_that_sees_that_it_is_recorded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def program(_: Any, record: Any, way: Any) -> Any:
        return recorded(record, lambda: torch.ones(3) * (1.0 if isinstance(record, type) else 1.0 + 2**-23))

    row = answer(program, monkeypatch, tmp_path)
    assert len(row.changed) == 3
    assert "level api, /result" in row.complaints[0]


def test_memory_that_nobody_wrote_to_is_no_surprise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fill shows it every time, where the process was begun as workers are; elsewhere memory may be alike by chance."""

    def program(_: Any, record: Any, way: Any) -> Any:
        return recorded(record, lambda: torch.empty(1 << 20) + torch.zeros(1 << 20))

    row = answer(program, monkeypatch, tmp_path)
    assert not row.is_repeatable
    assert row.changed == ()


def test_a_formula_in_which_torch_asks_for_a_dispatch_mode_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The gradient of masked_fill's value is summed in another order under any dispatch mode, also under one that does nothing."""
    row = ask(Program("operator", "masked_fill"), "cpu", tmp_path)
    assert row.changed == ()
    assert len(row.changed_by_torch) >= 1
    assert all("level op" in text for text in row.changed_by_torch)


def test_two_runs_that_differ_are_no_twins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed: list[int] = []

    def program(_: Any, record: Any, way: Any) -> Any:
        passed.append(1)
        factor = 2.0 if len(passed) == 6 else 1.0  # the sixth is the second recording at level api
        return recorded(record, lambda: torch.nn.functional.linear(torch.ones(4, 4), torch.full((4, 4), factor)))

    row = answer(program, monkeypatch, tmp_path)
    assert row.pairs["same seed"].exit_code == 1
    assert any(text.startswith("same seed: exit 1") for text in row.complaints)


def test_a_wrong_kernel_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.overrides import TorchFunctionMode

    class Wrong(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result.mul_(1.01) if func is torch.tanh else result

    def program(_: Any, record: Any, way: Any) -> Any:
        with Wrong():
            return recorded(record, lambda: torch.tanh(torch.linspace(-1, 1, 64)))

    row = answer(program, monkeypatch, tmp_path)
    assert row.num_checked >= 1
    assert any("tanh" in text for text in row.failures)


@pytest.mark.parametrize(("code", "name", "wrong"), [(2, "same seed", 1), (2, "bfloat16 against float32", 0), (1, "eager against SDPA", 1)])
def test_unknown_is_an_answer_between_two_devices_and_none_between_twins(code: int, name: str, wrong: int) -> None:
    assert len(Row("architecture/llama/float32", pairs={name: Pair(code)}).complaints) == wrong


# ---- nothing becomes quiet by being skipped --------------------------------------------------------------------------------------------


def row(**more: Any) -> Row:
    words: dict[str, Any] = {"num_calls": {"api": 9, "both": 12, "op": 30}, "num_checked": 8, "num_skipped": 1}
    return Row("operator/exp/float32", **{**words, **more})


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, 0),
        ({"num_calls": {"api": 9, "both": 12, "op": 29}}, 1),
        ({"num_calls": {"api": 10, "both": 13, "op": 31}, "num_checked": 9}, 0),
        ({"num_checked": 7, "num_skipped": 2}, 1),
        ({"num_checked": 0, "num_skipped": 9}, 1),
        ({"num_checked": 7, "num_skipped": 0}, 0),
    ],
)
def test_less_than_at_the_start_is_said(now: dict[str, Any], said: int, tmp_path: Path) -> None:
    Baseline({}, {}).with_rows([row()]).write(tmp_path / "baseline.json")
    baseline = Baseline.read(tmp_path / "baseline.json")
    assert baseline.is_of_this_torch
    assert len(fallen(row(**now), baseline)) == said


def test_the_baseline_knows_nearly_every_program() -> None:
    """The missing ones came after the counts, or were not counted yet."""
    baseline = Baseline.read()
    if not baseline.is_of_this_torch:
        pytest.skip(f"counted with {baseline.versions}")
    programs = all_programs()
    known = {one.key for one in programs} & set(baseline.counts)
    assert {one.key for one in programs if one.kind == "architecture" or one.dtype == "float32"} - known <= {
        one.key for one in programs if one.kind == "layout"
    }
    assert len(known) > 0.9 * len(programs)
    assert {one.key for one in kept_short(programs) if one.kind != "layout"} <= set(baseline.counts)


# ---- processes -------------------------------------------------------------------------------------------------------------------------


def killing(program: Program, device: str, folder: Path) -> Row:
    if program.name == "one that dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if program.name == "one that eats":
        torch.ones(1 << 40)
    return Row(program.key, device)


def test_a_crash_is_a_row_and_not_the_end(tmp_path: Path) -> None:
    names = ("one that dies", "one that lives", "one that eats", "one more")
    rows = list(ask_all([Program("operator", name) for name in names], "cpu", 1, tmp_path, killing))
    problems = {row.key.split("/")[1]: row.problem for row in rows}
    assert "exit code -11" in problems["one that dies"]
    assert "Error" in problems["one that eats"]
    assert problems["one that lives"] == problems["one more"] == ""


# ---- what is printed -------------------------------------------------------------------------------------------------------------------


def test_the_table_counts_what_the_rows_say() -> None:
    rows = [
        row(),
        replace(row(changed=("level api, result",)), key="operator/log/float32"),
        row(failures=("a", "b"), pairs={"same seed": Pair(1)}),
    ]
    line = summary_table(rows, Baseline({}, {})).splitlines()[2]
    assert line == "| operators, float32, cpu | 3 | 2 of 3 | 0 | 0 of 1 | 27, 36, 90 | 24 | 3 | 2 | 0 |"


def test_tables_replace_the_last_ones_on_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    replace_table(page, "| new |\n")
    replace_table(page, "| newer |\n")
    assert page.read_text() == f"before\n{BEGIN}\n\n| newer |\n\n{END}\nafter\n"


def test_a_name_that_fits_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name", "no such program"]) == 2
    assert "no program is called that" in capsys.readouterr().err


# ---- findings that are true ------------------------------------------------------------------------------------------------------------


def _of_swin(**changes: Any) -> Row:
    failures = ("functional.layer_norm.1 (backward): output.bias: cpu errs 380x what an honest bfloat16 kernel errs",)
    return replace(Row("architecture/swin/bfloat16", num_checked=10, failures=failures, pairs={"same seed": Pair(0)}), **changes)


def test_a_known_finding_is_no_complaint_and_anything_else_is() -> None:
    row = _of_swin()
    assert row.complaints == []
    other = "functional.linear.1 (backward): output.weight: cpu errs 12x what an honest bfloat16 kernel errs"
    assert [text for text in _of_swin(failures=(*row.failures, other)).complaints if "linear" in text] == [f"check fails: {other}"]
    assert len(replace(row, key="architecture/vit/bfloat16").complaints) == 1
    assert len(replace(row, device="cuda").complaints) == 1
    pair = Pair(1, "first contributed error: swin.layernorm  layer_norm (call 10, backward, output bias), step 0, rank 0")
    plain = Row("architecture/swin/float32", num_checked=10, pairs={"bfloat16 against float32": pair})
    assert plain.complaints == []
    assert len(replace(plain, pairs={"eager against SDPA": pair, **plain.pairs}).complaints) == 1
    wrong = Pair(1, "first contributed error: swin.layernorm  layer_norm (call 10, forward, output 0), step 0, rank 0")
    assert len(replace(plain, pairs={"bfloat16 against float32": wrong}).complaints) == 2  # another finding, and the known one is gone


def test_a_known_finding_that_is_gone_is_told() -> None:
    (text,) = _of_swin(failures=()).complaints
    assert "can go" in text
    assert _of_swin(failures=(), num_checked=0).complaints == []  # nothing was checked: who knows
    assert all(one.program in {program.key for program in all_programs()} for one in KNOWN)


def test_the_cpus_layer_norm_adds_up_in_the_dtype_of_its_input() -> None:
    """If this fails, torch was repaired: the entry of layer norm in `bench.programs.known` can go."""
    bias = torch.zeros(16, requires_grad=True)
    rows = torch.randn(4096, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        made = torch.nn.functional.layer_norm(rows, (16,), torch.ones(16).bfloat16(), bias.bfloat16())
    made.backward(torch.ones_like(made))
    assert bias.grad is not None
    assert float((bias.grad - 4096).abs().max()) > 100
