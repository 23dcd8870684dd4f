# SPDX-License-Identifier: Apache-2.0
"""Run one of two processes that train together: `on_two_processes.py RANK FOLDER`.

Each program runs without a capture and then with one for each case; differences are written to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harmless import programs
from tests.harmless.test_harmless import recorded, recording
from tests.older_torch import SHARDS_ON_CPU

CASES = [("api", "statistics"), ("both", "tensors"), ("op", "tensors")]


def tokens() -> torch.Tensor:
    """Make a batch of this rank's own."""
    return torch.randint(0, 23, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))


def language_loss(batch):
    return lambda net: F.cross_entropy(net(batch).flatten(0, 1), batch.flatten())


def data_parallel(record, device):
    model = DistributedDataParallel(programs.Gpt(p=0.1), bucket_cap_mb=1)
    return programs.train(record, model, programs.adam(model), language_loss(tokens()))


def data_parallel_accumulating(record, device):
    """Gradients of two batches before they are reduced, a bucket hook, and a parameter that is never used."""
    inner = programs.Mlp()
    inner.unused = nn.Parameter(torch.ones(3))
    model = DistributedDataParallel(inner, find_unused_parameters=True, gradient_as_bucket_view=True)
    model.register_comm_hook(None, halved)
    optimizer, losses = programs.sgd(model), []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(4, 8)).square().mean().backward()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return programs.outcome(losses, model, optimizer)


def halved(state, bucket):
    work = dist.all_reduce(bucket.buffer() / 4, async_op=True).get_future()
    return work.then(lambda future: future.value()[0])


def fully_sharded(record, device):
    model = programs.Gpt()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return programs.train(record, model, programs.adam(model), language_loss(tokens()))


def collectives(record, device):
    model, rank = programs.Mlp(), dist.get_rank()
    optimizer, seen = programs.sgd(model), []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for work in works:
                work.wait()
            optimizer.step()
            gathered = [torch.empty(3) for _ in range(2)]
            dist.all_gather(gathered, torch.full((3,), float(rank)))
            shard = torch.empty(2)
            dist.reduce_scatter_tensor(shard, torch.arange(4.0) + rank)
            value = torch.full((2,), float(rank))
            dist.broadcast(value, src=1)
            if rank == 0:
                dist.send(value + 1, dst=1)
            else:
                dist.recv(value, src=0)
            dist.barrier()
            seen += [loss.detach(), *gathered, shard, value]
            capture.step()
    return programs.outcome(seen, model, optimizer)


TOGETHER = {each.__name__: each for each in (data_parallel, data_parallel_accumulating, fully_sharded, collectives)}


def compare(name: str, folder: Path) -> dict[str, str]:
    """Run one program, and return what went wrong, by case."""
    without, wrong = programs.run(name, programs.Nothing), {}
    for level, keep in CASES:
        place = folder / f"{name}-{level}-{keep}"
        try:
            found = programs.differences(without, programs.run(name, recording(place, level, keep)))
            dist.barrier()
            calls, complaints = recorded(place)
            found += complaints + (["nothing was recorded"] if calls < 4 else [])
        except Exception:
            found = [traceback.format_exc()]
        wrong[f"{name}-{level}-{keep}"] = "\n".join(found)
    return wrong


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    programs.PROGRAMS.update(TOGETHER)
    wrong: dict[str, str] = {}
    for name in TOGETHER if SHARDS_ON_CPU else TOGETHER.keys() - {"fully_sharded"}:
        wrong |= compare(name, folder)
    (folder / f"{rank}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
