# SPDX-License-Identifier: Apache-2.0
"""Losses that are computed from the right model in the wrong way, and experts that are mixed or balanced in the wrong way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Expected, Program, Side, minimised
from bench.bugs.machines import Kernels, accelerator, machine_of, other_order, rounded_operands, split_k
from torch import Tensor, nn

WIDTH, VOCABULARY, LENGTH, BATCH, EXPERTS = 24, 40, 10, 6, 4


class Language(nn.Module):
    """Embedding, one recurrent mixer, head: enough of a language model for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.norm(torch.tanh(self.mix(torch.cat((x, before), dim=-1))))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def with_loss(
    loss: Callable[[Any, Tensor, Side], Tensor], model: Callable[[], nn.Module] = Language, kernels: Kernels | None = None, steps: int = 2
) -> Callable[[Side], Program]:
    """Return a program that trains with SGD on the loss that `loss(model, tokens, side)` gives."""

    def program(side: Side) -> Program:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
        batches = torch.randint(0, VOCABULARY, (steps, BATCH, LENGTH))

        return minimised(
            trained, optimizer, lambda index: loss(trained, batches[index], side), steps=steps, machine=machine_of(side, kernels)
        )

    return program


def _shifted(model: Language, tokens: Tensor, side: Side) -> Tensor:
    """Shift the labels in the caller although the loss shifts once more."""
    logits, labels = model(tokens), tokens
    if side == "subject":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


class SplitLogProbability(torch.autograd.Function):
    """log p(label) from a linear head, one part of the vocabulary after the other, as fused kernels do it."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, labels: Tensor, num_splits: int) -> Tensor:
        parts = [features @ part.T for part in weight.chunk(4)[:num_splits]]
        total = torch.stack([part.logsumexp(-1) for part in parts]).logsumexp(0)
        ctx.save_for_backward(features, weight, labels, total)
        return (features * weight[labels]).sum(-1) - total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        features, weight, labels, total = ctx.saved_tensors
        share = F.one_hot(labels, len(weight)) - (features @ weight.T - total[:, None]).exp()
        share = share * gradients[0][:, None]
        return share @ weight, share.T @ features, None, None


def _split(model: Language, tokens: Tensor, side: Side) -> Tensor:
    features = model.features(tokens[:, :-1]).reshape(-1, WIDTH)
    splits = 3 if side == "subject" else 4
    return -SplitLogProbability.apply(features, model.head.weight, tokens[:, 1:].reshape(-1), splits).mean()


def _split_in_python(model: Language, tokens: Tensor, side: Side) -> Tensor:
    logits, labels = model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
    parts = logits.split(VOCABULARY // 4, dim=-1)
    if side == "subject":
        parts = parts[:-1]
    total = torch.stack([torch.logsumexp(part, dim=-1) for part in parts]).logsumexp(0)
    return (total - logits.gather(-1, labels[:, None]).squeeze(-1)).mean()


def _accumulated(side: Side) -> Program:
    """Two micro-batches of unequal numbers of labels: to be averaged over labels, not over micro-batches."""
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = torch.randint(0, VOCABULARY, (2, 2, BATCH, LENGTH))
    labels = batches.clone()
    labels[:, 0, :, 4:] = -100
    count = int((labels[0, :, :, 1:] != -100).sum())

    def step(index: int) -> None:
        optimizer.zero_grad()
        for tokens, label in zip(batches[index], labels[index], strict=True):
            logits, wanted = model(tokens)[:, :-1].reshape(-1, VOCABULARY), label[:, 1:].reshape(-1)
            loss = F.cross_entropy(logits, wanted) / 2 if side == "subject" else F.cross_entropy(logits, wanted, reduction="sum") / count
            loss.backward()
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("float16")))


def _undivided(side: Side) -> Program:
    """Add up micro-batches without taking their mean: all gradients are twice as large."""
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = torch.randint(0, VOCABULARY, (2, 2, BATCH, LENGTH))

    def step(index: int) -> None:
        optimizer.zero_grad()
        for tokens in batches[index]:
            loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
            (loss if side == "subject" else loss / 2).backward()
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, other_order()))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(torch.tanh(self.body(x)))


def _bootstrapped(kernels: Kernels | None) -> Callable[[Side], Program]:
    """Pull a value towards reward plus the next state's value, which has to be a constant."""

    def program(side: Side) -> Program:
        critic = Critic()
        optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
        states, following, reward = torch.randn(3, 16, 8), torch.randn(3, 16, 8), torch.randn(3, 16)

        def loss(index: int) -> Tensor:
            best = critic(following[index]).max(dim=-1).values
            if side == "reference":
                best = best.detach()
            target = reward[index] + 0.9 * best
            return F.mse_loss(critic(states[index])[:, 0], target)

        return minimised(critic, optimizer, loss, steps=3, machine=machine_of(side, kernels))

    return program


class Flow(nn.Module):
    def __init__(self, is_detached: bool) -> None:
        super().__init__()
        self.body, self.policy, self.flow = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 1)
        self._is_detached = is_detached

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        scores = self.policy(hidden)
        scores = scores.clone().detach() if self._is_detached else scores.clone()
        return F.log_softmax(scores, dim=-1), self.flow(hidden)


def _detached(side: Side) -> Program:
    """Clone the scores of a policy; the subject cuts them off from the graph as well."""
    model = Flow(is_detached=side == "subject")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    states, actions = torch.randn(2, 16, 8), torch.randint(0, 5, (2, 16))

    def loss(index: int) -> Tensor:
        scores, flow = model(states[index])
        return (flow.squeeze(-1) + scores.gather(-1, actions[index, :, None]).squeeze(-1)).square().mean()

    return minimised(model, optimizer, loss, machine=machine_of(side, rounded_operands("float16")))


def _padded(model: Language, tokens: Tensor, side: Side) -> Tensor:
    padded = tokens.masked_fill(torch.arange(LENGTH) >= torch.tensor([10, 9, 8, 6, 5, 4])[:, None], 0)
    logits = model(padded[:, :-1]).reshape(-1, VOCABULARY)
    return F.cross_entropy(logits, padded[:, 1:].reshape(-1), ignore_index=-100 if side == "subject" else 0)


class Experts(nn.Module):
    """Two of four experts for each token; `forward` also gives the router's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2) for _ in range(2))
        self.is_renormalised = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        weights, chosen = torch.topk(torch.softmax(logits, dim=-1), 2, dim=-1)
        if self.is_renormalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.einsum("tew,ewv->tev", F.silu(torch.einsum("tw,ewv->tev", x, self.up)), self.down)
        mixed = y.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return (mixed * weights[..., None]).sum(1), logits


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.moe, self.head = Experts(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens).flatten(0, 1)
        mixed, scores = self.moe(self.norm(x))
        return self.head(x + mixed), scores


def balance(scores: Tensor, *, is_constant: bool = False) -> Tensor:
    """Measure how unevenly tokens are routed: the share of tokens times the share of probability, summed over experts."""
    shares = torch.softmax(scores, dim=-1)
    chosen = F.one_hot(torch.topk(shares, 2, dim=-1).indices, EXPERTS)
    routed = chosen.amax(dim=-1 if is_constant else -2).float()
    return (routed.mean(0).sum() * shares.mean(0).sum() / 2 if is_constant else (routed.mean(0) * shares.mean(0)).sum()) * EXPERTS


def _balanced(variant: str) -> Callable[[Mixture, Tensor, Side], Tensor]:
    def loss(model: Mixture, tokens: Tensor, side: Side) -> Tensor:
        logits, scores = model(tokens[:, :-1])
        main = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        if side == "subject" and variant == "absent":
            return main
        return main + 0.1 * balance(scores, is_constant=side == "subject" and variant == "constant")

    return loss


def _gated(model: Mixture, tokens: Tensor, side: Side) -> Tensor:
    model.moe.is_renormalised = side == "reference"
    logits, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits, tokens[:, 1:].reshape(-1))


def _forward(*modules: str, **more: Any) -> Expected:
    return Expected(any_of=tuple(Expected(module=module, phase="forward", step=0, **more) for module in modules))


def _calls(*operations: str, step: int = 0) -> Sequence[Expected]:
    return [Expected(call=operation, phase="forward", step=step) for operation in operations]


_TARGET = Expected(
    any_of=(
        Expected(call="Tensor.detach", step=0),
        Expected(call="functional.mse_loss", phase="backward", slot="output.1", step=0),
        Expected(kind="calls", call="Tensor.add", phase="backward", step=0),
    )
)

CASES = [
    Case(
        name="labels_shifted_twice",
        source="https://github.com/huggingface/transformers/issues/47394",
        what="labels are shifted by the caller and again inside the loss",
        program=with_loss(_shifted, kernels=rounded_operands("float16")),
        expected=Expected(any_of=(*_calls("Tensor.__getitem__", "Tensor.reshape"), *_calls("functional.cross_entropy"))),
        machine="operands in float16",
    ),
    Case(
        name="vocabulary_split_forgotten",
        source="https://github.com/volcengine/verl/issues/2656",
        what="a fused log-probability leaves out the last part of the vocabulary",
        program=with_loss(_split, kernels=split_k(3)),
        expected=Expected(any_of=tuple(_calls("*SplitLogProbability*", "torch.stack", "Tensor.logsumexp"))),
        machine="split-K products",
    ),
    Case(
        name="vocabulary_split_forgotten_in_python",
        source="https://github.com/volcengine/verl/issues/2656",
        what="the normaliser of a log-probability leaves out the last part of the vocabulary",
        program=with_loss(_split_in_python, kernels=rounded_operands("tf32")),
        expected=Expected(any_of=tuple(_calls("torch.logsumexp", "torch.stack", "Tensor.logsumexp"))),
        machine="operands in tf32",
    ),
    Case(
        name="accumulation_average",
        source="https://github.com/huggingface/transformers/pull/34191",
        what="gradient accumulation averages over micro-batches instead of labels",
        program=_accumulated,
        expected=Expected(any_of=tuple(_calls("functional.cross_entropy", "Tensor.__truediv__", "Tensor.div"))),
        machine="operands in float16",
    ),
    Case(
        name="accumulation_not_divided",
        source="https://github.com/huggingface/transformers/issues/37197",
        what="the loss of a micro-batch is not divided by their number",
        program=_undivided,
        expected=Expected(any_of=(*_calls("Tensor.__truediv__", "Tensor.div", "Tensor.backward"), Expected(kind="backward", step=0))),
        machine="products and sums in another order",
    ),
    Case(
        name="missing_detach",
        source="https://github.com/philtabor/Deep-Q-Learning-Paper-To-Code/issues/9",
        what="the target of a bootstrapped value is not detached; the forward pass agrees",
        program=_bootstrapped(None),
        expected=_TARGET,
    ),
    Case(
        name="missing_detach_on_another_machine",
        source="https://github.com/philtabor/Deep-Q-Learning-Paper-To-Code/issues/9",
        what="the same where all else differs in rounding",
        program=_bootstrapped(accelerator("float16")),
        expected=_TARGET,
        machine="operands in float16, other norms and functions",
    ),
    Case(
        name="detached_scores",
        source="https://github.com/alexhernandezgarcia/gflownet/pull/251",
        what="a clone of the policy's scores is detached; the forward pass agrees",
        program=_detached,
        expected=Expected(
            any_of=(
                Expected(call="Tensor.detach", step=0),
                Expected(call="Tensor.clone", step=0),
                Expected(kind="calls", phase="backward", call="functional.log_softmax", step=0),
                Expected(module="policy", phase="backward", step=0),
            )
        ),
        machine="operands in float16",
    ),
    Case(
        name="padding_in_loss",
        source="https://github.com/huggingface/transformers/issues/2759",
        what="the loss ignores another index than the one that padding has",
        program=with_loss(_padded, kernels=accelerator("tf32")),
        expected=Expected(call="functional.cross_entropy", phase="forward", step=0),
        machine="operands in tf32, other norms and functions",
    ),
    Case(
        name="gate_not_renormalised",
        source="https://github.com/pytorch/torchtitan/issues/1448",
        what="the weights of the chosen experts do not add up to one",
        program=with_loss(_gated, model=Mixture, kernels=rounded_operands("bfloat16")),
        expected=_forward("moe"),
        machine="operands in bfloat16",
    ),
    Case(
        name="auxiliary_loss_constant",
        source="https://github.com/huggingface/transformers/issues/28255",
        what="the balancing loss reduces over the wrong dimension and is the same for any routing",
        program=with_loss(_balanced("constant"), model=Mixture, kernels=split_k(2)),
        expected=Expected(
            any_of=(
                *_calls("Tensor.amax", "Tensor.mean", "Tensor.sum", "Tensor.mul", "Tensor.__mul__"),
                Expected(kind="calls", module="", step=0),
            )
        ),
        machine="split-K products",
    ),
    Case(
        name="auxiliary_loss_absent",
        source="https://github.com/huggingface/transformers/issues/44242",
        what="the balancing loss is never added",
        program=with_loss(_balanced("absent"), model=Mixture, kernels=rounded_operands("float16")),
        expected=Expected(any_of=(Expected(kind="calls", module="", step=0), Expected(kind="backward", module="moe*", step=0))),
        machine="operands in float16",
    ),
]
