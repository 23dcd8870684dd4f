# SPDX-License-Identifier: Apache-2.0
"""`ulpscope check-devices`: tables of ours and of other tools, the list of standards, what is missing, and what is no table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ulpscope.cli.check_devices import check_devices
from ulpscope.errors import InputError, NothingComparableError
from ulpscope.model.check.standards import STANDARD_METRICS
from ulpscope.report.check.two_devices import DEVICE_COLUMNS
from ulpscope.store.foreign.check_table import read_check_table
from ulpscope.workflows.check.two_devices import compare_devices

GOOD: dict[str, Any] = {
    **dict.fromkeys(STANDARD_METRICS, 0.001),
    "cosine": 1.0,
    "within_1e3": 1.0,
    "mismatch": 0.0,
    "nonfinite_errors": 0.0,
}


def row(call: str = "torch.exp.0", **more: Any) -> dict[str, Any]:
    names = {"rank": 0, "step": 0, "order": 0, "module": "net", "call": call, "phase": "forward", "status": "passed", "slot": "output.0"}
    return {**names, "dtype": "float32", "shape": "[4]", "slot_status": "passed", "device": "cpu", **GOOD, **more}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    columns = list(dict.fromkeys(name for each in rows for name in each))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def upstream(name: str, *, dtype: str = "torch.float32", status: str = "pass", **figures: Any) -> dict[str, Any]:
    headings = "余弦相似度 最大绝对误差 双百指标 双千指标 双万指标 二进制一致错误率 误差均衡性 均方根误差"
    headings += " 小值域错误占比 相对误差最大值 相对误差平均值"
    headings += " inf/nan错误率 相对误差错误率 绝对误差错误率 ULP误差最大值 ULP误差平均值 ULP误差大于阈值占比"
    cells = {
        "API Name": name,
        "Bench Dtype": "torch.float64",
        "DEVICE Dtype": dtype,
        "Shape": "(4,)",
        **dict.fromkeys(headings.split(), " "),
    }
    return {**cells, **figures, "Status": status, "Message": ""}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(check_devices, [str(each) for each in arguments])


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Path, Path]:
    ours = write(
        tmp_path / "npu.csv",
        row("torch.exp.0"),
        row("torch.exp.1", rms_error=0.0015),
        row("torch.exp.2", mean_rel=0.1, max_rel=0.005),
        row("functional.linear.0", ulp_beyond=0.5, ulp_mean=100.0, rms_error=1.0),
        row("functional.linear.1", ulp_beyond=0.01, rms_error=1.0),
        row("functional.relu.0", mismatch=0.25, rms_error=0.0),
        row("Tensor.add.0", rel_errors=0.0, abs_errors=0.0, rms_error=1.0),
        row("functional.conv2d.0", within_1e3=0.99),
        row("Tensor.argmax.0", dtype="int64", mismatch=0.0),
        row(
            "torch.sin.0",
            slot="",
            dtype="",
            slot_status="",
            status="skipped",
            reason="it is not here",
            **dict.fromkeys(STANDARD_METRICS, ""),
        ),
        row("torch.cos.0"),
    )
    names = ["torch.exp.0", "torch.exp.1", "torch.exp.2", "functional.linear.0", "functional.linear.1", "functional.relu.0", "Tensor.add.0"]
    theirs = [row(name) for name in [*names, "functional.conv2d.0"]]
    gone = row("torch.sin.0", slot="", dtype="", slot_status="", status="skipped", **dict.fromkeys(STANDARD_METRICS, ""))
    return ours, write(tmp_path / "gpu.csv", *theirs, row("Tensor.argmax.0", dtype="int64"), gone, row("torch.tan.0"))


def test_each_call_by_its_standard(tables: tuple[Path, Path]) -> None:
    found = {pair.row.call: (pair.verdict.standard, pair.verdict.status) for pair in compare_devices(*tables).pairs}
    assert found == {
        "torch.exp.0": ("benchmark", "passed"),
        "torch.exp.1": ("benchmark", "warning"),
        "torch.exp.2": ("benchmark", "failed"),
        "functional.linear.0": ("ulp", "failed"),
        "functional.linear.1": ("ulp", "passed"),
        "functional.relu.0": ("binary", "failed"),
        "Tensor.add.0": ("absolute", "passed"),
        "functional.conv2d.0": ("thousandth", "failed"),
        "Tensor.argmax.0": ("binary", "passed"),
        "torch.sin.0": ("benchmark", "skipped"),
        "torch.cos.0": ("benchmark", "skipped"),
        "torch.tan.0": ("benchmark", "skipped"),
    }


def test_the_answer_on_the_terminal(tables: tuple[Path, Path]) -> None:
    result = run(*tables)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("worse: ")
    assert "4 of 9 results fail, 1 are warnings" in lines[0]
    assert [line.split()[0] for line in lines[1:6]] == ["failed"] * 4 + ["warning"]
    assert "mean_rel is 100 times the other device's" in result.stdout
    assert "1 skipped: it was skipped on the subject's device: it is not here" in result.stdout
    assert run(*tables, "--quiet").stdout == ""


def test_tables_of_the_answer(tables: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(*tables, "--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json").exit_code == 1
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        cells = {each["call"]: each for each in csv.DictReader(stream)}
    assert tuple(next(iter(cells.values()))) == DEVICE_COLUMNS
    assert float(cells["torch.exp.2"]["ratio_mean_rel"]) == pytest.approx(100)
    assert (cells["torch.exp.2"]["status_mean_rel"], cells["torch.exp.2"]["status_max_rel"]) == ("failed", "warning")
    assert (cells["torch.exp.2"]["subject_mean_rel"], cells["torch.exp.2"]["reference_mean_rel"]) == ("0.1", "0.001")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["schema"] == "ulpscope.devices/1"
    assert found["counts"] == {"passed": 4, "warning": 1, "failed": 4, "skipped": 3}
    assert {"call": "functional.relu.0", "phase": "forward", "status": "failed"} in found["calls"]
    assert found["results"][5]["multiple"] == "Infinity"
    assert json.loads(run(*tables, "--json", "-").stdout) == found


def test_a_device_is_no_worse_than_itself(tables: tuple[Path, Path], tmp_path: Path) -> None:
    same = write(tmp_path / "same.csv", row("torch.exp.0"), row("torch.exp.1"))
    result = run(same, same)
    assert result.exit_code == 0
    assert result.stdout.startswith("no worse: ")


def test_the_worst_result_of_a_call_is_its_status(tmp_path: Path) -> None:
    ours = [row(slot="output.0", rms_error=0.0015), row(slot="output.1", rms_error=0.1), row(slot="output.2")]
    theirs = [row(slot=f"output.{at}") for at in range(3)]
    found = compare_devices(write(tmp_path / "a.csv", *ours), write(tmp_path / "b.csv", *theirs))
    assert found.calls == {("torch.exp.0", "forward"): "failed"}
    assert [pair.verdict.status for pair in found.worst] == ["failed", "warning"]


def test_the_same_name_twice_is_told_apart_by_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a.csv", row(rms_error=0.001), row(rms_error=0.004))
    b = write(tmp_path / "b.csv", row(rms_error=0.001), row(rms_error=0.004))
    assert [pair.verdict.status for pair in compare_devices(a, b).pairs] == ["passed", "passed"]


def test_other_shapes_are_not_compared(tmp_path: Path) -> None:
    a, b = (
        write(tmp_path / "a.csv", row(), row("torch.sin.0")),
        write(tmp_path / "b.csv", row(shape="[5]"), row("torch.sin.0", dtype="float16")),
    )
    assert [pair.verdict.status for pair in compare_devices(a, b).pairs] == ["skipped", "skipped"]
    assert run(a, b).exit_code == 2


def test_one_step_compares_with_another(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.csv", row(step=3)), write(tmp_path / "b.csv", row(step=0))
    assert compare_devices(a, b).counts["passed"] == 1
    two = write(tmp_path / "two.csv", row(step=3), row(step=4))
    with pytest.raises(NothingComparableError):
        compare_devices(two, b)
    assert [pair.row.place for pair in compare_devices(two, two).pairs] == ["rank 0 step 3", "rank 0 step 4"]


def test_tables_of_derived_rules(tmp_path: Path) -> None:
    nothing = dict.fromkeys(STANDARD_METRICS, "")
    ours = [row(device_error=1e-6, **nothing), row("torch.sin.0", device_error=1e-3, slot_status="failed", reason="errs 50x", **nothing)]
    theirs = [row(device_error=2e-6, **nothing), row("torch.sin.0", device_error=1e-6, **nothing)]
    found = compare_devices(write(tmp_path / "a.csv", *ours), write(tmp_path / "b.csv", *theirs))
    assert [(pair.verdict.standard, pair.verdict.status, pair.verdict.ratios["error"]) for pair in found.pairs] == [
        ("derived", "passed", 0.5),
        ("derived", "failed", pytest.approx(1000)),
    ]


# --------------------------------------------------------------------------------------------------------- other tools' tables


def test_details_of_the_other_tools(tmp_path: Path) -> None:
    benchmark = {"均方根误差": "0.00100000000000", "小值域错误占比": 0, "相对误差最大值": 0.1, "相对误差平均值": 0.01, "误差均衡性": 0.5}
    ours = [
        upstream("Functional.gelu.0.forward.output.0", **{**benchmark, "均方根误差": 0.0015}),
        upstream("Functional.linear.0.backward.output.1", **{**benchmark, "相对误差最大值": 5.0}),
        upstream("Functional*relu*3.forward.output.0", **{"二进制一致错误率": 0.5}),
        upstream("Functional.conv2d.0.forward.output.0", status="SKIP", dtype=" "),
        upstream("nonsense", **benchmark),
    ]
    theirs = [
        upstream("Functional.gelu.0.forward.output.0", **benchmark),
        upstream("Functional.linear.0.backward.output.1", **benchmark),
        upstream("Functional*relu*3.forward.output.0", **{"二进制一致错误率": 0}),
        upstream("Functional.conv2d.0.forward.output.0"),
        upstream("nonsense", **benchmark),
    ]
    found = compare_devices(write(tmp_path / "npu.csv", *ours), write(tmp_path / "gpu.csv", *theirs))
    names = [(pair.row.call, pair.row.phase, pair.row.slot, pair.verdict.standard, pair.verdict.status) for pair in found.pairs]
    assert names == [
        ("functional.gelu.0", "forward", "output.0", "benchmark", "warning"),
        ("functional.linear.0", "backward", "output.1", "benchmark", "failed"),
        ("functional.relu.3", "forward", "output.0", "binary", "failed"),
        ("functional.conv2d.0", "forward", "output.0", "thousandth", "skipped"),
        ("nonsense", "", "", "benchmark", "passed"),
    ]


def test_english_headings_of_2023(tmp_path: Path) -> None:
    headings = {
        "Npu Name": "Functional*relu*0.forward.output.0",
        "Bench Dtype": "torch.float64",
        "NPU Dtype": "torch.float32",
        "Shape": "(4,)",
    }
    (found,) = read_check_table(
        write(tmp_path / "old.csv", {**headings, "Cosine Similarity": "N/A", "Error Rate": "0.5", "Status": "error"})
    )
    assert (found.call, found.dtype, found.status, found.metrics) == ("functional.relu.0", "float32", "failed", {"mismatch": 0.5})


def test_ours_against_theirs(tmp_path: Path) -> None:
    """The same call under both tools' names, in the edition of the later one."""
    benchmark = {"均方根误差": 2.0**-16, "小值域错误占比": 0, "相对误差最大值": 2.0**-16, "相对误差平均值": 2.0**-16}
    ours = write(
        tmp_path / "a.csv",
        row("functional.gelu.0", module="", shape="(4,)", rms_error=2.0**-14 * 1.1, max_rel=0, mean_rel=0, small_errors=0),
    )
    theirs = write(tmp_path / "b.csv", upstream("Functional.gelu.0.forward.output.0", **benchmark))
    assert compare_devices(ours, theirs).counts["failed"] == 1
    assert compare_devices(ours, theirs, edition="26.2").counts["passed"] == 1
    with pytest.raises(InputError, match=r"2024, 26\.2"):
        compare_devices(ours, theirs, edition="27")


# ------------------------------------------------------------------------------------------------------------------ hostile


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no table of a check"),
        (b"a,b\n1,2\n", "no table of a check"),
        (b"\xff\xfe\x00", "no csv"),
        (b'call,phase,slot,dtype\n"' + b"x" * 200_000, "no csv"),
        (b"API Name,Status\nx,pass\n", "no table of a check"),
    ],
)
def test_what_is_no_table_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_check_table(tmp_path / "bad.csv")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_check_table(path)
    same = write(tmp_path / "same.csv", row())
    assert isinstance(run(same, same, "--csv", tmp_path / "none" / "x.csv").exception, InputError)
    assert isinstance(run(same, write(tmp_path / "other.csv", row("torch.sin.0"))).exception, NothingComparableError)


def test_cells_cannot_run_in_a_spreadsheet(tmp_path: Path) -> None:
    same = write(tmp_path / "same.csv", row("=cmd()"))
    run(same, same, "--csv", tmp_path / "out.csv")
    assert "'=cmd()" in (tmp_path / "out.csv").read_text()


@given(st.text(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_after_the_headings(tmp_path: Path, text: str) -> None:
    (tmp_path / "any.csv").write_text("call,phase,slot,dtype,rms_error\n" + text, encoding="utf-8", errors="replace", newline="")
    try:
        rows = read_check_table(tmp_path / "any.csv")
    except InputError:
        return
    assert all(isinstance(each.metrics.get("rms_error", 0.0), float) for each in rows)


def test_help_names_the_exit_codes() -> None:
    result = CliRunner().invoke(click.Group(commands={"check-devices": check_devices}), ["check-devices", "--help"])
    assert "Exit codes: 0 no result fails" in result.stdout
