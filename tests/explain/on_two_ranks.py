# SPDX-License-Identifier: Apache-2.0
"""Two gloo processes that train together, honestly and not, and record themselves: `on_two_ranks.py RANK FOLDER`."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ulpscope.workflows.record.capturing import Capture

WIDTH, WORDS, STEPS = 8, 12, 2


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.norm(self.embed(ids)))))


def batches(rank: int) -> Iterable[tuple[Tensor, Tensor]]:
    ids = torch.randint(0, WORDS, (STEPS, 4, 7), generator=torch.Generator().manual_seed(rank))
    return [(one[:, :-1], one[:, 1:]) for one in ids]


def train(rank: int, done: Callable[[], None], model: nn.Module, called: nn.Module, settle: Callable[[nn.Module, int], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (ids, labels) in enumerate(batches(rank)):
        F.cross_entropy(called(ids).flatten(0, 1), labels.flatten()).backward()
        settle(model, step)
        optimizer.step()
        optimizer.zero_grad()
        done()


def average(model: nn.Module, without: str = "?") -> None:
    for name, parameter in model.named_parameters():
        if not name.startswith(without):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2


def wrapper(rank: int, done: Callable[[], None], is_faulty: bool) -> None:
    model = Tower()
    parallel = DistributedDataParallel(model)
    train(rank, done, model, model if is_faulty else parallel, lambda model, step: None)


def norm(rank: int, done: Callable[[], None], is_faulty: bool) -> None:
    model = Tower()
    train(rank, done, model, model, lambda model, step: average(model, "norm" if is_faulty else "?"))


def kernel(rank: int, done: Callable[[], None], is_faulty: bool) -> None:
    """A fault of one rank, before anything is reduced: the replicas part because of it, not by themselves."""
    model = Tower()

    def settle(model: nn.Module, step: int) -> None:
        pass

    if is_faulty and rank == 1:
        model.mix.register_forward_hook(lambda module, given, result: result * 1.5)
    torch.manual_seed(5)
    train(0, done, model, model, settle)


def stages(rank: int, done: Callable[[], None], is_faulty: bool) -> None:
    """Two stages of a pipeline with the same words under two names; each has its own share of their gradient."""
    first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    with torch.no_grad():
        last.weight.copy_(first.weight)
    model = nn.Sequential(OrderedDict({"words": first} if rank == 0 else {"scores": last}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, labels in batches(0):
        if rank == 0:
            hidden = model(ids)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            received = torch.empty(4, 6, WIDTH)
            dist.recv(received, 0)
            received.requires_grad_()
            F.cross_entropy(model(received).flatten(0, 1), labels.flatten()).backward()
            dist.send(received.grad, 0)
        if not is_faulty:
            dist.all_reduce((first if rank == 0 else last).weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        done()


PROGRAMS = {each.__name__: each for each in (wrapper, norm, kernel, stages)}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for name, program in PROGRAMS.items():
        for side in ("subject", "reference"):
            torch.manual_seed(0)
            with Capture(folder / f"{name}-{side}", keep="statistics") as capture:
                program(rank, capture.step, side == "subject")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
