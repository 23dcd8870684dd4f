# SPDX-License-Identifier: Apache-2.0
"""Programs whose forward pass agrees and whose gradients do not, or whose optimizer forgets: no comparison of losses sees them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Expected, Program, Side, classifying
from bench.bugs.machines import Kernels, accelerator, machine_of, other_order, rounded_operands, split_k
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INPUTS, WIDTH, CLASSES, BATCH = 12, 24, 5, 16


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.head = (
            nn.Linear(INPUTS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.dropout = nn.Dropout(0.3)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc2(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.fc1(x)))
        return self.head(torch.tanh(self.fc3(x)))


def _trained(model: nn.Module, side: Side, kernels: Kernels | None = None, *, steps: int = 2, optimizer: Any = None) -> Program:
    stepper = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(steps, BATCH, INPUTS), torch.randint(0, CLASSES, (steps, BATCH))

    return classifying(model, stepper, inputs, labels, steps=steps, machine=machine_of(side, kernels))


class Checkpointed(Tower):
    """The middle is computed a second time in the backward pass, with dropout inside."""

    def __init__(self, is_rng_kept: bool) -> None:
        super().__init__()
        self._is_rng_kept = is_rng_kept

    def _dropped(self, x: Tensor) -> Tensor:
        return self.dropout(self.middle(x))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        x = checkpoint(self._dropped, x, use_reentrant=False, preserve_rng_state=self._is_rng_kept)
        return self.head(torch.tanh(self.fc3(x)))


def _recomputed(side: Side) -> Program:
    return _trained(Checkpointed(is_rng_kept=side == "reference"), side)


class Overwritten(Tower):
    """Weights are scaled by hand after the forward pass, where autograd does not see it and still needs them."""

    def __init__(self, is_overwritten: bool) -> None:
        super().__init__()
        self._is_overwritten = is_overwritten

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self._is_overwritten:
            self.fc3.weight.data.mul_(0.5)
        return y


def _overwritten(side: Side) -> Program:
    """Scale the weights after the forward pass; the reference does so after the backward pass, so both update the same weights."""
    model = Overwritten(is_overwritten=side == "subject")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, BATCH, INPUTS), torch.randint(0, CLASSES, (2, BATCH))

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        if side == "reference":
            model.fc3.weight.data.mul_(0.5)
        optimizer.step()

    return Program(step=step, model=model)


class Reversal(torch.autograd.Function):
    """The identity, with a gradient of the other sign; the subject forgets to turn it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Adversary(Tower):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.fc1(x)))
        return self.head(torch.tanh(self.fc3(Reversal.apply(x, self._factor))))


def _reversed(side: Side) -> Program:
    return _trained(Adversary(1.0 if side == "subject" else -1.0), side, rounded_operands("float16"))


class Swish(torch.autograd.Function):
    """x * sigmoid(x) with a backward of its own; on the subject it lacks a term."""

    is_short = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradients[0] * (s if Swish.is_short else s * (1 + x * (1 - s)))


class Swished(Tower):
    def middle(self, x: Tensor) -> Tensor:
        return Swish.apply(self.fc2(x))


def _hand_written(side: Side) -> Program:
    program = _trained(Swished(), side, split_k(2))

    def step(index: int) -> None:
        Swish.is_short = side == "subject"
        program.step(index)

    return Program(step=step, model=program.model, machine=program.machine)


class Branched(Tower):
    """Two branches add up; one of them is computed without gradients on the subject."""

    def __init__(self, is_blind: bool) -> None:
        super().__init__()
        self._is_blind = is_blind

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        with torch.set_grad_enabled(not self._is_blind):
            side = self.middle(x)
        return self.head(torch.tanh(self.fc3(x)) + side)


def _blind(side: Side) -> Program:
    return _trained(Branched(is_blind=side == "subject"), side, accelerator("tf32"))


def _frozen(side: Side) -> Program:
    model = Tower()
    model.fc2.weight.requires_grad_(side == "reference")
    return _trained(model, side, rounded_operands("float16"))


def _hooked(side: Side) -> Program:
    """Halve the gradient of one layer in a user's hook."""
    model = Tower()
    if side == "subject":
        model.fc2.weight.register_hook(lambda gradient: gradient * 0.5)
    return _trained(model, side, other_order())


def _resumed(side: Side) -> Program:
    """Resume from a checkpoint in step 2; the subject loads the weights only."""
    model = Tower()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    inputs, labels = torch.randn(4, BATCH, INPUTS), torch.randint(0, CLASSES, (4, BATCH))

    def step(index: int) -> None:
        if index == 2:
            kept = optimizers[0].state_dict()
            optimizers[0] = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if side == "reference":
                optimizers[0].load_state_dict(kept)
        optimizers[0].zero_grad()
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        optimizers[0].step()

    return Program(step=step, model=model, steps=4, machine=machine_of(side, rounded_operands("float16")))


def _left_out(side: Side) -> Program:
    """Leave one layer out of the optimizer's parameters."""
    model = Tower()
    parameters = [p for name, p in model.named_parameters() if side == "reference" or not name.startswith("fc3.")]
    return _trained(model, side, rounded_operands("tf32"), steps=3, optimizer=torch.optim.SGD(parameters, lr=0.1))


def _written_over(side: Side) -> Program:
    """Write to a weight between two steps, from outside of them."""
    model = Tower()
    program = _trained(model, side, split_k(2), steps=3)

    def step(index: int) -> None:
        if side == "subject" and index == 1:
            model.head.bias.data.clamp_(min=0)
        program.step(index)

    return Program(step=step, model=model, steps=3, machine=program.machine)


def _at(step: int = 0, **more: Any) -> Expected:
    return Expected(step=step, **more)


CASES = [
    Case(
        name="checkpoint_without_rng",
        source="https://pytorch.org/docs/stable/checkpoint.html",
        what="dropout draws other numbers when a checkpointed block is computed again",
        program=_recomputed,
        expected=Expected(
            any_of=(
                _at(call="functional.dropout"),
                _at(module="dropout"),
                _at(kind="rng"),
                _at(module="fc2", phase="backward"),
                _at(kind="recompute"),
            )
        ),
    ),
    Case(
        name="weights_overwritten_before_backward",
        source="https://pytorch.org/docs/stable/notes/autograd.html",
        what="weights are scaled through .data while the backward pass still needs them",
        program=_overwritten,
        expected=Expected(any_of=(_at(call="Tensor.mul_"), _at(call="functional.linear", module="fc3", phase="backward"))),
    ),
    Case(
        name="gradient_not_reversed",
        source="https://github.com/CuthbertCai/pytorch_DANN/issues/10",
        what="a gradient reversal layer does not turn the sign",
        program=_reversed,
        expected=_at(call="*Reversal*"),
        machine="operands in float16",
    ),
    Case(
        name="hand_written_backward",
        source="https://github.com/NACLab/ngc-learn/pull/159",
        what="the backward of a hand-written function lacks a term",
        program=_hand_written,
        expected=_at(call="*Swish*", phase="backward"),
        machine="split-K products",
    ),
    Case(
        name="branch_without_gradients",
        source="https://github.com/coqui-ai/TTS/issues/2348",
        what="one branch is computed under no_grad",
        program=_blind,
        expected=Expected(any_of=(_at(module="fc2"), _at(call="torch.tanh"), _at(call="*grad_enabled*"), _at(slot="gradient.fc2.*"))),
        machine="operands in tf32, other norms and functions",
    ),
    Case(
        name="weight_frozen",
        source="synthetic",
        what="one weight does not require a gradient",
        program=_frozen,
        expected=Expected(any_of=(_at(module="fc2"), _at(slot="*fc2.weight*"))),
        machine="operands in float16",
    ),
    Case(
        name="gradient_hook",
        source="synthetic",
        what="a hook halves the gradient of one weight",
        program=_hooked,
        expected=_at(slot="gradient.fc2.weight"),
        machine="products and sums in another order",
    ),
    Case(
        name="optimizer_state_not_restored",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/2613",
        what="after a restart the moments of Adam begin at zero",
        program=_resumed,
        expected=_at(2, call="optimizer.AdamW", phase="optimizer"),
        machine="operands in float16",
    ),
    Case(
        name="layer_left_out_of_optimizer",
        source="https://github.com/zjunlp/HVPNeT/issues/5",
        what="one layer is not among the parameters of the optimizer",
        program=_left_out,
        expected=Expected(any_of=(_at(kind="optimizer"), _at(1, kind="parameters", slot="parameter.fc3.*"))),
        machine="operands in tf32",
    ),
    Case(
        name="weight_written_between_steps",
        source="synthetic",
        what="a bias is clamped between two steps",
        program=_written_over,
        expected=Expected(any_of=(_at(1, kind="parameters", slot="parameter.head.bias"), _at(1, call="Tensor.clamp_"))),
        machine="split-K products",
    ),
]
