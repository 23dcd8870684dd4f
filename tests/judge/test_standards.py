# SPDX-License-Identifier: Apache-2.0
"""The published standards: their numbers on the page, their order of decisions, and that the worst figure wins."""

from __future__ import annotations

import re
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.judge.published.standard_tables import API_STANDARDS, EDITION_26, EDITION_2024, EDITIONS, RULE_SOURCES, ULP
from ulpscope.judge.published.standards import figures_of, judge_standard, limits_of, standard_of, worst_status
from ulpscope.model import Undefined
from ulpscope.model.check.standards import STANDARD_METRICS, Standard, StandardMeasurement, StandardVerdict

PAGE = (Path(__file__).parents[2] / "docs" / "standards.md").read_text(encoding="utf-8")
GOOD: dict[str, float] = {
    **dict.fromkeys(STANDARD_METRICS, 0.0),
    "cosine": 1.0,
    "within_1e2": 1.0,
    "within_1e3": 1.0,
    "within_1e4": 1.0,
}


def judge(standard: Standard, dtype: str = "float32", *, other: dict[str, float] | None = None, **figures: Any) -> StandardVerdict:
    edition = figures.pop("edition", EDITION_2024)
    op = figures.pop("op", "")
    return judge_standard(standard, {**GOOD, **figures}, dtype=dtype, op=op, other=other, edition=edition)


def rows(*cells: str) -> list[tuple[str, ...]]:
    return re.findall("^" + r"\| " + r" \| ".join(cells) + r" \|$", PAGE, re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------------ tables


def test_the_page_names_the_sources() -> None:
    assert {name: source for name, _, source in rows("`(.+?)`", "(.+?)", "(.+?)") if name in RULE_SOURCES} == RULE_SOURCES


def test_the_page_has_the_list_of_calls() -> None:
    listed = {name: calls.split() for name, calls in rows("`(.+?)`", "([a-z0-9_ ]+)") if name in set(API_STANDARDS.values())}
    assert {call: name for name, calls in listed.items() for call in calls} == API_STANDARDS


def test_the_page_has_the_limits() -> None:
    shown = {name: numbers for name, *numbers in rows(r"(\w+)", r"([\d.e-]+)", r"([\d.e-]+)", r"([\d.e-]+)") if name.endswith(("16", "32"))}
    limits = {name: EDITION_2024.limits[name] for name in ("float32", "float16", "bfloat16")}
    expected = {name: [f"{each.small_value:g}", f"{each.small_error:g}", f"{each.rtol:g}"] for name, each in limits.items()}
    assert {name: numbers for name, numbers in shown.items() if numbers[0] != "32"} == expected


def test_the_page_has_the_ratios() -> None:
    shown = {
        name: (float(passed), float(warning), counts) for name, passed, warning, counts in rows(r"`(\w+)`", r"(\d+)", r"(\d+)", "(yes|no)")
    }
    ratios = EDITION_2024.ratios.items()
    assert shown == {name: (one.passed, one.warning, "no" if name in EDITION_2024.shown else "yes") for name, one in ratios}


def test_the_page_has_the_units() -> None:
    shown = {
        name: (units, share, mean.strip())
        for name, units, share, mean in re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \|([ \d]*)\|$", PAGE, re.M)
    }
    expected = {
        name: (f"{EDITION_2024.limits[name].ulp:g}", f"{one.beyond:g}", "" if one.mean is None else f"{one.mean:g}")
        for name, one in ULP.items()
    }
    assert shown == expected


def test_the_page_has_the_levels() -> None:
    shown = {name: calls.split() for name, calls in re.findall(r"^\| (L\d) \| [\d.]+ \| [\d.]+ \| (.+) \|$", PAGE, re.MULTILINE)}
    assert {call: name for name, calls in shown.items() for call in calls} == EDITION_26.level_of


def test_editions() -> None:
    assert list(EDITIONS) == ["2024", "26.2"]
    assert all(edition.source for edition in EDITIONS.values())


# ---------------------------------------------------------------------------------------------------------------- the list


@pytest.mark.parametrize(
    ("op", "dtype", "standard"),
    [
        ("functional.linear", "float16", "ulp"),
        ("Tensor.__matmul__", "float32", "ulp"),
        ("aten.mm.default", "float32", "ulp"),
        ("Tensor.add", "float32", "absolute"),
        ("Tensor.mul_", "bfloat16", "absolute"),
        ("Tensor.__imul__", "float32", "absolute"),
        ("Tensor.__truediv__", "float32", "absolute"),
        ("functional.relu", "float32", "binary"),
        ("Tensor.masked_fill_", "float16", "binary"),
        ("functional.conv2d", "float32", "thousandth"),
        ("functional.gelu", "float32", "benchmark"),
        ("Tensor.__pow__", "float32", "benchmark"),
        ("functional.gelu", "int64", "binary"),
        ("functional.gelu", "bool", "binary"),
        ("functional.linear", "float8_e4m3fn", "ulp"),
        ("x", "no dtype", "benchmark"),
    ],
)
def test_which_call_by_which_standard(op: str, dtype: str, standard: Standard) -> None:
    assert standard_of(op, dtype) == standard


# ----------------------------------------------------------------------------------------------------------------- checker


@pytest.mark.parametrize(
    ("dtype", "figures", "status"),
    [
        ("float32", {}, "passed"),
        ("float32", {"cosine": 0.99}, "failed"),
        ("float32", {"cosine": nan}, "failed"),
        ("float32", {"cosine": 0.9901, "max_abs": 1e-4, "within_1e3": 0.0}, "passed"),
        ("float32", {"cosine": 0.5, "max_abs": 0.0}, "failed"),
        ("float32", {"max_abs": 0.001, "within_1e3": 0.999}, "failed"),
        ("float32", {"max_abs": 0.001, "within_1e3": 0.9991, "within_1e4": 0.9999}, "warning"),
        ("float32", {"max_abs": 0.001, "within_1e4": 0.99991}, "passed"),
        ("float32", {"max_abs": 1.0, "within_1e2": 0.0}, "passed"),
        ("float64", {"max_abs": 1.0, "within_1e4": 0.5}, "warning"),
        ("float16", {"max_abs": 1.0, "within_1e2": 0.99}, "failed"),
        ("float16", {"max_abs": 1.0, "within_1e3": 0.999}, "warning"),
        ("bfloat16", {"max_abs": 1.0, "within_1e4": 0.0}, "passed"),
        ("bfloat16", {"max_abs": 1.0, "within_1e2": 0.5, "within_1e3": 0.5}, "failed"),
        ("complex64", {"max_abs": 1.0, "within_1e3": 0.9}, "failed"),
        ("float8_e8m0fnu", {}, "skipped"),
        ("int64", {}, "passed"),
        ("int64", {"mismatch": 1e-9}, "failed"),
        ("bool", {"mismatch": 1.0}, "failed"),
    ],
)
def test_checker(dtype: str, figures: dict[str, float], status: str) -> None:
    found = judge("checker", dtype, **figures)
    assert found.status == status
    assert bool(found.reason) == (status != "passed")


def test_checker_without_a_cosine_goes_on() -> None:
    figures = {name: value for name, value in GOOD.items() if name != "cosine"}
    assert judge_standard("checker", figures, dtype="float32").status == "passed"
    assert judge_standard("checker", {**figures, "max_abs": 1.0, "within_1e3": 0.0}, dtype="float32").status == "failed"


# ------------------------------------------------------------------------------------------------- binary, absolute, thousandth


@pytest.mark.parametrize(
    ("standard", "figures", "status"),
    [
        ("binary", {}, "passed"),
        ("binary", {"mismatch": 1e-12}, "failed"),
        ("absolute", {}, "passed"),
        ("absolute", {"rel_errors": 1e-12}, "failed"),
        ("absolute", {"abs_errors": 1e-12}, "failed"),
        ("absolute", {"small_errors": 1.0, "max_rel": 1.0}, "passed"),
        ("thousandth", {"within_1e3": 0.999}, "passed"),
        ("thousandth", {"within_1e3": 0.9989}, "failed"),
    ],
)
def test_all_or_nothing(standard: Standard, figures: dict[str, float], status: str) -> None:
    assert judge(standard, **figures).status == status


@pytest.mark.parametrize("standard", ["checker", "benchmark", "ulp", "binary", "absolute", "thousandth"])
def test_nan_in_the_wrong_place_fails_everywhere(standard: Standard) -> None:
    found = judge(standard, nonfinite_errors=0.1, other=GOOD)
    assert (found.status, found.multiple) == ("failed", inf)
    assert "NaN" in found.reason


# --------------------------------------------------------------------------------------------------------------------- ulp


@pytest.mark.parametrize(
    ("dtype", "figures", "share_there", "status"),
    [
        ("float32", {"ulp_beyond": 0.04, "ulp_mean": 1e9}, None, "passed"),
        ("float32", {"ulp_beyond": 0.05, "ulp_mean": 63.0}, None, "passed"),
        ("float32", {"ulp_beyond": 0.05, "ulp_mean": 64.0}, None, "failed"),
        ("float32", {"ulp_beyond": 0.05, "ulp_mean": 64.0}, 0.06, "passed"),
        ("float32", {"ulp_beyond": 0.05, "ulp_mean": 64.0}, 0.05, "failed"),
        ("float16", {"ulp_beyond": 0.001, "ulp_mean": 0.1}, None, "failed"),
        ("float16", {"ulp_beyond": 0.0009, "ulp_mean": 99.0}, None, "passed"),
        ("bfloat16", {"ulp_beyond": 0.5}, 0.6, "passed"),
        ("bfloat16", {"ulp_beyond": 0.5}, 0.0, "failed"),
        ("float64", {"ulp_beyond": 0.0}, None, "skipped"),
    ],
)
def test_ulp(dtype: str, figures: dict[str, float], share_there: float | None, status: str) -> None:
    other = None if share_there is None else {**GOOD, "ulp_beyond": share_there}
    found = judge("ulp", dtype, other=other, **figures)
    assert found.status == status
    assert found.multiple is None or (found.multiple < 1) == (status == "passed")


# --------------------------------------------------------------------------------------------------------------- benchmark


@pytest.mark.parametrize(
    ("name", "ratio", "status"),
    [
        ("small_errors", 1.0, "passed"),
        ("small_errors", 1.01, "warning"),
        ("rms_error", 2.0, "warning"),
        ("rms_error", 2.01, "failed"),
        ("max_rel", 10.0, "warning"),
        ("max_rel", 10.1, "failed"),
        ("mean_rel", 2.5, "failed"),
        ("balance", 1e6, "passed"),
        ("max_rel", 0.1, "passed"),
    ],
)
def test_benchmark_ratios(name: str, ratio: float, status: str) -> None:
    there = {**GOOD, **dict.fromkeys(EDITION_2024.ratios, 0.5)}
    found = judge("benchmark", other=there, **{**there, name: 0.5 * ratio})
    assert found.status == status
    assert found.ratios[name] == pytest.approx(ratio)
    assert name in found.reason or status == "passed"


def test_an_error_wins_over_a_warning() -> None:
    there = {**GOOD, **dict.fromkeys(EDITION_2024.ratios, 0.1)}
    found = judge("benchmark", other=there, **{**there, "max_rel": 0.9, "mean_rel": 0.3})
    assert found.statuses["max_rel"] == "warning"
    assert found.statuses["mean_rel"] == "failed"
    assert found.status == "failed"
    assert "mean_rel" in found.reason
    assert worst_status({"a": "passed", "b": "failed", "c": "warning", "d": "skipped"}) == "failed"


@pytest.mark.parametrize(
    ("here", "there", "ratio"), [(0.0, 0.0, 1.0), (1e-9, 0.0, 10_000.0), (0.0, 1.0, 0.0), (inf, inf, 1.0), (1.0, inf, inf), (inf, 1.0, inf)]
)
def test_ratios_at_the_edges(here: float, there: float, ratio: float) -> None:
    assert judge("benchmark", other={**GOOD, "rms_error": there}, rms_error=here).ratios["rms_error"] == ratio


def test_nothing_to_compare_with() -> None:
    assert judge("benchmark").status == "skipped"
    assert judge("benchmark", "float64", other=GOOD).status == "skipped"
    assert judge("benchmark", other={**GOOD, "nonfinite_errors": 1.0}).status == "skipped"
    assert judge_standard("benchmark", {"mismatch": 0.5}, dtype="float32", other=GOOD).status == "skipped"
    assert judge_standard("benchmark", {"mismatch": 0.0}, dtype="float32", other={"mismatch": 0.0}).status == "passed", "it is empty"


def test_the_later_edition_has_floors_levels_and_no_warnings() -> None:
    there, here = {**GOOD, "rms_error": 2.0**-14}, {"rms_error": 2.0**-14 * 1.4}
    assert judge("benchmark", other=there, op="torch.exp", edition=EDITION_26, **here).status == "passed"
    assert judge("benchmark", other=there, op="functional.embedding", edition=EDITION_26, **here).status == "passed"
    assert judge("benchmark", other=there, op="torch.matmul", edition=EDITION_26, **here).status == "failed"
    assert judge("benchmark", other=GOOD, edition=EDITION_26, rms_error=2.0**-13).ratios["rms_error"] == 2.0
    assert judge("benchmark", other=GOOD, edition=EDITION_26, rms_error=2.0**-13).status == "passed"


@given(st.dictionaries(st.sampled_from(STANDARD_METRICS), st.floats(allow_nan=True)), st.sampled_from(list(RULE_SOURCES)), st.booleans())
def test_any_figures_get_an_answer(figures: dict[str, float], standard: Standard, is_alone: bool) -> None:
    for dtype in ("float16", "float32", "float64", "int32", "complex64", "float8_e5m2", "what"):
        found = judge_standard(standard, figures, dtype=dtype, op="torch.mm", other=None if is_alone else figures)
        assert found.status in ("passed", "warning", "failed", "skipped")
        assert found.reason or found.status == "passed"


def test_figures_are_the_defined_metrics() -> None:
    nothing = Undefined("nothing")
    measured = StandardMeasurement(numel=1, **{**dict.fromkeys(STANDARD_METRICS, nothing), "mismatch": 0.5})
    assert figures_of(measured) == {"mismatch": 0.5}
    assert limits_of("complex64") == limits_of("float32")
    assert limits_of("int8") is None
