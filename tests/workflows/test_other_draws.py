# SPDX-License-Identifier: Apache-2.0
"""Calls that draw other numbers where generators are not alike, whatever hides the draw: neither they nor what comes of them is blamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ulpscope import Capture, compare_runs
from ulpscope.model import Comparison

SIZE = 16


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class First(nn.Module):
    """A layer with several results, of which the first counts."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.times)[0]  # type: ignore[no-any-return]


def _fused(x: Tensor, share: float = 0.2) -> Tensor:
    query, key, value = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in (x, x.flip(-1), x * 2))
    return F.scaled_dot_product_attention(query, key, value, dropout_p=share).transpose(1, 2).flatten(2)


def _sampled(x: Tensor) -> Tensor:
    index = torch.multinomial(x.softmax(-1).flatten(0, 1), 1).view(x.shape[:2])
    return F.embedding(index, torch.eye(SIZE)) + x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Function(_fused),
    "attention that drops nearly all": lambda: Function(lambda x: x + _fused(x[:, :2], 0.9).sum(1, keepdim=True)),
    "attention layer": lambda: First(nn.MultiheadAttention(SIZE, 2, dropout=0.3, batch_first=True), times=3),
    "written out": lambda: Function(lambda x: F.dropout((x @ x.mT).softmax(-1), 0.3) @ x),
    "gru": lambda: First(nn.GRU(SIZE, SIZE, num_layers=2, dropout=0.4, batch_first=True)),
    "rrelu": lambda: Function(lambda x: F.rrelu(x, training=True)),
    "gumbel": lambda: Function(lambda x: F.gumbel_softmax(x, hard=True) + x * 0.1),
    "channels": lambda: Function(lambda x: F.dropout1d(x, 0.5)),
    "sampled": lambda: Function(_sampled),
    "noise": lambda: Function(lambda x: x + 0.1 * torch.randn_like(x)),
}


def _run(into: Path, layer: str, keep: str, seed: int, spoil: Callable[[Tensor], Tensor] | None = None) -> Path:
    """Run two steps; only inside the layer another generator draws, like that of another device."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(SIZE, SIZE), LAYERS[layer](), nn.Linear(SIZE, SIZE)])
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 12, SIZE)
    with Capture(into, model=model, optimizer=optimizer, keep=keep) as capture:
        for _ in range(2):
            hidden = model[0](x)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                hidden = model[1](hidden)
            hidden = model[2](hidden)
            (spoil(hidden) if spoil else hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into


def _by_another_torch(run: Path) -> Path:
    """Mark the run as recorded by another version of torch, whose generators need not give the same numbers."""
    facts = json.loads((run / "run.json").read_text())
    facts["versions"]["torch"] = "1.13.0"
    (run / "run.json").write_text(json.dumps(facts))
    return run


def _compared(folder: Path, layer: str, keep: str) -> Comparison:
    return compare_runs(_run(folder / "subject", layer, keep, 5), _by_another_torch(_run(folder / "reference", layer, keep, 6)))


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_call_that_draws_is_not_blamed_nor_what_is_made_of_it(tmp_path: Path, layer: str, keep: str) -> None:
    comparison = _compared(tmp_path, layer, keep)
    assert comparison.faults == ()
    assert comparison.verdict == "unknown"


class _Spoilt(TorchDispatchMode):
    """Every result of one kernel is 1 % too large."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.01 if func is self.op else result


@pytest.mark.parametrize(
    ("op", "call"), [(torch.ops.aten.pow.Tensor_Scalar, "Tensor.square.0"), (torch.ops.aten.tanh_backward.default, "torch.tanh.0")]
)
def test_a_wrong_call_behind_a_draw_is_still_named(tmp_path: Path, op: Any, call: str) -> None:
    reference = _run(tmp_path / "reference", "attention", "tensors", 6, torch.tanh)
    with _Spoilt(op):
        subject = _run(tmp_path / "subject", "attention", "tensors", 5, torch.tanh)
    (fault,) = compare_runs(subject, _by_another_torch(reference)).faults
    assert fault.call == call
