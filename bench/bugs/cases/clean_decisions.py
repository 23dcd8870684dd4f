# SPDX-License-Identifier: Apache-2.0
"""Clean pairs where rounding or chance decides: ties that fall to either side, other random numbers. What follows rightly differs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Program, Side, classifying, minimised
from bench.bugs.machines import accelerator, machine_of, other_order, rounded_operands, split_k
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, EXPERTS, VOCABULARY = 16, 4, 12
aten = torch.ops.aten


class OtherStream(TorchDispatchMode):
    """A backend whose random numbers are as good as the CPU's, and others."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(77)

    def __call__(self) -> OtherStream:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.bernoulli_.float:
            return func(*args, generator=self._generator)
        if func is aten.native_dropout.default:
            x, p, train = args
            kept = torch.empty_like(x, dtype=torch.float32).bernoulli_(1 - p, generator=self._generator)
            return (x * kept.to(x.dtype) / (1 - p), kept.bool()) if train else func(*args)
        return func(*args, **(kwargs or {}))


def _dropped(side: Side) -> Program:
    """Dropout that is switched off, on a backend with a generator of its own."""
    model = nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 5)).eval()
    return _classified(model, side, OtherStream())


def _other_seed(side: Side) -> Program:
    """Dropout of nothing where the subject was seeded otherwise just before it began."""
    model = nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.0), nn.GELU(), nn.Linear(64, 5))
    program = _classified(model, side, None)
    torch.manual_seed(5 if side == "subject" else 6)
    return program


def _classified(model: nn.Module, side: Side, machine: Any, steps: int = 2) -> Program:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(steps, 32, 12), torch.randint(0, 5, (steps, 32))

    return classifying(
        model, optimizer, inputs, labels, steps=steps, machine=machine if side == "subject" and machine else contextlib.nullcontext
    )


class Routed(nn.Module):
    """One expert of four for each token; two rows of the router are the same but for the last bits."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(WIDTH, EXPERTS, bias=False), chosen
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.head = nn.Linear(WIDTH, 5)
        with torch.no_grad():
            self.router.weight[1] = self.router.weight[0] * (1 + 3e-8 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.chosen, dim=-1)
        each = torch.einsum("tw,ewv->tev", x, self.experts)
        mixed = each.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return self.head(x + (mixed * weights[..., None]).sum(1))


def _routed(chosen: int, kernels: Any) -> Any:
    def program(side: Side) -> Program:
        model = Routed(chosen)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inputs, labels = torch.randn(2, 64, WIDTH), torch.randint(0, 5, (2, 64))

        return classifying(model, optimizer, inputs, labels, machine=machine_of(side, kernels))

    return program


def _pooled(side: Side) -> Program:
    """Max pooling over values that are the same but for rounding."""
    conv, head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)
    model = nn.ModuleList([conv, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = torch.randn(2, 8, 3, 1, 1).expand(-1, -1, -1, 8, 8)
    images, labels = flat + 1e-8 * torch.randn(2, 8, 3, 8, 8), torch.randint(0, 5, (2, 8))

    def loss(index: int) -> Tensor:
        pooled = F.max_pool2d(conv(images[index]), 2)
        return F.cross_entropy(head(pooled.amax((2, 3))), labels[index])

    return minimised(model, optimizer, loss, machine=machine_of(side, accelerator("tf32")))


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.mix(self.tokens(token), state)
        return self.head(state), state


def _sampled(is_tied: bool, kernels: Any) -> Any:
    """Feed the most likely token in again; where two are as likely, rounding chooses the rest of the text."""

    def program(side: Side) -> Program:
        model = Sampler()
        if is_tied:
            with torch.no_grad():
                model.head.weight[1::2] = model.head.weight[::2] * (1 + 2e-8 * torch.randn(VOCABULARY // 2, WIDTH))
                model.head.bias[1::2] = model.head.bias[::2]

        def step(index: int) -> None:
            with torch.no_grad():
                token, state = torch.arange(8) % VOCABULARY, torch.zeros(8, WIDTH)
                for _ in range(6):
                    logits, state = model(token, state)
                    token = logits.argmax(-1)

        return Program(step=step, model=model, machine=machine_of(side, kernels))

    return program


def _quantised(side: Side) -> Program:
    """Weights rounded to eight bits with a straight-through gradient: an element on the edge goes to either side."""
    fc1, fc2 = nn.Linear(12, 64), nn.Linear(64, 5)
    model = nn.ModuleList([fc1, fc2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, 32, 12), torch.randint(0, 5, (2, 32))

    def rounded(x: Tensor) -> Tensor:
        step = x.abs().amax() / 127
        return x + ((x / step).round() * step - x).detach()

    def loss(index: int) -> Tensor:
        hidden = torch.relu(rounded(fc1(inputs[index])))
        return F.cross_entropy(fc2(rounded(hidden)), labels[index])

    return minimised(model, optimizer, loss, machine=machine_of(side, rounded_operands("float16")))


def _sorted(side: Side) -> Program:
    """Train on the hardest examples; ties between them fall either way."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, 16, 12).repeat_interleave(2, dim=1), torch.randint(0, 5, (2, 16)).repeat_interleave(2, dim=1)
    inputs = inputs * (1 + 2e-8 * torch.randn_like(inputs))

    def loss(index: int) -> Tensor:
        losses = F.cross_entropy(model(inputs[index]), labels[index], reduction="none")
        hardest = losses.detach().argsort(descending=True)[:15]
        return losses[hardest].mean()

    return minimised(model, optimizer, loss, machine=machine_of(side, other_order()))


def _masked(side: Side) -> Program:
    """Values above a threshold are kept; some lie on it but for rounding."""
    fc1, fc2 = nn.Linear(12, 48), nn.Linear(48, 5)
    model = nn.ModuleList([fc1, fc2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, 32, 12), torch.randint(0, 5, (2, 32))

    def loss(index: int) -> Tensor:
        hidden = fc1(inputs[index])
        kept = hidden > hidden.detach().median()
        return F.cross_entropy(fc2(torch.where(kept, hidden, torch.zeros_like(hidden))), labels[index])

    return minimised(model, optimizer, loss, machine=machine_of(side, rounded_operands("bfloat16")))


def _case(name: str, what: str, program: Any, machine: str = "") -> Case:
    return Case(name=name, source="synthetic", what=what, program=program, machine=machine)


CASES = [
    _case(
        "clean_dropout_other_stream", "dropout that is switched off, on a backend with other random numbers", _dropped, "another generator"
    ),
    _case("clean_dropout_other_seed", "dropout of nothing after another seed", _other_seed),
    _case(
        "clean_router_near_tie",
        "a router of which two rows are the same but for the last bits",
        _routed(1, rounded_operands("float16")),
        "operands in float16",
    ),
    _case("clean_router_near_tie_two", "the same with two experts for each token", _routed(2, other_order()), "another order"),
    _case("clean_pooling_ties", "max pooling over values that are the same but for rounding", _pooled, "operands in tf32, other functions"),
    _case(
        "clean_greedy_sampling",
        "the most likely token goes in again",
        _sampled(False, accelerator("float16")),
        "operands in float16, other functions",
    ),
    _case("clean_greedy_sampling_ties", "the same where two tokens are as likely", _sampled(True, split_k(2)), "split-K products"),
    _case("clean_quantised", "activations rounded to eight bits", _quantised, "operands in float16"),
    _case(
        "clean_hardest_examples", "the hardest examples are chosen among pairs that are the same but for rounding", _sorted, "another order"
    ),
    _case("clean_threshold", "values above their median are kept", _masked, "operands in bfloat16"),
]
