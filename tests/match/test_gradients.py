# SPDX-License-Identifier: Apache-2.0
"""A backward record stands behind those that make the gradients that it receives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.capture.recording import recording
from ulpscope.match import match_calls, with_makers_first
from ulpscope.model import Pair


class Whole(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(8, 8), layer

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(self.before(x).sin())
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def _pairs(model: nn.Module, level: str = "api", passes: int = 1) -> list[Pair]:
    with recording(level=level) as run:
        loss = model(torch.randn(2, 5, 8)).square().sum()
        for number in range(passes):
            loss.backward(retain_graph=number + 1 < passes)
    return list(match_calls(run.records, run.records))


def _names(pairs: list[Pair]) -> list[str]:
    return [str(pair.record.call) for pair in pairs if pair.record.phase == "backward"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]  # type: ignore[no-any-return]


LAYERS = {"gru": lambda: nn.GRU(8, 8, num_layers=2, batch_first=True), "attention": Attention, "linear": lambda: nn.Linear(8, 8)}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("level", ["api", "both"])
@pytest.mark.parametrize("passes", [1, 2])
def test_no_gradient_is_received_before_it_is_made(layer: str, level: str, passes: int) -> None:
    pairs = _pairs(Whole(LAYERS[layer]()), level, passes)
    ordered = with_makers_first(pairs)
    assert sorted(map(id, ordered)) == sorted(map(id, pairs))
    rest = [[pair for pair in some if pair.record.phase != "backward"] for some in (pairs, ordered)]
    assert rest[0] == rest[1]
    names = [name for name in _names(ordered) if not name.startswith("Module")]
    for first, last in (("torch.gru.0", "Tensor.sin.0"), ("Tensor.sin.0", "functional.linear.0")):
        if first in names:
            assert [name for name in names if name in (first, last)] == [first, last] * passes


def test_what_is_in_order_stays_the_same() -> None:
    pairs = _pairs(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    assert with_makers_first(pairs) == pairs


def test_a_layer_that_hands_on_early_is_recorded_late() -> None:
    """Else there would be nothing to put in order."""
    names = _names(_pairs(Whole(LAYERS["gru"]())))
    assert names.index("functional.linear.0") < names.index("torch.gru.0")
