# SPDX-License-Identifier: Apache-2.0
"""A value that is laid out otherwise: every call is honest on what it was given, and yet something is to blame."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.explain.programs import recorded
from ulpscope.model import Amplification, Comparison, ReplayMode
from ulpscope.workflows.compare.comparing import compare_runs

HEADS, SIZE = 3, 4
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """Heads are split off, looked at and joined again; the word of `mode` does one of these otherwise."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.qkv, self.out, self.mode = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mode

    def split(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.mode == "split":
            return x.reshape(batch, HEADS, length, SIZE)
        return x.reshape(batch, length, HEADS, SIZE).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if self.mode != "unmasked" else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.mode == "axis":
            y = y.transpose(1, 3)
        elif self.mode != "joined":
            y = y.transpose(1, 2)
        y = y.reshape(x.shape)
        if self.mode == "flipped":
            y = y.flip(-1)
        return self.out(y)


def attend(done: Any, mode: str, *, length: int = 5, is_trained: bool = True) -> None:
    torch.manual_seed(0)
    model = Attention(mode)
    x = torch.randn(2, length, WIDTH)
    y = model(x)
    if is_trained:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.mse_loss(y, torch.ones_like(y)).backward()
        optimizer.step()
    done()


def compared_with(mode: str, *, replay: ReplayMode = "needed", program: Any = attend, **options: Any) -> Comparison:
    return compare_runs(recorded(mode, program=program, **options), recorded(program=program, **options), replay=replay)


@pytest.mark.parametrize(("is_trained", "replay"), [(True, "needed"), (False, "needed"), (False, "all"), (False, "none")])
@pytest.mark.parametrize("length", [5, HEADS, SIZE])
@pytest.mark.parametrize(
    ("mode", "kind", "call"),
    [
        ("joined", "calls", "Tensor.transpose"),
        ("axis", "arguments", "Tensor.transpose"),
        ("flipped", "calls", "Tensor.flip"),
        ("split", "calls|arguments", "Tensor.transpose|Tensor.reshape"),
    ],
)
def test_what_lays_a_value_out_otherwise_is_the_cause(
    mode: str, kind: str, call: str, length: int, is_trained: bool, replay: ReplayMode
) -> None:
    comparison = compared_with(mode, length=length, is_trained=is_trained, replay=replay)
    assert comparison.verdict == "diverges"
    fault = comparison.faults[0]
    assert (fault.kind in kind.split("|"), fault.call.rpartition(".")[0] in call.split("|")) == (True, True), fault.headline
    assert fault.phase == "forward"
    assert not any(finding.kind in ("amplified", "fork") for finding in comparison.findings)


def test_a_missing_mask_is_another_argument() -> None:
    fault = compared_with("unmasked").faults[0]
    assert fault.phase == "forward"
    assert fault.call.startswith(("functional.scaled_dot_product_attention", "ones", "Tensor.tril", "torch."))


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_same_laid_out_otherwise_and_back_is_no_fault(is_trained: bool) -> None:
    """One side looks at heads before positions; what is joined again agrees."""

    def rearranging(done: Any, mode: str) -> None:
        torch.manual_seed(0)
        model, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, 5, WIDTH, requires_grad=True)
        y = model(x).view(2, 5, HEADS, SIZE)
        y = y.permute(0, 2, 1, 3).exp().permute(0, 2, 1, 3) if mode else y.exp()
        y = y.reshape(x.shape).tanh()
        if is_trained:
            y.square().mean().backward()
        done()

    comparison = compared_with("permuted", program=rearranging)
    assert comparison.faults == ()
    assert not any(finding.kind in ("amplified", "fork") for finding in comparison.findings)


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.11), (0.5, 0.1), (1.0, 1.0), (1e-3, float("inf")), (float("nan"), 1.0)])
def test_what_did_not_grow_cannot_be_called_magnified(before: float, after: float) -> None:
    assert Amplification.of(before, after) is None
    with pytest.raises(ValueError, match="not magnified"):
        Amplification(before, after)


def test_what_grew_tells_by_how_much() -> None:
    found = Amplification.of(1e-6, 1e-3)
    assert found is not None
    assert found.factor == pytest.approx(1000)


def certain(done: Any, mode: str) -> None:
    """Attention that picks one key for certain, as its formula or as one call; in the first the gradient of the values may be 1 % off."""
    torch.manual_seed(3)
    qkv, out, x = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        qkv.weight[: 2 * WIDTH] *= 40
    q, k, v = (part.view(2, 1, 5, WIDTH) for part in qkv(x).chunk(3, -1))
    if "spoilt" in mode:
        v.register_hook(lambda gradient: gradient * 1.01)
    y = (q @ k.mT / WIDTH**0.5).softmax(-1) @ v if "formula" in mode else F.scaled_dot_product_attention(q, k, v)
    out(y).square().mean().backward()
    done()


@pytest.mark.parametrize(("mode", "num_faults"), [("formula", 0), ("formula spoilt", 1)])
def test_a_gradient_that_is_zero_but_for_the_rounding_of_its_terms_is_no_fault(mode: str, num_faults: int) -> None:
    """The formula gives exact zeros where the fused call gives what rounding left of its terms."""
    found = compared_with(mode, program=certain)
    assert len(found.faults) == num_faults
