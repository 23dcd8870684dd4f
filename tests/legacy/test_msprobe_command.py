# SPDX-License-Identifier: Apache-2.0
"""Test the command `msprobe`: its help, its refusals, the pre-check, overflow, merging and the parse shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openpyxl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.legacy.msprobe_dumps import F4, Statistics, csv_rows, msprobe, only, write_dump
from tests.legacy.test_msprobe_compare import network
from tests.store.acl_writer import described, dump_bytes

OLD = ("run_ut", "multi_run_ut", "api_precision_compare", "compare", "run_overflow_check", "parse")
NEW = ("compare", "acc_check", "multi_acc_check", "overflow_check", "api_precision_compare", "merge_result", "graph_visualize", "parse")
CHINESE = """
余弦相似度 最大绝对误差 双百指标 双千指标 双万指标 二进制一致错误率 误差均衡性 均方根误差 小值域错误占比 相对误差最大值 相对误差平均值
inf/nan错误率 相对误差错误率 绝对误差错误率 ULP误差最大值 ULP误差平均值 ULP误差大于阈值占比
""".split()
DETAILS = ["API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *CHINESE, "Status", "Message"]
RESULTS = ["API name", "Forward Test Success", "Backward Test Success", "Message"]
COMMAND = [str(Path(sys.executable).with_name("msprobe"))]


# --- help and refusals


@pytest.mark.promise("M05", "M06")
@pytest.mark.parametrize("words", [*(("-f", "pytorch", name) for name in OLD), *((name,) for name in NEW), ("-f", "mindspore", "compare")])
def test_every_command_tells_its_options_with_an_example(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        msprobe(*words, "-h")
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: msprobe {' '.join(words)}")
    assert re.search(rf"Example:\n  msprobe (-f pytorch )?{words[-1]}", text)


@pytest.mark.promise("M05")
def test_help_needs_no_framework() -> None:
    """As a real process, through the installed script."""
    script = (
        "import sys; sys.argv = ['msprobe', '-h']; from msprobe.msprobe import main; main(); print({'torch', 'numpy'} & set(sys.modules))"
    )
    asked = [
        subprocess.run(words, capture_output=True, text=True, timeout=60) for words in ([*COMMAND, "-h"], [sys.executable, "-c", script])
    ]
    assert [one.returncode for one in asked] == [0, 0]
    assert asked[1].stdout == asked[0].stdout + "set()\n"
    assert all(f"  {name} " in asked[0].stdout for name in (*OLD, *NEW))


@pytest.mark.promise("M08", "M10", "M11")
@pytest.mark.parametrize("name", [name for name in OLD if name != "compare"])
def test_mindspore_has_compare_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert msprobe("-f", "mindspore", name, "-api_info", "dump.json") == 2
    assert (
        capsys.readouterr().err
        == f"msprobe: {name} is not supported for mindspore; compare is, and ulpscope compare reads the same dumps\n"
    )


@pytest.mark.refused("E68")
@pytest.mark.parametrize(
    "words", [("config_check", "-d"), ("data2db", "--db", "x", "--data", "y"), ("offline_dump",), ("install_deps", "-m", "offline")]
)
def test_what_is_not_there_says_so_in_one_sentence(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert msprobe(*words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"msprobe: {words[0]} is not there: ")
    assert "ulpscope" in printed
    assert printed.count("\n") == 1


def test_graph_visualize_writes_our_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npu, bench = (write_dump(tmp_path / side, network(scale), "tensor") for side, scale in (("npu", 1.5), ("bench", 1.0)))
    assert msprobe("graph_visualize", "-tp", npu.parent, "-gp", bench.parent, "-o", tmp_path / "output", "-oc", "--file_type", "db") == 0
    assert "gelu" in only(tmp_path / "output", "compare_*.html").read_text()
    assert "first contributed error: gelu" in capsys.readouterr().out
    assert msprobe("graph_visualize", "-tp", npu.parent, "-o", tmp_path / "output") == 2
    assert "ulpscope show" in capsys.readouterr().err


def complaint(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert msprobe(*words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("msprobe: ")
    assert printed.count("\n") == 1, printed
    return printed


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_dump(tmp_path / "good", network(), "tensor")
    files = {
        "broken.json": '{"task": "statistics", "data": {',
        "list.json": "[1, 2]",
        "nodata.json": '{"task": "statistics"}',
        "deep.json": '{"data": {"Torch.relu.0.forward": {"input_args": ' + "[" * 300 + "]" * 300 + "}}}",
        "deeper.json": "[" * 200_000,
        "words.json": '{"npu_path": 3, "bench_path": "x"}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    said = {
        name: complaint(capsys, "compare", "-tp", tmp_path / name, "-gp", good, "-o", tmp_path / "o")
        for name in files
        if name != "words.json"
    }
    assert "ends in the middle" in said["broken.json"]
    assert "holds a list" in said["list.json"]
    assert "no object named 'data'" in said["nodata.json"]
    assert "too deeply" in said["deep.json"]
    assert "broken.json" in complaint(capsys, "-f", "pytorch", "compare", "-i", tmp_path / "broken.json", "-o", tmp_path / "o")
    assert "npu_path is 3" in complaint(capsys, "-f", "pytorch", "compare", "-i", tmp_path / "words.json", "-o", tmp_path / "o")
    assert "there is no" in complaint(capsys, "compare", "-tp", tmp_path / "missing", "-gp", good)
    assert "one of" in complaint(capsys, "compare", "-tp", good, "-gp", good.parent)
    assert "holds no dump.json" in complaint(capsys, "compare", "-tp", tmp_path, "-gp", tmp_path)
    assert "needs -tp and -gp" in complaint(capsys, "compare", "-tp", good)
    assert "pytorch or mindspore" in complaint(capsys, "-f", "tensorflow", "compare")
    assert "there is no command 'comprae'" in complaint(capsys, "comprae")
    assert "-lm is not there" in complaint(capsys, "compare", "-tp", good, "-gp", good, "-lm")
    assert "only auto is there" in complaint(capsys, "compare", "-tp", good, "-gp", good, "-m", "atb")
    assert "cannot be read" in complaint(capsys, "compare", "-tp", good, "-gp", good, "-dm", tmp_path / "no.yaml")
    assert "line 1" in complaint(capsys, "compare", "-tp", good, "-gp", good, "-cm", tmp_path / "list.json")
    assert "there is no" in complaint(capsys, "acc_check", "-api_info", tmp_path / "missing.json")
    assert "is no folder" in complaint(capsys, "acc_check", "-api_info", good, "-o", tmp_path / "missing")
    assert "more than 8 processes" in complaint(capsys, "multi_acc_check", "-api_info", good, "-n", 9, "-d", 0)
    assert "1 to 64" in complaint(capsys, "multi_acc_check", "-api_info", good, "-n", 65, "-d", 0)
    assert "from 0 up" in complaint(capsys, "acc_check", "-api_info", good, "-d", -1)
    assert "cannot be read" in complaint(capsys, "api_precision_compare", "-npu", tmp_path / "a.csv", "-gpu", tmp_path / "b.csv")
    assert "is no folder" in complaint(capsys, "overflow_check", "-i", good)
    assert "there is no" in complaint(capsys, "run_overflow_check", "-api_info", tmp_path / "missing.json")


class Bomb:
    """Makes a file if its pickle is run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.file,)


def test_files_with_code_in_them_are_refused_and_named(tmp_path: Path) -> None:
    npu, bench = (write_dump(tmp_path / side, network(), "tensor") for side in ("npu", "bench"))
    name = "Functional.gelu.0.forward.output.0.pt"
    torch.save(Bomb(tmp_path / "exploded"), npu.parent / "dump_tensor_data" / name)
    outside = tmp_path / "secret.pt"
    torch.save(torch.ones(3, 4), outside)
    content = json.loads(bench.read_text())
    content["data"]["Functional.linear.0.forward"]["output"][0]["data_name"] = "../../secret.pt"
    bench.write_text(json.dumps(content))
    assert msprobe("compare", "-tp", npu, "-gp", bench, "-o", tmp_path / "output") == 0
    rows = {row["NPU Name"]: row for row in csv_rows(only(tmp_path / "output", "*.csv"))}
    refused = rows["Functional.gelu.0.forward.output.0"]
    assert (refused["Result"], refused["Cosine"]) == ("warning", "unsupported")
    assert name in refused["Err_message"]
    lost = rows["Functional.linear.0.forward.output.0"]
    assert lost["Result"] == "warning"
    assert "not found: ../../secret.pt of the bench dump" in lost["Err_message"]
    assert not (tmp_path / "exploded").exists()


def test_formulas_and_escapes_in_names_are_shown_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "=cmd|'/c calc'!A0.\x1b[31m.0.forward"
    npu, bench = (write_dump(tmp_path / side, {name: {"inputs": [np.ones(2, F4)]}}) for side in ("npu", "bench"))
    assert msprobe("compare", "-tp", npu, "-gp", bench, "-o", tmp_path / "output", "-tensor_log") == 0
    (row,) = csv_rows(only(tmp_path / "output", "*.csv"))
    assert row["NPU Name"].startswith("'=cmd")
    assert "\x1b" not in capsys.readouterr().out + row["NPU Name"]


NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
TENSORS = st.fixed_dictionaries(
    {
        "type": st.just("torch.Tensor"),
        "dtype": st.sampled_from(["torch.float32", "torch.int8", "x", 3]),
        "shape": NUMBERS | st.just([2, 3]),
    },
    optional=dict.fromkeys(("Max", "Min", "Mean", "Norm", "requires_grad", "md5", "data_name"), NUMBERS),
)
LEAVES = TENSORS | st.fixed_dictionaries({"type": st.text(max_size=5), "value": NUMBERS}) | NUMBERS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6
)
ENTRIES = st.dictionaries(st.sampled_from(["input_args", "input_kwargs", "output", "parameters", "input", "x"]), VALUES, max_size=4)
NAMES = ("Torch.relu.0.forward", "Torch.relu.0.backward", "Module.fc.Linear.forward.0", "Module.fc.Linear.parameters_grad.0", "loss", "")
DUMPS = st.dictionaries(st.sampled_from(NAMES), ENTRIES | VALUES, max_size=4)


@settings(max_examples=25, deadline=None)
@given(target=DUMPS, golden=DUMPS, words=st.sampled_from([(), ("-fm",), ("-da",)]))
def test_no_dump_makes_a_traceback(target: Any, golden: Any, words: tuple[str, ...]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for side, data in (("a", target), ("b", golden)):
            (folder / f"{side}.json").write_text(json.dumps({"task": "statistics", "data": data, "dump_data_dir": None}))
        assert msprobe("compare", "-tp", folder / "a.json", "-gp", folder / "b.json", "-o", folder / "new", *words) in (0, 2)
        (folder / "c.json").write_text(json.dumps({"npu_path": f"{folder}/a.json", "bench_path": f"{folder}/b.json"}))
        assert msprobe("-f", "pytorch", "compare", "-i", folder / "c.json", "-o", folder / "old") in (0, 2)


# --- the pre-check


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump relu three times, twice on the same kind of data; a sigmoid that was recorded wrong does not matter here."""
    x = np.linspace(-1, 1, 8, dtype=F4)
    calls: dict[str, Any] = {
        "Torch.relu.0.forward": {"inputs": [x], "outputs": [np.maximum(x, 0)]},
        "Torch.relu.1.forward": {"inputs": [x], "outputs": [np.maximum(x, 0)]},
        "Torch.relu.2.forward": {"inputs": [x * 2], "outputs": [np.maximum(x, 0) * 2]},
        "Functional.softmax.0.forward": {"inputs": [x], "kwargs": {"dim": 0}, "outputs": [np.exp(x) / np.exp(x).sum()]},
        "Functional.softmax.0.backward": {"inputs": [x], "outputs": [x]},
    }
    return write_dump(tmp_path_factory.mktemp("dump"), calls, "tensor")


def checked(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    return csv_rows(only(folder, "accuracy_checking_result_*.csv")), csv_rows(only(folder, "accuracy_checking_details_*.csv"))


@pytest.mark.promise("M08", "E50", "E51")
@pytest.mark.parametrize("words", [("-f", "pytorch", "run_ut"), ("acc_check",)])
def test_run_ut_and_acc_check(tmp_path: Path, dump: Path, words: tuple[str, ...]) -> None:
    assert msprobe(*words, "-api_info", dump, "-o", tmp_path, "-j", "-d", 0) == 0
    results, details = checked(tmp_path)
    assert list(results[0]) == RESULTS
    assert list(details[0]) == DETAILS
    assert [(row["API name"], row["Forward Test Success"], row["Backward Test Success"]) for row in results] == [
        *((f"Torch.relu.{at}", "pass", "") for at in range(3)),
        ("Functional.softmax.0", "pass", "pass"),
    ]
    row = details[0]
    assert (row["API Name"], row["Bench Dtype"], row["DEVICE Dtype"]) == ("Torch.relu.0.forward.output.0", "torch.float64", "torch.float32")
    assert (row["Shape"], float(row["余弦相似度"]), float(row["最大绝对误差"]), row["Status"]) == ("[8]", 1.0, 0.0, "pass")


@pytest.mark.promise("E50", "E56")
def test_filter_lists_and_continuing(tmp_path: Path, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"task": "run_ut", "dump_path": "x", "run_ut": {"white_list": ["relu", "softmax"], "black_list": ["softmax"]}})
    )
    first = tmp_path / "first"
    first.mkdir()
    assert msprobe("-f", "pytorch", "run_ut", "-api_info", dump, "-o", first, "-f", "-config", config) == 0
    results, _ = checked(first)
    assert [row["API name"] for row in results] == ["Torch.relu.0", "Torch.relu.2"]
    csv = only(first, "accuracy_checking_result_*.csv")
    second = tmp_path / "second"
    second.mkdir()
    assert msprobe("-f", "pytorch", "run_ut", "-api_info", dump, "-o", second, "-csv_path", csv) == 0
    results, details = checked(second)
    assert [row["API name"] for row in results] == ["Torch.relu.0", "Torch.relu.2", "Torch.relu.1", "Functional.softmax.0"]
    assert {row["API Name"].partition(".forward")[0].partition(".backward")[0] for row in details} == {
        "Torch.relu.1",
        "Functional.softmax.0",
    }
    other = write_dump(tmp_path / "other", {"Torch.sigmoid.0.forward": {"inputs": [np.ones(2, F4)]}})
    assert "another dump: it has 'Torch.relu.0'" in complaint(capsys, "acc_check", "-api_info", other, "-o", second, "-csv_path", csv)
    details_csv = only(first, "accuracy_checking_details_*.csv")
    assert "is no accuracy_checking_result" in complaint(capsys, "acc_check", "-api_info", dump, "-o", second, "-csv_path", details_csv)


@pytest.mark.promise("E52")
def test_multi_run_ut_shares_the_work(tmp_path: Path, dump: Path) -> None:
    assert msprobe("-f", "pytorch", "multi_run_ut", "-api_info", dump, "-o", tmp_path, "-n", 2, "-d", 0, 1) == 0
    results, _ = checked(tmp_path)
    assert [row["API name"] for row in results] == ["Torch.relu.0", "Torch.relu.1", "Torch.relu.2", "Functional.softmax.0"]
    assert {row["Forward Test Success"] for row in results} == {"pass"}


@pytest.mark.promise("M08", "E50", "E51")
def test_a_wrong_kernel_of_the_device_fails_and_its_data_are_kept(tmp_path: Path) -> None:
    """On the stand-in for an npu, as a real process. What cannot be run is skipped with the reason."""
    x = np.linspace(-1, 3, 64, dtype=F4)
    dump = write_dump(
        tmp_path / "dump", {name: {"inputs": [x]} for name in ("Torch.nonsense.0.forward", "Functional.gelu.0.forward")}, "tensor"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parent / "stand_in"), "ULPSCOPE_NPU_FAULTS": "aten.gelu.default scale=0.01"}
    words = [*COMMAND, "acc_check", "-api_info", str(dump), "-o", str(tmp_path), "-save_error_data"]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    results, details = checked(tmp_path)
    assert [(row["API name"], row["Forward Test Success"]) for row in results] == [
        ("Torch.nonsense.0", "SKIP"),
        ("Functional.gelu.0", "error"),
    ]
    assert "nonsense" in results[0]["Message"]
    assert [(row["Status"], row["Shape"]) for row in details] == [("SKIP", ""), ("error", "[64]")]
    (folder,) = tmp_path.glob("ut_error_data*")
    assert re.fullmatch(r"ut_error_data\d{14}", folder.name)
    assert sorted(file.name for file in folder.iterdir()) == [
        f"Functional.gelu.0.forward.{name}.0.pt" for name in ("input", "output.bench", "output.device")
    ]
    wrong = subprocess.run([*words, "-d", "9"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=180)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
    assert "npu:9" in wrong.stderr


# --- the checks of two devices

LIMITS = {"小值域错误占比": "small", "均方根误差": "rms", "相对误差最大值": "max", "相对误差平均值": "mean", "误差均衡性": "balance"}


def details_csv(path: Path, name: str, dtype: str = "torch.float32", **figures: float) -> Path:
    cells = {
        "API Name": name,
        "Bench Dtype": "torch.float64",
        "DEVICE Dtype": dtype,
        "Shape": "[8]",
        **figures,
        "Status": "pass",
        "Message": "",
    }
    path.write_text(",".join(DETAILS) + "\n" + ",".join(str(cells.get(column, " ")) for column in DETAILS) + "\n", encoding="utf-8")
    return path


def judged(
    tmp_path: Path, name: str, npu: dict[str, float], gpu: dict[str, float], *, dtype: str = "torch.float32", old: bool = True
) -> Any:
    sides = [details_csv(tmp_path / f"{side}.csv", name, dtype, **figures) for side, figures in (("npu", npu), ("gpu", gpu))]
    words = ("-f", "pytorch") if old else ()
    assert msprobe(*words, "api_precision_compare", "-npu", sides[0], "-gpu", sides[1], "-o", tmp_path) == 0
    (result,), (details,) = (csv_rows(only(tmp_path, f"api_precision_compare_{kind}_*.csv")) for kind in ("result", "details"))
    assert result["Forward Test Success"] == details["比对结果"]
    return details


FIGURES = dict.fromkeys((*LIMITS, "inf/nan错误率", "相对误差错误率", "绝对误差错误率", "二进制一致错误率"), 0.0) | {"余弦相似度": 1.0}


@pytest.mark.promise("E53")
@pytest.mark.parametrize(
    ("figure", "ratio", "status"),
    [
        *((figure, ratio, status) for figure in ("小值域错误占比", "均方根误差", "相对误差平均值")
          for ratio, status in ((1.0, "pass"), (1.001, "warning"), (2.0, "warning"), (2.001, "error"))),
        *(("相对误差最大值", ratio, status) for ratio, status in ((1.0, "pass"), (1.001, "warning"), (10.0, "warning"), (10.001, "error"))),
    ],
)  # fmt: skip
def test_benchmark_ratios_of_2024(tmp_path: Path, figure: str, ratio: float, status: str) -> None:
    found = judged(tmp_path, "Functional.gelu.0.forward.output.0", FIGURES | {figure: 0.25 * ratio}, FIGURES | {figure: 0.25})
    assert found["比对结果"] == status
    assert found["比对算法"] == "标杆比对法"


@pytest.mark.promise("E53")
@pytest.mark.parametrize(("ratio", "status"), [(1.0, "pass"), (1.001, "warning"), (2.0, "warning"), (2.001, "error")])
def test_balance_is_shown_and_does_not_count(tmp_path: Path, ratio: float, status: str) -> None:
    sides = (FIGURES | {"误差均衡性": 0.25 * factor} for factor in (ratio, 1.0))
    found = judged(tmp_path, "Functional.gelu.0.forward.output.0", *sides)
    assert (found["误差均衡性判定结果"], found["比对结果"]) == (status, "pass")


@pytest.mark.promise("E54")
@pytest.mark.parametrize(
    ("name", "dtype", "npu", "gpu", "status"),
    [
        ("Torch.abs.0.forward.output.0", "torch.float32", {"二进制一致错误率": 0.0}, {}, "pass"),
        ("Torch.abs.0.forward.output.0", "torch.float32", {"二进制一致错误率": 0.001}, {}, "error"),
        ("Torch.mul.0.forward.output.0", "torch.float32", {"相对误差错误率": 0.0}, {}, "pass"),
        ("Torch.mul.0.forward.output.0", "torch.float32", {"相对误差错误率": 0.001}, {}, "error"),
        ("Torch.mul.0.forward.output.0", "torch.float32", {"绝对误差错误率": 0.001}, {}, "error"),
        ("Torch.mul.0.forward.output.0", "torch.float32", {"inf/nan错误率": 0.001}, {}, "error"),
        ("Torch.matmul.0.forward.output.0", "torch.float16", {"ULP误差大于阈值占比": 0.00099}, {}, "pass"),
        ("Torch.matmul.0.forward.output.0", "torch.float16", {"ULP误差大于阈值占比": 0.001}, {}, "error"),
        ("Torch.matmul.0.forward.output.0", "torch.float16", {"ULP误差大于阈值占比": 0.2}, {"ULP误差大于阈值占比": 0.21}, "pass"),
        ("Torch.matmul.0.forward.output.0", "torch.float32", {"ULP误差平均值": 63.9, "ULP误差大于阈值占比": 0.5}, {}, "pass"),
        ("Torch.matmul.0.forward.output.0", "torch.float32", {"ULP误差平均值": 64.0, "ULP误差大于阈值占比": 0.0499}, {}, "pass"),
        ("Torch.matmul.0.forward.output.0", "torch.float32", {"ULP误差平均值": 64.0, "ULP误差大于阈值占比": 0.05}, {}, "error"),
        ("Functional.conv2d.0.forward.output.0", "torch.float16", {"双千指标": 0.9991}, {}, "pass"),
        ("Functional.conv2d.0.forward.output.0", "torch.float16", {"双千指标": 0.9989}, {}, "error"),
    ],
)  # fmt: skip
def test_other_standards_of_2024(tmp_path: Path, name: str, dtype: str, npu: dict[str, float], gpu: dict[str, float], status: str) -> None:
    rest = FIGURES | {"ULP误差最大值": 0.0, "ULP误差平均值": 0.0, "ULP误差大于阈值占比": 0.0, "双千指标": 1.0}
    found = judged(tmp_path, name, rest | npu, rest | gpu, dtype=dtype)
    assert found["比对结果"] == status, found


@pytest.mark.promise("E65")
@pytest.mark.parametrize(
    ("op", "ratio", "status"), [("silu", 2.0, "pass"), ("silu", 2.01, "error"), ("layer_norm", 1.2, "pass"), ("layer_norm", 1.21, "error")]
)
def test_api_precision_compare_of_26x(tmp_path: Path, op: str, ratio: float, status: str) -> None:
    """Mean relative error: 2 times at the lowest level of guard, 1.2 at the highest."""
    sides = (FIGURES | {"相对误差平均值": 0.25 * factor} for factor in (ratio, 1.0))
    assert judged(tmp_path, f"Functional.{op}.0.forward.output.0", *sides, old=False)["比对结果"] == status


# --- overflow


@pytest.mark.promise("M10", "E57")
def test_run_overflow_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """exp(100) overflows in float16 wherever it runs; a sum that was recorded as infinite does not."""
    big, small = np.array([100.0, 1.0], "f2"), np.array([1.0, 2.0], "f2")
    calls = {
        "Torch.exp.0.forward": {"inputs": [big], "outputs": [np.array([np.inf, 2.718], "f2")]},
        "Torch.sin.0.forward": {"inputs": [small], "outputs": [np.array([np.inf, 0.9], "f2")]},
    }
    dump = write_dump(tmp_path, calls, "tensor")
    assert msprobe("-f", "pytorch", "run_overflow_check", "-api_info", dump, "-j", "-d", 0) == 0
    printed = capsys.readouterr().out
    assert "Torch.exp.0 forward: normal overflow" in printed
    assert "Torch.sin.0 forward: not reproduced" in printed


@pytest.mark.promise("E66")
def test_overflow_check_names_the_first_maker_across_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine, bad = Statistics(3.0, -1.0), Statistics(float("inf"), -1.0)
    chain = lambda leaving: {  # noqa: E731
        "Torch.exp.0.forward": {"inputs": [fine], "outputs": [leaving]},
        "Torch.mul.0.forward": {"inputs": [leaving], "outputs": [leaving]},
    }
    stacks = {"Torch.exp.0.forward": ["File train.py, line 7, in step, \n y = torch.exp(x)"]}
    for rank, leaving in ((0, fine), (1, bad)):
        write_dump(tmp_path / "step0" / f"rank{rank}", chain(leaving), stacks=stacks)
    assert msprobe("overflow_check", "-i", tmp_path / "step0", "-o", tmp_path / "output") == 0
    found = json.loads(only(tmp_path / "output", "anomaly_analyze_*.json").read_text())
    (node,) = found["rank_1"]
    assert list(found) == ["rank_1"]
    assert node["op_name"] == "Torch.exp.0.forward"
    assert node["data_info"]["output"][0]["Max"] == float("inf")
    assert "y = torch.exp(x)" in node["stack_info"][0]
    assert "first non-finite value: +inf made by exp" in capsys.readouterr().out


# --- merging


@pytest.mark.promise("E67")
@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_merge_result(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("npu", "bench"):
        for rank in (0, 1):
            x = Statistics(2.0 + rank * (side == "npu"), 0.0)
            write_dump(
                tmp_path / side / "step0" / f"rank{rank}",
                {"Distributed.all_reduce.0.forward": {"inputs": [x]}, "Torch.relu.0.forward": {"inputs": [x]}},
            )
    words = ["--xlsx"] if kind == "xlsx" else []
    assert msprobe("compare", "-tp", tmp_path / "npu/step0", "-gp", tmp_path / "bench/step0", "-o", tmp_path / "output", *words) == 0
    config = tmp_path / "merge.yaml"
    config.write_text("api:\n  - Distributed.all_reduce\ncompare_index: [Max diff, NormRelativeErr]\n")
    assert msprobe("merge_result", "-i", tmp_path / "output", "-o", tmp_path / "merged", "-config", config) == 0
    book = openpyxl.load_workbook(only(tmp_path / "merged", "multi_ranks_compare_merge_*.xlsx"))
    assert book.sheetnames == ["Max diff", "NormRelativeErr"]
    assert [[cell.value for cell in row] for row in book["Max diff"].iter_rows()] == [
        ["NPU Name", "rank0", "rank1"],
        ["Distributed.all_reduce.0.forward.input.0", 0, 1],
    ]
    config.write_text("api: [Torch.exp]\ncompare_index: [Max diff]\n")
    assert "no row begins" in complaint(capsys, "merge_result", "-i", tmp_path / "output", "-o", tmp_path, "-config", config)
    assert "holds 0 results" in complaint(capsys, "merge_result", "-i", tmp_path, "-o", tmp_path, "-config", config)


# --- parse

DUMP = "Add.layer_add_1.24.5.16365957946{}"


def typed(folder: Path, *lines: str) -> str:
    finished = subprocess.run(
        [*COMMAND, "-f", "pytorch", "parse"],
        input="".join(f"{line}\n" for line in lines),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


@pytest.mark.promise("M11", "E59")
def test_the_parse_shell_converts_a_device_and_compares_two(tmp_path: Path) -> None:
    x = np.arange(8, dtype=F4)
    for side, wrong in (("npu", 1.0), ("gold", 0.0)):
        for at, stamp in enumerate(("31347", "41347")):
            folder = tmp_path / side / "20240101000000" / "0" / "272"
            folder.mkdir(parents=True, exist_ok=True)
            out = x * 2 + (wrong if at else 0.0)
            (folder / DUMP.format(stamp)).write_bytes(dump_bytes([described(x)], [described(out.astype(F4))]))
        (tmp_path / f"converted_{side}").mkdir()
    said = typed(
        tmp_path,
        "cad -m npu/20240101000000/0 -out converted_npu",
        "cad -m gold/20240101000000/0 -out converted_gold",
        "run ls converted_npu",
        "pk -f x -n y",
    )
    assert said.count("SrcFile: ") == 4
    assert "pk is not supported here" in said
    npu, gold = (only(tmp_path / f"converted_{side}", "*") for side in ("npu", "gold"))
    assert npu.name in said
    assert sorted(file.name for file in (npu / "layer_add_1" / "1636595794631347").iterdir()) == [
        f"{DUMP.format('31347')}.{slot}.0.npy" for slot in ("input", "output")
    ]
    said = typed(tmp_path, f"vc -m {npu} -g {gold}")
    assert re.search(r"Compare result is saved in : parse_data/acl_batch_compare/batch_compare_\d+\.csv", said)
    rows = csv_rows(only(tmp_path / "parse_data" / "acl_batch_compare", "batch_compare_*.csv"))
    assert [(row["NPU File"].split(".")[-3], row["MaxAbsErr"]) for row in rows] == [
        ("input", "0.0"), ("output", "0.0"), ("input", "0.0"), ("output", "1.0"),
    ]  # fmt: skip


@pytest.mark.promise("E69")
@pytest.mark.parametrize("kind", ["pt", "npy"])
def test_parse_of_26x_converts(tmp_path: Path, kind: str) -> None:
    x = np.arange(8, dtype=F4)
    file = tmp_path / DUMP.format("31347")
    file.write_bytes(dump_bytes([described(x)], [described(x * 2)]))
    assert msprobe("parse", "-d", file, "-t", kind, "-o", tmp_path / "output") == 0
    out = only(tmp_path / "output", f"*.output.0.{kind}")
    values = torch.load(out, weights_only=True).numpy() if kind == "pt" else np.load(out)
    assert (values == x * 2).all()
