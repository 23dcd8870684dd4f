# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks that should stay alike, or should act as one, and do not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench.bugs.case import Case, Expected, Program, Side, minimised
from bench.bugs.machines import machine_of, rounded_operands, split_k
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH, LENGTH = 24, 6, 8, 10


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.fc1(x))
        x = x + torch.tanh(self.fc2(x))
        return self.head(self.norm(x))


def own_share(x: Tensor, dim: int = 0) -> Tensor:
    """Return the part of a global batch that this rank works on."""
    return x.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _data(steps: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, 2 * BATCH, WIDTH), torch.randint(0, CLASSES, (steps, 2 * BATCH))


def _wrapped(side: Side) -> Program:
    """Train the wrapped model without going through its wrapper."""
    model = Tower()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(3)

    def step(index: int) -> None:
        optimizer.zero_grad()
        x, y = own_share(inputs[index]), own_share(labels[index])
        with parallel.no_sync() if side == "subject" else contextlib.nullcontext():
            F.cross_entropy((model if side == "subject" else parallel)(x), y).backward()
        optimizer.step()

    return Program(step=step, model=model, steps=3)


def _by_hand(side: Side) -> Program:
    """Average gradients by hand; the subject does not."""
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        if side == "reference":
            average_gradients(list(model.parameters()))
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("float16")))


def _sequence_parallel(side: Side) -> Program:
    """Each rank norms its half of the sequence, so the gradients of norms have to be added up over ranks."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, BATCH, LENGTH, WIDTH), torch.randint(0, CLASSES, (2, BATCH, LENGTH))
    forgotten = {"norm.weight", "norm.bias"} if side == "subject" else set()
    reduced = [p for name, p in model.named_parameters() if name not in forgotten]

    def step(index: int) -> None:
        optimizer.zero_grad()
        logits = model(own_share(inputs[index], dim=1))
        F.cross_entropy(logits.flatten(0, 1), own_share(labels[index], dim=1).flatten()).backward()
        average_gradients(reduced)
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, split_k(2)))


class Stage(nn.Module):
    """The first stage embeds, the last one scores with the same weights; each holds a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(20, WIDTH) * 0.5)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return F.linear(torch.tanh(self.mix(x)), self.words)
        return F.embedding(x, self.words)


def _pipeline(side: Side) -> Program:
    model = Stage()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    batches = torch.randint(0, 20, (3, BATCH, LENGTH + 1))

    def step(index: int) -> None:
        optimizer.zero_grad()
        tokens, labels = batches[index, :, :-1], batches[index, :, 1:]
        if dist.get_rank() == 0:
            sent = model(tokens)
            dist.send(sent.detach(), 1)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, 1)
            sent.backward(gradient)
        else:
            received = torch.empty(BATCH, LENGTH, WIDTH)
            dist.recv(received, 0)
            received.requires_grad_()
            F.cross_entropy(model(received).flatten(0, 1), labels.flatten()).backward()
            dist.send(received.grad, 0)
        if side == "reference":
            dist.all_reduce(model.words.grad)
        optimizer.step()

    return Program(step=step, model=model, steps=3)


def _sharded_clip(side: Side) -> Program:
    """Each rank holds half of every parameter, so the norm to clip by is that of both halves."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        average_gradients(list(model.parameters()))
        shares = [own_share(parameter.grad) for parameter in model.parameters()]
        total = torch.stack([share.square().sum() for share in shares]).sum()
        if side == "reference":
            dist.all_reduce(total)
        factor = (0.1 / total.sqrt()).clamp(max=1.0)
        for share in shares:
            share.mul_(factor)
        for parameter in model.parameters():
            parts = [torch.empty_like(part) for part in parameter.grad.chunk(2)]
            dist.all_gather(parts, own_share(parameter.grad).contiguous())
            parameter.grad.copy_(torch.cat(parts))
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("tf32")))


def _late_bucket(side: Side) -> Program:
    """One bucket is copied back before its reduction of this step has begun, so it holds the step before."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(4)
    buckets = [list(part.parameters()) for part in (model.fc1, model.fc2, nn.ModuleList([model.norm, model.head]))]
    kept: dict[int, Tensor] = {}

    def reduce(number: int) -> Tensor:
        flat = torch.cat([p.grad.flatten() for p in buckets[number]])
        dist.all_reduce(flat)
        return flat / 2

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        for number, bucket in enumerate(buckets):
            now = reduce(number)
            flat = kept.get(number, now) if side == "subject" and number == 1 else now
            kept[number] = now
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(part.view_as(p))
        optimizer.step()

    return Program(step=step, model=model, steps=4)


def _token_average(side: Side) -> Program:
    """Ranks have unequal numbers of labels; the mean is to be taken over all of them."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(2)
    labels[:, 2:BATCH] = -100

    def step(index: int) -> None:
        optimizer.zero_grad()
        y = own_share(labels[index])
        count = (y != -100).sum()
        if side == "reference":
            dist.all_reduce(count)
            count = count / 2
        loss = F.cross_entropy(model(own_share(inputs[index])), y, reduction="sum") / count
        loss.backward()
        average_gradients(list(model.parameters()))
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("float16")))


def _ignored(side: Side) -> Program:
    """Tell the wrapper to leave one layer alone."""
    model = Tower()
    if side == "subject":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["fc2.weight", "fc2.bias"])
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(2)

    return minimised(
        model,
        optimizer,
        lambda index: F.cross_entropy(parallel(own_share(inputs[index])), own_share(labels[index])),
        machine=machine_of(side, rounded_operands("float16")),
    )


def _reduced_copy(side: Side) -> Program:
    """Reduce the gradient of one layer in a copy that is never used."""
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        for name, parameter in model.named_parameters():
            is_copied = side == "subject" and name == "fc2.weight"
            gradient = parameter.grad.clone() if is_copied else parameter.grad
            dist.all_reduce(gradient)
            gradient /= 2
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, split_k(2)))


def _largest(side: Side) -> Program:
    """Gradients are combined by their maximum."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX if side == "subject" else dist.ReduceOp.SUM)
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("tf32")))


def _unequal_start(side: Side) -> Program:
    """Replicas are not given the same weights before the first step: one rank was seeded by its number."""
    if side == "subject" and dist.get_rank() == 1:
        torch.manual_seed(99)
    model = Tower()
    torch.manual_seed(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        average_gradients(list(model.parameters()))
        optimizer.step()

    return Program(step=step, model=model)


_NOT_REDUCED = (
    Expected(call="*all_reduce*", step=0),
    Expected(slot="gradient.*", step=0),
    Expected(kind="replicas", step=0),
)

CASES = [
    Case(
        name="wrapper_bypassed",
        source="https://github.com/intel/e2eAIOK/pull/198",
        what="the model is called without its data-parallel wrapper, so gradients stay local",
        program=_wrapped,
        expected=Expected(any_of=_NOT_REDUCED),
        ranks=2,
    ),
    Case(
        name="gradients_not_averaged",
        source="https://github.com/intel/e2eAIOK/pull/198",
        what="nobody averages the gradients over ranks",
        program=_by_hand,
        expected=Expected(any_of=_NOT_REDUCED),
        machine="operands in float16",
        ranks=2,
    ),
    Case(
        name="norm_gradient_not_reduced",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1446",
        what="with sequence parallelism the gradients of the last norm are not added up over ranks",
        program=_sequence_parallel,
        expected=Expected(
            any_of=(
                Expected(call="*all_reduce*", step=0),
                Expected(slot="gradient.norm.*", step=0),
                Expected(slot="*.norm.*", kind="replicas", step=0),
            )
        ),
        machine="split-K products",
        ranks=2,
    ),
    Case(
        name="tied_head_drifts",
        source="https://github.com/NVIDIA/Megatron-LM/issues/656",
        what="the first and the last stage share their word embeddings, but not the gradients of them",
        program=_pipeline,
        expected=Expected(any_of=(Expected(call="*all_reduce*", step=0), Expected(slot="gradient.words", step=0))),
        ranks=2,
    ),
    Case(
        name="clip_on_local_norm",
        source="https://github.com/pytorch/pytorch/issues/170862",
        what="gradients are clipped by the norm of this rank's shards",
        program=_sharded_clip,
        expected=Expected(any_of=(Expected(call="*all_reduce*", step=0), Expected(call="Tensor.sqrt", step=0))),
        machine="operands in tf32",
        ranks=2,
    ),
    Case(
        name="bucket_one_step_late",
        source="https://github.com/deepspeedai/DeepSpeed/issues/8061",
        what="one bucket of gradients is that of the step before",
        program=_late_bucket,
        expected=Expected(
            any_of=(
                Expected(call="Tensor.split", step=1),
                Expected(slot="gradient.fc2.*", step=1),
                Expected(kind="stale", step=1),
                Expected(call="Tensor.copy_", step=1),
            )
        ),
        ranks=2,
    ),
    Case(
        name="mean_of_local_means",
        source="https://github.com/huggingface/transformers/issues/34242",
        what="losses are averaged over ranks with unequal numbers of labels",
        program=_token_average,
        expected=Expected(
            any_of=(Expected(call="*all_reduce*", step=0), Expected(call="Tensor.div", step=0), Expected(call="Tensor.__truediv__", step=0))
        ),
        machine="operands in float16",
        ranks=2,
    ),
    Case(
        name="layer_ignored_by_wrapper",
        source="https://github.com/pytorch/pytorch/issues/112152",
        what="the wrapper leaves out the gradients of one layer; no call differs",
        program=_ignored,
        expected=Expected(any_of=(Expected(slot="gradient.*fc2.*", step=0), Expected(slot="*fc2.*", kind="replicas", step=0))),
        machine="operands in float16",
        ranks=2,
    ),
    Case(
        name="reduced_in_a_copy",
        source="synthetic",
        what="the gradient of one layer is reduced in a copy",
        program=_reduced_copy,
        expected=Expected(
            any_of=(
                Expected(call="Tensor.clone", step=0),
                Expected(slot="gradient.fc2.weight", step=0),
                Expected(slot="*fc2.weight", kind="replicas", step=0),
            )
        ),
        machine="split-K products",
        ranks=2,
    ),
    Case(
        name="reduced_by_maximum",
        source="synthetic",
        what="gradients are combined by their maximum instead of their sum",
        program=_largest,
        expected=Expected(call="*all_reduce*", step=0),
        machine="operands in tf32",
        ranks=2,
    ),
    Case(
        name="replica_seeded_alone",
        source="https://github.com/pytorch/pytorch/issues/112152",
        what="one rank begins with other weights",
        program=_unequal_start,
        expected=Expected(kind="parameters", step=0, rank=1),
        ranks=2,
    ),
]
