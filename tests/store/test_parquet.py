# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ulpscope.model import Arguments, RunInfo, Summary
from ulpscope.store import DirectorySink, create_run, open_run, parquet
from ulpscope.testing.stores import example_record

pa = pytest.importorskip("pyarrow")
import pyarrow.compute as pc  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402


def written(tmp_path: Path, *summaries: Summary | None) -> Path:
    """A run with one record for each summary; returns its Parquet copy."""
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 0)
    sink.begin_step(0)
    for order, summary in enumerate(summaries):
        slot = replace(example_record().slots[0], summary=summary)
        sink.write(example_record(order, slots=(slot,)))
    sink.close()
    return tmp_path / "run" / "rank00000" / "step00000" / "records.parquet"


def test_one_row_for_each_slot(tmp_path: Path) -> None:
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 3)
    sink.begin_step(5)
    sink.write(example_record(0))
    sink.write(example_record(1, slots=(), stack=(), arguments=None))
    sink.close()
    rows = pq.read_table(tmp_path / "run/rank00003/step00005/records.parquet").to_pylist()
    assert [(row["rank"], row["step"], row["order"], row["slot"]) for row in rows] == [
        (3, 5, 0, "input.0.mask.1"),
        (3, 5, 0, "parameter.fc%2Eweight"),
        (3, 5, 1, None),
    ]
    first, _, last = rows
    assert (first["op"], first["phase"], first["module"], first["dtype"]) == ("functional.gelu", "backward", "layers.1.mlp", "float32")
    assert (first["shape"], first["strides"], first["num_neginf"], first["min"]) == ([3, 4], [1, 3], 2, -math.inf)
    assert (first["file"], first["line"], first["function"]) == ("train.py", 48, "forward")
    assert "NaN" in first["arguments"]
    assert (last["file"], last["arguments"], last["numel"]) == (None, None, None)


def test_nan_survives_and_no_filter_loses_it(tmp_path: Path) -> None:
    nan = math.nan
    table = written(
        tmp_path, Summary(4, 1.0, 2.0, 1.5, 1.6, 0), Summary(4, nan, nan, nan, nan, 4), Summary(4, -1.0, 9.0, nan, 1.0, 1), None
    )
    read = pq.read_table(table)
    assert [math.isnan(value) if value is not None else None for value in read["mean"].to_pylist()] == [False, True, True, None]
    dataset = ds.dataset(table)
    assert dataset.to_table(filter=pc.is_nan(ds.field("mean")))["order"].to_pylist() == [1, 2]
    assert dataset.to_table(filter=~(ds.field("max") <= 5.0))["order"].to_pylist() == [1, 2]
    assert dataset.to_table(filter=ds.field("num_nan") > 0)["order"].to_pylist() == [1, 2]


def test_there_are_no_statistics_to_prune_by(tmp_path: Path) -> None:
    metadata = pq.ParquetFile(written(tmp_path, Summary(4, 1.0, 2.0))).metadata
    columns = [metadata.row_group(0).column(number) for number in range(metadata.num_columns)]
    assert [column.path_in_schema for column in columns if column.is_stats_set] == []


def test_large_steps_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "RECORDS_IN_GROUP", 4)
    file = pq.ParquetFile(written(tmp_path, *[None] * 10))
    assert file.metadata.num_row_groups == 3
    assert file.read()["order"].to_pylist() == list(range(10))


def test_without_pyarrow_there_is_no_copy_and_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not written(tmp_path, None).exists()
    assert open_run(tmp_path / "run").ledger(0) == ()


def test_a_copy_that_fails_is_noted_and_the_record_stays(tmp_path: Path) -> None:
    sink = DirectorySink(create_run(tmp_path / "run", RunInfo()), 0)
    sink.begin_step(0)
    sink.write(example_record(2**63, arguments=Arguments()))
    sink.close()
    run = open_run(tmp_path / "run")
    assert [record.order for record in run.records(0, 0)] == [2**63]
    assert [entry.what for entry in run.ledger(0)] == ["a Parquet copy was not written"]
    assert sorted(entry.name for entry in (tmp_path / "run/rank00000/step00000").iterdir()) == ["records.msgpack", "tensors.journal"]
