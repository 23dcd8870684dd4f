# SPDX-License-Identifier: Apache-2.0
"""Small programs that are hard on a recorder. Each is given what ends a step, and returns everything that it computed, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, mint, nn, ops

from tests.mindspore_live.transformer import made, train

__all__ = ["PROGRAMS"]

Step = Callable[[], None]


def array(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(*tensors: Any) -> list[bytes]:
    found: list[bytes] = []
    for one in tensors:
        found += bits(*one) if isinstance(one, (tuple, list)) else [one.asnumpy().tobytes()]
    return found


def transformer(step: Step) -> list[bytes]:
    net = made()
    losses, gradients = train(net, step, steps=2)
    return [*losses, *(one for each in gradients for one in each), *bits(list(net.get_parameters()))]


def many_consumers(step: Step) -> list[bytes]:
    """One tensor that nine calls read: the order in which their gradients are added shows in the last bits."""
    x, w = Tensor(array(4, 5)), Tensor(array(5, 5, seed=1))

    def loss(x: Any, w: Any) -> Any:
        h = mint.matmul(x, w)
        total = ops.gelu(h) + ops.tanh(h) * 0.3 + h * h - ops.exp(h * 0.1) + ops.sigmoid(h) / 3.0
        total = total + ops.softmax(h, axis=-1) + mint.matmul(h, w) + ops.sin(h) + h.mean(1, True)
        return total.sum()

    found = [ms.value_and_grad(loss, (0, 1))(x, w) for _ in range(2)]
    step()
    return bits(found)


def written_in_place(step: Step) -> list[bytes]:
    x = Tensor(array(4, 5))

    def loss(x: Any) -> Any:
        y = ops.tanh(x)
        z = y * 2
        z.add_(y)
        z += 1
        z[0] = 3.0
        return (z * y).sum()

    found = ms.value_and_grad(loss, 0)(x)
    step()
    return bits(found)


def several_results(step: Step) -> list[bytes]:
    x = Tensor(array(4, 6))

    def loss(x: Any) -> Any:
        one, other = ops.split(x, 3, 1)
        values, places = ops.topk(x, 2, 1)
        parts = x.chunk(2, 0)
        return (one * other).sum() + values.sum() + (parts[0] * parts[1]).sum() + places.sum()

    found = ms.value_and_grad(loss, 0)(x)
    step()
    return bits(found)


def hooks_of_the_user(step: Step) -> list[bytes]:
    net, x, seen = nn.Dense(5, 3), Tensor(array(4, 5)), []
    net.weight.set_data(Tensor(array(3, 5, seed=2)))
    net.bias.set_data(Tensor(array(3, seed=3)))
    net.weight.register_hook(lambda gradient: seen.append(gradient.asnumpy().tobytes()))
    net.register_forward_hook(lambda cell, given, result: result * 2)

    def loss(x: Any) -> Any:
        y = net(x)
        y.register_hook(lambda gradient: gradient * 3)
        return ops.gelu(y).sum()

    found = ms.value_and_grad(loss, 0, net.trainable_params())(x)
    step()
    return [*bits(found), *seen]


def random_numbers(step: Step) -> list[bytes]:
    net, x = nn.SequentialCell(nn.Dense(5, 5), nn.Dropout(p=0.4)), Tensor(array(4, 5))
    net[0].weight.set_data(Tensor(array(5, 5, seed=4)))
    net[0].bias.set_data(Tensor(array(5, seed=5)))
    net.set_train()
    differentiate = ms.value_and_grad(
        lambda x: (net(x) * ops.dropout(x, 0.3) + ops.standard_normal((4, 5))).sum(), 0, net.trainable_params()
    )
    found = []
    for _ in range(2):
        found.append(differentiate(x))
        step()
    return [*bits(found), *bits(ops.standard_normal((3,)), ms.get_rng_state()), np.random.random(3).tobytes()]


def ways_to_differentiate(step: Step) -> list[bytes]:
    x, w = Tensor(array(3, 4)), Tensor(array(4, 2, seed=6))

    def function(x: Any, w: Any) -> Any:
        return ops.tanh(mint.matmul(x, w))

    sens = Tensor(array(3, 2, seed=7))
    found = [
        ms.grad(lambda x, w: function(x, w).sum(), (0, 1))(x, w),
        ops.GradOperation(get_all=True, sens_param=True)(function)(x, w, sens),
        ms.value_and_grad(lambda x, w: (function(x, w).sum(), x * 2), 0, has_aux=True)(x, w),
        ms.grad(lambda x: ms.grad(lambda x: (x * x * x).sum())(x).sum())(x),
        ms.vjp(function, x, w)[1](sens),
    ]
    step()
    return bits(found)


def mixed_precision(step: Step) -> list[bytes]:
    net, x = nn.SequentialCell(nn.Dense(5, 5), nn.ReLU(), nn.Dense(5, 2)), Tensor(array(4, 5))
    for number, parameter in enumerate(net.get_parameters()):
        parameter.set_data(Tensor(array(*parameter.shape, seed=number)))
    net = amp.auto_mixed_precision(net, "O2")
    scaler = amp.StaticLossScaler(1024)
    found = ms.value_and_grad(lambda x: scaler.scale(net(x).astype(ms.float32).sum()), None, net.trainable_params())(x)
    step()
    return bits(found, scaler.unscale(found[1]))


class Convolutions(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, pad_mode="valid")
        self.norm = nn.BatchNorm2d(3)
        self.pool = nn.MaxPool2d(2)
        self.scale = Parameter(Tensor(array(3, 1, 1, seed=8)), name="scale")

    def construct(self, x: Any) -> Any:
        return self.pool(ops.relu(self.norm(self.conv(x)) * self.scale))


def convolutions(step: Step) -> list[bytes]:
    net = Convolutions()
    net.conv.weight.set_data(Tensor(array(3, 2, 3, 3, seed=9)))
    net.set_train()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    differentiate = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)
    found = []
    for number in range(2):
        loss, gradients = differentiate(Tensor(array(2, 2, 6, 6, seed=number)))
        optimizer(gradients)
        found += bits(loss, gradients)
        step()
    return [*found, *bits(list(net.get_parameters()))]


def recurrent(step: Step) -> list[bytes]:
    net, x = nn.LSTM(3, 4, 1), Tensor(array(5, 2, 3))
    for number, parameter in enumerate(net.get_parameters()):
        parameter.set_data(Tensor(array(*parameter.shape, seed=number)))
    found = ms.value_and_grad(lambda x: net(x)[0].sum(), 0, net.trainable_params())(x)
    step()
    return bits(found)


@ms.jit
def region(x: Any, w: Any) -> Any:
    return ops.gelu(ops.matmul(x, w)) + 1


def compiled_region(step: Step) -> list[bytes]:
    x, w = Tensor(array(3, 4)), Tensor(array(4, 4, seed=1))
    found = ms.value_and_grad(lambda x, w: (region(ops.tanh(x), w) * x).sum(), (0, 1))(x, w)
    step()
    return bits(found)


def trained_by_model(step: Step) -> list[bytes]:
    net = nn.SequentialCell(nn.Dense(5, 4), nn.ReLU(), nn.Dense(4, 3))
    for number, parameter in enumerate(net.get_parameters()):
        parameter.set_data(Tensor(array(*parameter.shape, seed=number)))
    rows = [(array(5, seed=number), np.int32(number % 3)) for number in range(4)]
    data = ms.dataset.GeneratorDataset(rows, ["x", "y"], shuffle=False).batch(2)

    class Steps(ms.train.Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            step()

    model = ms.train.Model(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
    model.train(1, data, callbacks=[Steps()], dataset_sink_mode=False)
    return bits(list(net.get_parameters()))


PROGRAMS: dict[str, Callable[[Step], list[bytes]]] = {
    program.__name__: program
    for program in (
        transformer,
        many_consumers,
        written_in_place,
        several_results,
        hooks_of_the_user,
        random_numbers,
        ways_to_differentiate,
        mixed_precision,
        convolutions,
        recurrent,
        compiled_region,
        trained_by_model,
    )
}
