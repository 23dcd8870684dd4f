# SPDX-License-Identifier: Apache-2.0
"""msprobe's debugger through its old name: how it is made and switched, its seeds, its saves, its DataLoader, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import msprobe.mindspore
import msprobe.pytorch
from msprobe.pytorch import PrecisionDebugger, seed_all
from tests.legacy.forking import Job, Outcome, run_all
from tests.legacy.msprobe_programs import Net, X, dump, entries, read, same, training_step, write_config
from ulpscope.compat.msprobe.dump.exceptions import MsprobeException
from ulpscope.errors import InputError

ROOT = Path(__file__).parents[2]

GUIDE = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger, seed_all

# 在训练开始前固定随机性
seed_all()

# 请勿将PrecisionDebugger的初始化流程插入到循环代码中
debugger = PrecisionDebugger(config_path="./config.json", dump_path="./dump_path")

# 定义网络
class ModuleOP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features=8, out_features=4)
        self.linear_2 = nn.Linear(in_features=4, out_features=2)

    def forward(self, x):
        x1 = self.linear_1(x)
        x2 = self.linear_2(x1)
        r1 = F.relu(x2)
        return r1

if __name__ == "__main__":
    module = ModuleOP()

    # 开启数据 dump
    debugger.start(model=module)
    x = torch.randn(10, 8)
    out = module(x)
    loss = out.sum()
    loss.backward()

    # 关闭数据 dump
    debugger.stop()
"""

CARD = """
import os, sys
import torch, torch.distributed as dist
import torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger

rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + os.path.abspath("rendezvous"))
debugger = PrecisionDebugger(config_path="./config.json")
for step in range(2):
    debugger.start()
    x = F.relu(torch.ones(3) * (rank + 1))
    dist.all_reduce(x)
    debugger.stop()
    debugger.step()
dist.destroy_process_group()
"""


IMPORT = """
import random, torch
before = (torch.Tensor.__add__, torch.nn.Module.__call__, torch.nn.functional.dropout)
random.seed(3)
state, torch_state = random.getstate(), torch.get_rng_state()
import msprobe, msprobe.pytorch, msprobe.mindspore
from msprobe.pytorch import PrecisionDebugger, seed_all, module_dump
assert before == (torch.Tensor.__add__, torch.nn.Module.__call__, torch.nn.functional.dropout)
assert state == random.getstate() and torch.equal(torch_state, torch.get_rng_state())
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run the scripts as processes of their own."""
    scratch = tmp_path_factory.mktemp("scripts")
    guide, cards, bare = scratch / "guide", scratch / "cards", scratch / "import"
    for folder, script in ((guide, GUIDE), (cards, CARD), (bare, IMPORT)):
        folder.mkdir()
        (folder / "script.py").write_text(script)
    write_config(guide, "statistics", {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"})
    write_config(cards, "tensor", {}, rank=[1], step=[1])
    jobs = [Job(str(guide)), Job(str(bare)), *(Job(str(cards), arguments=[str(rank)], group="cards") for rank in range(2))]
    found = run_all(jobs, scratch)
    return dict(zip(("guide", "import", "card0", "card1"), found, strict=True))


@pytest.mark.promise("E15")
def test_the_script_of_the_guide(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["guide"].succeeded() / "dump_path" / "step0"
    (rank,) = folder.iterdir()
    assert rank.name.startswith("proc")
    data = json.loads((rank / "dump.json").read_text())["data"]
    assert list(data) == [
        "Torch.randn.0.forward", "Functional.linear.0.forward", "Functional.linear.1.forward", "Functional.relu.0.forward",
        "Tensor.sum.0.forward", "Tensor.sum.0.backward", "Functional.relu.0.backward", "Functional.linear.1.backward",
        "Functional.linear.0.backward",
    ]  # fmt: skip


@pytest.mark.promise("E02", "E16")
def test_several_cards_have_a_folder_each(outcomes: dict[str, Outcome]) -> None:
    outcomes["card0"].succeeded()
    folder = outcomes["card1"].succeeded() / "dump"
    assert [str(path.relative_to(folder)) for path in sorted(folder.glob("*/*"))] == ["step1/rank1"]
    reduced = json.loads((folder / "step1" / "rank1" / "dump.json").read_text())["data"]["Distributed.all_reduce.0.forward"]
    assert (reduced["input_args"][0]["Max"], reduced["output"][0]["Max"]) == (2.0, 3.0)


@pytest.mark.promise("E14")
def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(write_config(tmp_path, "statistics"), "tensor", str(tmp_path / "other"), "L0", Net(), [1], layout="1.x")
    for _ in range(2):
        debugger.start()
        training_step(debugger._model)
        debugger.stop()
        debugger.step()
    header = read(tmp_path / "other", step=1)
    assert (header["task"], header["level"]) == ("tensor", "L0")
    assert not (tmp_path / "dump").exists()
    assert not (tmp_path / "other" / "step0").exists()


@pytest.mark.promise("E14")
def test_steps_where_26_takes_them(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(None, "statistics", str(tmp_path / "dump"), "L1", ["1-2"], layout="1.x")
    for _ in range(4):
        debugger.start()
        X.abs()
        debugger.stop()
        debugger.step()
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step1", "step2"]


def test_a_process_has_one_debugger(tmp_path: Path) -> None:
    first = PrecisionDebugger(config_path=write_config(tmp_path))
    assert PrecisionDebugger(dump_path=str(tmp_path / "other"), task="tensor") is first
    PrecisionDebugger.forget()
    assert PrecisionDebugger(config_path=write_config(tmp_path)) is not first


@pytest.mark.promise("E15")
def test_start_and_stop_inside_a_step(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path), layout="1.x")
    for end in (PrecisionDebugger.stop, PrecisionDebugger.forward_backward_dump_end):
        PrecisionDebugger.start()
        X.abs()
        end()
        X.neg()
    assert list(entries(tmp_path / "dump")) == ["Tensor.abs.0.forward", "Tensor.abs.1.forward"]
    assert list(read(tmp_path / "dump", "stack")) == ["Tensor.abs.0.forward", "Tensor.abs.1.forward"]
    debugger.step()
    debugger.start()
    X.abs()
    debugger.stop()
    assert list(entries(tmp_path / "dump", step=1)) == ["Tensor.abs.0.forward"]


def test_the_first_step_can_have_another_number(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, step=[7]), layout="1.x")
    debugger.set_init_step(6)
    for _ in range(2):
        debugger.start(rank_id=5)
        X.abs()
        debugger.stop()
        debugger.step()
    assert list(entries(tmp_path / "dump", step=7, rank="rank5")) == ["Tensor.abs.0.forward"]
    with pytest.raises(InputError, match="set_init_step wants a number from 0 up, not -1"):
        debugger.set_init_step(-1)
    with pytest.raises(InputError, match="takes no range of tokens"):
        debugger.start(token_range=[0, 3])


@pytest.mark.promise("E06")
def test_steps_from_a_dataloader(tmp_path: Path) -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__
    PrecisionDebugger(config_path=write_config(tmp_path, step=[0, 2], enable_dataloader=True), layout="1.x")
    seen: list[float] = []

    def train() -> None:
        for (batch,) in DataLoader(TensorDataset(torch.arange(12.0).reshape(6, 2)), batch_size=1):
            seen.append(float(batch.abs().max()))

    with pytest.raises(MsprobeException, match=r"exit after iteration \[0, 2\]"):
        train()
    assert seen == [1.0, 3.0, 5.0]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step0", "step2"]
    assert entries(tmp_path / "dump", step=2)["Tensor.abs.0.forward"]["output"][0]["Max"] == 5.0
    assert _BaseDataLoaderIter.__next__ is original


@pytest.fixture
def restored_switches() -> Any:
    cudnn = torch.backends.cudnn
    before = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled())
    environment = dict(os.environ)
    yield
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before[:3]
    torch.use_deterministic_algorithms(before[3])
    os.environ.clear()
    os.environ.update(environment)


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


@pytest.mark.promise("E05")
@pytest.mark.usefixtures("restored_switches")
def test_the_config_seeds(tmp_path: Path) -> None:
    seed_all(99)
    expected = drawn()
    PrecisionDebugger(config_path=write_config(tmp_path, seed=99, is_deterministic=True))
    assert drawn() == expected
    assert torch.are_deterministic_algorithms_enabled()


def test_without_a_seed_nothing_is_seeded(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    PrecisionDebugger(config_path=write_config(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.promise("E39")
@pytest.mark.usefixtures("restored_switches")
def test_seed_all_can_switch_dropout_off() -> None:
    original = F.dropout
    seed_all(seed=1234, mode=False, rm_dropout=True, is_enhanced=True)
    assert torch.equal(torch.nn.Dropout(0.9)(X), X)
    from ulpscope.compat.ptdbg.dropout import restore_dropout

    restore_dropout()
    assert F.dropout is original
    with pytest.raises(InputError, match="wants rm_dropout=True or rm_dropout=False, not 1"):
        seed_all(rm_dropout=1)  # type: ignore[arg-type]


# ---- level debug


@pytest.mark.promise("E35")
@pytest.mark.parametrize("task", ["statistics", "tensor"])
def test_save_keeps_values_and_gradients(tmp_path: Path, task: str) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, task, level="debug"), layout="1.x")
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    y = x * 2
    debugger.save(y, "y")
    debugger.save({"pair": [y, x], "n": 3, "s": "word"}, "nested")
    debugger.save(y, "y", save_backward=False)
    y.pow(2).sum().backward()
    debugger.step()
    rank = tmp_path / "dump" / "step0" / "rank"
    saved = json.loads((rank / "debug.json").read_text())
    data = saved["data"]
    assert list(data) == ["y.0.debug", "nested.0.debug", "y.1.debug", "y_grad.0.debug", "nested_grad.0.debug"]
    assert (data["y.0.debug"]["Max"], data["y.0.debug"]["Min"]) == (2.0, -6.0)
    assert data["nested.0.debug"]["n"] == {"type": "int", "value": 3}
    assert data["y_grad.0.debug"]["Max"] == 4.0
    assert [leaf["Min"] for leaf in data["nested_grad.0.debug"]["pair"]] == [-12.0, -24.0]
    assert data["nested_grad.0.debug"]["n"] is None
    assert not (rank / "dump.json").exists()
    if task == "statistics":
        assert saved["dump_data_dir"] is None
        return
    assert sorted(file.name for file in (rank / "dump_tensor_data").iterdir()) == [
        "nested.0.debug.pair.0.pt", "nested.0.debug.pair.1.pt", "nested_grad.0.debug.pair.0.pt", "nested_grad.0.debug.pair.1.pt",
        "y.0.debug.pt", "y.1.debug.pt", "y_grad.0.debug.pt",
    ]  # fmt: skip
    gradient = torch.load(rank / "dump_tensor_data" / data["y_grad.0.debug"]["data_name"], weights_only=True)
    assert gradient.tolist() == [4.0, -12.0]


@pytest.mark.promise("E35")
def test_saving_follows_the_steps_and_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    training_step(plain)
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "tensor", level="debug", step=[1]), layout="1.x")
    torch.manual_seed(0)
    model = Net()
    for _ in range(3):
        model.zero_grad()
        out = model(X)
        debugger.save(out, "out")
        F.cross_entropy(out, torch.tensor([0, 2])).backward()
        debugger.step()
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["step1"]
    assert same((p.grad for p in plain.parameters()), (p.grad for p in model.parameters()))


def test_what_cannot_be_saved_is_said_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, level="debug"), layout="1.x")
    for variable, name in ((object(), "x"), (X, "../x"), ({"a/b": X}, "x"), (X, 3)):
        debugger.save(variable, name)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("save() skipped") == 4
    assert not (tmp_path / "dump").exists()
    PrecisionDebugger.forget()
    debugger = PrecisionDebugger(config_path=write_config(tmp_path))
    with pytest.raises(InputError, match=r"save\(\) works at level \"debug\", and the level is 'L1'"):
        debugger.save(X, "x")


# ---- refusals


def test_level_l2_is_refused_by_name(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "tensor", level="L2", acl_config="./dump.json"))
    with pytest.raises(InputError, match="level L2 dumps the kernels of an Ascend device through CANN"):
        debugger.start()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dump_path": "x", "task": "tensors"}, "task is 'tensors'; it may be statistics, tensor"),
        ({"dump_path": "x", "level": "L7"}, "level is 'L7'; it may be L0, L1"),
        ({"dump_path": "x", "step": ["a"]}, "step holds 'a'; it takes numbers"),
        ({}, "wants a dump_path"),
        ({"config_path": "missing.json"}, "the config 'missing.json' cannot be read"),
    ],
)
def test_wrong_arguments_leave_no_debugger(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrecisionDebugger(**arguments)
    with pytest.raises(InputError, match="no PrecisionDebugger was made yet"):
        PrecisionDebugger.start()


def test_what_a_config_asks_for_in_vain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = dump(tmp_path, "statistics", {"slice": [{"dim": 0}], "scop": []}, risk_level="FOCUS", dump_enable=True, load={"path": "x"})
    assert entries(folder)
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "msprobe: load of config.json does nothing here: inputs of modules are not replaced from a dump",
        "msprobe: dump_enable of config.json does nothing here: config.json is read once, and not again when it changes",
        "msprobe: slice of statistics does nothing here: tensors are taken whole",
        "msprobe: statistics has the key 'scop', which is not known and does nothing",
    ]


def test_a_dump_that_is_not_enabled(tmp_path: Path) -> None:
    assert not dump(tmp_path, dump_enable=False).exists()


def test_tasks_that_are_not_there_say_so(tmp_path: Path) -> None:
    for task in ("exception_dump", "diff_check"):
        debugger = PrecisionDebugger(config_path=write_config(tmp_path, task))
        with pytest.raises(InputError, match=f"the task '{task}' is not there"):
            debugger.start()
        PrecisionDebugger.forget()


@pytest.mark.refused("M07", "E33")
def test_mindspore_says_that_it_is_not_there() -> None:
    for use in (
        lambda: msprobe.mindspore.PrecisionDebugger("./config.json"),
        lambda: msprobe.mindspore.PrecisionDebugger.start(),
        lambda: msprobe.mindspore.MsprobeStep(None),
        lambda: msprobe.mindspore.seed_all(),
    ):
        with pytest.raises(InputError, match="collecting under MindSpore is not there yet"):
            use()


# ---- the package


@pytest.mark.promise("E18")
def test_the_names_of_the_package() -> None:
    assert {"PrecisionDebugger", "seed_all", "compare", "compare_distributed"} <= set(msprobe.pytorch.__all__)
    assert all(callable(getattr(msprobe.pytorch, name)) for name in msprobe.pytorch.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        msprobe.pytorch.nothing  # noqa: B018


@pytest.mark.promise("E19")
def test_a_star_import_gives_the_comparator() -> None:
    space: dict[str, Any] = {}
    exec("from msprobe import *", space)
    assert [name for name in space if name != "__builtins__"] == ["GradComparator"]


def test_importing_changes_nothing(outcomes: dict[str, Outcome]) -> None:
    outcomes["import"].succeeded()


@pytest.mark.promise("M01", "M03")
def test_the_package_says_what_it_is() -> None:
    shown = metadata.metadata("ulpscope-legacy")
    assert shown["Name"] == "ulpscope-legacy"
    assert shown["Version"] == metadata.version("ulpscope-legacy")
    assert "msprobe" in shown["Summary"]
    assert shown.get_all("Requires-Dist") == ["ulpscope[torch,xlsx]"]


@pytest.mark.promise("M04")
def test_the_package_builds_from_its_source(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-q", "-w", str(tmp_path)]
    source = shutil.copytree(ROOT / "packages" / "legacy", tmp_path / "legacy", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    subprocess.run([*command, str(source)], check=True, timeout=300, cwd=tmp_path)
    (wheel,) = tmp_path.glob("ulpscope_legacy-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"msprobe/__init__.py", "msprobe/pytorch/__init__.py", "msprobe/mindspore/__init__.py"} <= set(names)


def test_dumps_of_a_stopped_debugger_stay(tmp_path: Path) -> None:
    folder = dump(tmp_path, "tensor", steps=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step0", "step1"]
    assert not list(folder.rglob(".content"))
