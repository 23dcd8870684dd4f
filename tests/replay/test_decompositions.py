# SPDX-License-Identifier: Apache-2.0
"""Shortcuts around torch's references for single primitives give the bits that these give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope.replay.formulas import decompositions
from ulpscope.replay.formulas.decompositions import Decomposed
from ulpscope.replay.yardstick.independent import Independent

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]] = {
    **{name: (lambda x, y, name=name: getattr(torch, name)(x.abs() + 0.1)) for name in decompositions._UNARY.split()},
    "add": lambda x, y: x + y,
    "a number is added": lambda x, y: x + 0.1,
    "sub": lambda x, y: x - y[0],
    "mul": lambda x, y: x * y[:, :1],
    "div": lambda x, y: x / y,
    "a number divides": lambda x, y: x / 3,
    "sum": lambda x, y: x.sum(),
    "sum over one": lambda x, y: x.sum(-1),
    "sum over several": lambda x, y: x.view(4, 2, -1).sum((0, -1), keepdim=True),
    "sum over none": lambda x, y: x.sum(()),
    "var_mean": lambda x, y: torch.var_mean(x, 1, correction=0, keepdim=True),
    "var_mean of all": lambda x, y: torch.var_mean(x),
    "var_mean, unbiased": lambda x, y: torch.var_mean(x, (0,), unbiased=True),
    "layer_norm": lambda x, y: F.layer_norm(x, (y.shape[-1],), y[0], y[1]),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
    "mixed": lambda x, y: x * y.to(torch.float16),
    "by a tensor of one number": lambda x, y: torch.tensor(2.0) * x,
}


def _run(mode: type[Decomposed], call: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 12, generator=generator).to(dtype) for _ in range(2))
    with torch.no_grad(), mode() as running:
        found = call(x, y)
    assert running.is_covered
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("mode", [Decomposed, Independent])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_shortcut_gives_what_the_reference_gives(
    name: str, dtype: torch.dtype, mode: type[Decomposed], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _run(mode, CALLS[name], dtype)
    monkeypatch.setattr(decompositions, "_shared_dtype", lambda args: None)
    wanted = _run(mode, CALLS[name], dtype)
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (5, 4), (2, 5, 4)])
def test_a_product_of_batches_is_that_of_matmul(shape: tuple[int, ...]) -> None:
    one, other = torch.randn(shape), torch.randn(*shape[:-2], 4, 6)
    assert torch.equal(decompositions._times(one, other), one @ other)
    assert torch.equal(decompositions._times(one.mT.contiguous().mT, other), one @ other)
