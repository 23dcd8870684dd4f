# SPDX-License-Identifier: Apache-2.0
"""The door of torch_npu.hooks, through its old import path, as real processes."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ulpscope.compat import npu_hooks
from ulpscope.errors import DamagedRunError, InputError
from ulpscope.store import open_run

SCRIPTS = Path(__file__).parent / "scripts"
DOOR = "from ulpscope.testing import npu\nnpu.install()\nfrom ulpscope.compat import npu_hooks\nnpu_hooks.install()\n"
COLUMNS = ["Name", "Npu Tensor Dtype", "Bench Tensor Dtype", "Npu Tensor Shape", "Bench Tensor Shape", "Cosine", "RMSE", "MAPE"]


def run(folder: Path, script: str, **environment: str) -> str:
    """Run a script with the door installed and the stand-in npu; return its output."""
    (folder / "script.py").write_text(DOOR + script)
    variables = {**os.environ, "PYTHONPATH": str(SCRIPTS), **environment}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`torch_npu.hooks.tools.compare`, by its old path."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_npu"]:
        monkeypatch.delitem(sys.modules, name)
    npu_hooks.install()
    from torch_npu.hooks.tools import compare  # type: ignore[import-not-found]

    yield compare
    for name in ("torch_npu", "torch_npu.hooks", "torch_npu.hooks.tools"):
        sys.modules.pop(name, None)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def lines(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sample")
    return folder, run(folder, (SCRIPTS / "hooks_module.py").read_text(), ULPSCOPE_NPU_ARITHMETIC="reduced")


@pytest.mark.promise("H01", "H02", "H03", "H09", "H13", "H14", "H22")
def test_the_guides_first_sample(sample: tuple[Path, str]) -> None:
    folder, printed = sample
    table = rows(folder / "module_result.csv")
    assert list(table[0]) == COLUMNS
    outputs = [row for row in table if row["Name"] == "Functional_linear_forward_output"]
    assert len(outputs) == 2
    assert all(0.9999 < float(row["Cosine"]) < 1 and 0 < float(row["RMSE"]) < 1e-3 for row in outputs)
    assert "nothing differs by more than honest rounding explains" in printed
    assert (folder / "module_result.html").stat().st_size > 10_000


@pytest.mark.promise("H05", "H07", "H08", "H10", "H11", "H12")
def test_what_the_dump_holds(sample: tuple[Path, str]) -> None:
    folder, _ = sample
    cpu, npu = lines(folder / "cpu_module_op.pkl"), lines(folder / "npu_module_op.pkl")
    names = [line[0] for line in cpu]
    assert names == [line[0] for line in npu]
    assert names[:4] == [f"Functional_linear_forward_{slot}" for slot in ("input.0", "input.1", "input.2", "output")]
    assert [name for name in names if name.startswith("Module_")] == [
        "Module_Linear_forward_input.0", "Module_Linear_forward_output", "Module_Linear_forward_input.0", "Module_Linear_forward_output",
        "Module_ReLU_forward_input.0", "Module_ReLU_forward_output", "Module_ReLU_backward_input.0", "Module_ReLU_backward_output.0",
        "Module_Linear_backward_input.0", "Module_Linear_backward_output.0", "Module_Linear_backward_input.0",
    ]  # fmt: skip
    assert "Tensor_sum_forward_output" in names
    output = next(line for line in cpu if line[0] == "Functional_relu_forward_output")
    assert (len(output[1]), output[2], output[3]) == (2, "torch.float32", [2, 1])
    gradient = next(line for line in cpu if line[0] == "Functional_linear_backward_output.2")
    arriving = next(line for line in cpu if line[0] == "Functional_relu_backward_output.0")
    assert gradient[1] == [sum(arriving[1])]


@pytest.mark.promise("H06", "H23")
def test_the_guides_second_sample_with_two_models(tmp_path: Path) -> None:
    seed = "import torch\ntorch.manual_seed(5)\n"  # the guide makes its model before it seeds; one in some eighty has a row below the bound
    run(tmp_path, seed + (SCRIPTS / "hooks_resnet.py").read_text(), ULPSCOPE_NPU_ARITHMETIC="reduced")
    table = rows(tmp_path / "resnet50_result.csv")
    names = [row["Name"] for row in table]
    assert [name for name in names if name.startswith("Module_Conv2d_forward_output")] == ["Module_Conv2d_forward_output"] * 5
    assert "Tensor___iadd___forward_output" in names
    assert "Functional_cross_entropy_backward_input.0" in names
    assert not any(name.startswith(("Module_Bottleneck", "Module_Sequential")) for name in names)
    assert all(row["Cosine"] == "nan" or float(row["Cosine"]) > 0.99 for row in table)


CHANGED = """
import torch
from torch_npu.hooks import register_acc_cmp_hook, seed_all, set_dump_path
from torch_npu.hooks.tools import compare

def forward(model, x, device):
    model.to(device)
    model(x.to(device)).sum().backward()

seed_all()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
register_acc_cmp_hook(model)
x = torch.randn(3, 4)
set_dump_path("old.pkl")
forward(model, x, "npu:0")
set_dump_path("new.pkl")
with npu.inject("aten.gelu.default", "scale"):
    forward(model, x, "npu:0")
compare("new.pkl", "old.pkl", "versions.csv")
"""


@pytest.mark.promise("H04", "H24")
def test_two_versions_on_one_device_by_its_name(tmp_path: Path) -> None:
    printed = run(tmp_path, CHANGED)
    table = {row["Name"]: row for row in rows(tmp_path / "versions.csv")}
    assert float(table["Functional_linear_forward_output"]["RMSE"]) == 0
    assert float(table["Functional_gelu_forward_output"]["MAPE"]) > 5e-4
    assert "first contributed error: gelu" in printed


def write(file: Path, *operators: tuple[str, list[list[float]]]) -> Path:
    """Write a dump with one operator for each name: its tensors, the last of which is the output."""
    text = []
    for name, tensors in operators:
        for index, values in enumerate(tensors):
            slot = "output" if index == len(tensors) - 1 else f"input.{index}"
            text.append(json.dumps([f"{name}_forward_{slot}", values, "torch.float32", [len(values)]]))
    file.write_text("\n".join(text) + "\n")
    return file


@pytest.mark.promise("H15", "H16", "H17")
def test_matching_skips_and_goes_on(tmp_path: Path, compare: Callable[..., None]) -> None:
    npu = write(
        tmp_path / "npu.pkl",
        ("Torch_a", [[1.0], [1.0]]), ("Torch_fused", [[1.0], [2.0]]), ("Torch_shaped", [[1.0], [1.0, 2.0]]), ("Torch_c", [[1.0], [3.0]]),
    )  # fmt: skip
    bench = write(
        tmp_path / "cpu.pkl",
        ("Torch_a", [[1.0], [1.0]]), ("Torch_b", [[1.0], [9.0]]), ("Torch_shaped", [[1.0], [1.0]]), ("Torch_c", [[1.0], [3.0]]),
    )  # fmt: skip
    compare(npu, bench, tmp_path / "strict.csv")
    assert [row["Name"] for row in rows(tmp_path / "strict.csv")] == [
        "Torch_a_forward_input.0", "Torch_a_forward_output", "Torch_c_forward_input.0", "Torch_c_forward_output"
    ]  # fmt: skip
    compare(npu, bench, tmp_path / "names.csv", shape_flag=False)
    shaped = next(row for row in rows(tmp_path / "names.csv") if row["Name"] == "Torch_shaped_forward_output")
    assert shaped["Cosine"] == shaped["RMSE"] == shaped["MAPE"] == "cannot be calculated"


@pytest.mark.promise("H18", "H19", "H20", "H21")
def test_the_three_numbers(tmp_path: Path, compare: Callable[..., None]) -> None:
    npu = write(
        tmp_path / "npu.pkl",
        ("Torch_a", [[3.0], [1.0, 2.0]]), ("Torch_b", [[-1.0], [0.0, 0.0]]), ("Torch_c", [[0.5], [4.0, math.inf]]),
        ("Torch_d", [[1.0], [1.0, 1.0]]),
    )  # fmt: skip
    bench = write(
        tmp_path / "cpu.pkl",
        ("Torch_a", [[4.0], [2.0, 4.0]]), ("Torch_b", [[1.0], [1.0, 1.0]]), ("Torch_c", [[0.5], [4.0, 1.0]]),
        ("Torch_d", [[1.0], [0.0, 1.0]]),
    )  # fmt: skip
    compare(npu, bench, tmp_path / "out.csv")
    table = {row["Name"]: row for row in rows(tmp_path / "out.csv")}
    a, b, c, d = (table[f"Torch_{letter}_forward_output"] for letter in "abcd")
    assert float(a["Cosine"]) == pytest.approx(1.0)
    assert float(a["RMSE"]) == pytest.approx(math.sqrt((1 + 4) / 2))
    assert float(a["MAPE"]) == pytest.approx(0.5)
    assert (b["Cosine"], float(b["RMSE"]), float(b["MAPE"])) == ("nan", 1.0, 1.0)
    assert c["Cosine"] == c["RMSE"] == c["MAPE"] == "nan"
    assert (d["MAPE"], float(d["Cosine"])) == ("nan", pytest.approx(math.sqrt(0.5)))
    assert float(table["Torch_a_forward_input.0"]["MAPE"]) == pytest.approx(0.25)
    assert float(table["Torch_b_forward_input.0"]["Cosine"]) == -1.0


PLAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
if HOOKED:
    from torch_npu.hooks import register_acc_cmp_hook, set_dump_path
    before = dict(vars(torch.Tensor)), torch.nn.Module.__call__
    register_acc_cmp_hook(model)
    set_dump_path("dump.pkl")
x = torch.randn(8, 4)
for _ in range(2):
    model(x * 2 + 1).square().mean().backward()
if HOOKED:
    npu_hooks.stop()
    assert (dict(vars(torch.Tensor)), torch.nn.Module.__call__) == before
print([p.grad.flatten().tolist() for p in model.parameters()], torch.rand(2).tolist())
"""


def test_the_dump_changes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, f"HOOKED = False\n{PLAIN}") == run(tmp_path, f"HOOKED = True\n{PLAIN}")
    assert len(lines(tmp_path / "dump.pkl")) > 20


def test_a_real_torch_npu_keeps_its_own_hooks(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu"
    (package / "hooks").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import hooks\n")
    (package / "hooks" / "__init__.py").write_text("seed_all = 'theirs'\n")
    script = "from ulpscope.compat import npu_hooks\nnpu_hooks.install()\nfrom torch_npu.hooks import seed_all\nprint(seed_all)\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "theirs\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json\n",
        '["Torch_a_forward_output", [1.0], "torch.float32"]\n',
        '["Torch_a_forward_output", [1.0], "torch.float32", [-1]]\n',
        '["Torch_a_forward_output", {"a": 1}, "torch.float32", [1]]\n',
        "[" * 100_000 + "\n",
    ],
)
def test_files_that_are_no_dump_say_so(tmp_path: Path, compare: Callable[..., None], text: str) -> None:
    good = write(tmp_path / "cpu.pkl", ("Torch_a", [[1.0], [1.0]]))
    bad = tmp_path / "npu.pkl"
    bad.write_text(text)
    if text:
        with pytest.raises(DamagedRunError, match="line 1"):
            compare(bad, good, tmp_path / "out.csv")
    else:
        compare(bad, good, tmp_path / "out.csv")
        assert rows(tmp_path / "out.csv") == []


def test_a_claim_of_more_values_than_there_are_takes_no_memory(tmp_path: Path, compare: Callable[..., None]) -> None:
    good = write(tmp_path / "cpu.pkl", ("Torch_a", [[1.0], [1.0]]))
    bad = tmp_path / "npu.pkl"
    bad.write_text(good.read_text().replace("[1]]", "[4000000000]]"))
    with pytest.raises(DamagedRunError, match="4000000000 numbers"):
        compare(bad, bad, tmp_path / "out.csv")
    record = next(iter(open_run(bad).records(0, 0)))
    assert all(slot.content is None for slot in record.slots)


def test_a_last_line_that_was_cut_costs_only_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "cpu.pkl", ("Torch_a", [[1.0], [1.0]]), ("Torch_b", [[2.0], [2.0]]))
    file.write_text(file.read_text()[:-20])
    run = open_run(file)
    assert [len(record.slots) for record in run.records(0, 0)] == [2, 1]
    assert "not written to its end" in run.ledger(0)[0].why


@pytest.mark.parametrize("name", ["missing/file.pkl", "."])
def test_a_dump_path_that_cannot_be_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="wants a file in a folder that exists"):
        npu_hooks.set_dump_path(name)
