# SPDX-License-Identifier: Apache-2.0
"""The gradient probe of msprobe and its comparator through their old names, on the worked examples of the guide and of upstream's tests."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from msprobe import GradComparator
from msprobe.pytorch import PrecisionDebugger
from tests.legacy.msprobe_programs import Net, same, training_step, write_config
from ulpscope.compat.msprobe.compare.grad_compare import suspicions
from ulpscope.errors import InputError

STATISTICS = ["2.0", "-2.0", "2.851315498352051", "[2, 2]"]


class Weights(nn.Module):
    """A model whose gradients a test sets."""

    def __init__(self, *gradients: list[Any]) -> None:
        super().__init__()
        for number, gradient in enumerate(gradients):
            parameter = nn.Parameter(torch.zeros_like(torch.tensor(gradient)))
            parameter.grad = torch.tensor(gradient)
            self.register_parameter(f"w{number}", parameter)


def probe(folder: Path, model: nn.Module, *, steps: int = 1, **options: Any) -> Path:
    common = {name: options.pop(name) for name in ("step", "rank") if name in options}
    debugger = PrecisionDebugger(config_path=write_config(folder, "grad_probe", options, **common))
    debugger.monitor(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        optimizer.step()
    PrecisionDebugger.forget()
    return folder / "dump"


def rows(file: Path) -> list[list[str]]:
    with file.open(newline="") as stream:
        return list(csv.reader(stream))


@pytest.mark.promise("M12", "E26", "E01")
@pytest.mark.parametrize(
    ("level", "header", "expected"),
    [
        ("L0", ["MD5", "max", "min", "norm", "shape"], ["678a6c7d9d9716682b56fda097d0936c", *STATISTICS]),
        ("L1", ["max", "min", "norm", "shape"], STATISTICS),
        (
            "L2",
            ["(-inf, -1.0]", "(-1.0, 0.0]", "(0.0, 1.0]", "(1.0, inf)", "=0", "max", "min", "norm", "shape"],
            ["0.25", "0.0", "0.5", "0.25", "0.0", *STATISTICS],
        ),
    ],
)
def test_the_gradient_of_upstreams_own_test(tmp_path: Path, level: str, header: list[str], expected: list[str]) -> None:
    folder = probe(tmp_path, Weights([[-2.0, 2.0], [0.2, 0.3]]), grad_level=level, bounds=[-1, 0, 1])
    assert rows(folder / "rank0" / "grad_summary_0.csv") == [["param_name", *header], ["w0", *expected]]


@pytest.mark.promise("E32")
def test_the_worked_example_of_the_guide(tmp_path: Path) -> None:
    folder = probe(tmp_path, Weights([9.3, 5.4, -1.0, -12.3]), grad_level="L2", bounds=[-10, 0, 10])
    head, row = rows(folder / "rank0" / "grad_summary_0.csv")
    assert head[1:6] == ["(-inf, -10.0]", "(-10.0, 0.0]", "(0.0, 10.0]", "(10.0, inf)", "=0"]
    assert [float(share) * 4 for share in row[1:6]] == [1, 1, 2, 0, 0]


@pytest.mark.promise("E29")
@pytest.mark.parametrize(("level", "has_masks"), [("L0", False), ("L1", True), ("L2", True)])
def test_masks_of_positive_gradients(tmp_path: Path, level: str, has_masks: bool) -> None:
    folder = probe(tmp_path, Weights([1.0, 0.0, -1.0], [[2.0]]), grad_level=level) / "rank0" / "step0"
    assert folder.exists() == has_masks
    if has_masks:
        mask = np.load(folder / "w0.npy", allow_pickle=False)
        assert (mask.dtype, mask.tolist()) == (np.bool_, [True, False, False])
        assert sorted(file.name for file in folder.iterdir()) == ["w0.npy", "w1.npy"]


@pytest.mark.promise("E27")
def test_parameters_and_steps_are_chosen(tmp_path: Path) -> None:
    model = Weights([1.0], [2.0])
    folder = probe(tmp_path, model, steps=5, step=[1, 3], param_list=["w1"], grad_level="L1")
    assert sorted(path.name for path in (folder / "rank0").iterdir()) == ["grad_summary_1.csv", "grad_summary_3.csv", "step1", "step3"]
    assert [row[0] for row in rows(folder / "rank0" / "grad_summary_3.csv")] == ["param_name", "w1"]
    assert [file.name for file in (folder / "rank0" / "step3").iterdir()] == ["w1.npy"]


@pytest.mark.promise("E27")
def test_a_step_is_a_call_of_an_optimizer_of_the_model(tmp_path: Path) -> None:
    model, other = Weights([1.0]), Weights([5.0])
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "grad_probe", {"grad_level": "L1"}, rank=[0]))
    debugger.monitor(model)
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        debugger.start()
        theirs.step()
        ours.step()
        debugger.stop()
        debugger.step()
    assert len(list((tmp_path / "dump" / "rank0").glob("grad_summary_*.csv"))) == 2
    PrecisionDebugger.forget()
    ours.step()
    assert len(list((tmp_path / "dump" / "rank0").glob("grad_summary_*.csv"))) == 2


@pytest.mark.promise("E27")
def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    assert not probe(tmp_path, Weights([1.0]), rank=[3]).exists()


@pytest.mark.promise("E28")
def test_main_grad_stands_before_grad(tmp_path: Path) -> None:
    model = Weights([1.0, 1.0], [1.0], [4.0])
    model.w0.main_grad = torch.tensor([-7.0, 3.0], dtype=torch.float64)
    model.w1.grad = None
    folder = probe(tmp_path, model, grad_level="L1")
    assert rows(folder / "rank0" / "grad_summary_0.csv")[1:] == [
        ["w0", "3.0", "-7.0", "7.6157732009887695", "[2]"], ["w2", "4.0", "4.0", "4.0", "[1]"]
    ]  # fmt: skip


def test_probing_changes_nothing(tmp_path: Path) -> None:
    def train(debugger: Any = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        if debugger is not None:
            debugger.monitor(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            training_step(model)
            optimizer.step()
            optimizer.zero_grad()
        return [*(parameter.detach() for parameter in model.parameters()), torch.get_rng_state()]

    plain = train()
    assert same(plain, train(PrecisionDebugger(config_path=write_config(tmp_path, "grad_probe", {"grad_level": "L2"}))))


@pytest.mark.parametrize("bounds", [[1, 0], [0, 0], 5, "0,1", [True], [float("nan")], [0, float("inf")]])
def test_bounds_are_numbers_in_order(tmp_path: Path, bounds: Any) -> None:
    with pytest.raises(InputError, match="they are numbers in ascending order"):
        PrecisionDebugger(config_path=write_config(tmp_path, "grad_probe", {"bounds": bounds}))


def test_monitor_wants_a_module_and_its_task(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "grad_probe"))
    with pytest.raises(InputError, match=r"wants debugger.monitor\(model\) with a torch.nn.Module, not a SGD"):
        debugger.monitor(torch.optim.SGD(Net().parameters()))
    PrecisionDebugger.forget()
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "statistics"))
    with pytest.raises(InputError, match=r"monitor\(\) belongs to the task grad_probe, and the task is 'statistics'"):
        debugger.monitor(Net())


# ---- the comparator


def masks(folder: Path, step: int, rank: int = 0, **signs: list[int]) -> None:
    """Write the files of a probe by hand: 1 for a positive gradient."""
    place = folder / f"rank{rank}" / f"step{step}"
    place.mkdir(parents=True)
    for name, values in signs.items():
        np.save(place / f"{name}.npy", np.array(values, dtype=bool))


@pytest.mark.promise("M12", "E30", "E31")
def test_similarities_of_two_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npu, gpu, out = tmp_path / "npu", tmp_path / "gpu", tmp_path / "out"
    for folder in (npu, gpu):
        masks(folder, 0, a=[1, 1, 0, 0], b=[1] * 12)
        masks(folder, 1, a=[1, 1, 0, 0], b=[1] * 12)
    masks(npu, 10, a=[1, 0, 0, 0], b=[1] * 12)
    masks(gpu, 10, a=[1, 1, 0, 0], b=[1] * 11 + [0])
    masks(npu, 11, a=[1, 0, 0, 0])
    masks(npu, 0, rank=1, a=[1, 1])
    masks(gpu, 0, rank=1, a=[1, 0])
    GradComparator.compare_distributed(str(npu), str(gpu), str(out))
    assert rows(out / "rank0" / "similarities.csv") == [
        ["step", "0", "1", "10"], ["a", "1.0", "1.0", "0.75"], ["b", "1.0", "1.0", str(11 / 12)], ["summary", "1.0", "1.0", "0.875"]
    ]  # fmt: skip
    assert rows(out / "rank1" / "similarities.csv") == [["step", "0"], ["a", "0.5"], ["summary", "0.5"]]
    pictures = out / "rank0" / "similarities_picture"
    assert sorted(file.name for file in pictures.iterdir()) == [
        "a_similarities.png", "b_similarities.png", "summary_similarities.png"
    ]  # fmt: skip
    assert (pictures / "a_similarities.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "suspicious from step 10: the similarity of a falls from 1.000 to 0.750" in told
    assert "suspicious from step 0: the similarity of a is 0.500 at first" in told


@pytest.mark.promise("E31")
@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.97, 0.95], []), ([0.9699, 1.0], [0]), ([1.0, 0.98, 0.94], [2]), ([1.0, 0.9701], []), ([1.0, 0.9699], [1])],
)
def test_the_limits_of_suspicion(values: list[float], expected: list[int]) -> None:
    assert [step for step, _, _ in suspicions(range(9), {"w": values})] == expected


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.lists(st.booleans(), min_size=1, max_size=20))
def test_the_share_of_equal_signs(one: list[bool], other: list[bool]) -> None:
    import tempfile

    from ulpscope.compat.msprobe.compare.grad_compare import _similarities

    with tempfile.TemporaryDirectory() as name:
        folder, length = Path(name), min(len(one), len(other))
        for side, values in (("one", one), ("other", other)):
            (folder / side / "step0").mkdir(parents=True)
            np.save(folder / side / "step0" / "w.npy", np.array(values[:length]))
        (found,) = _similarities(folder / "one", folder / "other", [0], ["w"])["w"]
    assert found == sum(left == right for left, right in zip(one, other, strict=False)) / length


def test_two_real_probes_are_compared(tmp_path: Path) -> None:
    for side, sign in (("npu", 1.0), ("gpu", -1.0)):
        (tmp_path / side).mkdir()
        probe(tmp_path / side, Weights([1.0, -1.0], [sign]), grad_level="L1")
    GradComparator.compare_distributed(tmp_path / "npu" / "dump", tmp_path / "gpu" / "dump", tmp_path / "out")
    assert rows(tmp_path / "out" / "rank0" / "similarities.csv")[1:] == [["w0", "1.0"], ["w1", "0.0"], ["summary", str(2 / 3)]]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    npu, gpu = tmp_path / "npu", tmp_path / "gpu"
    with pytest.raises(InputError, match="is no folder"):
        GradComparator.compare_distributed(npu, gpu, tmp_path / "out")
    masks(npu, 0, a=[1, 0])
    masks(gpu, 1, a=[1, 0])
    with pytest.raises(InputError, match="have no folder stepN in common"):
        GradComparator.compare_distributed(npu, gpu, tmp_path / "out")
    masks(gpu, 0, a=[1, 0, 1])
    with pytest.raises(InputError, match=r"a at step 0 has the shapes \(2,\) and \(3,\)"):
        GradComparator.compare_distributed(npu, gpu, tmp_path / "out")
    np.save(gpu / "rank0" / "step0" / "a.npy", np.array([1.0, 2.0]))
    with pytest.raises(InputError, match="holds float64, no mask of signs"):
        GradComparator.compare_distributed(npu, gpu, tmp_path / "out")
    np.save(gpu / "rank0" / "step0" / "a.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read as a mask of signs"):
        GradComparator.compare_distributed(npu, gpu, tmp_path / "out")
