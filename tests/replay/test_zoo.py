# SPDX-License-Identifier: Apache-2.0
"""A corner of the zoo, so that it goes on running; the whole of it takes minutes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from bench.zoo.__main__ import write_rows
from bench.zoo.inputs import HELD
from bench.zoo.limits import OF_RECORD, STATISTICS, above_record, limits_of, value_of
from bench.zoo.operations import OPERATIONS
from bench.zoo.rows import Row, Task, cases, rows_by, rows_of, ways


@pytest.mark.parametrize("half", ["calibration", "held"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_rows_keep_the_limits(half: str, dtype: str) -> None:
    rows = [row for row in rows_of(Task(half, "softplus", dtype, "cpu")) if row.kind == "kernel"]
    assert not [row.raised for row in rows if row.raised]
    assert len({row.implementation for row in rows}) == (2 if half == "calibration" else 3)
    assert all(value_of(row, one) <= OF_RECORD[dtype][one] for row in rows for one in STATISTICS)


def test_the_zoo_is_large_and_every_operation_has_something_held_back() -> None:
    assert len(OPERATIONS) >= 25
    for operation in OPERATIONS.values():
        halves = {one.held for one in operation.implementations}
        assert halves == {False, True}, operation.name
        assert not set(operation.sizes) & set(operation.held_sizes)


def _row(**changes: object) -> Row:
    known = {"half": "calibration", "kind": "kernel", "op": "sum", "implementation": "", "dtype": "float32", "distribution": "", "size": ""}
    return Row(**{**known, "phase": "forward", "slot": "output.0", "numel": 100, **changes})  # type: ignore[arg-type]


def test_limits_come_from_kernels_of_the_calibration_half() -> None:
    rows = [_row(max_ratio=20.0), _row(max_ratio=1e6, half="held"), _row(max_ratio=1e6, kind="program")]
    assert {one.statistic: one.value for one in limits_of(rows)}["max_ratio"] == 32.0


def test_what_the_limits_of_record_would_blame() -> None:
    worse = _row(half="held", max_ratio=200.0)
    rows = [_row(half="held", max_ratio=127.0), _row(half="held", max_ratio=200.0, leeway=2.0), _row(max_ratio=200.0), worse]
    assert above_record(rows, "held") == [(worse, "max_ratio")]
    assert above_record([_row(half="held", max_ratio=40.0, dtype="bfloat16")], "held")


@pytest.mark.parametrize("distribution", ["mean 1000 std 3", "mean -1 std 0.1"])
def test_under_autocast_a_kernel_is_judged_by_what_it_was_given(distribution: str) -> None:
    """Attention on numbers far from zero, whose gradients hang on digits that 16 bits do not have."""
    operation = OPERATIONS["sdpa"]
    some = list(cases("held", operation, "float32", distribution, HELD[distribution], operation.held_sizes[0], seed=1))
    rows = [row for case in some for way in ways(case, "cpu") if way.autocast for row in rows_by(case, way)]
    assert {(row.dtype, row.phase) for row in rows} == {
        (dtype, phase) for dtype in ("bfloat16", "float16") for phase in ("forward", "backward")
    }
    assert {row.leeway for row in rows} == {2.0}
    assert above_record(rows, "held") == []


def test_few_elements_have_neither_an_rms_nor_a_bias() -> None:
    few, many = _row(numel=3, rms_ratio=9.0, bias=9.0), _row(numel=900, rms_ratio=9.0, bias=9.0)
    assert [value_of(few, one) for one in STATISTICS] == [0.0, 0.0, 0.0]
    assert [value_of(many, one) for one in STATISTICS] == [0.0, 9.0, 0.3]


def test_rows_are_written(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", [_row(max_ratio=2.5)])
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [row["max_ratio"] for row in csv.DictReader(file)] == ["2.5"]
