# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.sample import sample_run_info
from tests.report.test_table import read_csv, with_measurement
from ulpscope.errors import InputError
from ulpscope.model import (
    Arguments,
    Comparison,
    ComparisonVerdict,
    Contribution,
    FindingLevel,
    LedgerEntry,
    Level,
    MatchedBy,
    Phase,
    Undefined,
    VerdictLevel,
)
from ulpscope.report.comparison.json_ import dump_comparison, dump_run, write_json
from ulpscope.report.comparison.rows import COLUMNS
from ulpscope.store import MemoryRun

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "report.schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}


def complaints(value: Any, schema: dict[str, Any], at: str = "$") -> list[str]:
    """Return the complaints about a value, by the part of JSON Schema that the project's schema uses."""
    if "$ref" in schema:
        return complaints(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], at)
    if "anyOf" in schema:
        tried = [complaints(value, choice, at) for choice in schema["anyOf"]]
        return [] if [] in tried else min(tried, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{at}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    if "type" in schema and not is_of(value, schema["type"]):
        return [f"{at}: {value!r} is not of type {schema['type']}"]
    return [*complaints_about_keys(value, schema, at), *complaints_about_items(value, schema, at)]


def is_of(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    return any(isinstance(value, TYPES[name]) and (name == "boolean") == isinstance(value, bool) for name in names)


def complaints_about_keys(value: Any, schema: dict[str, Any], at: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
    found = [f"{at}: {key} is missing" for key in schema.get("required", ()) if key not in value]
    for key, item in value.items():
        if key not in known and rest is False:
            found.append(f"{at}: {key} is unknown")
        else:
            found += complaints(item, known.get(key, rest or {}), f"{at}.{key}")
    return found


def complaints_about_items(value: Any, schema: dict[str, Any], at: str) -> list[str]:
    if not isinstance(value, list) or "items" not in schema:
        return []
    return [complaint for place, item in enumerate(value) for complaint in complaints(item, schema["items"], f"{at}[{place}]")]


def dumped(comparison: Comparison) -> Any:
    stream = io.StringIO()
    dump_comparison(comparison, stream)
    return json.loads(stream.getvalue(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_a_report_fits_its_schema(comparison: Comparison, nasty: Comparison, tmp_path: Path) -> None:
    for given_comparison in (comparison, nasty, replace(comparison, findings=(), calls=())):
        write_json(given_comparison, tmp_path / "report.json")
        report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert not complaints(report, SCHEMA)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("findings", 0, "level"), "fatal"),
        (("findings", 0, "surprise"), 1),
        (("pairs", 0, "verdict"), "fine"),
        (("pairs", 1, "surprise"), 1),
        (("pairs", 2, "distance"), "nan"),
        (("counts", "same"), "many"),
        (("subject", "seed"), True),
        (("pairs",), {"table": "report.pairs.csv"}),
    ],
)
def test_the_checker_sees_what_does_not_fit(place: tuple[Any, ...], value: Any, comparison: Comparison) -> None:
    report = part = dumped(comparison)
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    assert complaints(report, SCHEMA)


def test_the_checker_misses_what_is_missing(comparison: Comparison) -> None:
    report = dumped(comparison)
    del report["findings"][0]["headline"]
    assert complaints(report, SCHEMA) == ["$.findings[0]: headline is missing"]


def test_the_schema_knows_every_word_of_the_model() -> None:
    parts = SCHEMA["$defs"]
    pair = parts["pair"]["properties"]
    assert SCHEMA["properties"]["verdict"]["enum"] == list(get_args(ComparisonVerdict))
    assert parts["finding"]["properties"]["level"]["enum"] == list(get_args(FindingLevel))
    words = {"level": Level, "phase": Phase, "matched_by": MatchedBy, "verdict": VerdictLevel, "contribution": Contribution}
    assert {name: pair[name]["enum"] for name in words} == {name: list(get_args(word)) for name, word in words.items()}
    assert list(pair) == [column.name for column in COLUMNS]


def test_the_first_finding_names_the_culprit(comparison: Comparison) -> None:
    report = dumped(comparison)
    first = report["findings"][0]
    assert (report["schema"], report["verdict"]) == ("ulpscope.comparison/1", "diverges")
    assert (first["level"], first["kind"], first["module"], first["call"]) == ("fault", "contributed", "layers.1.mlp", "functional.gelu.1")
    assert (first["step"], first["rank"], first["phase"], first["slot"]) == (0, 0, "forward", "output.0")
    assert first["source"] == {"file": "train.py", "line": 48, "function": "forward", "code": "return self.fc2(F.gelu(self.fc1(x)))"}
    assert [histogram["what"] for histogram in first["histograms"]] == ["subject", "reference", "difference"]
    assert report["subject"]["path"] == "runs/npu"
    assert report["reference"]["devices"] == ["cuda:0"]
    assert report["counts"]["compared"] == 38
    assert report["counts"]["only_subject"] == report["counts"]["only_reference"] == 1


def test_nan_and_infinities_survive(comparison: Comparison) -> None:
    strange = with_measurement(comparison, max_abs=math.nan, max_rel=math.inf, snr_db=-math.inf, cosine=Undefined("a side is zero"))
    report = dumped(strange)
    (pair,) = report["pairs"]
    assert (pair["max_abs"], pair["max_rel"], pair["snr_db"]) == ("NaN", "Infinity", "-Infinity")
    assert "cosine" not in pair
    assert pair["remarks"] == "cosine: a side is zero"
    assert not complaints(report, SCHEMA)


@given(st.floats(), st.text(st.characters(exclude_categories=()), max_size=20))
def test_every_number_and_text_comes_back(comparison: Comparison, number: float, text: str) -> None:
    report = dumped(replace(with_measurement(comparison, distance=number), subject_path=text))
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    found = report["pairs"][0]["distance"]
    found = words[found] if isinstance(found, str) else found
    assert found == number or (math.isnan(found) and math.isnan(number))
    assert report["subject"]["path"] == text


def test_many_pairs_go_to_a_table_beside(comparison: Comparison, tmp_path: Path) -> None:
    write_json(comparison, tmp_path / "report.json", rows_inside=10)
    report = json.loads((tmp_path / "report.json").read_text())
    num_rows = sum(len(call.slots) for call in comparison.calls)
    assert report["pairs"] == {"table": "report.pairs.csv", "rows": num_rows}
    assert len(read_csv(tmp_path / "report.pairs.csv")) == num_rows
    assert not complaints(report, SCHEMA)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.pairs.csv"]


def test_a_failing_report_leaves_the_old_one(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("what was there")
    broken = with_measurement(comparison)
    object.__setattr__(broken.calls[0].slots[0], "measurement", "not a measurement")
    with pytest.raises(TypeError):
        write_json(broken, path)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_sentence(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ulpscope.report.comparison.json_.dump_comparison", lambda *_, **__: refuse())
    with pytest.raises(InputError, match=r"cannot write '.*report.json': No space left on device; choose another place"):
        write_json(comparison, tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []


def test_a_run_as_json(comparison: Comparison) -> None:
    run = MemoryRun(sample_run_info(), "runs/npu")
    sink = run.sink(0)
    sink.begin_step(0)
    sink.note(LedgerEntry(what="one tensor", why="it is sparse"))
    record = comparison.calls[5].pair.record
    sink.write(replace(record, arguments=Arguments(args=({"$dtype": "float32"}, math.nan))))
    stream = io.StringIO()
    dump_run(run, run.records(0, 0), stream)
    report = json.loads(stream.getvalue())
    assert report["schema"] == "ulpscope.run/1"
    assert report["run"]["path"] == "runs/npu"
    assert report["ranks"][0]["steps"] == [{"step": 0, "complete": False}]
    assert report["ranks"][0]["ledger"][0]["why"] == "it is sparse"
    (found,) = report["records"]
    assert found["arguments"]["args"] == [{"$dtype": "float32"}, "NaN"]
    assert found["call"] == str(record.call)
    assert [slot["slot"] for slot in found["slots"]] == ["input.0", "input.1", "input.2", "output.0"]


def test_an_unknown_difference_is_a_verdict_of_its_own(doubtful: Comparison) -> None:
    stream = io.StringIO()
    dump_comparison(doubtful, stream)
    written = json.loads(stream.getvalue())
    assert complaints(written, SCHEMA) == []
    assert (written["verdict"], written["findings"][0]["kind"]) == ("unknown", "bitwise")
