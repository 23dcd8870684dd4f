# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels of the CPU itself are found, although the reference runs on the same CPU: a kernel is not its own judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope import Capture
from ulpscope.model.check.checks import Check
from ulpscope.workflows.check.checking import check_run


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _program() -> None:
    values = F.gelu(_leaf(8, 16))
    values = F.layer_norm(F.linear(values, _leaf(24, 16), _leaf(24)), (24,))
    values = torch.cumsum(torch.exp(values * 0.1), 1)
    image = F.conv2d(_leaf(2, 3, 8, 8), _leaf(4, 3, 3, 3), stride=2, padding=1)
    (values.square().mean() + image.square().mean()).backward()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "run"
    torch.manual_seed(0)
    with Capture(path, keep="tensors") as capture:
        _program()
        capture.step()
    return path


@contextmanager
def _planted(name: str, kernel: Callable[..., Any]) -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, kernel, "CPU", allow_override=True)
        yield


def _failed(check: Check) -> set[str]:
    return {f"{call.call.short} {call.phase}" for call in check.calls if call.status == "failed"}


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(variance + eps + 1e-3), mean, 1 / torch.sqrt(variance + eps)


PLANTS: dict[str, tuple[Callable[..., Any], str]] = {
    "gelu": (lambda x, approximate="none": 1.0001 * x * 0.5 * (1 + torch.erf(x / 2**0.5)), "gelu forward"),
    "addmm": (lambda b, x, y, beta=1, alpha=1: (x @ y) * (1 + 1e-4) + b, "linear forward"),
    "mm": (lambda x, y: torch.einsum("ij,jk->ijk", x, y).sum(1) * (1 + 1e-4), "linear backward"),
    "exp": (lambda x: torch.pow(2.718281828459045, x) * (1 + 1e-4), "exp forward"),
    "native_layer_norm": (_layer_norm, "layer_norm forward"),
    "cumsum": (lambda x, dim, dtype=None: torch.stack([x[:, : i + 1].sum(1) for i in range(24)], 1) * (1 + 1e-4), "cumsum forward"),
}


def test_nothing_else_is_blamed(run: Path) -> None:
    check = check_run(run, isolated=False)
    assert _failed(check) == set()
    judged = [slot for call in check.calls for slot in call.slots if not call.is_random]
    assert sum(slot.second_opinion is not None for slot in judged) > 0.9 * len(judged)


@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize("name", PLANTS)
def test_a_kernel_that_is_wrong_in_every_precision_is_found(run: Path, name: str) -> None:
    kernel, expected = PLANTS[name]
    with _planted(name, kernel):
        check = check_run(run, isolated=False)
    worst = next(call for call in check.calls if f"{call.call.short} {call.phase}" == expected)
    assert worst.status == "failed"
    assert worst.worst is not None
    assert worst.worst.blamed == "device"
    assert "float64 as well" in worst.reason
    assert worst.is_reproduced is not True
    short = expected.split()[0]
    assert {one for one in _failed(check) if one.split()[0] != short} <= ({"cumsum backward", "exp backward"} if name == "mm" else set())


def test_a_kernel_that_is_wrong_in_float32_alone_is_found(run: Path) -> None:
    def wrong(x: Tensor, approximate: str = "none") -> Tensor:
        wide = x.double()
        return (0.5 * wide * (1 + torch.erf(wide / 2**0.5)) * (1 + (1e-5 if x.dtype == torch.float32 else 0.0))).to(x.dtype)

    with _planted("gelu", wrong):
        check = check_run(run, isolated=False)
    assert _failed(check) == {"gelu forward"}
    assert "was not so when it was recorded" in check.failures[0].reason


def test_layer_norm_of_one_element_is_wrong_in_this_torch(tmp_path: Path) -> None:
    """pytorch#188375: the output does not depend on the weight, yet the kernel gives it a gradient."""
    torch.manual_seed(0)
    with Capture(tmp_path / "run", keep="tensors") as capture:
        weight = _leaf(1)
        F.layer_norm(1e3 * _leaf(64, 1), (1,), weight, _leaf(1)).backward(torch.randn(64, 1))
        capture.step()
    if float(weight.grad.abs()) == 0:  # type: ignore[union-attr]
        pytest.skip("this torch has the kernel mended")
    check = check_run(tmp_path / "run", isolated=False)
    assert [(call.call.short, call.phase) for call in check.failures] == [("layer_norm", "backward")]
    assert "output.weight" in [str(slot.slot) for slot in check.failures[0].slots if slot.status == "failed"]
    assert [finding.kind for finding in check.findings if finding.level == "fault"] == ["kernel"]


def test_a_gradient_that_is_added_up_in_16_bits_is_wrong_in_this_torch(tmp_path: Path) -> None:
    """The CPU's layer norm keeps the sums of its weight's and bias's gradients in bfloat16: bit for bit a running sum of such numbers."""
    torch.manual_seed(0)
    bias, gradient = torch.zeros(32, requires_grad=True), torch.randn(8192, 32).bfloat16()
    with Capture(tmp_path / "run", keep="tensors") as capture:
        F.layer_norm(torch.randn(8192, 32).bfloat16(), (32,), torch.ones(32), bias).backward(gradient)
        capture.step()
    running = torch.zeros(32, dtype=torch.bfloat16)
    for row in gradient:
        running = running + row
    assert torch.equal(bias.grad, running.float())  # type: ignore[arg-type]
    check = check_run(tmp_path / "run", isolated=False)
    assert [(call.call.short, call.phase) for call in check.failures] == [("layer_norm", "backward")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_overflows_in_its_dtype_is_no_wrong_kernel(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float64, where two formulas are compared, none of it overflows."""
    large = torch.finfo(dtype).max / 2
    with Capture(tmp_path / "run", keep="tensors") as capture:
        x = torch.tensor([[large, -large, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1e-4, 1e-4, 5e-5, large / 2]], dtype=dtype)
        for result in (x.var(0), x * x, x + x + x, x.cumsum(1) * 3, x.square().sum(0)):
            assert not result.isfinite().all()
        capture.step()
    assert _failed(check_run(tmp_path / "run", isolated=False)) == set()
