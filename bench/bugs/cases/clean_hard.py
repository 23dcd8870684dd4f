# SPDX-License-Identifier: Apache-2.0
"""Clean pairs that look like faults: results that are not unique, sums without an order, cancellation, saturation, overflow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Program, Side, minimised
from bench.bugs.cases.clean_machines import narrow_backend
from bench.bugs.machines import (
    Kernels,
    accelerator,
    machine_of,
    other_functions,
    other_order,
    own_norms,
    rounded_operands,
    split_k,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 16
aten = torch.ops.aten


def other_scatter() -> Kernels:
    """Add up values that meet in one place from the last to the first, as atomic additions may."""

    def embedding(gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
        columns = gradient.shape[-1]
        return aten.embedding_dense_backward.default(
            gradient.reshape(-1, columns).flip(0), indices.reshape(-1).flip(0), rows, padding, by_frequency
        )

    def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        return aten.index_add.default(x, dim, index.flip(0), source.flip(dim), alpha=alpha)

    def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        return aten.scatter_add.default(x, dim, index.flip(dim), source.flip(dim))

    return {aten.embedding_dense_backward.default: embedding, aten.index_add.default: index_add, aten.scatter_add.default: scatter_add}


def other_gauge() -> Kernels:
    """Give eigenvectors, singular vectors and orthogonal factors other signs, which nothing determines."""

    def eigh(x: Tensor, uplo: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
        values, vectors = aten._linalg_eigh.default(x, uplo, compute_v)
        return values, vectors * _signs(vectors.shape[-1])

    def qr(x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
        q, r = aten.linalg_qr.default(x, mode)
        signs = _signs(q.shape[-1])
        return q * signs, r * signs[:, None]

    def svd(x: Tensor, full: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        u, values, v = aten._linalg_svd.default(x, full, compute_uv, driver=driver)
        signs = _signs(values.shape[-1])
        return u * signs, values, v * signs[:, None]

    return {aten._linalg_eigh.default: eigh, aten.linalg_qr.default: qr, aten._linalg_svd.default: svd}


def _signs(many: int) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(many) % 2)


def other_order_of_equals() -> Kernels:
    """Sort equal keys the other way round where no order of them is asked for."""

    def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[dim])
        _, order = aten.sort.stable(x.flip(dim), stable=True, dim=dim, descending=descending)
        order = places.flip(0)[order]
        return x.gather(dim, order), order

    return {aten.sort.default: sort}


def other_pick_of_equals() -> Kernels:
    """Find the last of several equal elements where this CPU finds the first."""

    def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
        values, places = aten.topk.default(x.flip(dim), k, dim, largest, sorted)
        return values, x.shape[dim] - 1 - places

    def maximum(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        values, places = aten.max.dim(x.flip(dim), dim, keepdim)
        return values, x.shape[dim] - 1 - places

    def argmax(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        return x.shape[dim] - 1 - aten.argmax.default(x.flip(dim), dim, keepdim)

    return {aten.topk.default: topk, aten.max.dim: maximum, aten.argmax.default: argmax}


class OtherNoise(TorchDispatchMode):
    """A backend with a generator of its own for normal and uniform numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(91)

    def __call__(self) -> OtherNoise:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (aten.randn_like.default, aten.randn.default):
            return result.normal_(generator=self._generator)
        if func in (aten.rand_like.default, aten.rand.default):
            return result.uniform_(generator=self._generator)
        return result


def _stepped(
    model: nn.Module, loss: Callable[[int], Tensor], *, steps: int = 2, machine: Any = contextlib.nullcontext, lr: float = 0.05
) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    return minimised(model, optimizer, loss, machine=machine)


class Products(nn.Module):
    """Matrix products by every name that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.bilinear, self.recurrent = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.up, self.spread = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.mixing = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.2)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.bilinear(x, x)
        x = x + self.recurrent(x)[0]
        x = x + self.up(self.spread(x.mT)).mT
        x = x + torch.einsum("btw,gwv->btv", x, self.mixing)
        x = x + torch.matmul(x.unsqueeze(1), self.mixing).sum(1) + torch.bmm(x, self.mixing[0].expand(len(x), -1, -1))
        return self.head(torch.baddbmm(x, x, self.mixing[1].expand(len(x), -1, -1), alpha=0.5))


def _products(kernels: Kernels) -> Callable[[Side], Program]:
    def program(side: Side) -> Program:
        model = Products()
        inputs, labels = torch.randn(2, 4, 6, WIDTH), torch.randint(0, 5, (2, 4, 6))
        return _stepped(
            model, lambda i: F.cross_entropy(model(inputs[i]).flatten(0, 1), labels[i].flatten()), machine=machine_of(side, kernels)
        )

    return program


def _scattered(side: Side) -> Program:
    """A graph network: messages are added up where they arrive."""
    table, fc, head = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([table, fc, head])
    nodes, edges, labels = torch.randint(0, 12, (2, 20)), torch.randint(0, 20, (2, 2, 300)), torch.randint(0, 5, (2, 20))

    def loss(index: int) -> Tensor:
        x = table(nodes[index])
        sent = torch.tanh(fc(x))[edges[index, 0]]
        received = torch.zeros_like(x).index_add(0, edges[index, 1], sent)
        received = received + torch.zeros_like(x).scatter_add(0, edges[index, 1][:, None].expand(-1, WIDTH), sent)
        return F.cross_entropy(head(received), labels[index])

    return _stepped(model, loss, machine=machine_of(side, other_scatter()))


def _eigenvectors(side: Side) -> Program:
    """Whiten: the signs of eigenvectors cancel in the results computed from them."""
    fc, head = nn.Linear(WIDTH, 6), nn.Linear(6, 5)
    model = nn.ModuleList([fc, head])
    inputs, labels = torch.randn(2, 32, WIDTH), torch.randint(0, 5, (2, 32))

    def loss(index: int) -> Tensor:
        x = fc(inputs[index])
        values, vectors = torch.linalg.eigh(x.T @ x / 32)
        return F.cross_entropy(head(x @ (vectors * values.rsqrt()) @ vectors.T), labels[index])

    return _stepped(model, loss, machine=machine_of(side, other_gauge()))


def _orthogonal(side: Side) -> Program:
    """Project by an orthogonal factor, whose signs cancel."""
    fc, head = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([fc, head])
    inputs, labels = torch.randn(2, 32, WIDTH), torch.randint(0, 5, (2, 32))

    def loss(index: int) -> Tensor:
        q, _ = torch.linalg.qr(fc.weight.T)
        return F.cross_entropy(head(inputs[index] @ q @ q.T), labels[index])

    return _stepped(model, loss, machine=machine_of(side, other_gauge()))


def _grouped(side: Side) -> Program:
    """Sort tokens by their expert and put them back; the order within an expert does not matter."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, 5)])
    inputs, experts, labels = torch.randn(2, 24, WIDTH), torch.randint(0, 3, (2, 24)), torch.randint(0, 5, (2, 24))

    def loss(index: int) -> Tensor:
        *parts, head = model
        owners, order = torch.sort(experts[index])
        x = inputs[index][order]
        y = torch.cat([part(piece) for part, piece in zip(parts, x.split(owners.bincount(minlength=3).tolist()), strict=True)])
        return F.cross_entropy(head(torch.zeros_like(y).index_copy(0, order, y)), labels[index])

    return _stepped(model, loss, machine=machine_of(side, other_order_of_equals()))


def _low_rank(side: Side) -> Program:
    """Approximate by low rank; the signs of singular vectors cancel."""
    fc, head = nn.Linear(WIDTH, 12), nn.Linear(12, 5)
    inputs, labels = torch.randn(2, 40, WIDTH), torch.randint(0, 5, (2, 40))

    def loss(index: int) -> Tensor:
        u, values, v = torch.linalg.svd(fc(inputs[index]), full_matrices=False)
        return F.cross_entropy(head((u[:, :6] * values[:6]) @ v[:6]), labels[index])

    return _stepped(nn.ModuleList([fc, head]), loss, machine=machine_of(side, {**other_gauge(), **split_k(4)}))


def _full_experts(side: Side) -> Program:
    """Give each expert the first twelve of its tokens; which of them come first among equal keys does not matter."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, 5)])
    inputs, experts, labels = torch.randn(2, 48, WIDTH), torch.randint(0, 3, (2, 48)), torch.randint(0, 5, (2, 48))

    def loss(index: int) -> Tensor:
        *parts, head = model
        owners, order = torch.sort(experts[index])
        taken = [one[:12] for one in order.split(owners.bincount(minlength=3).tolist())]
        made = [torch.zeros(48, WIDTH).index_copy(0, one, part(inputs[index][one])) for part, one in zip(parts, taken, strict=True)]
        return F.cross_entropy(head(made[0] + made[1] + made[2]), labels[index])

    return _stepped(model, loss, machine=machine_of(side, other_order_of_equals()))


def _sparse(side: Side) -> Program:
    """Take the twenty largest activations of thirty-two, of which half are zero; and the largest over a set of points."""
    fc, head = nn.Linear(WIDTH, 32), nn.Linear(32, 5)
    inputs, labels = torch.randn(2, 40, 3, WIDTH), torch.randint(0, 5, (2, 40))

    def loss(index: int) -> Tensor:
        x = torch.relu(fc(inputs[index])).max(1).values - 0.3
        values, places = torch.relu(x).topk(20, dim=-1)
        return F.cross_entropy(head(torch.zeros_like(x).scatter(1, places, values)), labels[index])

    return _stepped(nn.ModuleList([fc, head]), loss, machine=machine_of(side, {**other_pick_of_equals(), **split_k(2)}))


def _most_likely(side: Side) -> Program:
    """Take the most likely of two thousand classes by scores in bfloat16, among which many are equal."""
    scores, table, head = nn.Linear(WIDTH, 2000), nn.Embedding(2000, WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([scores, table, head]).to(torch.bfloat16)
    inputs, labels = torch.randn(2, 40, WIDTH).to(torch.bfloat16), torch.randint(0, 5, (2, 40))

    def loss(index: int) -> Tensor:
        x = scores(inputs[index])
        return F.cross_entropy(head(table(x.argmax(-1))).float(), labels[index]) + x.float().square().mean()

    return _stepped(model, loss, machine=machine_of(side, other_pick_of_equals()))


def _cancelled(side: Side) -> Program:
    """Subtract two large numbers: rounding is all that is left of some differences."""
    fc, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([fc, head])
    inputs, labels = torch.randn(2, 32, WIDTH), torch.randint(0, 5, (2, 32))

    def loss(index: int) -> Tensor:
        far = fc(inputs[index]) + 300.0
        near = fc(inputs[index] * 1.0001) + 300.0
        return F.cross_entropy(head((near - far) * 1e4), labels[index])

    return _stepped(model, loss, machine=machine_of(side, rounded_operands("float16")), lr=1e-3)


def _saturated(side: Side) -> Program:
    """Attention whose scores are in the hundreds, and functions at the end of their range."""
    qkv, head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([qkv, head])
    inputs, labels = 30 * torch.randn(2, 4, 8, WIDTH), torch.randint(0, 5, (2, 4, 8))

    def loss(index: int) -> Tensor:
        q, k, v = qkv(inputs[index]).chunk(3, dim=-1)
        y = (q @ k.mT).softmax(-1) @ v
        return F.cross_entropy(head(torch.tanh(y) + torch.sigmoid(y * 3)).flatten(0, 1), labels[index].flatten())

    return _stepped(model, loss, machine=machine_of(side, {**split_k(4), **other_functions()}))


def _normalised(side: Side) -> Program:
    """Directions of vectors that are almost zero."""
    fc, head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([fc, head])
    inputs, labels = torch.randn(2, 32, WIDTH) * torch.logspace(-12, 2, 32)[:, None], torch.randint(0, 5, (2, 32))

    def loss(index: int) -> Tensor:
        return F.cross_entropy(head(F.normalize(fc(inputs[index]), eps=1e-30)), labels[index])

    return _stepped(model, loss, machine=machine_of(side, accelerator("tf32")))


def _overflowed(side: Side) -> Program:
    """Start with too large a loss scale: both sides meet infinities, skip the step and go on with half of it."""
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    inputs, labels = torch.randn(4, 16, WIDTH), torch.randint(0, 5, (4, 16))

    def step(index: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(inputs[index]).float(), labels[index])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Program(step=step, model=model, steps=4, machine=machine_of(side, narrow_backend()))


def _zeroed(side: Side) -> Program:
    """Gradients are set to zero, or taken away."""
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(3, 16, WIDTH), torch.randint(0, 5, (3, 16))

    def step(index: int) -> None:
        optimizer.zero_grad(set_to_none=side == "reference")
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        optimizer.step()

    return Program(step=step, model=model, steps=3)


def _statistics(side: Side) -> Program:
    """Sums, means, deviations, norms, cumulative sums of many terms in another order."""
    fc, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
    model = nn.ModuleList([fc, head])
    inputs, labels = 5 + torch.randn(2, 200, WIDTH), torch.randint(0, 5, (2, 200))

    def loss(index: int) -> Tensor:
        x = fc(inputs[index])
        x = (x - x.mean(0)) / x.std(0)
        x = x + x.cumsum(0) / 200 + x.norm(dim=0) / 200 + x.logsumexp(0) + x.var(0, unbiased=False)
        return F.cross_entropy(head(x), labels[index]) + x.square().sum() * 1e-6

    return _stepped(model, loss, machine=machine_of(side, {**other_order(), **own_norms()}))


def _resized(side: Side) -> Program:
    """Images are resized, cropped, pooled and upsampled on another backend."""
    conv, head = nn.Conv2d(3, 8, 5, stride=2, padding=2, padding_mode="reflect"), nn.Linear(8, 5)
    model = nn.ModuleList([conv, head])
    images, labels = torch.randn(2, 4, 3, 15, 15), torch.randint(0, 5, (2, 4))

    def loss(index: int) -> Tensor:
        x = F.interpolate(images[index], size=(20, 20), mode="bilinear", align_corners=False)
        x = F.adaptive_avg_pool2d(F.hardswish(conv(x)), 4)
        x = F.pixel_shuffle(F.interpolate(x, scale_factor=2.0, mode="nearest").repeat(1, 4, 1, 1), 2)
        return F.cross_entropy(head(x.mean((2, 3))), labels[index])

    return _stepped(model, loss, machine=machine_of(side, accelerator("float16")))


def _case(name: str, what: str, program: Callable[[Side], Program], machine: str = "") -> Case:
    return Case(name=name, source="synthetic", what=what, program=program, machine=machine)


CASES = [
    _case("clean_all_products", "matrix products by every name", _products(rounded_operands("float16")), "operands in float16"),
    _case(
        "clean_all_products_tf32",
        "the same on a whole backend",
        _products(accelerator("tf32")),
        "operands in tf32, other norms and functions",
    ),
    _case("clean_scatter_order", "messages added up in another order", _scattered, "another order of scattered sums"),
    _case("clean_eigenvectors", "eigenvectors of other signs", _eigenvectors, "other signs of eigenvectors"),
    _case("clean_orthogonal_factor", "orthogonal factors of other signs", _orthogonal, "other signs of orthogonal factors"),
    _case("clean_unstable_sort", "equal keys in another order", _grouped, "equal keys sorted the other way round"),
    _case("clean_low_rank", "singular vectors of other signs", _low_rank, "other signs of singular vectors, split-K products"),
    _case("clean_full_experts", "the first of equal keys, in another order", _full_experts, "equal keys sorted the other way round"),
    _case("clean_largest_of_zeros", "other ones of equal elements picked", _sparse, "the last of equals picked, split-K products"),
    _case("clean_most_likely_class", "other ones of equal scores in bfloat16", _most_likely, "the last of equals picked"),
    _case("clean_cancellation", "a small difference of two large numbers", _cancelled, "operands in float16"),
    _case("clean_saturation", "softmax, tanh and sigmoid at the end of their range", _saturated, "split-K products, other functions"),
    _case("clean_directions", "directions of vectors that are almost zero", _normalised, "operands in tf32, other norms and functions"),
    _case("clean_overflow", "a loss scale that overflows on both sides at first", _overflowed, "split-K products, other functions"),
    _case("clean_zeroed_gradients", "gradients set to zero against taken away", _zeroed),
    _case("clean_statistics", "statistics of many terms in another order", _statistics, "another order"),
    _case("clean_resizing", "resizing and pooling on another backend", _resized, "operands in float16, other norms and functions"),
]
