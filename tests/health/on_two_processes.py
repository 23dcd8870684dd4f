# SPDX-License-Identifier: Apache-2.0
"""Train as one of two processes under a health recording: `on_two_processes.py RANK FOLDER`. Its result is in FOLDER/RANK.json.

Every program trains without a recording and with one, from the same seed; the parameters have to be equal bit by bit.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from ulpscope.workflows.health_recording import watch

STEPS = 12
FAULT = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 31), nn.Tanh(), nn.Linear(31, 3))


def whole() -> nn.Module:
    """Return the network for one process that takes the batches of both."""
    return network()


def data_parallel() -> nn.Module:
    return DistributedDataParallel(network())


def fully_sharded() -> nn.Module:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel() -> nn.Module:
    """Weights cut along columns in one layer and along rows in the next, with a bias that every process has."""
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, into: Path | None, *, fault: bool = False, alone: bool = False) -> list[torch.Tensor]:
    """Train a few steps; with a fault, from step 6 on the last layer of rank 1 keeps its own gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = None if into is None else watch(model, optimizer, into=into, quiet=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        ranks = [0, 1] if alone else [dist.get_rank()]
        loss = torch.stack([model(batch(step, rank)).square().mean() for rank in ranks]).mean()
        loss.backward()
        if fault and step >= FAULT and dist.get_rank() == 1:
            list(model.parameters())[-1].grad.mul_(3)
        optimizer.step()
        if handle is not None:
            handle.log(loss=loss)
    if handle is not None:
        handle.close()
    return [local(parameter) for parameter in model.parameters()]


def local(parameter: Any) -> torch.Tensor:
    values = parameter.detach()
    return (values.to_local() if hasattr(values, "to_local") else values).clone()


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    equal: dict[str, bool] = {}
    for build in (data_parallel, fully_sharded):
        without, watched = train(build(), None), train(build(), folder / build.__name__)
        equal[build.__name__] = all(torch.equal(one, other) for one, other in zip(without, watched, strict=True))
    without = train(tensor_parallel(), None, alone=True)
    watched = train(tensor_parallel(), folder / "tensor_parallel", alone=True)
    equal["tensor_parallel"] = all(torch.equal(one, other) for one, other in zip(without, watched, strict=True))
    train(data_parallel(), folder / "drifting", fault=True)
    if rank == 0:
        train(whole(), folder / "alone", alone=True)
    (folder / f"{rank}.json").write_text(json.dumps(equal))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
