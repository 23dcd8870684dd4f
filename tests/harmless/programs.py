# SPDX-License-Identifier: Apache-2.0
"""Train small programs, one for each way in which recording could disturb a program.

Each takes `record(model=None, optimizer=None)`, which gives a context manager with a `step()` (a real capture, or nothing at all), trains
two or three steps inside it, and returns everything that must be bitwise the same either way.
"""

from __future__ import annotations

import copy
import io
import random
import threading
import warnings
from collections import Counter, namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

PROGRAMS: dict[str, Any] = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Nothing:
    """Stands in for a capture in the run without one."""

    def __init__(self, model=None, optimizer=None) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def step(self) -> None: ...


def run(name: str, record, device: str = "cpu") -> dict[str, Any]:
    """Run one program from a fixed seed, and return its results."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    result = PROGRAMS[name](record, device)
    result["rng"] = torch.get_rng_state()
    result["python rng"] = hash(random.getstate())
    result["numpy rng"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    return result


def outcome(losses=(), model=None, optimizer=None, **more: Any) -> dict[str, Any]:
    """Return losses, gradients, parameters, buffers and optimizer state, by name."""
    result: dict[str, Any] = {f"loss {i}": loss for i, loss in enumerate(losses)} | more
    models = model if isinstance(model, (list, tuple)) else [model] if model is not None else []
    for i, each in enumerate(models):
        for name, parameter in each.named_parameters():
            result[f"parameter {i} {name}"] = parameter.detach()
            result[f"gradient {i} {name}"] = parameter.grad
        for name, buffer in each.named_buffers():
            result[f"buffer {i} {name}"] = buffer
        result[f"hooks {i}"] = {name: _hook_counts(module) for name, module in each.named_modules()}
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []
    for i, each in enumerate(optimizers):
        result[f"optimizer {i}"] = each.state_dict()
    return result


def _hook_counts(module: nn.Module) -> list[int]:
    return [len(getattr(module, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")]


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Say in words where two results are not bitwise equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if _same_bits(left, right) else [f"{where}: {_describe(left)} became {_describe(right)}"]
    if type(left) is not type(right):
        return [f"{where}: {type(left).__name__} became {type(right).__name__}"]
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"{where}: keys {list(left)} became {list(right)}"]
        return [text for key in left for text in differences(left[key], right[key], f"{where}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{where}: {len(left)} entries became {len(right)}"]
        return [text for i, pair in enumerate(zip(left, right, strict=True)) for text in differences(*pair, f"{where}/{i}")]
    same = left == right or (left != left and right != right)
    return [] if same else [f"{where}: {left!r} became {right!r}"]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = _plain(left), _plain(right)
    if (left.dtype, left.shape, left.stride()) != (right.dtype, right.shape, right.stride()):
        return False
    words = [tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*words)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor = tensor.coalesce() if tensor.is_sparse else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.cpu().resolve_conj().resolve_neg().as_subclass(torch.Tensor)


def _describe(tensor: torch.Tensor) -> str:
    plain = _plain(tensor)
    return f"{plain.dtype} {tuple(plain.shape)} strides {plain.stride()} {plain.flatten()[:3].tolist()}"


def train(record, model, optimizer, loss_of, *, steps: int = 2, **more: Any) -> dict[str, Any]:
    """The usual loop."""
    losses = []
    with record(model, optimizer) as capture:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer, **more)


class Mlp(nn.Module):
    def __init__(self, width: int = 8, act=F.gelu) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.act = act

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.drop = Mlp(width), nn.Dropout(p)
        self.heads, self.fused = heads, fused

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self, *, fused: bool = True, tied: bool = False, p: float = 0.0, checkpointing: str = "") -> None:
        super().__init__()
        width, vocabulary = 16, 23
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(12, width) * 0.1)
        self.layers = nn.ModuleList(Block(width, 2, fused, p) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant") if self.checkpointing else layer(x)
        return self.head(self.norm(x))


def gpt(record, device, **options):
    model = Gpt(**options).to(device)
    tokens = torch.randint(0, 23, (2, 12)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return train(record, model, optimizer, lambda net: F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@program
def mlp(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    return train(record, model, adam(model), lambda net: net(x).square().mean(), steps=3)


@program
def conv_batch_norm(record, device):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    model, x, y = model.to(device), torch.randn(4, 2, 6, 6).to(device), torch.tensor([0, 1, 2, 0]).to(device)
    return train(record, model, sgd(model), lambda net: F.cross_entropy(net(x), y))


@program
def channels_last(record, device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    return train(record, model, sgd(model), lambda net: net(x).square().mean())


@program
def gpt_unfused(record, device):
    return gpt(record, device, fused=False)


@program
def gpt_sdpa(record, device):
    return gpt(record, device, fused=True)


@program
def gpt_dropout(record, device):
    return gpt(record, device, p=0.2)


@program
def tied_weights(record, device):
    return gpt(record, device, tied=True)


@program
def checkpoint_reentrant(record, device):
    return gpt(record, device, p=0.1, checkpointing="reentrant")


@program
def checkpoint_not_reentrant(record, device):
    return gpt(record, device, p=0.1, checkpointing="plain")


@program
def lstm(record, device):
    model, x = nn.LSTM(5, 6, num_layers=2, batch_first=True, dropout=0.1), torch.randn(3, 4, 5)
    return train(record, model, adam(model), lambda net: net(x)[0].square().mean())


@program
def lstm_packed(record, device):
    model = nn.GRU(5, 6, bidirectional=True, batch_first=True)
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 4, 5), torch.tensor([4, 3, 1]), batch_first=True)
    return train(record, model, adam(model), lambda net: net(x)[0].data.square().mean())


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        h = self.fc1(x)
        h += x
        h = F.relu(h.mul_(0.5).add_(1), inplace=True)
        h = self.fc2(h)
        h[:, 0] *= 2
        h -= h.mean(-1, keepdim=True)
        self.seen += h.detach().sum(0)
        h = F.leaky_relu_(h, 0.1) * 1
        return torch.sigmoid_(h)


@program
def in_place(record, device):
    model, x = InPlace().to(device), torch.randn(4, 8).to(device)
    return train(record, model, sgd(model), lambda net: net(x).square().mean(), x=x)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        cache = torch.zeros(4, 16, device=x.device)
        cache[:, :8] = self.fc(x)
        left, right = cache[:, :8], cache[:, 8:]
        right.copy_(left.flip(1)).add_(1)
        cache.view(8, 8)[::2].mul_(3)
        cache.t()[3].sub_(1)
        cache[torch.tensor([0, 2], device=x.device)] += 1
        cache.masked_fill_(cache > 4, 0.5)
        cache.diagonal().neg_()
        parts = torch.split(cache, [6, 10], dim=1)
        return parts[1].expand(2, 4, 10).permute(2, 0, 1).narrow(0, 1, 5).unsqueeze(-1).squeeze(-1)


@program
def views_written_to(record, device):
    model, x = Views().to(device), torch.randn(4, 8).to(device)
    return train(record, model, sgd(model), lambda net: net(x).square().mean())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale, x.detach() + 1

    @staticmethod
    def backward(ctx, grad, _):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.scale, None


class DirtyDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@program
def autograd_function(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)

    def loss_of(net):
        y, extra = Cube.apply(net(x), 0.5)
        return (WithSetup.apply(DirtyDouble.apply(y * 1)) * extra).mean()

    return train(record, model, adam(model), loss_of)


@program
def autocast_grad_scaler(record, device):
    model, x = Gpt().to(device), torch.randint(0, 23, (2, 12)).to(device)
    optimizer, scaler, losses = adam(model), torch.amp.GradScaler(device, init_scale=64.0, growth_interval=1), []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.detach(), norm.detach()]
            capture.step()
    return outcome(losses, model, optimizer, scaler=scaler.state_dict())


@program
def skipped_steps(record, device):
    """The scaler skips the first step, whose gradients overflow."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, scaler, losses = sgd(model), torch.amp.GradScaler(device, init_scale=2.0**100), []
    with record(model, optimizer) as capture:
        for factor in (1e30, 1.0, 1.0):
            optimizer.zero_grad()
            loss = (model(x) * factor).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(2.0)
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer, scaler=scaler.state_dict())


@program
def gradient_accumulation(record, device):
    model, batches = Mlp().to(device), torch.randn(4, 4, 8).to(device)
    optimizer, losses = adam(model), []
    with record(model, optimizer) as capture:
        for i, x in enumerate(batches):
            loss = model(x).square().mean() / 2
            loss.backward()
            losses.append(loss.detach())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=i == 1)
                capture.step()
    return outcome(losses, model, optimizer)


@program
def users_hooks(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses, calls, kept = sgd(model), [], [], []
    model.fc1.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.fc1.register_forward_hook(lambda module, args, out: out + 1)
    model.fc2.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5, *grads[1:]))
    model.fc2.register_full_backward_pre_hook(lambda module, outs: (outs[0] * 3,))
    model.fc1.weight.register_hook(lambda grad: grad * 0.25)
    model.fc2.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(tuple(parameter.grad.shape)))
    with record(model, optimizer) as capture:
        for _ in range(3):
            optimizer.zero_grad()
            h = model(x)
            h.register_hook(lambda grad: grad.clamp(-1, 1))
            h.retain_grad()
            y = h.square()
            y.grad_fn.register_hook(lambda grads_in, grads_out: (grads_in[0] * 2,))
            y.grad_fn.register_prehook(lambda grads: (grads[0] + 0.01,))
            loss = y.mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            kept.append(h.grad)
            capture.step()
    hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
    return outcome(losses, model, optimizer, calls=calls, kept=kept, parameter_hooks=hooks)


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.counts[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class CountingOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _with_mode(record, device, mode, outside):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses = adam(model), []

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    if outside:
        with mode, record(model, optimizer) as capture:
            for _ in range(2):
                step()
                capture.step()
    else:
        with record(model, optimizer) as capture:
            for _ in range(2):
                with mode:
                    step()
                capture.step()
    return losses, model, optimizer


@program
def users_function_mode(record, device):
    mode = CountingFunctions()
    losses, model, optimizer = _with_mode(record, device, mode, outside=False)
    return outcome(losses, model, optimizer, counts=dict(mode.counts))


@program
def users_dispatch_mode(record, device):
    mode = CountingOps()
    losses, model, optimizer = _with_mode(record, device, mode, outside=False)
    return outcome(losses, model, optimizer, counts=dict(sorted(mode.counts.items())))


@program
def users_dispatch_mode_outside(record, device):
    mode = CountingOps()
    losses, model, optimizer = _with_mode(record, device, mode, outside=True)
    return outcome(losses, model, optimizer, counts=dict(sorted(mode.counts.items())))


@program
def users_function_mode_outside(record, device):
    mode = CountingFunctions()
    losses, model, optimizer = _with_mode(record, device, mode, outside=True)
    return outcome(losses, model, optimizer, counts=dict(sorted(mode.counts.items())))


@program
def flop_counter(record, device):
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    losses, model, optimizer = _with_mode(record, device, counter, outside=False)
    counts = {name: {str(op): flops for op, flops in ops.items()} for name, ops in counter.get_flop_counts().items()}
    return outcome(losses, model, optimizer, flops=counts)


@program
def double_backward(record, device):
    model, x = Mlp(act=torch.tanh).to(device), torch.randn(4, 8).to(device).requires_grad_()

    def loss_of(net):
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=-1) - 1).square().mean()

    return train(record, model, adam(model), loss_of)


@program
def retain_graph(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses = sgd(model), []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            h = model(x)
            first, second = h.square().mean(), h.abs().mean()
            first.backward(retain_graph=True)
            second.backward(retain_graph=True)
            (first + second).backward(inputs=[model.fc1.weight])
            optimizer.step()
            losses += [first.detach(), second.detach()]
            capture.step()
    return outcome(losses, model, optimizer)


@program
def evaluation(record, device):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).to(device)
    x, optimizer, seen = torch.randn(4, 8).to(device), None, []
    optimizer = sgd(model)
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                seen.append(model(x))
            with torch.inference_mode():
                y = model(x)
                y += 1
                seen.append(y.clone())
            model.train()
            capture.step()
    return outcome(seen, model, optimizer, inference=[t.is_inference() for t in seen], needs_grad=[t.requires_grad for t in seen])


@program
def threads(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses, beside = sgd(model), [], {}

    def work(i):
        net = copy.deepcopy(model)
        net.zero_grad()
        net(x + i).square().mean().backward()
        beside[i] = [p.grad for p in net.parameters()]

    with record(model, optimizer) as capture:
        for _ in range(2):
            workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer, beside=[beside[i] for i in sorted(beside)])


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(8) + torch.full((8,), float(index)).sqrt()


@program
def data_loader_workers(record, device):
    model = Mlp().to(device)
    optimizer, losses = sgd(model), []
    with record(model, optimizer) as capture:
        for x in torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=1, shuffle=True):
            optimizer.zero_grad()
            loss = model(x.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer)


@program
def several_optimizers(record, device):
    """A generator and a discriminator, trained in turn."""
    maker, critic, z = Mlp().to(device), Mlp().to(device), torch.randn(4, 8).to(device)
    optimizers, losses = [adam(maker), sgd(critic)], []
    with record(nn.ModuleDict({"maker": maker, "critic": critic}), optimizers) as capture:
        for _ in range(2):
            optimizers[1].zero_grad()
            judged = critic(maker(z).detach()).mean() - critic(z).mean()
            judged.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            made = -critic(maker(z)).mean()
            made.backward()
            optimizers[0].step()
            losses += [judged.detach(), made.detach()]
            capture.step()
    return outcome(losses, [maker, critic], optimizers)


@program
def lbfgs_closure(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        return loss

    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.step(closure)
            capture.step()
    return outcome(losses, model, optimizer)


@program
def foreach_fused_and_scheduler(record, device):
    models = [Mlp().to(device), Mlp().to(device)]
    optimizers = [torch.optim.AdamW(models[0].parameters(), foreach=True), torch.optim.AdamW(models[1].parameters(), fused=device == "cpu")]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=5) for optimizer in optimizers]
    x, losses = torch.randn(4, 8).to(device), []
    with record(nn.ModuleList(models), optimizers) as capture:
        for _ in range(2):
            for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                losses.append(loss.detach())
            capture.step()
    return outcome(losses, models, optimizers, rates=[s.get_last_lr() for s in schedulers])


class Oops(Exception):
    """Raised by the user's code."""


@program
def exception_in_mid_step(record, device):
    """The user's code raises, the capture ends, training goes on without it."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses, caught = sgd(model), [], ""

    def step(raise_at=""):
        optimizer.zero_grad()
        y = model(x)
        if raise_at == "forward":
            raise Oops("in forward")
        if raise_at == "backward":

            def fail(grad):
                raise Oops("in backward")

            y.register_hook(fail)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for where in ("forward", "backward", "call"):
        if where == "backward" and device == "npu":
            continue  # torch cannot unwind an exception of backward through a device guard written in Python
        try:
            with record(model, optimizer) as capture:
                step()
                capture.step()
                if where == "call":
                    torch.cat([torch.ones(2, device=device), torch.ones(1, 2, device=device)])
                step(where)
        except (Oops, RuntimeError) as error:
            caught += f"{type(error).__name__} {str(error).splitlines()[0][:40]}; "
        step()
    return outcome(losses, model, optimizer, caught=caught)


@program
def caught_inside(record, device):
    """Errors that the user's code expects and handles inside a step."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    errors = []

    def loss_of(net):
        for attempt in (
            lambda: x @ x,
            lambda: net.fc1(x[:, :3]),
            lambda: x.view(5, 5),
            lambda: F.gelu("no"),
            lambda: torch.ones(2).nothing,
        ):
            try:
                attempt()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return net(x).square().mean()

    return train(record, model, sgd(model), loss_of, errors=errors)


def _compiled(record, device, backend):
    torch._dynamo.reset()
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    fast = torch.compile(model, backend=backend)
    result = train(record, model, sgd(model), lambda _: fast(x).square().mean())
    torch._dynamo.reset()
    return result


@program
def compiled_eager(record, device):
    return _compiled(record, device, "eager")


@program
def compiled_aot_eager(record, device):
    return _compiled(record, device, "aot_eager")


@program
def compiled_before(record, device):
    """Compiled and warmed up before recording starts, with a graph break inside."""
    torch._dynamo.reset()
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)

    def loss_of(y):
        y = y * 2
        torch._dynamo.graph_break()
        return y.square().mean()

    fast = torch.compile(lambda x: loss_of(model(x)), backend="aot_eager")
    fast(x).backward()
    result = train(record, model, sgd(model), lambda _: fast(x))
    torch._dynamo.reset()
    return result


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * self.filter
        turned = torch.view_as_complex(torch.stack((spectrum.real, -spectrum.imag), -1)).conj() * (1 + 2j)
        return torch.fft.irfft(turned + torch.polar(torch.ones(5), torch.arange(5.0)), n=8)


@program
def complex_numbers(record, device):
    model, x = Wave(), torch.randn(4, 8)
    return train(record, model, adam(model), lambda net: net(x).square().mean())


@program
def functional_transforms(record, device):
    model, x = Mlp(act=torch.tanh).to(device), torch.randn(4, 8).to(device)
    optimizer, seen = sgd(model), []
    with record(model, optimizer) as capture:
        for _ in range(2):
            weights = {name: p.detach() for name, p in model.named_parameters()}

            def loss_of(weights, sample):
                return torch.func.functional_call(model, weights, (sample,)).square().mean()

            each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, x)
            jacobian = torch.func.jacrev(torch.tanh)(x[0])
            _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
            hessian = torch.func.hessian(lambda v: v.pow(3).sum())(x[0].cpu())  # nested transforms crash torch in a device's thread
            for name, parameter in model.named_parameters():
                parameter.grad = each[name].mean(0)
            optimizer.step()
            seen += [jacobian, tangent, hessian, *each.values()]
            capture.step()
    return outcome(seen, model, optimizer)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, *, mask):
        y, weights = self.attention(x, x, x, attn_mask=mask, average_attn_weights=False)
        return {"y": self.layer(y, src_mask=mask), "weights": weights}


@program
def multihead_attention(record, device):
    model, x = Attention().to(device), torch.randn(2, 5, 8).to(device)
    mask = torch.ones(5, 5, dtype=torch.bool, device=device).triu(1)

    def loss_of(net):
        out = net(x, mask=mask)
        return out["y"].square().mean() + out["weights"].square().mean()

    result = train(record, model, adam(model), loss_of)
    with record(model.eval()), torch.inference_mode():
        result["fast path"] = model(x, mask=mask)["y"].clone()
    return result


@torch.library.custom_op("ulpscope_tests::shifted_square", mutates_args=())
def shifted_square(x: torch.Tensor, shift: float) -> torch.Tensor:
    return (x + shift) ** 2


@shifted_square.register_fake
def _(x, shift):
    return torch.empty_like(x)


def _shifted_square_backward(ctx, grad):
    return grad * 2 * (ctx.saved_tensors[0] + ctx.shift), None


def _shifted_square_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.shift = inputs[1]


shifted_square.register_autograd(_shifted_square_backward, setup_context=_shifted_square_setup)


@torch.library.custom_op("ulpscope_tests::add_into", mutates_args=("target",))
def add_into(target: torch.Tensor, amount: torch.Tensor) -> None:
    target.add_(amount)


@program
def custom_ops(record, device):
    model, x = Mlp(), torch.randn(4, 8)
    total = torch.zeros(4, 8)

    def loss_of(net):
        y = shifted_square(net(x), 0.5)
        add_into(total, y.detach())
        return torch.ops.ulpscope_tests.shifted_square(y, 1.0).mean()

    return train(record, model, adam(model), loss_of, total=total)


class Tagged(torch.Tensor):
    """A user's tensor class with a protocol of its own."""

    seen: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def tensor_subclass(record, device):
    Tagged.seen.clear()
    model, x = Mlp(), torch.randn(4, 8).as_subclass(Tagged)

    def loss_of(net):
        y = net(x)
        assert type(y) is Tagged
        return (y * 2).as_subclass(torch.Tensor).square().mean()

    result = train(record, model, adam(model), loss_of)
    return result | {"seen": dict(sorted(Tagged.seen.items()))}


@program
def sparse_gradients(record, device):
    model, tokens = nn.EmbeddingBag(11, 4, sparse=True), torch.randint(0, 11, (3, 5))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    return train(record, model, optimizer, lambda net: net(tokens).square().mean())


class Odd(nn.Module):
    """Empty, zero-dimensional, expanded, integer, boolean, float16, float64 and meta tensors; arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fc = nn.Linear(8, 8)

    def forward(self, x, *, options):
        h = self.fc(x) * self.scale
        empty = torch.cat([h[:0], torch.zeros(0, 8)])
        wide = h.double().sum() + torch.linspace(0, 1, 3, dtype=torch.float64).sum()
        thin = torch.empty(1, device="meta") + 1
        count = (h > 0).sum() + torch.arange(5).max() + int(thin.numel())
        if h.mean().item() > 1e6:
            return h.sum()
        low = h.half().exp().float()
        values, where = h.topk(2, dim=options["dim"])
        spread = torch.einsum("bi,bj->bij", values, values).logsumexp((1, 2)) + torch.where(where[:, 0] > 3, 1.0, 2.0)
        mixed = torch.ones(1).expand(4, 8) * h
        return wide.float() + empty.sum() + low.mean() + spread.sum() * 1e-3 + mixed.std() + count.float() * 0


@program
def odd_tensors(record, device):
    model, x = Odd(), torch.randn(4, 8)
    return train(record, model, sgd(model), lambda net: net(x, options={"dim": -1, "why": None}))


@program
def generators_and_noise(record, device):
    """Random numbers from torch, a generator of one's own, Python and NumPy, between the steps."""
    model, generator, drawn = Mlp().to(device), torch.Generator().manual_seed(5), []

    def loss_of(net):
        x = torch.randn(4, 8, generator=generator).to(device) * random.random() + np.random.rand()
        drawn.append(x)
        return (net(x) + torch.rand_like(x) + F.dropout(x, 0.3)).square().mean()

    return train(record, model, adam(model), loss_of, drawn=drawn, own=generator.get_state())


@program
def frozen_and_averaged(record, device):
    """Frozen parameters, an average of weights, weight norm, and the module saved and loaded in mid-run."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    model.fc1.bias.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(model.fc2)
    average, optimizer, losses, saved = {}, sgd(model), [], []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    average.setdefault(name, parameter.clone()).lerp_(parameter, 0.1)
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
            saved.append(sorted(state))
            model.load_state_dict(state)
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer, average=average, saved=saved)


@program
def graph_introspection(record, device):
    """Look at the program's own autograd graph: node names, metadata, saved-tensor hooks."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses, packed, nodes = sgd(model), [], [], []

    def walk(node, depth=0):
        if node is not None and depth < 8:
            nodes.append((depth, node.name(), dict(node.metadata)))
            for parent, _ in node.next_functions:
                walk(parent, depth + 1)

    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
                loss = model(x).square().mean()
            walk(loss.grad_fn)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer, packed=packed, nodes=nodes)


@program
def versions_and_identity(record, device):
    """Version counters, object identity, attributes put on tensors, reference counts that a program can see."""
    import gc
    import weakref

    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses, versions, alive = sgd(model), [], [], []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            h = model.fc1(x)
            h.note = "mine"
            same = h.relu_()
            assert same is h
            assert h.note == "mine"
            versions.append((h._version, x._version, [p._version for p in model.parameters()]))
            loss = model.fc2(h).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            gone = weakref.ref(h)
            del h, same, loss
            capture.step()
            gc.collect()
            alive.append(gone() is not None)
    return outcome(losses, model, optimizer, versions=versions, alive=alive)


@program
def anomaly_detection(record, device):
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, text = sgd(model), ""
    with record(model, optimizer) as capture, torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        capture.step()
        try:
            torch.ones(2, 2).view(3)
        except RuntimeError as error:
            text = str(error)
    return outcome([loss.detach()], model, optimizer, text=text)


@program
def no_model_given(record, device):
    """Nothing is told to the capture; the model is made inside."""
    with record() as capture:
        model, losses = Mlp().to(device), []
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer)


class Duck:
    """Not a tensor, but torch functions take it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return f"quack {func.__name__}"


class Prickly:
    """An argument that must not be looked at too closely."""

    looked = 0

    def __repr__(self):
        raise Oops("do not print me")

    def __eq__(self, other):
        raise Oops("do not compare me")

    def __hash__(self):
        raise Oops("do not hash me")

    @property
    def shape(self):
        type(self).looked += 1
        return None


class Counted(dict):
    """A dictionary that counts how often it is read."""

    reads = 0

    def __getitem__(self, key):
        type(self).reads += 1
        return super().__getitem__(key)


Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    more: Any = None


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, stream, prickly, table, pair, *rest, **options):
        x = torch.stack(list(stream)) + table["bias"]
        return Output(self.fc(x) * pair.left + pair.right, more=iter([rest, options]))


@program
def awkward_arguments(record, device):
    """Generators that can be read once, objects that refuse to be printed, containers that count, results that are iterators."""
    model, x = Awkward(), torch.randn(4, 8)
    Counted.reads = Prickly.looked = 0
    quacks = []

    def loss_of(net):
        stream = (row for row in x)
        out = net(stream, Prickly(), Counted(bias=torch.ones(8)), Pair(2.0, torch.ones(1)), None, [Prickly()], key=Ellipsis, other=b"bytes")
        rest, options = out.more
        quacks.append((torch.add(Duck(), Duck()), torch.sum(Duck()), len(rest), sorted(options)))
        return out.logits.square().mean()

    result = train(record, model, sgd(model), loss_of)
    return result | {"quacks": quacks, "reads": Counted.reads, "looked": Prickly.looked}


@program
def odd_layouts(record, device):
    """Tensors without strides: sparse, compressed, jagged, oneDNN's own, quantized; and ones that share or lack memory."""
    model, x = Mlp(), torch.randn(4, 8)
    seen = []
    shared = torch.randn(4, 8).share_memory_()
    fixed = torch.from_numpy(np.arange(8.0, dtype=np.float32))

    def loss_of(net):
        csr = x.relu().to_sparse_csr()
        coo = x.relu().to_sparse()
        seen.extend([(csr @ x.t()), torch.sparse.mm(coo, x.t()), (coo * 2).to_dense()])
        if torch.backends.mkldnn.is_available():
            seen.append(x.to_mkldnn().relu().to_dense())
        jagged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        seen.append((jagged * 2).sin().values())
        freed = torch.randn(16)
        doubled = freed * 2
        freed.untyped_storage().resize_(0)
        grown = torch.zeros(2).resize_(0)
        return (net(shared) + fixed).square().mean() + doubled.sum() * 0 + grown.sum()

    return train(record, model, sgd(model), loss_of, seen=seen)


@program
def lazy_modules(record, device):
    model, x = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3)), torch.randn(4, 8)
    losses = []
    with record(model) as capture:
        optimizer = None
        for _ in range(2):
            loss = model(x).square().mean()
            optimizer = optimizer or sgd(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer)


@program
def optimizer_in_backward(record, device):
    """Each parameter is stepped as soon as its gradient is there, inside the backward pass."""
    model, x, losses = Mlp().to(device), torch.randn(4, 8).to(device), []
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with record(model) as capture:
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, list(optimizers.values()))


@program
def tracing(record, device):
    """A program that traces itself while it is recorded: symbolically, through proxies, and with fake tensors."""
    import torch.fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = Mlp(), torch.randn(4, 8)
    seen = []

    def loss_of(net):
        graph = torch.fx.symbolic_trace(net)
        flat = make_fx(lambda t: torch.sin(t) + 1)(x)
        with FakeTensorMode() as fake:
            shape = tuple((fake.from_tensor(x) @ torch.empty(8, 5)).t().shape)
        seen.append((str(graph.graph), str(flat.code).strip(), shape))
        return (graph(x) + flat(x)).square().mean()

    return train(record, model, sgd(model), loss_of, seen=seen)


@program
def jit_tracing(record, device):
    model, x = Mlp(), torch.randn(4, 8)
    seen = []

    def loss_of(net):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(net, x)
        seen.append(str(traced.inlined_graph).count("aten::"))
        return traced(x).square().mean()

    return train(record, model, sgd(model), loss_of, seen=seen)


@program
def forward_mode(record, device):
    import torch.autograd.forward_ad as forward_ad

    model, x = Mlp(act=torch.tanh), torch.randn(4, 8)
    seen = []

    def loss_of(net):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            seen.append(forward_ad.unpack_dual(net(dual)).tangent.detach())
        return net(x).square().mean()

    return train(record, model, sgd(model), loss_of, seen=seen)


@program
def saved_tensors(record, device):
    """Saved tensors moved away, packed, mutated on purpose; several gradients watched at once."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses, seen = sgd(model), [], []
    with record(model, optimizer) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            parameters = tuple(model.parameters())
            handle = torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: seen.append([g.clone() for g in grads]))
            with torch.autograd.graph.save_on_cpu():
                loss = model(x).square().mean()
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                y = x.clone().requires_grad_() * 1
                z = y.square()
                y.mul_(2)
                z.sum().backward()
                seen.append([z.detach()])
            loss.backward()
            handle.remove()
            optimizer.step()
            losses.append(loss.detach())
            capture.step()
    return outcome(losses, model, optimizer, seen=seen)


@program
def trained_in_a_thread(record, device):
    """The capture is opened in one thread and the model trained in another."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, losses = sgd(model), []

    def work():
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    with record(model, optimizer) as capture:
        (model(x) * 0).sum().backward()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        capture.step()
    return outcome(losses, model, optimizer)


@program
def profiled(record, device):
    """Train under torch's profiler; the user's own labels are counted, not the time."""
    from torch.profiler import ProfilerActivity, profile, record_function

    model, x = Mlp(), torch.randn(4, 8)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:

        def loss_of(net):
            with record_function("mine"):
                return net(x).square().mean()

        result = train(record, model, sgd(model), loss_of)
    return result | {"mine": sum(event.key == "mine" and event.count for event in profiler.key_averages())}


@program
def selective_checkpointing(record, device):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    model, x = Mlp().to(device), torch.randn(4, 8).to(device)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def loss_of(net):
        y = checkpoint(net, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
        return checkpoint(torch.sin, y, use_reentrant=False).square().mean()

    return train(record, model, sgd(model), loss_of)


@program
def interrupted(record, device):
    """KeyboardInterrupt, StopIteration and GeneratorExit are the user's business."""
    model, x = Mlp().to(device), torch.randn(4, 8).to(device)
    optimizer, caught = sgd(model), []

    def samples():
        with record(model, optimizer) as capture:
            while True:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                capture.step()
                yield loss.detach()

    stream = samples()
    losses = [next(stream), next(stream)]
    stream.close()
    for kind in (KeyboardInterrupt, StopIteration, SystemExit):
        try:
            with record(model, optimizer):
                model(x)
                raise kind
        except BaseException as error:
            caught.append(type(error).__name__)
    return outcome(losses, model, optimizer, caught=caught)


@program
def defaults_changed(record, device):
    """Train with another default dtype, and a default device for new tensors."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("cpu"):
            model, x = Mlp(), torch.randn(4, 8)
            return train(record, model, adam(model), lambda net: (net(x) + torch.rand(8)).square().mean())
    finally:
        torch.set_default_dtype(torch.float32)
