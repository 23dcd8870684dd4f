# SPDX-License-Identifier: Apache-2.0
"""Train small programs in several processes, one for each way in which work is laid out over ranks.

`LAYOUTS[name](rank, world_size, step)` trains with the existing process group, calls `step` at the end of each step and returns the values
that must be bitwise the same whether it is recorded or not. `WORLD_SIZES[name]` is the number of its processes. Each sets its own seeds;
gloo on the CPU is enough.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# Imported by name before any capture begins, as programs do.
from torch.distributed import all_reduce, irecv, isend
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LAYOUTS", "WITHOUT_MODULES", "WORLD_SIZES", "nothing"]

LAYOUTS: dict[str, Callable[..., dict[str, Any]]] = {}
WORLD_SIZES: dict[str, int] = {}
WITHOUT_MODULES = ("sends_and_receives",)
"""At level `module` these have nothing to record."""

_WIDTH, _BATCH, _STEPS = 8, 8, 2


def nothing() -> None:
    """Do nothing at the end of a step that is not recorded."""


def layout(world_size: int) -> Callable[..., Any]:
    def keep(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        LAYOUTS[function.__name__] = function
        WORLD_SIZES[function.__name__] = world_size
        return function

    return keep


class Block(nn.Module):
    """A residual feed-forward block with the names that plans for tensor parallelism use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(number: int = 2) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(Block() for _ in range(number)))


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (_BATCH, _WIDTH)), generator=torch.Generator().manual_seed(100 * step + rank))


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (tensor.wait() if hasattr(tensor, "trigger_wait") else tensor).clone()


def results(losses: list[torch.Tensor], model: nn.Module, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {f"loss {number}": local(loss) for number, loss in enumerate(losses)} | more
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"], found[f"gradient {name}"] = local(parameter), local(parameter.grad)
    return found | {"rng": torch.get_rng_state()}


def train(model: nn.Module, rank: int, step: Callable[[], None], loss_of: Any = None) -> dict[str, Any]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, number) if loss_of is not None else model(batch(rank, number)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        step()
    return results(losses, model)


# ---- between pairs


@layout(2)
def sends_and_receives(rank, world_size, step=nothing):
    """Send and receive, blocking and not, one by one and as a batch, by functions imported before and after, into memory that was never
    written.
    """
    seen, other = {}, 1 - rank
    for number in range(_STEPS):
        x, received = batch(rank, number), torch.empty(_BATCH, _WIDTH)
        works = [isend(x * 2, other), irecv(received, other)]
        view = received.view(-1)
        for work in works:
            work.wait()
        doubled = received * 2 + view.view_as(received)
        operations = [dist.P2POp(dist.isend, doubled, other), dist.P2POp(dist.distributed_c10d.irecv, torch.empty_like(doubled), other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        first = dist.P2POp(isend, x, other), dist.P2POp(irecv, torch.empty_like(x), other)
        for work in dist.batch_isend_irecv(list(first)):
            work.wait()
        mine = first[1].tensor + operations[1].tensor
        if rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
        seen |= {f"received {number}": received, f"batch {number}": operations[1].tensor.clone(), f"mine {number}": mine + 1}
        step()
    return seen


@layout(2)
def experts(rank, world_size, step=nothing):
    """Send tokens to their expert's rank and back, by a Function written by hand."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            output = torch.empty_like(x)
            dist.all_to_all_single(output, x.contiguous())
            return output

        @staticmethod
        def backward(ctx, gradient):
            output = torch.empty_like(gradient)
            dist.all_to_all_single(output, gradient.contiguous(), async_op=True).wait()
            return output

    model = blocks(2)
    router, expert = model[0], model[1]

    def loss_of(model, number):
        x = router(batch(rank, number))
        return Exchange.apply(expert(Exchange.apply(x))).square().mean()

    return train(model, rank, step, loss_of)


# ---- collectives


@layout(2)
def asynchronous(rank, world_size, step=nothing):
    """Begin every kind of collective, and wait later; view memory under way; use one half of flat memory."""
    model = blocks(1)
    optimizer, losses, seen = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    for number in range(_STEPS):
        optimizer.zero_grad()
        loss = model(batch(rank, number)).square().mean()
        loss.backward()
        works = [all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        shapes = [parameter.grad.view(-1) for parameter in model.parameters()]
        for work in works:
            work.wait()
        for parameter in model.parameters():
            parameter.grad.div_(world_size)
        flat = torch.cat([shape * 0.5 for shape in shapes])
        lower, upper = flat.tensor_split(2)
        work = dist.all_reduce(lower, async_op=True)
        total = upper.mul_(3.0).sum()
        work.wait()
        gathered = [torch.empty(3) for _ in range(2)]
        later = [dist.all_gather(gathered, batch(rank, number, 3), async_op=True)]
        single, piece = torch.empty(4), torch.empty(2)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        later += [gather(single, batch(rank, number, 2), async_op=True), scatter(piece, batch(rank, number, 4), async_op=True)]
        future = dist.all_reduce(value := batch(rank, number, 5), async_op=True).get_future()
        future.wait()
        value.mul_(2)
        for each in reversed(later):
            each.wait()
        sent = batch(rank, number, 3)
        dist.broadcast(sent, src=1)
        with dist.distributed_c10d._coalescing_manager():
            together = [batch(rank, number, 2), batch(rank, number + 5, 3)]
            for each in together:
                dist.all_reduce(each)
        apart = [batch(rank, number, 2), batch(rank, number + 5, 3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for each in apart:
                dist.all_reduce(each, async_op=True)
        manager.wait()
        everything = [*gathered, single, piece, value, sent, *together, *apart, flat, total]
        seen |= {f"{number} {index}": (each + 1).clone() for index, each in enumerate(everything)}
        optimizer.step()
        losses.append(loss)
        step()
    return results(losses, model, **seen)


@layout(2)
def functional(rank, world_size, step=nothing):
    """Functional collectives, whose results wait for themselves, and those of torch.distributed.nn, which are differentiable."""
    import torch.distributed._functional_collectives as funcol
    import torch.distributed.nn.functional as differentiable

    gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)

    def loss_of(model, number):
        x = model(batch(rank, number))
        summed = funcol.all_reduce(x.detach(), "sum", dist.group.WORLD)
        early = summed.view(-1)
        both = gather(x.detach(), 0, dist.group.WORLD)
        x = differentiable.all_reduce(x) + summed
        waited = funcol.wait_tensor(early) if isinstance(early, funcol.AsyncCollectiveTensor) else early
        pieces = differentiable.all_gather(x)
        return (pieces[0] * pieces[1]).mean() + (both.sum() + waited.sum()) * x.mean()

    return train(blocks(1), rank, step, loss_of)


# ---- data parallel


@layout(2)
def data_parallel_hooked(rank, world_size, step=nothing):
    """Reduce each bucket in a hook, with a graph that is told to stay as it is."""
    model = DistributedDataParallel(blocks(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=1)

    def halved(state, bucket):
        work = dist.all_reduce(bucket.buffer() / world_size, async_op=True).get_future()
        return work.then(lambda future: future.value()[0])

    model.register_comm_hook(None, halved)
    return train(model, rank, step)


@layout(2)
def data_parallel_compressed(rank, world_size, step=nothing):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DistributedDataParallel(blocks())
    model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return train(model, rank, step)


@layout(2)
def fully_sharded(rank, world_size, step=nothing):
    from torch.distributed.fsdp import fully_shard

    model = blocks()
    for block in model:
        fully_shard(block)
    return train(fully_shard(model), rank, step)


@layout(4)
def hybrid_sharded(rank, world_size, step=nothing):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = blocks(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model:
        fully_shard(block, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), rank, step)


@layout(2)
def checkpointed(rank, world_size, step=nothing):
    """Save by torch.distributed.checkpoint in the middle of the run, change the model, and load it again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(blocks())
    folder = Path(tempfile.gettempdir()) / f"layout-{os.getppid()}"

    def loss_of(model, number):
        loss = model(batch(rank, number)).square().mean()
        state = get_model_state_dict(model)
        dcp.save(state, checkpoint_id=str(folder / str(number)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        dcp.load(state, checkpoint_id=str(folder / str(number)))
        set_model_state_dict(model, state)
        return loss

    found = train(model, rank, step, loss_of)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return found


# ---- tensor parallel


def parallelized(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in model:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model[0], mesh, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True)
    )
    parallelize_module(model[-1], mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()))
    return model


@layout(2)
def tensor_parallel(rank, world_size, step=nothing):
    """Train column, row and sequence parallel by DTensor, whose shards are results of functional collectives."""
    from torch.distributed.device_mesh import init_device_mesh

    model = parallelized(blocks(), init_device_mesh("cpu", (2,)))
    return train(model, rank, step, lambda model, number: model(batch(0, number)).square().mean())


@layout(4)
def tensor_and_data_parallel(rank, world_size, step=nothing):
    """Reduce the gradients of tensor-parallel shards over the other dimension by hand."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, group = parallelized(blocks(), mesh["tensor"]), mesh["data"].get_group()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(_STEPS):
        optimizer.zero_grad()
        loss = model(batch(mesh["data"].get_local_rank(), number)).square().mean()
        loss.backward()
        shards = [parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad for parameter in model.parameters()]
        shards = [shard.wait() if hasattr(shard, "trigger_wait") else shard for shard in shards]
        for work in [dist.all_reduce(shard, group=group, async_op=True) for shard in shards]:
            work.wait()
        optimizer.step()
        losses.append(loss)
        step()
    return results(losses, model)


@layout(4)
def tensor_parallel_and_sharded(rank, world_size, step=nothing):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelized(blocks(), mesh["tensor"])
    for block in model:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    data = mesh["data"].get_local_rank()
    return train(model, rank, step, lambda model, number: model(batch(data, number)).square().mean())


@layout(2)
def tensor_parallel_by_hand(rank, world_size, step=nothing):
    """Train as Megatron-LM does: two Functions, one of which reduces forward and the other backward, asynchronously."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient, async_op=True).wait()
            return gradient

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    model = blocks(1)
    with torch.no_grad():
        half = slice(rank * _WIDTH, (rank + 1) * _WIDTH)
        block = model[0]
        block.up.weight = nn.Parameter(block.up.weight[half].clone())
        block.up.bias = nn.Parameter(block.up.bias[half].clone())
        block.down.weight = nn.Parameter(block.down.weight[:, half].clone())

    def loss_of(model, number):
        block, x = model[0], batch(0, number)
        hidden = F.gelu(F.linear(Copy.apply(block.norm(x)), block.up.weight, block.up.bias))
        return (x + Reduce.apply(F.linear(hidden, block.down.weight)) + block.down.bias).square().mean()

    return train(model, rank, step, loss_of)


# ---- pipelines


def pipelined(rank: int, world_size: int, step: Callable[[], None], schedule_name: str, stages_of: list[list[int]]) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, schedules

    number_of_stages = sum(map(len, stages_of))
    whole = blocks(number_of_stages)
    parts = [copy.deepcopy(whole[index]) for index in stages_of[rank]]
    kind = getattr(schedules, schedule_name)
    stages = [PipelineStage(part, index, number_of_stages, torch.device("cpu")) for part, index in zip(parts, stages_of[rank], strict=True)]
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if is_single else stages, 4, loss_fn=lambda output, target: F.mse_loss(output, target))
    model = nn.ModuleList(parts)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(_STEPS):
        optimizer.zero_grad()
        of_batch: list[torch.Tensor] = []
        inputs = (batch(0, number),) if 0 in stages_of[rank] else ()
        if number_of_stages - 1 in stages_of[rank]:
            schedule.step(*inputs, target=batch(9, number), losses=of_batch)
        else:
            schedule.step(*inputs)
        optimizer.step()
        losses += of_batch
        step()
    return results(losses, model)


@layout(2)
def pipeline_gpipe(rank, world_size, step=nothing):
    return pipelined(rank, world_size, step, "ScheduleGPipe", [[0], [1]])


@layout(2)
def pipeline_1f1b(rank, world_size, step=nothing):
    return pipelined(rank, world_size, step, "Schedule1F1B", [[0], [1]])


@layout(2)
def pipeline_interleaved(rank, world_size, step=nothing):
    return pipelined(rank, world_size, step, "ScheduleInterleaved1F1B", [[0, 2], [1, 3]])


@layout(2)
def pipeline_zero_bubble(rank, world_size, step=nothing):
    return pipelined(rank, world_size, step, "ScheduleInterleavedZeroBubble", [[0, 2], [1, 3]])


@layout(2)
def pipeline_zero_bubble_v(rank, world_size, step=nothing):
    return pipelined(rank, world_size, step, "ScheduleZBVZeroBubble", [[0, 3], [1, 2]])
