# SPDX-License-Identifier: Apache-2.0
"""Test `msprobe compare` as 1.x and as 26.x spell it: the files, their columns, and which rows are bad."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe.pytorch import compare, compare_distributed
from tests.legacy.msprobe_dumps import F4, Statistics, compare_json, csv_rows, msprobe, number, only, write_dump, xlsx_rows

NAMES = ["NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"]
EIGHT = [f"{side} {what}" for side in ("NPU", "Bench") for what in ("max", "min", "mean", "l2norm")]
ERRORS = ["MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio"]
DIFFERENCES = ["Max diff", "Min diff", "Mean diff", "L2norm diff"]
RELATIVE = ["MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"]
GRAD = ["NPU Requires_grad", "Bench Requires_grad"]
END = ["Requires_grad Consistent", "Result", "Err_message"]
FORWARD = "Functional.linear.0.forward"


def network(scale: float = 1.0) -> dict[str, Any]:
    """Build a linear, a gelu with a word, and the backward of the linear; `scale` multiplies the gelu."""
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=shape).astype(F4) for shape in ((3, 2), (4, 2), (4,)))
    y = x @ w.T + b
    gelu = (np.tanh(y) * scale).astype(F4)
    return {
        FORWARD: {"inputs": [x, w, b], "outputs": [y]},
        "Functional.gelu.0.forward": {"inputs": [y], "kwargs": {"approximate": "none"}, "outputs": [gelu]},
        "Functional.linear.0.backward": {"inputs": [np.ones_like(y)], "outputs": [np.ones(4, F4) * 3, np.ones_like(y) @ w]},
    }


def old(tmp_path: Path, npu: dict[str, Any], bench: dict[str, Any], mode: str, *words: str, **more: Any) -> Path:
    """Return the xlsx of `msprobe -f pytorch compare -i`."""
    sides = [
        write_dump(tmp_path / side / "step0" / "rank0", calls, mode, stacks={FORWARD: ["File train.py, line 3, in step, \n y = fc(x)"]})
        for side, calls in (("npu", npu), ("bench", bench))
    ]
    code = msprobe("-f", "pytorch", "compare", "-i", compare_json(tmp_path, *sides, **more), "-o", tmp_path / "output", *words)
    assert code == 0
    return only(tmp_path / "output", "compare_result_*.xlsx")


def new(tmp_path: Path, target: dict[str, Any], golden: dict[str, Any], mode: str, *words: object) -> list[dict[str, str]]:
    """Return the csv of `msprobe compare -tp -gp`."""
    for side, calls in (("npu", target), ("bench", golden)):
        write_dump(tmp_path / side / "step0" / "rank0", calls, mode, stacks={FORWARD: ["File train.py, line 3, in step, \n y = fc(x)"]})
    assert msprobe("compare", "-tp", tmp_path / "npu/step0", "-gp", tmp_path / "bench/step0", "-o", tmp_path / "output", *words) == 0
    return csv_rows(only(tmp_path / "output", "compare_result_rank0_*.csv"))


# --- 1.x


@pytest.mark.promise("M09", "E40", "E41", "E42", "E47")
def test_compare_of_1x_by_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old(tmp_path, network(1.5), network(), "tensor", "-s", is_print_compare_log=True)
    assert re.fullmatch(r"compare_result_\d{14}\.xlsx", path.name)
    rows = xlsx_rows(path)
    assert [name for name in rows[0] if name != "colour"] == [
        *NAMES, "Cosine", *ERRORS, *EIGHT, "Accuracy Reached or Not", "Err_message", "NPU_Stack_Info"
    ]  # fmt: skip
    by_name = {row["NPU Name"]: row for row in rows}
    assert by_name[f"{FORWARD}.output.0"]["Accuracy Reached or Not"] == "Yes"
    gelu = by_name["Functional.gelu.0.forward.output.0"]
    assert (gelu["Cosine"], gelu["One Thousandth Err Ratio"], gelu["colour"]) == (1, 0, "red")
    assert number(gelu["MaxRelativeErr"]) == pytest.approx(0.5, rel=1e-6)
    assert "y = fc(x)" in by_name[f"{FORWARD}.input.0"]["NPU_Stack_Info"]
    printed = capsys.readouterr().out
    assert "[Functional.gelu.0.forward.output.0] against [Functional.gelu.0.forward.output.0]" in printed
    assert "ulpscope: first contributed error: gelu" in printed
    assert path.with_suffix(".html").is_file()
    advice = only(tmp_path / "output", "advisor_*.txt").read_text()
    assert advice.startswith("Line: NA")  # a scale of 1.5 leaves cosine 1 and errors below 1: accurate by these rules


@pytest.mark.promise("E40", "E45", "E48")
def test_compare_of_1x_by_statistics(tmp_path: Path) -> None:
    path = old(tmp_path, network(3.0), network(), "statistics")
    rows = xlsx_rows(path)
    assert [name for name in rows[0] if name != "colour"] == [*NAMES, *DIFFERENCES, *RELATIVE, *EIGHT, "Result", "Err_message"]
    by_name = {row["NPU Name"]: row for row in rows}
    assert by_name["Functional.gelu.0.forward.output.0"]["Result"] == "Warning"
    assert by_name[f"{FORWARD}.output.0"]["Result"] in (None, "")
    assert by_name[f"{FORWARD}.output.0"]["Max diff"] == 0
    advice = only(tmp_path / "output", "advisor_*.txt").read_text()
    assert "Suspect Nodes: Functional.gelu.0.forward.output.0" in advice
    assert "its forward computation is wrong" in advice


@pytest.mark.promise("E46", "E49")
def test_compare_of_1x_by_checksums(tmp_path: Path) -> None:
    bench = network()
    del bench["Functional.linear.0.backward"]
    rows = xlsx_rows(old(tmp_path, network(1.5), bench, "md5", "-c"))
    assert [name for name in rows[0] if name != "colour"] == [*NAMES, "NPU MD5", "BENCH MD5", "Result"]
    results = {row["NPU Name"]: row["Result"] for row in rows}
    assert results[f"{FORWARD}.output.0"] == "Pass"
    assert results["Functional.gelu.0.forward.output.0"] == "Different"
    assert results["Functional.linear.0.backward.input.0"] == "Nan"
    assert not list((tmp_path / "output").glob("advisor*"))


@pytest.mark.promise("E45")
@pytest.mark.parametrize(("npu", "result"), [(1.999, ""), (2.0, ""), (2.001, "Warning")])
def test_warning_is_above_a_half(tmp_path: Path, npu: float, result: str) -> None:
    calls = [{"Torch.relu.0.forward": {"inputs": [Statistics(1, 1)], "outputs": [Statistics(high, 1, 1, 1)]}} for high in (npu, 1.0)]
    row = xlsx_rows(old(tmp_path, *calls, "statistics"))[1]
    assert (row["Result"] or "") == result


def one_call(entering: Statistics, leaving: Statistics) -> dict[str, Any]:
    return {"Torch.relu.0.forward": {"inputs": [entering], "outputs": [leaving]}}


SAME = Statistics(1.0, -1.0)


@pytest.mark.promise("E43", "E44")
@pytest.mark.parametrize(
    ("entering", "leaving", "colour"),
    [
        ((1.0, 1.0), (float("nan"), 1.0), "red"),
        ((1.0, 1.0), (float("inf"), 1.0), "red"),
        ((1.0, 1.0), (1e10 + 1e12, 1e12), ""),
        ((1.0, 1.0), (1.1e10 + 1e12, 1e12), "red"),
        ((1.0, 1.0), (1.5, 1.0), "yellow"),
        ((1.0, 1.0), (1.51, 1.0), "red"),
        ((1.0, 1.0), (0.004, -0.001), "yellow"),
        ((1.0, 1.0), (0.0051, 0.0), "red"),
        ((1.0, 1.0), (1.1, 1.0), "yellow"),
        ((1.0, 1.0), (1.0999, 1.0), ""),
        ((1.02, 1.0), (1.2, 1.0), ""),
        ((102.0, 100.0), (1020.0, 1000.0), "yellow"),
        ((102.0, 100.0), (1019.9, 1000.0), ""),
    ],
)
def test_colours_by_statistics(tmp_path: Path, entering: tuple[float, float], leaving: tuple[float, float], colour: str) -> None:
    sides = [one_call(Statistics(entering[side], 0.0), Statistics(leaving[side], 0.0)) for side in (0, 1)]
    assert xlsx_rows(old(tmp_path, *sides, "statistics"))[1]["colour"] == colour


def off(share: float, by: float = 0.01) -> np.ndarray[Any, Any]:
    """Return a thousand ones, of which a share is off by 1 %."""
    values = np.ones(1000, F4)
    values[: round(1000 * share)] += by
    return values


@pytest.mark.promise("E43", "E44")
@pytest.mark.parametrize(
    ("entering", "leaving", "colour"),
    [
        (off(0.0), off(0.4), "yellow"),
        (off(0.0), off(0.401), "red"),
        (off(0.099), off(0.401), "red"),
        (off(0.1), off(0.401), "yellow"),
        (off(0.0), off(0.1), ""),
        (off(0.0), off(0.101), "yellow"),
        (off(1.0), off(1.0, -0.9995), ""),
    ],
)
def test_colours_by_thousandths(tmp_path: Path, entering: Any, leaving: Any, colour: str) -> None:
    npu = {"Torch.relu.0.forward": {"inputs": [entering], "outputs": [leaving]}}
    bench = {"Torch.relu.0.forward": {"inputs": [off(0.0)], "outputs": [off(0.0)]}}
    assert xlsx_rows(old(tmp_path, npu, bench, "tensor"))[1]["colour"] == colour


def turned(cosine: float) -> np.ndarray[Any, Any]:
    """Return a unit vector with that cosine to the first axis."""
    return np.array([cosine, np.sqrt(1 - cosine**2)])


@pytest.mark.promise("E44")
@pytest.mark.parametrize(("cosine", "colour"), [(0.9001, ""), (0.8999, "yellow")])
def test_colour_by_cosine(tmp_path: Path, cosine: float, colour: str) -> None:
    """The inputs are off too, so that the thousandths say nothing."""
    npu = {"Torch.relu.0.forward": {"inputs": [np.full(2, 1.1)], "outputs": [turned(cosine)]}}
    bench = {"Torch.relu.0.forward": {"inputs": [np.ones(2)], "outputs": [turned(1.0)]}}
    rows = xlsx_rows(old(tmp_path, npu, bench, "tensor"))
    assert [row["One Thousandth Err Ratio"] for row in rows] == [0, 0]
    assert rows[1]["colour"] == colour


@pytest.mark.promise("E18", "E58")
def test_compare_from_a_script(tmp_path: Path) -> None:
    for side, scale in (("npu", 3.0), ("bench", 1.0)):
        for rank in (0, 1):
            write_dump(tmp_path / side / "step0" / f"rank{rank}", network(scale if rank else 1.0), "tensor")
    npu, bench = (tmp_path / side / "step0" for side in ("npu", "bench"))
    files = {f"{side}_json_path": str(path / "rank1/dump.json") for side, path in (("npu", npu), ("bench", bench))}
    (single,) = compare({**files, "stack_json_path": str(npu / "rank1/stack.json")}, tmp_path / "one", stack_mode=False)
    assert "No" in {row["Accuracy Reached or Not"] for row in xlsx_rows(single)}
    both = compare_distributed(str(npu), str(bench), str(tmp_path / "all"))
    assert [re.sub(r"_\d{14}", "", path.name) for path in both] == [f"compare_result_rank{n}-rank{n}.xlsx" for n in (0, 1)]
    assert {row["Accuracy Reached or Not"] for row in xlsx_rows(both[0])} == {"Yes", "Nan"}
    with pytest.raises(ValueError, match="suffix"):
        compare_distributed(str(npu), str(bench), str(tmp_path / "all"), suffix="x")


# --- 26.x


@pytest.mark.promise("M09", "E61")
@pytest.mark.parametrize(
    ("mode", "middle", "last"),
    [
        ("tensor", ["Cosine", "EucDist", *ERRORS, *EIGHT], ["NPU_Stack_Info", "Data_name"]),
        ("statistics", [*DIFFERENCES, *RELATIVE, *EIGHT], ["NPU_Stack_Info"]),
        ("md5", ["NPU MD5", "BENCH MD5"], ["NPU_Stack_Info"]),
    ],
)
def test_compare_of_26x(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, middle: list[str], last: list[str]) -> None:
    rows = new(tmp_path, network(), network(), mode)
    assert list(rows[0]) == [*NAMES, *GRAD, *middle, *END, *last]
    assert {row["Result"] for row in rows} == {"pass"}
    assert len(rows) == 10
    assert rows[0]["NPU_Stack_Info"] == str(["File train.py, line 3, in step, \n y = fc(x)"]).replace("\n", "\\n")
    assert {row["NPU_Stack_Info"] for row in rows[1:4]} == {"N/A"}
    assert "nothing differs by more than honest rounding" in capsys.readouterr().out
    assert only(tmp_path / "output", "compare_result_*.html").is_file()


@pytest.mark.promise("E61")
def test_xlsx_holds_the_same_rows_as_csv(tmp_path: Path) -> None:
    rows = new(tmp_path, network(1.5), network(), "tensor")
    assert msprobe("compare", "-tp", tmp_path / "npu", "-gp", tmp_path / "bench", "-o", tmp_path / "again", "--xlsx") == 0
    sheet = xlsx_rows(only(tmp_path / "again", "compare_result_rank0_*.xlsx"))
    assert [str(row["MaxAbsErr"]) for row in sheet] == [re.sub(r"^0\.0$", "0", row["MaxAbsErr"]) for row in rows]
    assert [row["Result"] for row in sheet] == [row["Result"] for row in rows]


def results(rows: list[dict[str, str]]) -> dict[str, tuple[str, str]]:
    return {row["NPU Name"] if row["NPU Name"] != "N/A" else row["Bench Name"]: (row["Result"], row["Err_message"]) for row in rows}


@pytest.mark.promise("E62")
@pytest.mark.parametrize("mode", ["tensor", "statistics", "md5"])
def test_what_has_no_partner_is_told_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    target, golden = network(), network()
    target["Torch.relu.0.forward"] = target.pop("Functional.gelu.0.forward")
    del golden["Functional.linear.0.backward"]
    found = results(new(tmp_path, target, golden, mode))
    lone = {"Torch.relu.0.forward.output.0", "Functional.gelu.0.forward.output.0", "Functional.linear.0.backward.output.1"}
    assert {found[name][0] for name in lone} == {"warning"}
    assert "No bench data matched" in found["Torch.relu.0.forward.output.0"][1]
    assert "No NPU data matched" in found["Functional.gelu.0.forward.output.0"][1]
    assert found[f"{FORWARD}.output.0"] == ("pass", "[]")
    printed = capsys.readouterr().out
    assert "2 APIs or modules of the NPU dump have no partner" in printed
    assert "1 APIs or modules of the bench dump have no partner, the first is Functional.gelu.0.forward" in printed


@pytest.mark.promise("E62")
@pytest.mark.parametrize(
    ("entering", "leaving", "result"),
    [
        (off(0.0), off(0.4), "pass"),
        (off(0.0), off(0.401), "error"),
        (off(0.1), off(0.401), "pass"),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), "pass"),
        (np.array([1.0, 1.0]), np.array([np.nan, 1.0]), "error"),
        (np.array([1.0, 1.0]), np.array([np.inf, 1.0]), "error"),
    ],
)
def test_results_by_tensors(tmp_path: Path, entering: Any, leaving: Any, result: str) -> None:
    golden = entering if np.isnan(entering).any() else np.ones(entering.shape, entering.dtype)
    rows = new(
        tmp_path,
        {"Torch.relu.0.forward": {"inputs": [entering], "outputs": [leaving]}},
        {"Torch.relu.0.forward": {"inputs": [golden], "outputs": [golden]}},
        "tensor",
    )
    assert rows[1]["Result"] == result, rows[1]


@pytest.mark.promise("E62")
@pytest.mark.parametrize(("cosine", "result"), [(0.9001, "pass"), (0.8999, "warning")])
def test_warning_by_cosine(tmp_path: Path, cosine: float, result: str) -> None:
    target = {"Torch.relu.0.forward": {"inputs": [turned(1.0) * 1.1], "outputs": [turned(cosine)]}}
    golden = {"Torch.relu.0.forward": {"inputs": [turned(1.0)], "outputs": [turned(1.0)]}}
    assert new(tmp_path, target, golden, "tensor")[1]["Result"] == result


def norms(entering: float, leaving: float) -> dict[str, Any]:
    return one_call(Statistics(1, -1, 0, entering), Statistics(1, -1, 0, leaving))


@pytest.mark.promise("E62")
@pytest.mark.parametrize(
    ("entering", "leaving", "result"),
    [
        (1.0, 1.5, "warning"),
        (1.0, 1.51, "error"),
        (1.09, 1.51, "error"),
        (1.1001, 1.51, "pass"),
        (1.0, 1.0999, "pass"),
        (1.0, 1.101, "warning"),
        (1.01, 1.1, "pass"),
        (1.01, 1.101, "warning"),
    ],
)
def test_results_by_norms(tmp_path: Path, entering: float, leaving: float, result: str) -> None:
    rows = new(tmp_path, norms(entering, leaving), norms(1.0, 1.0), "statistics")
    assert [row["Result"] for row in rows] == ["pass", result], rows[1]["Err_message"]


@pytest.mark.promise("E62")
def test_what_is_described_otherwise_is_an_error(tmp_path: Path) -> None:
    target, golden = network(), network()
    target["Functional.gelu.0.forward"] = {**target["Functional.gelu.0.forward"], "kwargs": {"approximate": "tanh"}}
    linear = golden[FORWARD]["inputs"]
    golden[FORWARD] = {**golden[FORWARD], "inputs": [linear[0].astype("f8"), linear[1], linear[2].reshape(2, 2)]}
    found = results(new(tmp_path, target, golden, "tensor"))
    assert "plain argument" in found["Functional.gelu.0.forward.input.approximate"][1]
    assert "dtypes" in found[f"{FORWARD}.input.0"][1]
    assert "shapes" in found[f"{FORWARD}.input.2"][1]
    assert [found[f"{FORWARD}.input.{at}"][0] for at in range(3)] == ["error", "pass", "error"]


@pytest.mark.promise("E63")
def test_mappings(tmp_path: Path) -> None:
    target, golden = network(), network()
    target["NPU.npu_gelu.4.forward"] = target.pop("Functional.gelu.0.forward")
    names = ("input.0", "input.approximate", "output.0")
    mapping = tmp_path / "rows.yaml"
    mapping.write_text(
        "# target: golden\n" + "".join(f"NPU.npu_gelu.4.forward.{name}: Functional.gelu.0.forward.{name}\n" for name in names)
    )
    rows = new(tmp_path, target, golden, "tensor", "-dm", mapping)
    assert {row["Result"] for row in rows} == {"pass"}
    assert len(rows) == 10
    by_name = {row["NPU Name"]: row["Bench Name"] for row in rows}
    assert by_name["NPU.npu_gelu.4.forward.output.0"] == "Functional.gelu.0.forward.output.0"


@pytest.mark.promise("E63")
def test_cell_mapping(tmp_path: Path) -> None:
    x = np.ones(2, F4)
    sides = [
        {f"Module.{name}.forward.0": {"inputs": [x], "outputs": [x], "parameters": {"weight": x}} for name in names}
        for names in (("fc2.Dense", "h.0.RowParallelLinear"), ("fc2.Linear", "h.0.TERowParallelLinear"))
    ]
    mapping = tmp_path / "cells.yaml"
    mapping.write_text('fc2.Dense: fc2.Linear\n"RowParallelLinear": TERowParallelLinear  # a part of a name\n')
    rows = new(tmp_path, *sides, "statistics", "-cm", mapping)
    assert [row["Bench Name"] for row in rows if row["NPU Name"].endswith("weight")] == [
        "Module.fc2.Linear.forward.0.parameters.weight",
        "Module.h.0.TERowParallelLinear.forward.0.parameters.weight",
    ]


@pytest.mark.promise("E40", "E63")
def test_fuzzy_matching_leaves_the_count_out(tmp_path: Path) -> None:
    x = np.ones(2, F4)
    target = {f"Torch.relu.{at}.forward": {"inputs": [x * at], "outputs": [x * at]} for at in range(4)}
    golden = {f"Torch.relu.{at + 3}.forward": {"inputs": [x * at], "outputs": [x * at]} for at in range(4)}
    rows = new(tmp_path, target, golden, "tensor", "-fm")
    assert [(row["NPU Name"], row["Bench Name"]) for row in rows[::2]] == [
        (f"Torch.relu.{at}.forward.input.0", f"Torch.relu.{at + 3}.forward.input.0") for at in range(4)
    ]
    assert {row["Result"] for row in rows} == {"pass"}
    path = old(tmp_path / "old", target, golden, "tensor", "-f")
    assert {row["Accuracy Reached or Not"] for row in xlsx_rows(path)} == {"Yes"}


@pytest.mark.promise("E63")
def test_backward_calls_of_a_side_that_recomputes_find_their_partners(tmp_path: Path) -> None:
    def side(counts: list[int]) -> dict[str, Any]:
        return {
            f"Functional.linear.{count}.backward": {"inputs": [np.full(2, at, F4)], "outputs": [np.full(2, at, F4)]}
            for at, count in enumerate(counts)
        }

    rows = new(tmp_path, side([4, 5, 1, 0]), side([3, 2, 1, 0]), "tensor")
    pairs = [(row["NPU Name"].split(".")[2], row["Bench Name"].split(".")[2]) for row in rows[::2]]
    assert pairs == [("4", "3"), ("5", "2"), ("1", "1"), ("0", "0")]
    assert {row["Result"] for row in rows} == {"pass"}


@pytest.mark.promise("E64")
def test_diff_analyze_names_the_calls_where_the_dumps_part(tmp_path: Path) -> None:
    new(tmp_path, network(1.5), network(), "tensor", "-da")
    found = json.loads(only(tmp_path / "output", "diff_analyze_*.json").read_text())
    (node,) = found["rank_0"]
    assert node["op_name"] == "Functional.gelu.0.forward"
    assert node["data_info"]["output"]["Functional.gelu.0.forward.output.0"]["verdict"] == "differs"
    assert node["data_info"]["input"]["Functional.gelu.0.forward.input.0"]["distance"] == 0.0


@pytest.mark.promise("E61")
def test_ranks_are_paired_by_their_numbers_and_steps_by_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, ranks in (("npu", (0, 2, 10)), ("bench", (2, 10, 11))):
        for step in (0, 3):
            for rank in ranks:
                write_dump(tmp_path / side / f"step{step}" / f"rank{rank}", {"Torch.relu.0.forward": {"inputs": [np.full(2, rank, F4)]}})
    assert msprobe("compare", "-tp", tmp_path / "npu", "-gp", tmp_path / "bench", "-o", tmp_path / "output") == 0
    tables = sorted((tmp_path / "output").glob("step*/*.csv"))
    assert [re.sub(r"_\d{14}", "", f"{table.parent.name}/{table.name}") for table in tables] == [
        f"step{step}/compare_result_rank{rank}.csv" for step in (0, 3) for rank in (10, 2)
    ]
    assert {row["Result"] for table in tables for row in csv_rows(table)} == {"pass"}
    printed = capsys.readouterr().out
    assert "Only the NPU side has rank 0: not compared." in printed
    assert "Only the bench side has rank 11: not compared." in printed


def test_a_tensor_dump_and_a_statistics_dump_compare_by_statistics(tmp_path: Path) -> None:
    npu = write_dump(tmp_path / "npu", network(), "tensor")
    bench = write_dump(tmp_path / "bench", network())
    assert msprobe("compare", "--target_path", npu, f"--golden_path={bench}", "-o", tmp_path / "output") == 0
    rows = csv_rows(only(tmp_path / "output", "compare_result_*.csv"))
    assert "Max diff" in rows[0]
    assert {row["Result"] for row in rows} == {"pass"}


def test_results_of_save_compare_too(tmp_path: Path) -> None:
    for side, value in (("npu", 2.0), ("bench", 1.0)):
        file = write_dump(tmp_path / side, {})
        leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": value, "Min": 0.0, "Mean": 0.5, "Norm": value}
        content = json.loads(file.read_text()) | {"data": {"loss.0.debug": leaf, "parts.0.debug": [leaf, 3]}}
        file.with_name("debug.json").write_text(json.dumps(content))
        file.unlink()
    assert msprobe("compare", "-tp", tmp_path / "npu/debug.json", "-gp", tmp_path / "bench/debug.json", "-o", tmp_path / "output") == 0
    rows = csv_rows(only(tmp_path / "output", "debug_compare_result_*.csv"))
    assert [row["NPU Name"] for row in rows] == ["loss.0.debug", "parts.0.debug.0", "parts.0.debug.1"]
    assert [row["Max diff"] for row in rows] == ["1.0", "1.0", "0"]


# --- MindSpore


MINDSPORE = ("Tensor.add.0.forward", "Functional.relu.0.forward", "Mint.matmul.0.forward", "MintFunctional.gelu.0.forward",
             "Primitive.conv.0.forward", "Cell.layers.0.Dense.forward.0")  # fmt: skip


@pytest.mark.promise("M09", "E60")
@pytest.mark.parametrize("words", [("-f", "mindspore", "compare", "-i"), ("compare",)])
def test_dumps_of_mindspore_compare_without_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    x = np.arange(6, dtype=F4).reshape(2, 3)
    sides = [
        write_dump(
            tmp_path / side / "step0" / "rank0",
            {name: {"inputs": [x], "outputs": [x * (scale if "gelu" in name else 1)]} for name in MINDSPORE},
            "tensor",
            framework="mindspore",
        )
        for side, scale in (("npu", 1.5), ("bench", 1.0))
    ]
    if words[-1] == "-i":
        assert msprobe(*words, compare_json(tmp_path, *sides), "-o", tmp_path / "output") == 0
        found = {row["NPU Name"]: row["colour"] for row in xlsx_rows(only(tmp_path / "output", "compare_result_*.xlsx"))}
    else:
        assert msprobe(*words, "-tp", sides[0], "-gp", sides[1], "-o", tmp_path / "output") == 0
        rows = csv_rows(only(tmp_path / "output", "compare_result_*.csv"))
        found = {row["NPU Name"]: row["Result"] for row in rows}
        assert rows[0]["NPU Dtype"] == "Float32"
    assert {name.rpartition(".")[0].rpartition(".")[0] for name in found} == set(MINDSPORE)
    bad = {name for name, word in found.items() if word in ("red", "error")}
    assert bad == {"MintFunctional.gelu.0.forward.output.0"}


@pytest.mark.promise("E60")
def test_mindspore_against_pytorch(tmp_path: Path) -> None:
    x = np.ones(3, F4)
    pytorch = ("Torch.matmul.0.forward", "Functional.gelu.0.forward", "Module.fc.Dense.forward.0")
    ours = ("Mint.matmul.0.forward", "MintFunctional.gelu.0.forward", "Cell.fc.Dense.forward.0")
    target = write_dump(tmp_path / "ms", {name: {"inputs": [x], "outputs": [x]} for name in ours}, "tensor", framework="mindspore")
    golden = write_dump(tmp_path / "pt", {name: {"inputs": [x], "outputs": [x]} for name in pytorch}, "tensor")
    assert msprobe("compare", "-tp", target, "-gp", golden, "-o", tmp_path / "output") == 0
    rows = csv_rows(only(tmp_path / "output", "compare_result_*.csv"))
    assert [row["Bench Name"] for row in rows[::2]] == [f"{name}.input.0" for name in pytorch]
    assert "N/A" not in {row["Cosine"] for row in rows}


# --- dumps that the real tool wrote

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.promise("E70")
@pytest.mark.parametrize(
    ("target", "golden", "lone"),
    [
        ("msprobe-26/statistics-L1", "msprobe-26/statistics-L1", set()),
        ("msprobe-26/statistics-L0", "msprobe-26/statistics-L0", set()),
        ("msprobe-26/md5-L1", "msprobe-26/md5-L1", set()),
        ("msprobe-26/statistics-L1", "msprobe-1.0/statistics-L1", {"Torch.ones_like.0.forward"}),
    ],
)
def test_dumps_of_the_real_tool_also_of_other_versions(tmp_path: Path, target: str, golden: str, lone: set[str]) -> None:
    """The program is the same, so what both recorded agrees; 1.0 also recorded a call of its own."""
    assert msprobe("compare", "-tp", GOLDEN / target, "-gp", GOLDEN / golden, "-o", tmp_path) == 0
    rows = csv_rows(only(tmp_path, "compare_result_*.csv"))
    assert {row["Result"] for row in rows if row["NPU Name"] != "N/A"} == {"pass"}
    assert {re.sub(r"\.(input|output)\..*", "", row["Bench Name"]) for row in rows if row["NPU Name"] == "N/A"} == lone


@pytest.mark.promise("E70")
def test_tensors_of_the_real_tool(tmp_path: Path) -> None:
    """Of most tensors the file is missing, as in a dump that was mailed: these rows are not green."""
    assert msprobe("compare", "-tp", GOLDEN / "msprobe-26/tensor-mix", "-gp", GOLDEN / "msprobe-1.3/tensor-mix", "-o", tmp_path) == 0
    rows = {row["NPU Name"]: row for row in csv_rows(only(tmp_path, "compare_result_*.csv"))}
    gelu = rows["Functional.gelu.0.forward.output.0"]
    assert (gelu["Cosine"], gelu["MaxAbsErr"], gelu["Result"]) == ("1.0", "0.0", "pass")
    gradient = rows["Module.fc1.Linear.parameters_grad.0.weight"]
    assert (gradient["Bench Name"], gradient["Result"]) == ("Module.fc1.Linear.parameters_grad.weight", "pass")
    lost = rows["Functional.cross_entropy.0.forward.output.0"]
    assert (lost["Result"], lost["Cosine"]) == ("warning", "unsupported")
