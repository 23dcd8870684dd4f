# SPDX-License-Identifier: Apache-2.0
"""Run one of two processes whose second makes an infinite gradient: `on_two_processes.py RANK FOLDER`, once by DDP and once by hand."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

import ulpscope


class Rooted(nn.Module):
    """Takes a square root at 0, where its slope is infinite: the batch is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(self.linear(x))


def model() -> Rooted:
    torch.manual_seed(0)
    net = Rooted()
    with torch.no_grad():
        net.linear.weight.copy_(torch.eye(4))
        net.linear.bias.zero_()
    net.linear.bias.requires_grad_(False)
    return net


def batch(step: int) -> torch.Tensor:
    is_bad = step == 1 and dist.get_rank() == 1
    return torch.full((2, 4), 0.0 if is_bad else 1.0)


def by_wrapper(folder: Path) -> None:
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with ulpscope.Capture(folder / "wrapper", net, watch="nonfinite") as capture:
        for step in range(3):
            optimizer.zero_grad()
            net(batch(step)).sum().backward()
            optimizer.step()
            capture.step()


def by_hand(folder: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with ulpscope.Capture(folder / "hand", net, watch="nonfinite") as capture:
        for step in range(3):
            optimizer.zero_grad()
            net(batch(step)).sum().backward()
            dist.all_reduce(net.linear.weight.grad)
            optimizer.step()
            capture.step()


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for program in (by_wrapper, by_hand):
        program(folder)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
