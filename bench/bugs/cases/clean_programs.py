# SPDX-License-Identifier: Apache-2.0
"""Clean pairs: two programs that compute the same thing in two valid ways. Calls, arguments, layouts and dtypes may differ."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Program, Side, classifying, minimised
from bench.bugs.cases.clean_machines import Convolutions, classified
from bench.bugs.cases.models_transformer import Decoder, trained
from bench.bugs.machines import Machine, machine_of, rounded_operands, split_k
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, BATCH, LENGTH = 16, 2, 4, 8


def _layout(side: Side) -> Program:
    model = Convolutions()
    images = torch.randn(2, 8, 3, 10, 10)
    if side == "subject":
        model = model.to(memory_format=torch.channels_last)
        images = torch.stack([one.contiguous(memory_format=torch.channels_last) for one in images])
    return classified(model, images, steps=2, lr=1e-3)


def _optimizer(make: Callable[[Side, list[nn.Parameter]], torch.optim.Optimizer], steps: int = 3) -> Callable[[Side], Program]:
    def program(side: Side) -> Program:
        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.LayerNorm(24), nn.Linear(24, 5))
        optimizer = make(side, list(model.parameters()))
        inputs, labels = torch.randn(steps, 16, 12), torch.randint(0, 5, (steps, 16))

        return classifying(model, optimizer, inputs, labels, steps=steps)

    return program


def _inverted(side: Side) -> Program:
    """Invert an ill-conditioned matrix; the subject does so in float64 inside and is the better one."""
    matrix = nn.Parameter(torch.linalg.matrix_power(torch.eye(8) + 0.9 * torch.ones(8, 8).tril(-1), 3))
    model = nn.ParameterList([matrix])
    targets = torch.randn(2, 8, 8)

    def step(index: int) -> None:
        matrix.grad = None
        inverse = torch.linalg.inv(matrix.double()).float() if side == "subject" else torch.linalg.inv(matrix)
        (inverse @ targets[index]).square().mean().backward()

    return Program(step=step, model=model)


def _padded(side: Side) -> Program:
    """Write keys into a buffer that is longer than they are; behind them lies memory as the allocator left it."""
    project, out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([project, out])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(2, BATCH, LENGTH, WIDTH), torch.randint(0, 5, (2, BATCH, LENGTH))
    leftover = 0.37 if side == "subject" else -1.9
    seen = torch.arange(LENGTH + 4) < LENGTH

    def buffer(x: Tensor) -> Tensor:
        memory = torch.empty(BATCH, LENGTH + 4, WIDTH)
        memory.numpy()[...] = leftover
        memory[:, :LENGTH] = x
        return memory

    def loss(index: int) -> Tensor:
        q, k, v = project(inputs[index]).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, buffer(k), buffer(v), attn_mask=seen)
        return F.cross_entropy(out(y).flatten(0, 1), labels[index].flatten())

    return minimised(model, optimizer, loss)


def _unused_rows(side: Side) -> Program:
    """Use a workspace of which only the first rows are read again."""
    fc1, fc2 = nn.Linear(12, 16), nn.Linear(16, 5)
    model = nn.ModuleList([fc1, fc2])
    inputs, labels = torch.randn(2, 6, 12), torch.randint(0, 5, (2, 6))
    leftover = 3e30 if side == "subject" else 0.0

    def step(index: int) -> None:
        model.zero_grad()
        workspace = torch.empty(10, 16)
        workspace.numpy()[...] = leftover
        workspace.narrow(0, 0, 6).copy_(fc1(inputs[index]))
        F.cross_entropy(fc2(torch.tanh(workspace[:6])), labels[index]).backward()

    return Program(step=step, model=model)


def _checkpointed(side: Side) -> Program:
    model = Decoder()
    if side == "subject":
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda x, positions, forward=forward: checkpoint(forward, x, positions, use_reentrant=False)
    return trained(model)


def _checkpointed_elsewhere(side: Side) -> Program:
    program = _checkpointed(side)
    return Program(
        step=program.step,
        model=program.model,
        machine=machine_of(side, rounded_operands("float16")),
    )


def _autocast(side: Side) -> Program:
    program = trained(Decoder())

    def step(index: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=side == "subject"):
            program.step(index)

    return Program(step=step, model=program.model, steps=2)


def _cast(side: Side) -> Program:
    """Train the whole model in bfloat16 against float32."""
    model = Decoder()
    return trained(model.to(torch.bfloat16) if side == "subject" else model)


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out, self._kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 5), kind

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(self._attend(q, k, v).transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._kind == "eager":
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        with sdpa_kernel(SDPBackend.MATH if self._kind == "math" else SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention(subject: str, reference: str) -> Callable[[Side], Program]:
    def program(side: Side) -> Program:
        model = Attention(subject if side == "subject" else reference)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inputs, labels = torch.randn(2, BATCH, LENGTH, WIDTH), torch.randint(0, 5, (2, BATCH, LENGTH))

        return minimised(model, optimizer, lambda index: F.cross_entropy(model(inputs[index]).flatten(0, 1), labels[index].flatten()))

    return program


def _accumulated(side: Side) -> Program:
    """Four micro-batches, from the first to the last or the other way."""
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = torch.randn(2, 4, 8, 12), torch.randint(0, 5, (2, 4, 8))
    order = range(3, -1, -1) if side == "subject" else range(4)

    def step(index: int) -> None:
        optimizer.zero_grad()
        for micro in order:
            (F.cross_entropy(model(inputs[index, micro]), labels[index, micro]) / 4).backward()
        optimizer.step()

    return Program(step=step, model=model)


def _backward_order(side: Side) -> Program:
    """Compute the losses of three micro-batches alike, and go back through them in one or the other order."""
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = torch.randn(2, 3, 8, 12), torch.randint(0, 5, (2, 3, 8))

    def step(index: int) -> None:
        optimizer.zero_grad()
        losses = [F.cross_entropy(model(x), y) / 3 for x, y in zip(inputs[index], labels[index], strict=True)]
        for loss in reversed(losses) if side == "subject" else losses:
            loss.backward()
        optimizer.step()

    return Program(step=step, model=model)


def _embedded(side: Side) -> Program:
    """Gather a gradient that many tokens add to by an embedding or by a product with one-hot rows."""
    table, head = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([table, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = torch.randint(0, 6, (2, 64)), torch.randint(0, 5, (2, 64))

    def loss(index: int) -> Tensor:
        x = F.one_hot(tokens[index], 6).float() @ table.weight if side == "subject" else table(tokens[index])
        return F.cross_entropy(head(x), labels[index])

    return minimised(model, optimizer, loss)


class HandWrittenNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _hand_written(kernels_on_subject: bool) -> Callable[[Side], Program]:
    def program(side: Side) -> Program:
        norm = HandWrittenNorm if side == "subject" else nn.LayerNorm
        model = nn.Sequential(nn.Linear(12, 24), norm(24), nn.GELU(), nn.Linear(24, 24), norm(24), nn.Linear(24, 5))
        machine = Machine(rounded_operands("tf32")) if kernels_on_subject and side == "subject" else contextlib.nullcontext
        return classified(model, torch.randn(2, 16, 12), steps=2, lr=1e-3, machine=machine)

    return program


def _fused_projection(side: Side) -> Program:
    """One product with concatenated weights against three."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, 5)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(2, BATCH, LENGTH, WIDTH), torch.randint(0, 5, (2, BATCH, LENGTH))

    def loss(index: int) -> Tensor:
        *parts, head = model
        if side == "subject":
            weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
            q, k, v = F.linear(inputs[index], weight, bias).chunk(3, dim=-1)
        else:
            q, k, v = (part(inputs[index]) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return F.cross_entropy(head(y).flatten(0, 1), labels[index].flatten())

    return minimised(model, optimizer, loss)


def _keywords(side: Side) -> Program:
    """Pass the same arguments by position or by name, with defaults written out."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 5))
    inputs, labels = torch.randn(2, 16, 12), torch.randint(0, 5, (2, 16))

    def step(index: int) -> None:
        model.zero_grad()
        hidden = model[0](inputs[index])
        if side == "subject":
            hidden = F.layer_norm(input=F.gelu(hidden, approximate="none"), normalized_shape=[24], eps=1e-5)
            loss = F.cross_entropy(input=model[1](hidden), target=labels[index], reduction="mean", label_smoothing=0.0)
        else:
            hidden = F.layer_norm(F.gelu(hidden), (24,))
            loss = F.cross_entropy(model[1](hidden), labels[index])
        loss.backward()

    return Program(step=step, model=model, machine=machine_of(side, split_k(2)))


def _log_loss(side: Side) -> Program:
    """Cross entropy, or its parts."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, 16, 12), torch.randint(0, 5, (2, 16))

    def loss(index: int) -> Tensor:
        logits = model(inputs[index])
        if side == "subject":
            value = (logits.logsumexp(-1) - logits.gather(-1, labels[index, :, None]).squeeze(-1)).mean()
        else:
            value = F.cross_entropy(logits, labels[index])
        return value

    return minimised(model, optimizer, loss)


def _logging(side: Side) -> Program:
    """Compute values that nothing trains on in the subject: norms, accuracies, a detached copy."""
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(2, 16, 12), torch.randint(0, 5, (2, 16))

    def step(index: int) -> None:
        optimizer.zero_grad()
        logits = model(inputs[index])
        loss = F.cross_entropy(logits, labels[index])
        if side == "subject":
            (logits.detach().argmax(-1) == labels[index]).float().mean()
            logits.detach().clone().softmax(-1).std()
        loss.backward()
        if side == "subject":
            torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, rounded_operands("float16")))


def _inplace(side: Side) -> Program:
    """Run the same model in place and out of place."""
    fc1, fc2 = nn.Linear(12, 24), nn.Linear(24, 5)
    model = nn.ModuleList([fc1, fc2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(2, 16, 12), torch.randint(0, 5, (2, 16))

    def loss(index: int) -> Tensor:
        x = fc1(inputs[index])
        if side == "subject":
            x.mul_(2.0).add_(1.0)
        else:
            x = x * 2.0 + 1.0
        return F.cross_entropy(fc2(torch.tanh(x)), labels[index])

    return minimised(model, optimizer, loss)


def _case(name: str, what: str, program: Callable[[Side], Program], machine: str = "") -> Case:
    return Case(name=name, source="synthetic", what=what, program=program, machine=machine)


CASES = [
    _case("clean_channels_last", "channels_last on and off", _layout),
    _case(
        "clean_fused_adam",
        "fused against plain Adam",
        _optimizer(lambda side, p: torch.optim.Adam(p, lr=1e-2, fused=side == "subject", foreach=False if side == "reference" else None)),
    ),
    _case(
        "clean_foreach_adam",
        "foreach against plain Adam",
        _optimizer(lambda side, p: torch.optim.Adam(p, lr=1e-2, foreach=side == "subject")),
    ),
    _case(
        "clean_fused_against_foreach",
        "fused against foreach AdamW",
        _optimizer(
            lambda side, p: torch.optim.AdamW(
                p, lr=1e-2, weight_decay=0.1, fused=side == "subject" or None, foreach=side == "reference" or None
            )
        ),
    ),
    _case(
        "clean_foreach_sgd",
        "foreach against plain SGD with momentum",
        _optimizer(lambda side, p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=side == "subject")),
    ),
    _case(
        "clean_tensor_learning_rate",
        "a learning rate in a tensor against a number",
        _optimizer(
            lambda side, p: torch.optim.AdamW(p, lr=torch.tensor(1e-2) if side == "subject" else 1e-2, capturable=False, foreach=False)
        ),
    ),
    _case("clean_inverse", "the subject inverts an ill-conditioned matrix more accurately", _inverted),
    _case("clean_padding", "memory behind the keys that attention does not look at", _padded),
    _case("clean_unused_rows", "a workspace of which only some rows are used", _unused_rows),
    _case("clean_checkpointing", "activation checkpointing on and off", _checkpointed),
    _case("clean_checkpointing_elsewhere", "activation checkpointing on another backend", _checkpointed_elsewhere, "operands in float16"),
    _case("clean_autocast", "autocast to bfloat16 against float32", _autocast),
    _case("clean_bfloat16_against_float32", "a whole model in bfloat16 against float32", _cast),
    _case("clean_flash_against_math", "flash attention against its formula", _attention("flash", "math")),
    _case("clean_flash_against_eager", "flash attention against attention written out", _attention("flash", "eager")),
    _case("clean_eager_against_math", "attention written out against the formula", _attention("eager", "math")),
    _case("clean_accumulation_order", "gradients of micro-batches added up in another order", _backward_order),
    _case("clean_micro_batches_reversed", "micro-batches in another order", _accumulated),
    _case("clean_embedding_by_product", "an embedding against a product with one-hot rows", _embedded),
    _case("clean_hand_written_norm", "layer norm written out against the fused call", _hand_written(False)),
    _case("clean_hand_written_norm_elsewhere", "layer norm written out on another backend", _hand_written(True), "operands in tf32"),
    _case("clean_fused_projection", "one product against three", _fused_projection),
    _case("clean_keywords", "the same arguments by position and by name", _keywords, "split-K products"),
    _case("clean_written_out_loss", "cross entropy against its parts", _log_loss),
    _case("clean_logging", "extra calls for logs only", _logging, "operands in float16"),
    _case("clean_in_place", "the same in place and out of place", _inplace),
]
