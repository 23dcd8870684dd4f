# SPDX-License-Identifier: Apache-2.0
"""List small programs that make inf or NaN in the ways that happen in practice, and programs that only look like it.

Each is a function of `record`, which gives the context to train in. It is listed with the event that the hunt has to find: the kind, the
operation and the phase of the first maker, or None for a program that must raise no alarm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Record = Callable[..., Any]


class Expected(NamedTuple):
    kind: str
    op: str
    phase: str
    module: str | None = None
    says: str = ""


class Net(nn.Module):
    """Two linear layers with something in between."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = F.gelu, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, 1)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self.up(x)))


def train(
    record: Record,
    model: nn.Module,
    loss: Callable[[nn.Module, int], torch.Tensor],
    *,
    steps: int = 2,
    optimizer: Any = None,
) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    with record(model, optimizer) as capture:
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
            capture.step()


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 8)))


def square(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch()).float().square().mean()


# ---- overflow


def half_linear(record: Record) -> None:
    model = Net().half()
    with torch.no_grad():
        model.up.weight.fill_(3000.0)
    train(record, model, lambda net, step: net(torch.full((4, 8), 2.76, dtype=torch.float16)).float().mean())


def unsafe_softmax(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(h * 300)
        return powers / powers.sum(-1, keepdim=True)

    train(record, Net(middle), square)


def exponential_loss(record: Record) -> None:
    train(record, Net(), lambda net, step: torch.exp(net(batch()) + 100 * step).mean())


def cast_to_half(record: Record) -> None:
    train(record, Net(lambda h: (h * 0 + 1e5).half().float()), square)


def mean_of_large(record: Record) -> None:
    huge = torch.full((64,), 3e37, dtype=torch.bfloat16)
    train(record, Net(), lambda net, step: net(batch()).mean() + huge.float().mul(10).mean() * 0)


def half_gradient(record: Record) -> None:
    model = Net().half()
    train(record, model, lambda net, step: net(batch().half()).float().sum() * 1e7)


def second_moment(record: Record) -> None:
    model = Net()
    train(record, model, lambda net, step: net(batch()).sum() * 1e21, optimizer=torch.optim.Adam(model.parameters()), steps=9)


# ---- division


def zero_over_zero(record: Record) -> None:
    train(record, Net(lambda h: (h * 0) / (h * 0).norm(dim=-1, keepdim=True)), square)


def zero_count(record: Record) -> None:
    def loss(net: nn.Module, step: int) -> torch.Tensor:
        wanted = torch.zeros(4, 1) if step else torch.ones(4, 1)
        return (net(batch()) * wanted).sum() / wanted.sum()

    train(record, Net(), loss)


def division_in_place(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        scores = h * 2.0
        return scores.div_(torch.zeros(8))

    train(record, Net(middle), square)


def mean_of_nothing(record: Record) -> None:
    train(record, Net(), lambda net, step: net(batch())[torch.zeros(4, dtype=torch.bool)].mean())


def spread_of_one(record: Record) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so too
        train(record, Net(lambda h: h - h.std(0)), lambda net, step: net(batch(1, 8)).mean())


def every_target_ignored(record: Record) -> None:
    model = nn.Linear(8, 5)
    train(record, model, lambda net, step: F.cross_entropy(net(batch()), torch.full((4,), -100)))


def fully_masked_row(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 8, dtype=torch.bool)
        return h.masked_fill(mask, float("-inf")).softmax(-1)

    train(record, Net(middle), square)


# ---- roots, logarithms, powers


def negative_root(record: Record) -> None:
    train(record, Net(lambda h: torch.sqrt(h.abs() * -1)), square)


def log_of_softmax(record: Record) -> None:
    model = nn.Linear(8, 5)

    def loss(net: nn.Module, step: int) -> torch.Tensor:
        return -(net(batch()) * 1e4).softmax(-1).log().mean()

    train(record, model, loss)


def broken_power(record: Record) -> None:
    train(record, Net(lambda h: (-h.abs() - 1).pow(0.3)), square)


# ---- backward


def root_gradient(record: Record) -> None:
    train(record, Net(lambda h: torch.sqrt(h * 0)), square)


def zero_vector_gradient(record: Record) -> None:
    train(record, Net(lambda h: (h * 0).square().sum(-1, keepdim=True).sqrt().expand(4, 8)), square)


def root_behind_where(record: Record) -> None:
    """The famous trap: torch.where hides it in the forward pass, not from the gradient."""

    def middle(h: torch.Tensor) -> torch.Tensor:
        distance = h - h.detach()
        return torch.where(distance > 0, torch.sqrt(distance), torch.zeros(()))

    train(record, Net(middle), square)


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0.0


def function_of_the_user(record: Record) -> None:
    train(record, Net(lambda h: Careless.apply(h)), square)


def inside_a_checkpoint(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.sqrt(x * 0), h, use_reentrant=False)

    train(record, Net(middle), square)


# ---- from outside


def nan_in_the_data(record: Record) -> None:
    def loss(net: nn.Module, step: int) -> torch.Tensor:
        x = batch()
        if step:
            x[1, 2] = float("nan")
        return net(x).square().mean()

    train(record, Net(), loss)


def nan_row_of_an_embedding(record: Record) -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight[3] = float("nan")
    train(record, model, lambda net, step: net(torch.tensor([1, 3])).square().mean())


# ---- optimizers


def eps_of_zero(record: Record) -> None:
    model = Net()
    model.unused = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
    train(record, model, lambda net, step: square(net, step) + (net.unused * 0).sum(), optimizer=optimizer)


def learning_rate_too_large(record: Record) -> None:
    model = Net()
    train(record, model, lambda net, step: net(batch()).sum() * 1e10, optimizer=torch.optim.SGD(model.parameters(), lr=1e30))


# ---- what may not alarm


def causal_mask(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
        return (h @ h.T).masked_fill(mask, float("-inf")).softmax(-1) @ h

    train(record, Net(middle), square)


def added_mask(record: Record) -> None:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    train(record, Net(lambda h: torch.softmax(h @ h.T + mask, -1) @ h), square)


def lowest_number_as_mask(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
        return torch.softmax(h @ h.T + mask + mask, -1) @ h

    train(record, Net(middle), square)


def mask_by_a_large_number(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(4, 4, dtype=torch.float16).tril()
        mask = (1.0 - keep) * -1e9
        return torch.softmax(h @ h.T + mask, -1) @ h

    train(record, Net(middle), square)


def log_of_zero_hidden(record: Record) -> None:
    """p log p with p = 0, as an entropy is often written."""
    p = torch.tensor([0.0, 0.5, 0.5])
    train(record, Net(), lambda net, step: square(net, step) + torch.where(p > 0, p * p.log(), torch.zeros(())).sum())


def hidden_by_where(record: Record) -> None:
    x = torch.tensor([-1.0, 2.0, 4.0])
    train(record, Net(), lambda net, step: square(net, step) + torch.where(x > 0, x.log(), torch.zeros(())).sum())


def hidden_by_nan_to_num(record: Record) -> None:
    zeros = torch.zeros(3)
    train(record, Net(), lambda net, step: square(net, step) + (zeros / zeros).nan_to_num(0.0).sum())


def hidden_by_maximum(record: Record) -> None:
    zeros = torch.zeros(3)
    train(record, Net(), lambda net, step: square(net, step) + torch.fmax(zeros / zeros, torch.ones(3)).sum())


def hidden_by_relu(record: Record) -> None:
    zeros = torch.zeros(3)
    train(record, Net(), lambda net, step: square(net, step) + F.relu(zeros.log()).sum())


def infinite_slope_behind_relu(record: Record) -> None:
    """The slope of the root at 0 is infinite, and relu's own is 0 there."""
    train(record, Net(lambda h: torch.sqrt(F.relu(h - 100))), square)


def healthy(record: Record) -> None:
    model = Net()
    train(record, model, square, steps=4, optimizer=torch.optim.AdamW(model.parameters()))


def large_and_finite(record: Record) -> None:
    """A sum of float16 values overflows float16; the values do not."""
    huge = torch.full((4096,), 6e4, dtype=torch.float16)
    train(record, Net(), lambda net, step: square(net, step) + (huge * 1.0)[:1].float().sum() * 0)


def uninitialised(record: Record) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        place = torch.empty(4, 8)
        place.fill_(float("nan"))
        place = torch.empty_like(place)
        place.copy_(h)
        return place

    train(record, Net(middle), square)


def skipped_by_the_scaler(record: Record) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40, growth_interval=1000)
    with record(model, optimizer) as capture:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = model(batch()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            capture.step()


FAULTY: dict[str, tuple[Callable[[Record], None], Expected]] = {
    "half_linear": (
        half_linear,
        Expected("made", "linear", "forward", "up", "float16 ends at 65 504; bfloat16 or a scale of 1/2 would do"),
    ),
    "unsafe_softmax": (unsafe_softmax, Expected("made", "exp", "forward", "", "overflows")),
    "exponential_loss": (exponential_loss, Expected("made", "exp", "forward", "", "overflows")),
    "cast_to_half": (cast_to_half, Expected("made", "half", "forward", "", "it needs 100 000, float16 ends at 65 504")),
    "mean_of_large": (mean_of_large, Expected("made", "mean", "forward", "", "64 values")),
    "half_gradient": (half_gradient, Expected("made", "", "backward")),
    "second_moment": (second_moment, Expected("made", "Adam", "optimizer", "", "moment of the optimizer")),
    "zero_over_zero": (zero_over_zero, Expected("made", "div", "forward", "", "0/0")),
    "zero_count": (zero_count, Expected("made", "div", "forward", "", "0/0")),
    "division_in_place": (division_in_place, Expected("made", "div_", "forward", "", "division by zero")),
    "mean_of_nothing": (mean_of_nothing, Expected("made", "mean", "forward", "", "mean of nothing")),
    "spread_of_one": (spread_of_one, Expected("made", "std", "forward", "", "single value")),
    "every_target_ignored": (every_target_ignored, Expected("made", "cross_entropy", "forward", "", "no target")),
    "fully_masked_row": (fully_masked_row, Expected("made", "softmax", "forward", "", "masked wholly")),
    "negative_root": (negative_root, Expected("made", "sqrt", "forward", "", "square root of a negative number")),
    "log_of_softmax": (log_of_softmax, Expected("made", "log", "forward", "", "logarithm of 0")),
    "broken_power": (broken_power, Expected("made", "pow", "forward", "", "power")),
    "root_gradient": (root_gradient, Expected("made", "sqrt", "backward", "", "infinite slope")),
    "zero_vector_gradient": (zero_vector_gradient, Expected("made", "sqrt", "backward", "", "infinite slope")),
    "root_behind_where": (root_behind_where, Expected("made", "sqrt", "backward", "", "infinite slope")),
    "function_of_the_user": (function_of_the_user, Expected("made", "Careless", "backward")),
    "inside_a_checkpoint": (inside_a_checkpoint, Expected("made", "sqrt", "backward")),
    "nan_in_the_data": (nan_in_the_data, Expected("given", "", "")),
    "nan_row_of_an_embedding": (nan_row_of_an_embedding, Expected("given", "", "")),
    "eps_of_zero": (eps_of_zero, Expected("made", "Adam", "optimizer", "", "eps is 0")),
    "learning_rate_too_large": (learning_rate_too_large, Expected("made", "SGD", "optimizer")),
}
HARMLESS: dict[str, Callable[[Record], None]] = {
    program.__name__: program
    for program in (
        *(causal_mask, added_mask, lowest_number_as_mask, mask_by_a_large_number, log_of_zero_hidden, hidden_by_where),
        *(
            hidden_by_nan_to_num,
            hidden_by_maximum,
            hidden_by_relu,
            infinite_slope_behind_relu,
            healthy,
            large_and_finite,
            uninitialised,
            skipped_by_the_scaler,
        ),
    )
}
