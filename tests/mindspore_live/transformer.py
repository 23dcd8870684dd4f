# SPDX-License-Identifier: Apache-2.0
"""A transformer of two blocks in MindSpore; `tests/mindspore_runs/transformer.py` is the same in torch: same weights, same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

__all__ = ["Net", "made", "train"]


class Block(nn.Cell):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm((width,), epsilon=1e-5)
        self.norm2 = nn.LayerNorm((width,), epsilon=1e-5)
        self.q = nn.Dense(width, width)
        self.k = nn.Dense(width, width)
        self.v = nn.Dense(width, width)
        self.out = nn.Dense(width, width)
        self.up = nn.Dense(width, 2 * width)
        self.down = nn.Dense(2 * width, width)

    def split(self, x: Any) -> Any:
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).swapaxes(1, 2)

    def construct(self, x: Any) -> Any:
        y = self.norm1(x)
        q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        weights = ops.softmax(mint.matmul(q, k.swapaxes(-1, -2)) * (q.shape[-1] ** -0.5), axis=-1)
        x = x + self.out(mint.matmul(weights, v).swapaxes(1, 2).reshape(x.shape))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.CellList([Block(), Block()])
        self.norm = nn.LayerNorm((8,), epsilon=1e-5)
        self.head = nn.Dense(8, 7)

    def construct(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def weight(number: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The values of a parameter, by its place in the network: sixty-fourths, so that every framework has the same."""
    return (((np.arange(int(np.prod(shape))) + 1) * (2 * number + 7) % 41 - 20) / 64).astype(np.float32).reshape(shape)


def batch(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    numbers = np.arange(6) + step
    return (numbers * 5 % 7).astype(np.int32).reshape(2, 3), (numbers * 3 % 7).astype(np.int32).reshape(2, 3)


def made() -> Net:
    net = Net()
    for number, parameter in enumerate(net.get_parameters()):
        if "norm" not in parameter.name:
            parameter.set_data(Tensor(weight(number, tuple(parameter.shape))))
    net.set_train()
    return net


def train(net: Net, after: Callable[[], None], steps: int = 3) -> tuple[list[bytes], list[list[bytes]]]:
    """The losses and the gradients of all steps, bit by bit; `after` ends a step."""
    optimizer = nn.SGD(net.trainable_params(), 0.1)

    def loss_of(tokens: Any, labels: Any) -> Any:
        return ops.cross_entropy(net(tokens).reshape(-1, 7), labels.reshape(-1))

    step_of = ms.value_and_grad(loss_of, None, optimizer.parameters)
    losses, gradients = [], []
    for step in range(steps):
        tokens, labels = batch(step)
        loss, found = step_of(Tensor(tokens), Tensor(labels))
        optimizer(found)
        losses.append(loss.asnumpy().tobytes())
        gradients.append([one.asnumpy().tobytes() for one in found])
        after()
    return losses, gradients
