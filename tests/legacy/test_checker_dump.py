# SPDX-License-Identifier: Apache-2.0
"""Test the files that `import api_accuracy_checker.dump` writes, in real processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope

HEAD = """
import torch
import api_accuracy_checker.dump
"""
TRAINING = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU(), torch.nn.Linear(4, 3))
data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
for i, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=2)):
    loss = torch.nn.functional.cross_entropy(model(x * 2 + 1), y)
    loss.backward()
    print("iteration", i)
"""


def train(folder: Path, script: str, *, fails: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "main.py").write_text(script)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "main.py"], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    return done


def info(folder: Path, kind: str) -> dict[str, Any]:
    (file,) = folder.glob(f"{kind}_info_*.json")
    return json.loads(file.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("dumped")
    return folder, train(folder, HEAD + TRAINING)


@pytest.mark.promise("C05", "C07", "C13", "C14")
def test_the_import_is_enough_for_the_second_iteration(dumped: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = dumped
    assert done.stdout.split("\n")[:2] == ["iteration 0", "iteration 1"]
    assert "iteration 2" not in done.stdout
    assert done.stderr.strip().endswith("Exception: Model pretest: exit after iteration 1.")
    assert list(info(folder, "forward")) == [
        "Tensor*__mul__*0", "Tensor*__add__*0", "Functional*linear*0", "Functional*silu*0", "Functional*linear*1",
        "Functional*cross_entropy*0",
    ]  # fmt: skip


@pytest.mark.promise("C03", "C08", "C09")
def test_three_small_files_with_the_same_keys(dumped: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = dumped
    forward, backward, stack = (info(folder, kind) for kind in ("forward", "backward", "stack"))
    assert list(forward) == list(stack)
    assert set(backward) < set(forward)
    assert all(frames[0].startswith("File main.py, line ") for frames in stack.values())
    assert sum(file.stat().st_size for file in folder.glob("*_info_*.json")) < 10_000
    silu = forward["Functional*silu*0"]
    assert silu["kwargs"] == {"inplace": {"type": "bool", "value": False}}
    assert {name: silu["args"][0][name] for name in ("type", "dtype", "shape", "requires_grad")} == {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4], "requires_grad": True
    }  # fmt: skip
    assert silu["args"][0]["Max"] > silu["args"][0]["Min"]
    loss = backward["Functional*cross_entropy*0"]
    assert [(gradient["shape"], gradient["Max"], gradient["Min"]) for gradient in loss] == [([], 1.0, 1.0)]


def test_every_line_of_a_killed_dump_is_read(tmp_path: Path) -> None:
    killed = TRAINING.replace("loss.backward()", "loss.backward()\n    if i == 1: import os; os.kill(os.getpid(), 9)")
    train(tmp_path, HEAD + killed)
    assert len(info(tmp_path, "forward")) == 6
    assert len(info(tmp_path, "backward")) == 4


@pytest.mark.promise("C10", "C11", "C12")
def test_settings_and_real_data(tmp_path: Path) -> None:
    (tmp_path / "my" / "dump" / "path").mkdir(parents=True)
    settings = """
from api_accuracy_checker.dump import msCheckerConfig
msCheckerConfig.update_config(dump_path="my/dump/path", real_data=True, enable_dataloader=True, target_iter=2)
"""
    done = train(tmp_path, HEAD + settings + TRAINING)
    assert "exit after iteration 2." in done.stderr
    folder = tmp_path / "my" / "dump" / "path"
    linear = info(folder, "forward")["Functional*linear*0"]
    values = [torch.load(part["datapath"], weights_only=True) for part in linear["args"]]
    assert [tuple(value.shape) for value in values] == [(2, 4), (4, 4), (4,)]
    (arriving,) = info(folder, "backward")["Functional*linear*0"]
    assert torch.load(arriving["datapath"], weights_only=True).shape == (2, 4)
    assert sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) == ["backward_real_data", "forward_real_data"]
    records = {str(record.call): record for record in ulpscope.open_run(folder).records(0, 0) if record.phase == "forward"}
    assert [slot.shape for slot in records["functional.linear.0"].slots if slot.slot.role == "input"] == [(2, 4), (4, 4), (4,)]


@pytest.mark.promise("C06")
def test_a_switch_where_no_dataloader_is_used(tmp_path: Path) -> None:
    script = """
import torch
import api_accuracy_checker.dump as DP
model = torch.nn.Linear(2, 2)
for i in range(3):
    DP.dump.set_dump_switch("ON")
    model(torch.ones(1, 2)).sum().backward()
    DP.dump.set_dump_switch("OFF")
"""
    train(tmp_path, script, fails=False)
    assert list(info(tmp_path, "forward")) == ["Torch*ones*0", "Functional*linear*0", "Tensor*sum*0"]


@pytest.mark.promise("C19")
def test_bfloat16_and_integers_and_containers(tmp_path: Path) -> None:
    script = """
import torch
import api_accuracy_checker.dump as DP
DP.dump.set_dump_switch("ON")
x = torch.full((2, 2), 1.5, dtype=torch.bfloat16)
torch.cat([x, x], dim=1)
x[:, 0:1]
torch.tensor([3, 7]).sum(dtype=torch.int32)
(x > 1).any()
x.to(device="cpu", dtype=torch.float32)
(x / 0).exp()
DP.dump.set_dump_switch("OFF")
"""
    train(tmp_path, script, fails=False)
    forward = info(tmp_path, "forward")
    assert forward["Torch*cat*0"]["args"][0][1]["dtype"] == "torch.bfloat16"
    assert forward["Tensor*__getitem__*0"]["args"][1][1] == {"type": "slice", "value": [0, 1, None]}
    assert forward["Tensor*sum*0"]["args"][0]["Max"] == 7
    assert forward["Tensor*sum*0"]["kwargs"]["dtype"] == {"type": "torch.dtype", "value": "torch.int32"}
    assert (forward["Tensor*any*0"]["args"][0]["Max"], forward["Tensor*any*0"]["args"][0]["Min"]) == (1, 1)
    assert forward["Tensor*to*0"]["kwargs"]["device"] == {"type": "torch.device", "value": "cpu"}
    assert math.isinf(forward["Tensor*exp*0"]["args"][0]["Max"])


def test_the_training_is_bitwise_what_it_was(tmp_path: Path) -> None:
    digest = "\nprint([p.grad.flatten().tolist() for p in model.parameters()], torch.rand(2).tolist())\n"
    script = TRAINING + digest
    plain = train(tmp_path, "import torch\n" + script, fails=False).stdout
    off = HEAD + "from api_accuracy_checker.dump import msCheckerConfig\nmsCheckerConfig.update_config(target_iter=3)\n"
    assert train(tmp_path, off + script, fails=False).stdout == plain
    assert "Functional*cross_entropy*0" in info(tmp_path, "forward")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dump_path": "nowhere"}, "a folder that exists"),
        ({"real_data": "yes"}, "wants bool"),
        ({"target_iter": -1}, "from 0 up"),
        ({"colour": 1}, "no setting 'colour'"),
    ],
)
def test_settings_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    from ulpscope.compat.checker.checker_config import CheckerConfig

    with pytest.raises(ValueError, match=message):
        CheckerConfig().update_config(**setting)
