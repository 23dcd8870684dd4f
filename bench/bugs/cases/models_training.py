# SPDX-License-Identifier: Apache-2.0
"""Right models, trained in the wrong way: initialisation, batches, schedules, decay, clipping, tied weights, statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Expected, Program, Side, classifying, minimised
from bench.bugs.machines import Kernels, accelerator, machine_of, other_order, rounded_operands, split_k
from torch import Tensor, nn

INPUTS, WIDTH, CLASSES, BATCH = 12, 32, 5, 16


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2, self.head = (
            nn.Linear(INPUTS, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.fc1(x)))
        return self.head(F.gelu(self.fc2(x)))


def _data(steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, BATCH, INPUTS), torch.randint(0, CLASSES, (steps, BATCH))


def _bias(side: Side) -> Program:
    model = Classifier()
    if side == "subject":
        nn.init.ones_(model.fc2.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _plain(model, optimizer, side, accelerator("float16"))


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, side: Side, kernels: Kernels | None, steps: int = 2) -> Program:
    inputs, labels = _data(steps)

    return classifying(model, optimizer, inputs, labels, steps=steps, machine=machine_of(side, kernels))


def _schedule(side: Side) -> Program:
    """Warm up; on the subject the schedule moves before the optimizer does."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    inputs, labels = _data(3)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        if side == "subject":
            schedule._step_count = 2  # as in older versions of torch, which did not warn
            schedule.step()
        optimizer.step()
        if side == "reference":
            schedule.step()

    return Program(step=step, model=model, steps=3, machine=machine_of(side, rounded_operands("float16")))


def _decay(side: Side) -> Program:
    """Decay weights; norms and biases should not be decayed."""
    model = Classifier()
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 or (side == "subject" and name.startswith("norm."))]
    rest = [p for p in model.parameters() if not any(p is one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return _plain(model, torch.optim.AdamW(groups, lr=1e-2), side, split_k(3), steps=3)


def _coupled_decay(side: Side) -> Program:
    model = Classifier()
    kind = torch.optim.Adam if side == "subject" else torch.optim.AdamW
    return _plain(model, kind(model.parameters(), lr=1e-2, weight_decay=0.1), side, rounded_operands("tf32"))


def _betas(side: Side) -> Program:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95 if side == "subject" else 0.999))
    return _plain(model, optimizer, side, rounded_operands("float16"), steps=3)


def _kept_gradients(side: Side) -> Program:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(3)

    def step(index: int) -> None:
        if side == "reference":
            optimizer.zero_grad()
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        optimizer.step()

    return Program(step=step, model=model, steps=3, machine=machine_of(side, other_order()))


def _clipped_scaled(side: Side) -> Program:
    """Clip gradients while they still carry the scale of mixed precision."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs[index]), labels[index])).backward()
        if side == "reference":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Program(step=step, model=model)


def _clipped_each(side: Side) -> Program:
    """Clip the gradients of two micro-batches after each instead of once."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(4)

    def step(index: int) -> None:
        optimizer.zero_grad()
        for micro in (2 * index, 2 * index + 1):
            F.cross_entropy(model(inputs[micro]), labels[micro]).backward()
            if side == "subject" or micro % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("float16")))


class Tied(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.tokens.weight if is_tied else nn.Parameter(self.tokens.weight.detach().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(tokens))))


def _untied(side: Side) -> Program:
    model = Tied(is_tied=side == "reference")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randint(0, 20, (3, BATCH, 9))

    return minimised(
        model,
        optimizer,
        lambda index: F.cross_entropy(model(batches[index, :, :-1]).flatten(0, 1), batches[index, :, 1:].flatten()),
        steps=3,
        machine=machine_of(side, split_k(2)),
    )


def _shuffled(side: Side) -> Program:
    """Two steps make an epoch; the shuffle has to know which one it is."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(2 * BATCH, INPUTS), torch.randint(0, CLASSES, (2 * BATCH,))

    def step(index: int) -> None:
        epoch = 0 if side == "subject" else index // 2
        order = torch.randperm(2 * BATCH, generator=torch.Generator().manual_seed(epoch))
        chosen = order[index % 2 * BATCH :][:BATCH]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()

    return Program(step=step, model=model, steps=4, machine=machine_of(side, rounded_operands("float16")))


class Backbone(nn.Module):
    """A frozen feature extractor with batch norm, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, CLASSES)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        for frozen in (self.conv, self.norm):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def _frozen(side: Side) -> Program:
    model = Backbone()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    images, labels = torch.randn(2, BATCH, 3, 8, 8), torch.randint(0, CLASSES, (2, BATCH))

    def step(index: int) -> None:
        model.train()
        if side == "reference":
            model.norm.eval()
        optimizer.zero_grad()
        F.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, accelerator("tf32")))


def _averaged(side: Side) -> Program:
    """Keep an average of the weights and evaluate it; the subject never tells it of the last layer."""
    model, average = Classifier(), Classifier()
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(3)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        optimizer.step()
        with torch.no_grad():
            for (name, kept), new in zip(average.named_parameters(), model.parameters(), strict=True):
                if side == "reference" or not name.startswith("head."):
                    kept.lerp_(new, 0.1)
            average(inputs[index]).softmax(-1)

    return Program(
        step=step, model=nn.ModuleDict({"model": model, "average": average}), steps=3, machine=machine_of(side, rounded_operands("float16"))
    )


def _anywhere(*kinds: str, step: int = 0) -> tuple[Expected, ...]:
    return tuple(Expected(kind=kind, step=step) for kind in kinds)


CASES = [
    Case(
        name="bias_initialised_wrong",
        source="https://github.com/zymissy/CCViM/issues/6",
        what="one bias begins at one instead of zero or noise",
        program=_bias,
        expected=Expected(kind="parameters", slot="parameter.fc2.bias", step=0),
        machine="operands in float16, other norms and functions",
    ),
    Case(
        name="schedule_off_by_one",
        source="https://github.com/ildoonet/pytorch-gradual-warmup-lr/issues/8",
        what="the learning rate is that of the next step",
        program=_schedule,
        expected=Expected(kind="optimizer", call="optimizer.AdamW", phase="optimizer", step=0),
        machine="operands in float16",
    ),
    Case(
        name="decay_of_norms",
        source="https://github.com/ServiceNow/Fast-LLM/issues/542",
        what="weight decay also shrinks the weights of a norm",
        program=_decay,
        expected=Expected(kind="optimizer", call="optimizer.AdamW", phase="optimizer", step=0),
        machine="split-K products",
    ),
    Case(
        name="decay_coupled",
        source="https://github.com/keras-team/keras/issues/19051",
        what="weight decay goes through the moments of Adam instead of beside them",
        program=_coupled_decay,
        expected=Expected(any_of=(Expected(call="optimizer.Adam*", step=0), Expected(kind="optimizer", step=0))),
        machine="operands in tf32",
    ),
    Case(
        name="betas",
        source="synthetic",
        what="the second beta of Adam is 0.95 instead of 0.999; the first step's parameters hardly tell",
        program=_betas,
        expected=Expected(kind="optimizer", call="optimizer.AdamW", phase="optimizer", step=0),
        machine="operands in float16",
    ),
    Case(
        name="gradients_not_zeroed",
        source="https://github.com/IDEA-Research/DN-DETR/issues/19",
        what="gradients of the step before are still there",
        program=_kept_gradients,
        expected=Expected(any_of=(Expected(slot="gradient.*", step=1), *_anywhere("backward", "optimizer", step=1))),
        machine="products and sums in another order",
    ),
    Case(
        name="clipped_before_unscaling",
        source="https://github.com/pytorch/examples/issues/1196",
        what="gradients are clipped while they are still scaled",
        program=_clipped_scaled,
        expected=Expected(
            any_of=(
                *_anywhere("calls", "optimizer", "backward"),
                Expected(call="torch._foreach*", step=0),
                Expected(call="torch._amp*", step=0),
            )
        ),
    ),
    Case(
        name="clipped_each_micro_batch",
        source="https://github.com/huggingface/transformers/issues/1563",
        what="gradients are clipped after every micro-batch instead of once before the step",
        program=_clipped_each,
        expected=Expected(any_of=(*_anywhere("calls", "optimizer"), Expected(call="torch._foreach*", step=0))),
        machine="operands in float16",
    ),
    Case(
        name="head_not_tied",
        source="https://github.com/NVIDIA/Megatron-LM/issues/656",
        what="the head begins with the embedding's weights but is a parameter of its own",
        program=_untied,
        expected=Expected(
            any_of=(
                Expected(kind="parameters", slot="*head.weight", step=0),
                Expected(slot="*.tokens.weight*", step=0),
                Expected(slot="*.head.weight*", step=0),
            )
        ),
        machine="split-K products",
    ),
    Case(
        name="epoch_not_set",
        source="https://github.com/pytorch/pytorch/issues/31771",
        what="the second epoch is shuffled like the first",
        program=_shuffled,
        expected=Expected(any_of=(Expected(kind="batch", step=2), Expected(call="torch.randperm", step=2), Expected(kind="rng", step=2))),
        machine="operands in float16",
    ),
    Case(
        name="frozen_batch_norm_trains",
        source="https://github.com/kdexd/virtex/issues/16",
        what="batch norm of a frozen backbone is in training mode",
        program=_frozen,
        expected=Expected(call="functional.batch_norm", module="norm", phase="forward", step=0),
        machine="operands in tf32, other norms and functions",
    ),
    Case(
        name="average_not_updated",
        source="synthetic",
        what="the moving average of the weights leaves out the last layer",
        program=_averaged,
        expected=Expected(
            any_of=(Expected(call="Tensor.lerp_", step=0), Expected(slot="*average.head.*", step=0), Expected(kind="calls", step=0))
        ),
        machine="operands in float16",
    ),
]
