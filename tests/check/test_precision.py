# SPDX-License-Identifier: Apache-2.0
"""Machines that round the operands of some of their products: a property that is said, not a failure, however few products show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.check.networks import record
from ulpscope import Capture
from ulpscope.model.check.checks import Check
from ulpscope.replay.formulas.decompositions import separate_kernels
from ulpscope.replay.yardstick.rounding import ROUNDINGS, RoundedOperands
from ulpscope.workflows.check import one_call as check_calls
from ulpscope.workflows.check.checking import check_run

Chosen = Callable[[str, str], bool]
"""From the name of a call and `forward` or `backward` to whether the machine rounds there."""
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a device that rounds the operands of chosen products to TF32, and disturbs the results of others."""
    run = check_calls.run_on_device

    def build(rounds: Chosen, *, way: int = 0, disturbs: Chosen = lambda call, phase: False, size: float = 0.0) -> None:
        def compute(program: Any, device: str) -> Mapping[Any, torch.Tensor]:
            call, _, backward = program.name.partition(" ")
            phase = backward or "forward"
            if not rounds(call, phase):
                made = run(program, device)
            else:
                with _plain_kernels(), RoundedOperands(ROUNDINGS["tf32"][way]):
                    made = run(program, device)
            return {slot: _disturbed(value, size) for slot, value in made.items()} if disturbs(call, phase) else made

        monkeypatch.setattr(check_calls, "run_on_device", compute)

    return build


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Compute everything as products that can be rounded: no fused attention, no fused LSTM."""
    torch._C._set_mkldnn_enabled(False)
    try:
        with separate_kernels():
            yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def _disturbed(value: torch.Tensor, size: float) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (value.double() + noise * size * value.double().square().mean().sqrt()).to(value.dtype)


def _faults(check: Check) -> list[tuple[str, str]]:
    return [(str(call.call), call.phase) for call in check.calls if call.status in ("failed", "warning")]


MACHINES: dict[str, tuple[str, Chosen]] = {
    "lstm, all": ("lstm", lambda call, phase: True),
    "lstm, backward": ("lstm", lambda call, phase: phase == "backward"),
    "lstm, one linear backward": ("lstm", lambda call, phase: call == "functional.linear.0" and phase == "backward"),
    "lstm, the lstm backward": ("lstm", lambda call, phase: "lstm" in call and phase == "backward"),
    "unet, all": ("unet", lambda call, phase: True),
    "unet, one forward": ("unet", lambda call, phase: call.endswith("conv2d.1") and phase == "forward"),
    "unet, one backward": ("unet", lambda call, phase: "transpose" in call and phase == "backward"),
    "gpt, one backward": ("gpt", lambda call, phase: call == "functional.linear.3" and phase == "backward"),
}


QUICK = ("lstm, the lstm backward", "unet, one backward")


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(name, way, marks=[] if name in QUICK and way else [pytest.mark.long]) for name in MACHINES for way in (0, 1)],
)
def test_rounded_operands_are_a_note_however_few_products_show_them(tmp_path: Path, machine: Machine, case: str, way: int) -> None:
    """`way` is to the nearest, or cut off."""
    name, rounds = MACHINES[case]
    path = record(name, tmp_path / "run")
    machine(rounds, way=way)
    check = check_run(path, isolated=False)
    assert _faults(check) == []
    assert {one.operands for one in check.precision} == {"tf32"}
    (note, *_) = [finding for finding in check.findings if finding.kind == "precision"]
    assert note.level == "note"
    assert "11 significant bits" in note.headline


def test_the_note_counts_the_products_that_show_it(tmp_path: Path, machine: Machine) -> None:
    machine(lambda call, phase: call == "functional.linear.3" and phase == "backward")
    check = check_run(record("gpt", tmp_path / "run"), isolated=False, select=["*linear*", "*attention*"])
    (found,) = check.precision
    assert (found.family, found.num_calls, found.num_like) == ("matrix product", 22, 1)
    (note,) = [finding for finding in check.findings if finding.kind == "precision"]
    assert note.headline.startswith("1 of 22 matrix products on cpu computes with about 11 significant bits")


def _alone(path: Path, cell: str) -> Path:
    torch.manual_seed(0)
    with Capture(path, keep="tensors") as capture:
        if cell == "lstm":
            result = torch.nn.LSTM(16, 24, batch_first=True)(torch.randn(4, 9, 16))[0]
        else:
            query, key, value = (torch.randn(2, 2, 9, 16).requires_grad_() for _ in range(3))
            result = F.scaled_dot_product_attention(query, key, value)
        torch.autograd.backward(result, torch.randn_like(result))
        capture.step()
    return path


@pytest.mark.parametrize(
    ("cell", "phase", "size"),
    [
        ("lstm", "forward", 3e-5),
        ("lstm", "backward", 3e-5),
        ("lstm", "backward", 2e-2),
        ("attention", "backward", 3e-6),
        ("attention", "backward", 2e-2),
    ],
)
def test_a_wrong_product_is_no_machine_even_where_it_is_the_only_one(
    tmp_path: Path, machine: Machine, cell: str, phase: str, size: float
) -> None:
    """What such a call rounds on the way is open, so that noise of any size below that rounding would have an excuse."""
    path = _alone(tmp_path / "run", cell)
    machine(lambda call, phase: False, disturbs=lambda call, at: cell in call and at == phase, size=size)
    check = check_run(path, isolated=False)
    assert {(call.call.short, call.phase) for call in check.failures} == {(check.failures[0].call.short, phase)}
    assert not check.precision


@pytest.mark.parametrize("wrong", ["functional.linear.3", pytest.param("functional.linear.4", marks=pytest.mark.long)])
def test_a_wrong_product_beside_rounding_ones_still_fails(tmp_path: Path, machine: Machine, wrong: str) -> None:
    machine(lambda call, phase: phase == "backward", disturbs=lambda call, phase: call == wrong and phase == "backward", size=0.05)
    check = check_run(record("gpt", tmp_path / "run"), isolated=False, select=["*linear*", "*attention*"])
    assert [(str(call.call), call.phase) for call in check.failures] == [(wrong, "backward")]
    assert [one.family for one in check.precision] == ["matrix product"]
