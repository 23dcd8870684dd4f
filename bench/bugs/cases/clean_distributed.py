# SPDX-License-Identifier: Apache-2.0
"""Clean pairs of two gloo ranks: the same sums of gradients by other ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench.bugs.case import Case, Program, Side, minimised
from bench.bugs.cases.distributed_replicas import Tower, average_gradients, own_share
from bench.bugs.machines import machine_of, rounded_operands, split_k
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES, BATCH = 24, 6, 8


def _data(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(steps, 2 * BATCH, WIDTH), torch.randint(0, CLASSES, (steps, 2 * BATCH))


def _buckets(side: Side) -> Program:
    """One bucket against many."""
    model = Tower()
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.001 if side == "subject" else 25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = _data(3)

    return minimised(model, optimizer, lambda index: F.cross_entropy(parallel(own_share(inputs[index])), own_share(labels[index])), steps=3)


def _by_hand(side: Side) -> Program:
    """The data-parallel wrapper against averaging by hand, on another backend."""
    model = Tower()
    parallel: Any = model if side == "subject" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(parallel(own_share(inputs[index])), own_share(labels[index])).backward()
        if side == "subject":
            average_gradients(list(model.parameters()))
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("float16")))


def _flat(side: Side) -> Program:
    """One reduction of all gradients in one piece against one for each."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        parameters = list(model.parameters())
        if side == "subject":
            flat = torch.cat([p.grad.flatten() for p in parameters])
            dist.all_reduce(flat)
            for p, part in zip(parameters, (flat / 2).split([p.numel() for p in parameters]), strict=True):
                p.grad.copy_(part.view_as(p))
        else:
            average_gradients(parameters)
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, split_k(3)))


def _same(side: Side) -> Program:
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = _data(2)

    def step(index: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(own_share(inputs[index])), own_share(labels[index])).backward()
        average_gradients(list(model.parameters()))
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("tf32")))


CASES = [
    Case(name="clean_buckets", source="synthetic", what="gradients in many buckets against one", program=_buckets, ranks=2),
    Case(
        name="clean_wrapper_by_hand",
        source="synthetic",
        what="averaging by hand against the wrapper",
        program=_by_hand,
        ranks=2,
        machine="operands in float16",
    ),
    Case(
        name="clean_flat_reduction",
        source="synthetic",
        what="one reduction against many",
        program=_flat,
        ranks=2,
        machine="split-K products",
    ),
    Case(
        name="clean_two_ranks", source="synthetic", what="two ranks on another backend", program=_same, ranks=2, machine="operands in tf32"
    ),
]
