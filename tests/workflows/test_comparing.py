# SPDX-License-Identifier: Apache-2.0
"""The whole comparison: runs in, one frozen result out, and one sentence where it cannot be had."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.match.building import numbered, record, scale, train
from ulpscope.errors import InputError, NothingComparableError
from ulpscope.model import CallRecord, LedgerEntry, TensorData
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.comparing import compare_runs

GOLDEN = Path(__file__).parents[1] / "golden"


def run_of(records: list[CallRecord], path: str = "run") -> MemoryRun:
    run = MemoryRun(path=path)
    sink = run.sink()
    sink.begin_step(0)
    for one in records:
        sink.write(one)
    sink.close()
    return run


def test_the_result_names_both_sides_and_holds_the_calls() -> None:
    comparison = compare_runs(train(path="ours"), train(path="theirs"))
    assert (comparison.subject_path, comparison.reference_path, comparison.rules) == ("ours", "theirs", "derived")
    assert len(comparison.calls) == len([one for step in (0, 1) for one in train().records(0, step)])
    assert comparison.elapsed_s > 0


def test_swapping_the_sides_swaps_the_blame_but_not_the_culprit() -> None:
    wrong = train(change=scale(1.01, phase="forward", module="layers.1", op="functional.linear"))
    one, other = compare_runs(wrong, train()), compare_runs(train(), wrong)
    assert one.faults[0].call == other.faults[0].call == "functional.linear.1"


def test_each_pair_of_values_is_read_once() -> None:
    reads: Counter[str] = Counter()

    class Counting(MemoryRun):
        def tensor(self, rank: int, step: int, content: str) -> TensorData:
            reads[content] += 1
            return super().tensor(rank, step, content)

    wrong = train(steps=(0,), change=scale(1.001, phase="forward", module="layers.0", op="functional.linear"))
    wrong.__class__ = Counting
    comparison = compare_runs(wrong, train(steps=(0,)))
    culprit = comparison.faults[0]
    assert reads
    assert max(reads.values()) <= 3, "once to measure, once to run the culprit again, and once for its picture"
    assert sum(many > 1 for many in reads.values()) == 1
    assert culprit.histograms


def test_bitwise_equal_runs_read_no_tensor() -> None:
    class Unread(MemoryRun):
        def tensor(self, rank: int, step: int, content: str) -> TensorData:
            raise AssertionError("read")

    run = train()
    run.__class__ = Unread
    assert compare_runs(run, run).verdict == "same"


@pytest.mark.parametrize("dump", sorted(path for path in GOLDEN.glob("*/*") if path.is_dir()), ids=lambda path: "/".join(path.parts[-2:]))
def test_a_foreign_dump_agrees_with_itself(dump: Path) -> None:
    comparison = compare_runs(dump, dump)
    assert comparison.verdict in ("same", "rounding")
    assert {call.contribution for call in comparison.calls} <= {"clean", "unknown"}


def test_memory_that_nobody_wrote_to_is_not_worth_a_word() -> None:
    first, output = record("torch.empty", shapes=((4,),)).slots
    bare = replace(output, note="uninitialised memory: values are not read")
    run = run_of([replace(record("torch.empty"), slots=(replace(first, fingerprint="u1:1"), bare))])
    comparison = compare_runs(run, run)
    assert (comparison.verdict, comparison.findings) == ("same", ())


def test_progress_rises_to_the_whole() -> None:
    told: list[tuple[int, int]] = []
    compare_runs(train(), train(), progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_a_mapping_file_pairs_what_names_do_not(tmp_path: Path) -> None:
    ours, theirs = run_of(numbered([record("npu.magic", module="a")])), run_of(numbered([record("functional.gelu", module="b")]))
    with pytest.raises(NothingComparableError):
        compare_runs(ours, theirs)
    file = tmp_path / "names"
    file.write_text("a/npu.magic.* -> b/functional.gelu.*\n")
    comparison = compare_runs(ours, theirs, mapping=file)
    assert [call.pair.matched_by for call in comparison.calls] == ["mapping"]


def test_no_call_in_common_is_one_sentence() -> None:
    ours, theirs = run_of([record("torch.add")], "left"), run_of([record("module.Linear", level="module")], "right")
    expected = (
        r"no call is in both runs: the subject left has 1 of level api such as /torch\.add\.0, the reference right has 1 of level module"
    )
    with pytest.raises(NothingComparableError, match=expected):
        compare_runs(ours, theirs)


def test_rules_and_mapping_are_checked_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rules named"):
        compare_runs(tmp_path / "missing", tmp_path / "missing", rules="nonsense")
    with pytest.raises(InputError, match="mapping"):
        compare_runs(tmp_path / "missing", tmp_path / "missing", mapping=tmp_path / "none")


def test_rules_of_ptdbg_name_the_first_no() -> None:
    wrong = train(change=scale(9.0, phase="forward", module="layers.1", op="functional.linear"))
    comparison = compare_runs(wrong, train(), rules="ptdbg")
    assert (comparison.rules, comparison.faults[0].call) == ("ptdbg", "functional.linear.1")


def test_what_was_not_compared_is_said() -> None:
    subject, reference = train(steps=(0, 1)), train(steps=(0,))
    sink = subject.sink(0)
    sink.note(LedgerEntry(what="record the inputs of torch.add", why="ValueError: odd", count=3))
    comparison = compare_runs(subject, reference)
    assert comparison.verdict == "unknown"
    assert [(gap.kind, gap.why, gap.many) for gap in comparison.coverage.gaps] == [("step", "only in the subject", 1)]
    assert compare_runs(subject, reference, partial=True).verdict == "same"
    assert [finding.headline for finding in comparison.findings] == [
        "step 1 of rank 0 only in the subject: not compared",
        "recording the subject left 3 things out",
    ]
    assert comparison.findings[1].evidence == ("could not record the inputs of torch.add: ValueError: odd (3 times)",)


def test_steps_that_were_never_closed_are_said() -> None:
    run = MemoryRun()
    sink = run.sink()
    sink.begin_step(0)
    sink.write(record())
    note = compare_runs(run, run_of([record()])).findings[0]
    assert note.headline.startswith("1 step not closed by the writer: step 0 of rank 0 of the subject")


def test_slots_without_anything_in_common_are_counted() -> None:
    [note] = compare_runs(run_of([record()]), run_of([record()])).findings
    assert note.kind == "coverage"
    assert note.headline.startswith("2 of 2 slots could not be measured")


def test_a_thousand_calls_with_one_fault() -> None:
    wrong = train(
        layers=100, steps=(0,), keep="statistics", change=scale(1.01, phase="forward", module="layers.60", op="functional.linear")
    )
    found = compare_runs(wrong, train(layers=100, steps=(0,), keep="statistics")).faults
    assert [one.module for one in found] == ["layers.60"]
