# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.report.conftest import with_names
from tests.report.sample import sample_run_info
from ulpscope.model import Arguments, CallRecord, Comparison, Finding, LedgerEntry, Slot, TensorRecord
from ulpscope.report.comparison.console import render_comparison, render_details, render_records, render_run
from ulpscope.store import MemoryRun


def drawn(draw: Callable[[Console], None], **options: Any) -> str:
    stream = io.StringIO()
    draw(Console(file=stream, **options))
    return stream.getvalue()


def records(comparison: Comparison) -> list[CallRecord]:
    return [call.pair.subject for call in comparison.calls if call.pair.subject is not None]


def test_the_answer_comes_first(comparison: Comparison) -> None:
    lines = drawn(lambda console: render_comparison(comparison, console)).splitlines()
    assert lines[0] == "diverges: runs/npu against runs/gpu, 38 calls compared, 1 fault"
    assert lines[2:7] == [
        "first contributed error: layers.1.mlp  gelu (call 1, forward, output 0), step 0, rank 0",
        "  output errs 212x what rounding of float32 explains",
        "  inputs agree (0.6x); 17 later differences are inherited",
        "  train.py:48 in forward: return self.fc2(F.gelu(self.fc1(x)))",
        "  next: run this call alone on both devices: ulpscope show runs/npu 'layers.1.mlp/functional.gelu.1' --arguments",
    ]
    assert lines[-2].split("  ") == ["calls compared", "same", "rounding", "differ", "inherited", "only subject", "only reference"]
    assert lines[-1].split() == ["38", "2", "18", "18", "17", "1", "1"]


def test_clean_runs_are_said_to_be_clean(comparison: Comparison) -> None:
    calls = tuple(call for call in comparison.calls if call.level == "same")
    same = drawn(lambda console: render_comparison(replace(comparison, calls=calls, findings=()), console))
    assert same.startswith("same: runs/npu against runs/gpu, 2 calls compared, no difference\n")
    calls = tuple(call for call in comparison.calls if call.level in ("same", "rounding"))
    rounding = drawn(lambda console: render_comparison(replace(comparison, calls=calls, findings=()), console))
    assert rounding.startswith("nothing diverges: runs/npu against runs/gpu, 20 calls compared, no difference beyond rounding\n")


def test_the_headline_does_not_contradict_the_table(comparison: Comparison) -> None:
    """Of 38 calls 18 differ: without a fault that is said with the reason why it is none, in the words of the table."""
    headline, *_, counts = drawn(lambda console: render_comparison(replace(comparison, findings=()), console)).splitlines()
    assert "no difference beyond rounding" not in headline
    assert "18 calls differ by more than rounding explains, no call is to blame, and all that is made of them agrees" in headline
    assert counts.split()[3] == "18"


def test_what_nobody_knows_is_not_said_to_be_clean(doubtful: Comparison) -> None:
    lines = drawn(lambda console: render_comparison(doubtful, console)).splitlines()
    assert lines[0] == (
        "unknown: runs/npu against runs/gpu, 38 calls compared, no fault, but something differs bitwise by an unknown amount"
    )
    assert lines[2:6] == [
        "first bitwise difference: gelu",
        "  inputs agree bitwise",
        "  3 later calls differ bitwise too; nothing was kept that tells by how much",
        "  next: record again: ulpscope run",
    ]


def test_many_findings_are_counted_not_printed(comparison: Comparison) -> None:
    faults = [Finding(level="fault", kind="contributed", headline=f"fault {number}") for number in range(7)]
    notes = [Finding(level="note", kind="arguments", headline=f"number {number}") for number in range(15)]
    text = drawn(lambda console: render_comparison(replace(comparison, findings=(*faults, *notes)), console))
    assert "fault 4" in text
    assert "fault 5" not in text
    assert "and 2 more faults: --json" in text
    assert "note: number 2\n" in text
    assert "number 3" not in text
    assert "and 12 more notes: --json" in text


def test_a_pipe_gets_plain_whole_lines(comparison: Comparison) -> None:
    path = "/home/user/" + "deep/" * 40 + "run"
    text = drawn(lambda console: render_comparison(replace(comparison, subject_path=path), console), width=20)
    assert path in text
    assert "\x1b" not in text


def test_a_terminal_gets_colour_unless_told_otherwise(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = drawn(lambda console: render_comparison(comparison, console), force_terminal=True)
    assert "\x1b[1;31m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = drawn(lambda console: render_comparison(comparison, console), force_terminal=True)
    assert "31m" not in plain


def test_foreign_strings_reach_no_terminal_raw(nasty: Comparison) -> None:
    for text in (
        drawn(lambda console: render_comparison(nasty, console), no_color=True),
        drawn(lambda console: render_records(records(nasty), console, limit=None)),
        drawn(lambda console: render_details(records(nasty)[5], console, stacks=True, arguments=True)),
    ):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "[bold]" in text
        assert "\\x1b[31m" in text


@given(st.text(st.characters(exclude_categories=()), min_size=1, max_size=30))
def test_any_name_draws_one_line(comparison: Comparison, name: str) -> None:
    call = with_names(comparison.calls[5], name)
    assert call.pair.subject
    record = call.pair.subject
    text = drawn(lambda console: render_records([replace(record, slots=record.slots[:1])], console, limit=None))
    assert text.count("\n") == 3
    assert all(line.isprintable() for line in text.split("\n"))


def test_records_stop_at_a_screenful_but_never_inside_a_call(comparison: Comparison) -> None:
    text = drawn(lambda console: render_records(records(comparison), console, limit=4))
    assert text.splitlines()[-1] == "and 36 more calls: --all, or a glob such as 'layers.1.mlp*'"
    assert text.splitlines()[-2].split()[:3] == ["output.0", "float32", "[8,"]
    assert "more call" not in drawn(lambda console: render_records(records(comparison), console, limit=None))


def test_a_call_with_a_thousand_slots_takes_a_few_lines(comparison: Comparison) -> None:
    tensors = tuple(
        TensorRecord(slot=Slot("parameter", (f"layers.{number}.weight",)), dtype="float32", shape=(2,)) for number in range(1000)
    )
    text = drawn(lambda console: render_records([replace(records(comparison)[0], slots=tensors)], console, limit=None))
    assert text.count("\n") == 15
    assert "parameter.layers.11.weight" in text
    assert "and 988 more" in text


def test_strides_are_shown_where_they_are_not_plain(comparison: Comparison) -> None:
    slot = Slot("input", (0,))
    shown = {}
    for name, shape, strides in (("plain", (2, 1, 3), (3, 7, 1)), ("channels last", (2, 3, 4, 5), (60, 1, 15, 3)), ("empty", (), ())):
        tensor = TensorRecord(slot=slot, dtype="float32", shape=shape, strides=strides)
        record = replace(records(comparison)[5], slots=(tensor,))
        shown[name] = drawn(lambda console, record=record: render_details(record, console, stacks=False, arguments=False))
    assert "strides [60, 1, 15, 3]" in shown["channels last"]
    assert "strides" not in shown["plain"] + shown["empty"]


def test_a_backward_record_has_no_arguments_of_its_own(comparison: Comparison) -> None:
    backward = next(record for record in records(comparison) if record.phase == "backward")
    text = drawn(lambda console: render_details(replace(backward, arguments=Arguments()), console, stacks=False, arguments=True))
    assert "arguments" not in text
    assert "modes: " in text


def test_details_show_arguments_modes_and_stack(comparison: Comparison) -> None:
    culprit = next(record for record in records(comparison) if record.call.op == "functional.gelu" and record.call.index == 1)
    text = drawn(lambda console: render_details(culprit, console, stacks=True, arguments=True))
    assert text.startswith("layers.1.mlp/functional.gelu.1  forward, step 0, rank 0, order 19\n")
    assert "  arguments: gelu(input.0, approximate='none')\n" in text
    assert "  modes: grad=True, inference=False, training=True, deterministic=False\n" in text
    assert "    train.py:48 in forward: return self.fc2(F.gelu(self.fc1(x)))\n    train.py:88 in main: loss = model(tokens)\n" in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"$tensor": "input.0"}, "input.0"),
        ({"$dtype": "bfloat16"}, "bfloat16"),
        ({"$device": "cuda:0"}, "'cuda:0'"),
        ({"$size": [2, 3]}, "(2, 3)"),
        ({"$tuple": [1]}, "(1,)"),
        ({"$slice": [0, None, 2]}, "slice(0, None, 2)"),
        ({"$ellipsis": True}, "..."),
        ({"$complex": [0.0, 1.0]}, "complex(0.0, 1.0)"),
        ({"$object": "a.B", "repr": "<B>"}, "<B>"),
        ([1, {"$dtype": "int8"}], "[1, int8]"),
        ({"key": None}, "{'key': None}"),
        ("text", "'text'"),
    ],
)
def test_arguments_read_like_code(comparison: Comparison, value: Any, expected: str) -> None:
    record = records(comparison)[5]
    assert record.arguments
    shown = replace(record, arguments=replace(record.arguments, args=(value,), kwargs=None))
    text = drawn(lambda console: render_details(shown, console, stacks=False, arguments=True))
    assert f"({expected})\n" in text


def made_run() -> MemoryRun:
    run = MemoryRun(sample_run_info(), "runs/npu")
    for rank in (0, 1):
        sink = run.sink(rank)
        for step in (0, 1, 2, 5):
            sink.begin_step(step)
        if rank == 0:
            sink.end_step()
    run.sink(1).note(LedgerEntry(what="a tensor was not kept", why="the size limit is reached", count=12))
    return run


def test_the_header_says_what_made_the_run() -> None:
    text = drawn(lambda console: render_run(made_run(), console, size_bytes=12_345_678))
    for line in (
        "runs/npu: ulpscope run, format 1\n",
        "  made by     ulpscope 0.1.0, 2026-03-01T12:00:00+00:00\n",
        "  command     train.py --epochs 1\n",
        "  versions    python 3.11.7, torch 2.13.0, ulpscope 0.1.0\n",
        "  options     level='api', keep='tensors', steps=[0]\n",
        "  seed        1234\n",
        "  ranks       0-1 of world size 1\n",
        "  steps       0-2, 5\n",
        "  complete    no: step 5 of rank 1 was cut short\n",
        "  size        12.3 MB\n",
        "  ledger      1 entry: a tensor was not kept: the size limit is reached (12x)\n",
    ):
        assert line in text
