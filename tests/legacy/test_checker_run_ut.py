# SPDX-License-Identifier: Apache-2.0
"""run_ut.py and run_overflow_check.py by their old paths and as modules, on dumps of real processes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import api_accuracy_checker.run_ut

FOLDER = Path(api_accuracy_checker.run_ut.__file__).parent
STAND_IN = Path(__file__).parent / "stand_in"
DUMPING = """
import torch
import api_accuracy_checker.dump as DP
torch.manual_seed(0)
x = torch.randn(64, 32, requires_grad=True)
h = x.half().detach().requires_grad_()
w = torch.randn(32, 32, requires_grad=True)
DP.dump.set_dump_switch("ON")
y = torch.nn.functional.linear(x, w)
z = torch.nn.functional.gelu(y)
d = torch.nn.functional.dropout(z, 0.25)
s = torch.nn.functional.silu(h)
(d.sum() + s.float().sum()).backward()
torch.bincount(torch.arange(5))
DP.dump.set_dump_switch("OFF")
"""


def python(folder: Path, *arguments: str, npu: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if npu:
        variables["PYTHONPATH"] = str(STAND_IN)
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False)


def rows(file: Path) -> dict[str, dict[str, str]]:
    with file.open(newline="") as stream:
        read = list(csv.DictReader(stream))
    return {next(iter(row.values())): row for row in read}


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    assert python(folder, "-c", DUMPING).returncode == 0
    for kind in ("forward", "backward"):
        next(folder.glob(f"{kind}_info_*.json")).rename(folder / f"{kind}_info_0.json")
    return folder


COMMAND = ("run_ut.py", "-forward", "./forward_info_0.json", "-backward", "./backward_info_0.json")


@pytest.mark.promise("C15", "C16", "C20", "C21")
def test_a_sound_machine_passes(dump: Path, tmp_path: Path) -> None:
    done = python(dump, str(FOLDER / "run_ut.py"), *COMMAND[1:], "--out_path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results, details = rows(tmp_path / "accuracy_checking_result.csv"), rows(tmp_path / "accuracy_checking_details.csv")
    assert list(next(iter(results.values()))) == ["API name", "Forward Test Success", "Backward Test Success", "Message"]
    assert (results["Functional*gelu*0"]["Forward Test Success"], results["Functional*gelu*0"]["Backward Test Success"]) == ("True", "True")
    assert results["Functional*dropout*0"]["Forward Test Success"] == "True"
    assert results["Torch*bincount*0"]["Backward Test Success"] == "N/A"
    silu = details["Functional*silu*0.forward.output.0"]
    assert (silu["Bench Dtype"], silu["NPU Dtype"], silu["Shape"], silu["Status"]) == ("float32", "float16", "(64, 32)", "pass")
    assert details["Functional*linear*0.backward.output.1"]["Bench Dtype"] == "float64"
    assert float(silu["Cosine Similarity"]) > 0.99
    assert "100.00%" in done.stdout


@pytest.mark.promise("C01", "C17", "C18")
def test_a_wrong_kernel_of_the_device_fails_and_its_data_are_kept(dump: Path, tmp_path: Path) -> None:
    faults = "aten.gelu.default scale=0.01"
    code = f"""
import sys
from api_accuracy_checker.dump import msCheckerConfig
msCheckerConfig.update_config(error_data_path={str(tmp_path)!r})
from ulpscope.compat.checker.run_ut import main
sys.exit(main(sys.argv[1:]))
"""
    done = python(dump, "-c", code, *COMMAND[1:], "-save_error_data", "-o", str(tmp_path), npu=True, ULPSCOPE_NPU_FAULTS=faults)
    assert done.returncode == 0, done.stderr
    results, details = rows(tmp_path / "accuracy_checking_result.csv"), rows(tmp_path / "accuracy_checking_details.csv")
    assert [name for name, row in results.items() if row["Forward Test Success"] == "False"] == ["Functional*gelu*0"]
    gelu = details["Functional*gelu*0.forward.output.0"]
    assert (gelu["Status"], gelu["Pass"]) == ("error", "False")
    assert float(gelu["Cosine Similarity"]) > 0.99
    assert float(gelu["Relative Error (dual thousandth)"]) < 0.999
    assert results["Functional*linear*0"]["Forward Test Success"] == "True"
    kept = sorted(file.name for file in (tmp_path / "ut_error_data").glob("Functional.gelu.*"))
    assert kept == [f"Functional.gelu.0.forward.{name}.0.pt" for name in ("input", "output.bench", "output.device")]
    bench, device = (torch.load(tmp_path / "ut_error_data" / kept[at], weights_only=True) for at in (1, 2))
    assert not torch.allclose(bench.float(), device.float(), rtol=1e-3)


def test_a_result_that_is_there_is_not_written_over(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "accuracy_checking_result.csv").write_text("mine")
    done = python(dump, "-m", "api_accuracy_checker.run_ut.run_ut", *COMMAND[1:], "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "accuracy_checking_result.csv").read_text() == "mine"
    (other,) = tmp_path.glob("accuracy_checking_result_*.csv")
    assert "Functional*gelu*0" in rows(other)


def test_a_check_that_broke_off_goes_on(dump: Path, tmp_path: Path) -> None:
    first = tmp_path / "accuracy_checking_result_20231023120000.csv"
    first.write_text("API name,Forward Test Success,Backward Test Success,Message\nFunctional*gelu*0,False,False,from before\n")
    done = python(dump, "-m", "api_accuracy_checker.run_ut.run_ut", *COMMAND[1:], "-o", str(tmp_path), "-csv_path", str(first))
    assert done.returncode == 0, done.stderr
    (other,) = set(tmp_path.glob("accuracy_checking_result_*.csv")) - {first}
    results = rows(other)
    assert results["Functional*gelu*0"]["Message"] == "from before"
    assert results["Functional*linear*0"]["Forward Test Success"] == "True"
    assert not any("gelu" in name for name in rows(next(tmp_path.glob("accuracy_checking_details_*.csv"))))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-forward", "missing.json"), "is no json file of a dump"),
        (("-forward", "broken.json"), "broken.json"),
        (("-forward", "forward_info_0.json", "-o", "nowhere"), "is no folder"),
        (("-forward", "forward_info_0.json", "-csv_path", "notes.csv"), "no accuracy_checking_result csv"),
        (("-forward", "forward_info_0.json", "-csv_path", "accuracy_checking_result_20231023120000.csv"), "the result of another dump"),
    ],
)
def test_bad_input_is_one_sentence(dump: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "forward_info_0.json").write_bytes((dump / "forward_info_0.json").read_bytes())
    (tmp_path / "broken.json").write_text('{"Functional*gelu*0": {"args": [')
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    head = "API name,Forward Test Success,Backward Test Success,Message\n"
    (tmp_path / "accuracy_checking_result_20231023120000.csv").write_text(head + "Functional*conv9d*0,True,True,\n")
    done = python(tmp_path, "-m", "api_accuracy_checker.run_ut.run_ut", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def overflow_json(folder: Path, **apis: dict[str, Any]) -> None:
    (folder / "forward_info_0.json").write_text(json.dumps(apis))


@pytest.mark.promise("O01", "O02", "O03", "O06")
def test_normal_and_abnormal_overflow(tmp_path: Path) -> None:
    big = {"type": "torch.Tensor", "dtype": "torch.float16", "shape": [4, 4], "Max": 60000.0, "Min": 50000.0, "requires_grad": False}
    small = {**big, "Max": 2.0, "Min": 1.0}
    overflow_json(
        tmp_path,
        Torch_mul_0_forward={"args": [big, big], "kwargs": {}},
        Functional_gelu_0_forward={"args": [small], "kwargs": {}},
        Functional_silu_0_forward={"args": [small], "kwargs": {}},
    )
    command = (str(FOLDER / "run_overflow_check.py"), "-forward", "./forward_info_0.json", "-d", "0", "-j")
    done = python(tmp_path, *command, npu=True, ULPSCOPE_NPU_FAULTS="aten.gelu.default nan")
    assert done.returncode == 0, done.stderr
    told = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "normal overflow" in told["Torch_mul_0"]
    assert "abnormal overflow" in told["Functional_gelu_0"]
    assert "not reproduced" in told["Functional_silu_0"]
    assert done.stdout.splitlines()[-1] == "1 normal, 1 abnormal, 1 not reproduced"


@pytest.mark.promise("O04")
def test_a_backward_that_overflows_is_judged_too(tmp_path: Path) -> None:
    given = {"type": "torch.Tensor", "dtype": "torch.float16", "shape": [4], "Max": 1e-7, "Min": 6e-8, "requires_grad": True}
    overflow_json(tmp_path, Torch_rsqrt_0_forward={"args": [given], "kwargs": {}})
    gradient = {"type": "torch.Tensor", "dtype": "torch.float16", "shape": [4], "Max": 1.0, "Min": 1.0, "requires_grad": False}
    (tmp_path / "backward_info_0.json").write_text(json.dumps({"Torch_rsqrt_0_backward": [gradient]}))
    done = python(tmp_path, "-m", "api_accuracy_checker.run_ut.run_overflow_check", "-forward", "forward_info_0.json")
    assert done.returncode == 0, done.stderr
    assert "Torch_rsqrt_0 backward: normal overflow" in done.stdout
