# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import gc
import io
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.conftest import NASTY
from ulpscope.errors import InputError, MissingDependencyError
from ulpscope.model import Comparison, JudgedCall, Summary, TensorMeasurement, Undefined
from ulpscope.report.comparison.parquet import write_parquet
from ulpscope.report.comparison.rows import COLUMNS, pair_rows
from ulpscope.report.comparison.table import defused, write_csv, write_xlsx

NAMES = [column.name for column in COLUMNS]
WRITERS = [write_csv, write_xlsx, write_parquet]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def read_xlsx(path: Path) -> list[dict[str, Any]]:
    header, *rows = openpyxl.load_workbook(io.BytesIO(path.read_bytes()), read_only=True).worksheets[0].iter_rows(values_only=True)
    return [dict(zip(header, row, strict=True)) for row in rows]


def with_measurement(comparison: Comparison, **changes: Any) -> Comparison:
    """Return the comparison with one call alone, whose only slot has this measurement."""
    call = comparison.calls[4]
    slot = call.slots[-1]
    assert isinstance(slot.measurement, TensorMeasurement)
    return replace(comparison, calls=(replace(call, slots=(replace(slot, measurement=replace(slot.measurement, **changes)),)),))


def test_the_columns_hold_every_metric_and_statistic() -> None:
    assert NAMES[:10] == ["step", "rank", "order", "level", "phase", "module", "subject_call", "reference_call", "matched_by", "slot"]
    assert {field.name for field in fields(TensorMeasurement)} <= set(NAMES)
    assert {f"{side}_{field.name}" for side in ("subject", "reference") for field in fields(Summary)} <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_csv_has_a_row_for_each_slot_pair(comparison: Comparison, tmp_path: Path) -> None:
    write_csv(comparison, tmp_path / "pairs.csv")
    rows = read_csv(tmp_path / "pairs.csv")
    assert len(rows) == sum(len(call.slots) for call in comparison.calls)
    culprit = next(row for row in rows if row["contribution"] == "contributed" and row["slot"] == "output.0")
    assert culprit["module"] == "layers.1.mlp"
    assert culprit["subject_call"] == culprit["reference_call"] == "functional.gelu.1"
    assert (culprit["subject_dtype"], culprit["subject_shape"]) == ("float32", "[8, 128, 1024]")
    assert (culprit["verdict"], float(culprit["multiple"])) == ("differs", 212.0)
    assert culprit["source"] == "train.py:48 in forward"
    assert culprit["differences"] == "approximate: 'tanh' | 'none'"
    assert [row["reference_call"] for row in rows if row["subject_call"] == "functional.dropout.0"] == [""]


def test_all_tables_hold_the_same_cells(comparison: Comparison, tmp_path: Path) -> None:
    for write in WRITERS:
        write(comparison, tmp_path / write.__name__)
    from_csv = read_csv(tmp_path / "write_csv")
    from_xlsx = read_xlsx(tmp_path / "write_xlsx")
    from_parquet = pyarrow.parquet.read_table(tmp_path / "write_parquet").to_pylist()
    assert len(from_csv) == len(from_xlsx) == len(from_parquet)
    for texts, cells, values in zip(from_csv, from_xlsx, from_parquet, strict=True):
        for column in COLUMNS:
            value = values[column.name]
            assert (value is None) == (texts[column.name] == "") or value == ""
            if column.kind in ("float", "int") and value is not None:
                assert float(texts[column.name]) == value
                assert cells[column.name] == pytest.approx(value, rel=1e-15)
            elif value not in (None, ""):
                assert texts[column.name] == str(value) == str(cells[column.name])


def test_undefined_is_an_empty_cell_and_a_remark(comparison: Comparison, tmp_path: Path) -> None:
    undefined = with_measurement(comparison, max_rel=Undefined("the reference holds zeros"), cosine=Undefined("a side is zero"))
    write_csv(undefined, tmp_path / "pairs.csv")
    (row,) = read_csv(tmp_path / "pairs.csv")
    assert (row["max_rel"], row["cosine"]) == ("", "")
    assert row["remarks"] == "max_rel: the reference holds zeros; cosine: a side is zero"
    write_parquet(undefined, tmp_path / "pairs.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "pairs.parquet")["max_rel"].to_pylist() == [None]


def test_nan_and_infinities_survive(comparison: Comparison, tmp_path: Path) -> None:
    strange = with_measurement(comparison, max_abs=math.nan, max_rel=math.inf, snr_db=-math.inf)
    write_csv(strange, tmp_path / "pairs.csv")
    (row,) = read_csv(tmp_path / "pairs.csv")
    assert (row["max_abs"], row["max_rel"], row["snr_db"]) == ("nan", "inf", "-inf")
    write_xlsx(strange, tmp_path / "pairs.xlsx")
    (cells,) = read_xlsx(tmp_path / "pairs.xlsx")
    assert (cells["max_abs"], cells["max_rel"], cells["snr_db"]) == ("nan", "inf", "-inf")


@pytest.mark.parametrize("write", WRITERS)
def test_a_size_that_no_tensor_has_stops_no_report(write: Any, comparison: Comparison, tmp_path: Path) -> None:
    write(with_measurement(comparison, numel=10**400, worst_index=(10**30,), max_abs=1.7e308), tmp_path / "pairs")
    assert (tmp_path / "pairs").stat().st_size > 0


def test_parquet_readers_that_prune_still_find_nan(comparison: Comparison, tmp_path: Path) -> None:
    strange = with_measurement(comparison, max_abs=math.nan)
    write_parquet(strange, tmp_path / "pairs.parquet")
    file = pyarrow.parquet.ParquetFile(tmp_path / "pairs.parquet")
    group = file.metadata.row_group(0)
    floats = {column.name for column in COLUMNS if column.kind == "float"}
    has_statistics = {group.column(place).path_in_schema: group.column(place).is_stats_set for place in range(group.num_columns)}
    assert not any(has_statistics[name] for name in floats)
    assert has_statistics["step"]
    (value,) = pyarrow.parquet.read_table(tmp_path / "pairs.parquet", filters=[("rank", "=", 0)])["max_abs"].to_pylist()
    assert math.isnan(value)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "＝1", "\n@x"])
def test_what_starts_a_formula_is_defused(text: str) -> None:
    assert defused(text).startswith("'")


@pytest.mark.parametrize("text", ["gelu", "a=b", "", "1-1", "[1, 2]"])
def test_other_texts_stay(text: str) -> None:
    assert defused(text) == text


@given(st.text(st.characters(exclude_categories=()), max_size=30))
def test_no_text_starts_a_formula(text: str) -> None:
    assert defused(text).lstrip()[:1] not in set("=+-@\t\r\n")
    assert defused(text).isprintable()


def test_hostile_names_stay_in_their_cells(nasty: Comparison, tmp_path: Path) -> None:
    for write in WRITERS:
        write(nasty, tmp_path / write.__name__)
    commands = replace(nasty, calls=tuple(replace_module(call, "=cmd()") for call in nasty.calls))
    write_csv(commands, tmp_path / "commands.csv")
    write_xlsx(commands, tmp_path / "commands.xlsx")
    assert {row["module"] for row in read_csv(tmp_path / "commands.csv")} == {"'=cmd()"}
    sheet = openpyxl.load_workbook(tmp_path / "commands.xlsx").worksheets[0]
    assert not [cell for row in sheet.iter_rows() for cell in row if cell.data_type == "f" or cell.hyperlink]
    num_rows = sum(len(call.slots) for call in nasty.calls)
    assert len(read_csv(tmp_path / "write_csv")) == len(read_xlsx(tmp_path / "write_xlsx")) == num_rows
    modules = set(pyarrow.parquet.read_table(tmp_path / "write_parquet")["module"].to_pylist())
    assert modules == {NASTY.replace("\ud800", "\\ud800")}


def replace_module(call: JudgedCall, text: str) -> JudgedCall:
    pair = call.pair
    subject, reference = (record and replace(record, module=text) for record in (pair.subject, pair.reference))
    return replace(call, pair=replace(pair, subject=subject, reference=reference))


def test_an_address_stays_text_in_xlsx(comparison: Comparison, tmp_path: Path) -> None:
    calls = (replace_module(comparison.calls[4], "https://example.org/" + "x" * 3000),)
    write_xlsx(replace(comparison, calls=calls), tmp_path / "pairs.xlsx")
    sheet = openpyxl.load_workbook(tmp_path / "pairs.xlsx").worksheets[0]
    assert not [cell for row in sheet.iter_rows() for cell in row if cell.hyperlink]


def test_xlsx_is_ready_to_filter_and_splits_long_tables(comparison: Comparison, tmp_path: Path) -> None:
    write_xlsx(comparison, tmp_path / "pairs.xlsx", rows_per_sheet=50)
    sheets = openpyxl.load_workbook(tmp_path / "pairs.xlsx").worksheets
    num_rows = len(list(pair_rows(comparison)))
    assert [sheet.max_row - 1 for sheet in sheets] == [50] * (num_rows // 50) + [num_rows % 50]
    for sheet in sheets:
        assert sheet.freeze_panes == "A2"
        assert sheet.auto_filter.ref.startswith("A1:")
        assert [cell.value for cell in sheet[1]] == NAMES


@pytest.mark.parametrize("write", WRITERS)
def test_no_calls_make_a_table_with_a_header(write: Any, comparison: Comparison, tmp_path: Path) -> None:
    write(replace(comparison, calls=()), tmp_path / "pairs")
    reader = {write_csv: read_csv, write_xlsx: read_xlsx, write_parquet: lambda path: pyarrow.parquet.read_table(path).to_pylist()}[write]
    assert reader(tmp_path / "pairs") == []


def test_a_call_without_tensors_still_has_a_row(comparison: Comparison) -> None:
    (row,) = pair_rows(replace(comparison, calls=(replace(comparison.calls[4], slots=()),)))
    cells = dict(zip(NAMES, row, strict=True))
    assert cells["subject_call"] == "functional.linear.0"
    assert cells["slot"] is None
    assert cells["remarks"] == "the call has no tensors"


def test_a_hundred_thousand_rows_stream(comparison: Comparison, tmp_path: Path) -> None:
    num_rows = sum(len(call.slots) for call in comparison.calls)
    repeats = 100_000 // num_rows + 1
    write_csv(replace(comparison, calls=comparison.calls * repeats), tmp_path / "pairs.csv")
    with (tmp_path / "pairs.csv").open() as stream:
        assert sum(1 for _ in stream) == num_rows * repeats + 1 > 100_000


@pytest.mark.parametrize("write", WRITERS)
def test_a_report_that_fails_leaves_the_old_one(write: Any, comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "pairs"
    path.write_text("what was there")
    broken = with_measurement(comparison)
    object.__setattr__(broken.calls[0].slots[0], "measurement", "not a measurement")
    with pytest.raises(TypeError):
        write(broken, path)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", WRITERS)
def test_a_place_that_cannot_be_written_is_one_sentence(write: Any, comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder '.*missing' does not exist; create it first"):
        write(comparison, tmp_path / "missing" / "pairs")
    with pytest.raises(InputError, match="it is a folder; give the name of a file"):
        write(comparison, tmp_path)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # XlsxWriter leaves its scratch files open then
def test_a_full_disk_under_xlsx_is_one_sentence(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xlsxwriter.workbook.ZipFile", refuse)
    with pytest.raises(InputError, match=r"cannot write '.*pairs.xlsx': .*No space left on device"):
        write_xlsx(comparison, tmp_path / "pairs.xlsx")
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("write", "module", "extra"), [(write_xlsx, "xlsxwriter", "xlsx"), (write_parquet, "pyarrow", "parquet")])
def test_a_missing_package_comes_with_its_install_line(
    write: Any, module: str, extra: str, comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'ulpscope\[{extra}\]'"):
        write(comparison, tmp_path / "pairs")
