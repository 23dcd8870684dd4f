# SPDX-License-Identifier: Apache-2.0
"""Test free_benchmark of msprobe through its old name: the disturbances, the list, and that the program does not notice."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msprobe.pytorch import PrecisionDebugger
from tests.legacy.forking import Job, run_all
from tests.legacy.msprobe_programs import X, same, write_config
from ulpscope.compat.msprobe.free_benchmark.perturbing import disturbed, relative_error
from ulpscope.compat.msprobe.free_benchmark.preheating import Preheating
from ulpscope.errors import InputError

COLUMNS = ["rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index"]
ALL_MODES = ["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]
BIG, ONE = torch.tensor([1e8]), torch.tensor([1.0])
BLOCK = {
    "scope": [], "list": [], "fuzz_device": "npu", "pert_mode": "improve_precision", "handler_type": "check", "fuzz_level": "L1",
    "fuzz_stage": "forward", "if_preheat": False, "preheat_step": 15, "max_sample": 20,
}  # fmt: skip


def benchmark(folder: Path, program: Callable[[], Any], *, steps: int = 1, step: Any = (), **options: Any) -> list[dict[str, str]]:
    """Run the program under the check; return the rows of its table."""
    if options.get("pert_mode") == "to_cpu":
        options["fuzz_device"] = "cpu"
    debugger = PrecisionDebugger(config_path=write_config(folder, "free_benchmark", BLOCK | options, step=list(step)))
    for _ in range(steps):
        debugger.start()
        program()
        debugger.stop()
        debugger.step()
    PrecisionDebugger.forget()
    with (folder / "dump" / "free_benchmark.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def cancelling() -> torch.Tensor:
    """Lose a small number in a large one: float32 gives 0, a higher precision 1."""
    return (BIG + ONE) - BIG


@pytest.mark.promise("E20", "E01")
def test_a_call_that_jumps_is_listed(tmp_path: Path) -> None:
    found = benchmark(tmp_path, cancelling, pert_mode="bit_noise")
    assert (tmp_path / "dump" / "free_benchmark.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert found == [
        {
            "rank": "0", "pert_mode": "bit_noise", "stage": "forward", "step": "0", "api_name": "Tensor.__sub__.0.forward",
            "max_rel": "1.0", "dtype": "torch.float32", "shape": "torch.Size([1])", "output_index": "",
        }
    ]  # fmt: skip


@pytest.mark.promise("E21")
@pytest.mark.parametrize("mode", ALL_MODES)
def test_calls_that_do_not_jump_are_not_listed(tmp_path: Path, mode: str) -> None:
    x = torch.full((4, 4), 2.0)
    assert benchmark(tmp_path, lambda: F.gelu(F.linear(x, torch.eye(4))).sum(), pert_mode=mode) == []


@pytest.mark.promise("E21")
@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        ("improve_precision", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)),
        ("improve_precision", torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0])),
        ("add_noise", torch.tensor([0.5, 1e-5]), torch.tensor([0.5, 1e-5])),  # 1e-8 is below the last bit of 0.5, and 1e-5 too small
        ("add_noise", torch.tensor([0.01, 0.0]), torch.tensor([0.01 + 1e-8, 0.0])),
        ("add_noise", torch.tensor([0.01], dtype=torch.bfloat16), torch.tensor([0.01], dtype=torch.bfloat16)),
        ("bit_noise", torch.tensor([1.0, 0.0, 1e-40]), torch.tensor([1.0 + 2**-23, 0.0, 1e-40])),
        ("bit_noise", torch.tensor([1.0], dtype=torch.float16), torch.tensor([1.0 + 2**-10], dtype=torch.float16)),
        ("change_value", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[4.0, 2.0], [3.0, 1.0]])),
        ("no_change", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])),
        ("to_cpu", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])),
    ],
)  # fmt: skip
def test_disturbances(mode: str, given: torch.Tensor, expected: torch.Tensor) -> None:
    (found, number), named = disturbed(((given, 3), {"other": given}), mode)
    assert (found.dtype, number) == (expected.dtype, 3)
    assert torch.equal(found, expected)
    assert found.data_ptr() != given.data_ptr()
    untouched = expected if mode == "improve_precision" else given
    assert torch.equal(named["other"], untouched)


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("add_noise", torch.arange(3)), ("add_noise", torch.zeros(3)), ("bit_noise", torch.zeros(0)), ("change_value", torch.ones(1)),
        ("improve_precision", torch.ones(2, dtype=torch.float64)), ("no_change", torch.arange(3)), ("to_cpu", 3),
    ],
)  # fmt: skip
def test_nothing_to_disturb(mode: str, given: Any) -> None:
    assert disturbed(((given,), {}), mode) is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0, -2.0], [1.0, 2.0], 2.0), ([1e-5, 1.0], [2e-5, 1.0], 0.0), ([0.0, 1.0], [1.0, 1.0], 1.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0), ([math.inf, 1.0], [math.inf, 1.0], 0.0), ([math.nan, 1.0], [1.0, 1.0], math.nan),
        ([math.inf], [-math.inf], math.nan),
    ],
)  # fmt: skip
def test_how_far_results_lie_apart(first: list[float], second: list[float], expected: float) -> None:
    found = relative_error(torch.tensor(first), torch.tensor(second))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


class Unsteady:
    """A function of torch whose second result is larger by `error`."""

    def __init__(self, error: float) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(self.compute, (x,), x)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.clone() if self.calls % 2 else x.double() * (1 + self.error)


@pytest.mark.promise("E20")
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 0.0002), (torch.float16, 0.002), (torch.bfloat16, 0.004), (torch.float64, 0.0002)]
)
def test_the_limits_of_the_guide(tmp_path: Path, dtype: torch.dtype, limit: float) -> None:
    x = torch.ones(3, dtype=dtype)
    below = benchmark(_made(tmp_path / "below"), lambda: Unsteady(0.98 * limit)(x), pert_mode="to_cpu")
    above = benchmark(_made(tmp_path / "above"), lambda: Unsteady(1.02 * limit)(x), pert_mode="to_cpu")
    assert below == []
    assert [row["dtype"] for row in above] == [str(dtype)]


@pytest.mark.promise("E21")
def test_no_change_allows_no_difference(tmp_path: Path) -> None:
    assert len(benchmark(tmp_path, lambda: Unsteady(1e-7)(X), pert_mode="no_change")) == 1


@pytest.mark.promise("E20")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["Tensor.__add__.0", "Tensor.relu.0", "Tensor.__add__.1"]),
        ({"list": ["relu"]}, ["Tensor.relu.0"]),
        ({"scope": ["Tensor.relu.0.forward", "Tensor.__add__.1.forward"]}, ["Tensor.relu.0", "Tensor.__add__.1"]),
    ],
)
def test_calls_are_chosen(tmp_path: Path, options: dict[str, Any], expected: list[str]) -> None:
    x = torch.tensor([1.0, 5.0])
    found = benchmark(tmp_path, lambda: (x + 1).relu() + 1, pert_mode="change_value", **options)
    assert [row["api_name"] for row in found] == [f"{name}.forward" for name in expected]


@pytest.mark.promise("E20")
def test_steps_are_chosen_and_several_results_are_numbered(tmp_path: Path) -> None:
    x = torch.arange(6.0)
    found = benchmark(tmp_path, lambda: torch.split(x, 3), steps=4, step=[1, 2], pert_mode="change_value")
    assert [(row["step"], row["output_index"]) for row in found] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]


class Noisy(nn.Module):
    """Random numbers, running statistics, writing in place, views and several results."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 4))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        y += torch.rand_like(y)
        y[0] = 0
        y[:, 1:].mul_(2.0)
        first, second = y.chunk(2, dim=1)
        return (first * second.sigmoid()).sum() + y.std()


def train(dtype: torch.dtype = torch.float32, debugger: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Noisy(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        if debugger is not None:
            debugger.start()
        loss = model(torch.randn(16, 8, dtype=dtype))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if debugger is not None:
            debugger.stop()
            debugger.step()
    return [*losses, *(tensor.detach() for tensor in model.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_program_does_not_notice_a_check(tmp_path: Path, mode: str, stage: str) -> None:
    originals = (torch.Tensor.__add__, torch.Tensor.relu, F.linear)
    options = BLOCK | {"pert_mode": mode, "fuzz_stage": stage, "fuzz_device": "cpu" if mode == "to_cpu" else "npu"}
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "free_benchmark", options))
    assert same(train(torch.bfloat16), train(torch.bfloat16, debugger))
    assert originals == (torch.Tensor.__add__, torch.Tensor.relu, F.linear)


@pytest.mark.promise("E22")
def test_fix_puts_the_second_result_in_place_of_the_first(tmp_path: Path) -> None:
    weight = torch.tensor([3.0], dtype=torch.bfloat16, requires_grad=True)
    results: list[torch.Tensor] = []

    def program() -> None:
        y = F.softplus(weight, beta=0.3)
        results.append(y)
        y.sum().backward()

    program()
    assert benchmark(tmp_path, program, handler_type="fix") == []
    plain, fixed = results
    exact = F.softplus(weight.detach().float(), beta=0.3).to(torch.bfloat16)
    assert (fixed.dtype, fixed.item()) == (torch.bfloat16, exact.item())
    assert plain.dtype == torch.bfloat16
    assert weight.grad is not None


@pytest.mark.promise("E22")
def test_fix_shows_in_the_loss(tmp_path: Path) -> None:
    found: list[float] = []
    benchmark(tmp_path, lambda: found.append(float(cancelling())), handler_type="fix", list=["__sub__", "__add__"])
    assert found == [0.0]  # each call is raised on its own, and what is between them is float32
    debugger = PrecisionDebugger(config_path=write_config(_made(tmp_path / "b"), "free_benchmark", BLOCK | {"handler_type": "fix"}))
    x = torch.randn(16, 8, dtype=torch.bfloat16)
    weight = torch.randn(4, 8, dtype=torch.bfloat16)
    debugger.start()
    fixed = F.layer_norm(F.linear(x, weight), (4,))
    debugger.stop()
    rounded = F.linear(x.float(), weight.float()).bfloat16()
    assert torch.equal(fixed, F.layer_norm(rounded.float(), (4,)).bfloat16())


@pytest.mark.promise("E22")
def test_a_call_in_place_is_not_fixed(tmp_path: Path) -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    benchmark(tmp_path, lambda: x.add_(1.0), handler_type="fix")
    assert x.tolist() == [2.0, 2.0]


ON_THE_DEVICE = """
from ulpscope.testing import npu
npu.install(stand_in_torch_npu=True)
import json, torch, torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger

x = torch.linspace(0.5, 3, 8, device="npu")
for handler in ("check", "fix"):
    block = {"pert_mode": "to_cpu", "fuzz_device": "cpu", "handler_type": handler, "list": ["gelu"]}
    with open("config.json", "w") as file:
        json.dump({"task": "free_benchmark", "dump_path": handler, "level": "L1", "free_benchmark": block}, file)
    debugger = PrecisionDebugger(config_path="./config.json")
    debugger.start()
    with npu.inject("aten.gelu.default", "scale", value=0.01, call=0):
        y = F.gelu(x)
        F.relu(x)
    debugger.stop()
    PrecisionDebugger.forget()
    print(handler, y.device.type, torch.equal(y.cpu(), F.gelu(x.cpu())))
"""


@pytest.mark.promise("E21", "E22")
def test_a_broken_kernel_of_a_device_is_found_and_fixed_by_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ON_THE_DEVICE)
    (outcome,) = run_all([Job(str(tmp_path))], tmp_path)
    outcome.succeeded()
    assert outcome.output.splitlines()[-2:] == ["check npu False", "fix npu True"]
    with (tmp_path / "check" / "free_benchmark.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["api_name"], row["pert_mode"], row["dtype"]) == ("Functional.gelu.0.forward", "to_cpu", "torch.float32")
    assert float(row["max_rel"]) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.promise("E23")
def test_a_gradient_that_jumps_is_listed(tmp_path: Path) -> None:
    x = torch.tensor([1e-3, 2.0], requires_grad=True)
    found = benchmark(tmp_path, lambda: x.reciprocal().sum().backward(), pert_mode="change_value", fuzz_stage="backward")
    assert [(row["api_name"], row["stage"], row["output_index"]) for row in found] == [("Tensor.reciprocal.0.backward", "backward", "0")]
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([-1e6, -0.25])


@pytest.mark.promise("E23")
def test_gradients_that_do_not_jump_are_not_listed(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    assert benchmark(tmp_path, lambda: F.gelu(layer(X)).sum().backward(), pert_mode="add_noise", fuzz_stage="backward") == []


@pytest.mark.promise("E24")
def test_preheating_learns_what_is_harmless(tmp_path: Path) -> None:
    """Swapped ends change a result a lot, and the CPU confirms each: the limit widens until nothing is listed."""
    x = torch.tensor([1.0, 2.0, 4.0])
    plain = benchmark(_made(tmp_path / "plain"), lambda: torch.exp(x), steps=4, pert_mode="change_value")
    assert [row["step"] for row in plain] == ["0", "1", "2", "3"]
    options = {"pert_mode": "change_value", "if_preheat": True, "preheat_step": 6}
    warm = benchmark(_made(tmp_path / "warm"), lambda: torch.relu(x), steps=8, **options)
    assert [row["step"] for row in warm] == ["1", "2"]


def test_limits_follow_what_was_learned() -> None:
    learning = Preheating(preheat_step=4, max_sample=2)
    assert learning.limit("relu", "torch.float32", 0.0002) == 1.05
    assert [learning.call("relu") for _ in range(3)] == [False] * 3
    learning.begin_step(1)
    assert [learning.call("relu") for _ in range(3)] == [True, False, False]
    learning.take("relu", "torch.float32", 0.01, is_honest=True)
    learning.begin_step(2)
    assert learning.limit("relu", "torch.float32", 0.0002) == 1.05 / 2
    assert [learning.call("relu") for _ in range(3)] == [False, True, False]
    learning.take("relu", "torch.float32", 7.0, is_honest=True)
    learning.begin_step(3)
    assert learning.limit("relu", "torch.float32", 0.0002) == 1.05
    learning.take("relu", "torch.float32", 0.3, is_honest=False)
    learning.begin_step(4)
    assert learning.limit("relu", "torch.float32", 0.0002) == 0.3
    assert learning.call("relu") is False
    learning.take("relu", "torch.float32", 9.0, is_honest=True)
    learning.begin_step(5)
    assert learning.limit("relu", "torch.float32", 0.5) == 0.5


@pytest.mark.promise("E24")
def test_no_more_samples_than_allowed() -> None:
    learning = Preheating(preheat_step=2, max_sample=3)
    for _ in range(20):
        learning.call("relu")
    learning.begin_step(1)
    assert sum(learning.call("relu") for _ in range(20)) == 3


@pytest.mark.promise("E25")
@pytest.mark.parametrize(
    ("options", "level", "message"),
    [
        ({}, "L0", "free_benchmark works at level L1 only, not L0"),
        ({"scope": ["Torch.relu.0.forward"] * 2, "list": ["relu"]}, "L1", "takes scope or list, not both"),
        ({"fuzz_device": "cpu"}, "L1", "fuzz_device 'cpu' does not go with pert_mode 'improve_precision'"),
        ({"pert_mode": "to_cpu"}, "L1", "fuzz_device 'npu' does not go with pert_mode 'to_cpu'"),
        ({"pert_mode": "add_noise", "handler_type": "fix"}, "L1", "'fix' goes with pert_mode improve_precision or to_cpu"),
        ({"handler_type": "fix", "if_preheat": True}, "L1", "'fix' goes neither with if_preheat"),
        ({"handler_type": "fix", "fuzz_stage": "backward"}, "L1", "nor with fuzz_stage 'backward'"),
        ({"pert_mode": "shake"}, "L1", "pert_mode is 'shake' in the config; it may be improve_precision, add_noise"),
        ({"preheat_step": 0}, "L1", "preheat_step is 0 and max_sample 20; both are numbers from 1 up"),
        ({"fuzz_level": "L2"}, "L1", "fuzz_level is 'L2' in the config; it may be L1"),
    ],
)
def test_contradictions(tmp_path: Path, options: dict[str, Any], level: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrecisionDebugger(config_path=write_config(tmp_path, "free_benchmark", BLOCK | options, level=level))


def test_what_cannot_run_twice_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Once(Unsteady):
        def compute(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls % 2 == 0:
                raise RuntimeError("no second time")
            return x + 1

    once = Once(0.0)
    results: list[torch.Tensor] = []
    assert benchmark(tmp_path, lambda: results.append(once(X)), steps=3) == []
    assert same(results, [X + 1] * 3)
    assert capsys.readouterr().err.count("is not disturbed: no second time") == 1


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
