# SPDX-License-Identifier: Apache-2.0
"""One call for each row of the table of names, on inputs that are made without random numbers.

`x`, `y`, `z` are 3 x 4 of both signs, `p` and `q` are positive, `s` is 4 x 4, `v` a vector of 4, `c` 1 x 2 x 4 x 4, `b` 2 x 3 x 4, `w`
2 x 4 x 3, `i` are indices, `t` and `u` classes of the rows of `x`, `m` is a mask. Rows that take only tensors need no line: see `_call_of`.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ulpscope.model.operations.mindspore_names import NameRow, name_rows

__all__ = ["EXAMPLES", "ROWS", "evaluate", "example_of", "inputs", "values"]

_POSITIVE = frozenset("log log1p sqrt rsqrt pow __pow__ __rpow__ reciprocal acos asin __truediv__ __itruediv__ div div_".split())

EXAMPLES = """
mint.nn.functional.linear: F.linear(x, s, v)
ops.dense: ops.dense(x, s, v)
nn.Dense: cell(nn.Dense(4, 4), weight=s, bias=v)(x)
mint.nn.Linear: cell(mint.nn.Linear(4, 4), weight=s, bias=v)(x)
mint.nn.functional.layer_norm: F.layer_norm(x, (4,), v, v, 1e-3)
nn.LayerNorm: cell(nn.LayerNorm((4,), epsilon=1e-5), gamma=v, beta=v)(x)
mint.nn.LayerNorm: cell(mint.nn.LayerNorm((4,)), weight=v, bias=v)(x)
nn.Embedding: cell(nn.Embedding(3, 4), embedding_table=x)(i)
mint.nn.functional.embedding: F.embedding(i, x)
mint.nn.Embedding: cell(mint.nn.Embedding(3, 4), weight=x)(i)
mint.nn.functional.group_norm: F.group_norm(b, 3, p[0, :3], p[1, :3], 1e-3)
nn.GroupNorm: nn.GroupNorm(2, 2)(c)
mint.nn.GroupNorm: mint.nn.GroupNorm(2, 2)(c)
mint.nn.functional.batch_norm: F.batch_norm(c, fixed(v[:2]), fixed(p[0, :2]), p[1, :2], p[2, :2], False)
ops.batch_norm: ops.batch_norm(c, fixed(v[:2]), fixed(p[0, :2]), p[1, :2], p[2, :2], False)
mint.nn.functional.conv2d: F.conv2d(c, k, p[0, :3], 1, 1)
mint.nn.Conv2d: cell(mint.nn.Conv2d(2, 3, 2), weight=k)(c)
ops.conv2d: ops.conv2d(c, k, stride=2)
ops.conv1d: ops.conv1d(b, k[:, 0, :, :1].reshape(1, 3, 2), stride=1)
nn.Conv2d: cell(nn.Conv2d(2, 3, 2, pad_mode='valid'), weight=k)(c)
mint.nn.functional.max_pool2d: F.max_pool2d(c, 2, 2)
ops.max_pool2d: ops.max_pool2d(c, 2, 2)
mint.nn.functional.avg_pool2d: F.avg_pool2d(c, 2, 2)
ops.avg_pool2d: ops.avg_pool2d(c, 2)
mint.nn.functional.adaptive_avg_pool2d: F.adaptive_avg_pool2d(c, (2, 2))
ops.adaptive_avg_pool2d: ops.adaptive_avg_pool2d(c, 2)
mint.nn.functional.gelu: F.gelu(x, approximate='tanh')
ops.gelu: ops.gelu(x, approximate='tanh')
nn.GELU: nn.GELU(approximate=False)(x)
mint.nn.GELU: mint.nn.GELU()(x)
nn.ReLU: nn.ReLU()(x)
mint.nn.ReLU: mint.nn.ReLU()(x)
nn.SiLU: nn.SiLU()(x)
mint.nn.SiLU: mint.nn.SiLU()(x)
mint.nn.functional.elu: F.elu(x, 0.5)
ops.elu: ops.elu(x)
mint.nn.functional.leaky_relu: F.leaky_relu(x, 0.1)
ops.leaky_relu: ops.leaky_relu(x)
nn.LeakyReLU: nn.LeakyReLU()(x)
ops.softplus: ops.softplus(x, 2, 10)
mint.nn.functional.glu: F.glu(x, 1)
mint.nn.functional.prelu: F.prelu(x, p[0, :1])
nn.Tanh: nn.Tanh()(x)
mint.nn.Tanh: mint.nn.Tanh()(x)
nn.Sigmoid: nn.Sigmoid()(x)
mint.nn.Sigmoid: mint.nn.Sigmoid()(x)
mint.nn.functional.softmax: F.softmax(x, dim=1)
ops.softmax: ops.softmax(x, axis=0)
mint.softmax: mint.softmax(x, 0)
mint.nn.Softmax: mint.nn.Softmax(1)(x)
mint.nn.functional.log_softmax: F.log_softmax(x, dim=0)
ops.log_softmax: ops.log_softmax(x)
mint.nn.LogSoftmax: mint.nn.LogSoftmax(1)(x)
mint.nn.functional.dropout: F.dropout(x, 0.5, False)
ops.dropout: ops.dropout(x, 0.25)
nn.Dropout: nn.Dropout(p=0.25)(x)
mint.nn.Dropout: mint.nn.Dropout(0.25)(x)
mint.nn.functional.cross_entropy: F.cross_entropy(x, t)
ops.cross_entropy: ops.cross_entropy(x, t, label_smoothing=0.1)
nn.CrossEntropyLoss: nn.CrossEntropyLoss(reduction='sum')(x, u)
mint.nn.CrossEntropyLoss: mint.nn.CrossEntropyLoss()(x, t)
mint.nn.functional.nll_loss: F.nll_loss(x, t)
ops.nll_loss: ops.nll_loss(x, t)
nn.MSELoss: nn.MSELoss()(x, y)
mint.nn.MSELoss: mint.nn.MSELoss()(x, y)
nn.L1Loss: nn.L1Loss()(x, y)
mint.nn.functional.binary_cross_entropy: F.binary_cross_entropy(r, p)
ops.binary_cross_entropy: ops.binary_cross_entropy(r, p)
mint.nn.functional.kl_div: F.kl_div(x, p, 'sum')
ops.kl_div: ops.kl_div(x, p, 'sum')
mint.nn.functional.normalize: F.normalize(x, 2.0, 1)
mint.nn.functional.one_hot: F.one_hot(t, 5)
mint.nn.functional.pad: F.pad(x, (1, 2), value=0.5)
ops.pad: ops.pad(x, (1, 2), value=0.5)
mint.nn.functional.unfold: F.unfold(c, 2)
mint.nn.functional.flatten: F.flatten(b, 1)
nn.Flatten: nn.Flatten()(b)
mint.nn.Flatten: mint.nn.Flatten()(b)
mint.matmul: mint.matmul(b, w)
mint.mm: mint.mm(x, s)
mint.bmm: mint.bmm(b, w)
ops.bmm: ops.bmm(b, w)
mint.addmm: mint.addmm(x, x, s, beta=0.5, alpha=2)
mint.baddbmm: mint.baddbmm(w[:, :3], b, w, beta=0.5)
ops.baddbmm: ops.baddbmm(w[:, :3], b, w, beta=0.5)
mint.dot: mint.dot(v, v)
mint.outer: mint.outer(v, v)
mint.einsum: mint.einsum('ij,jk->ik', x, s)
ops.einsum: ops.einsum('ij,jk->ik', x, s)
mint.add: mint.add(x, y, alpha=2)
mint.sub: mint.sub(x, y, alpha=2)
mint.div: mint.div(x, p)
ops.div: ops.div(x, p)
mint.round: mint.round(x)
mint.clamp: mint.clamp(x, -0.25, 0.5)
ops.clamp: ops.clamp(x, min=-0.25)
ops.clip_by_value: ops.clip_by_value(x, Tensor(-0.25), Tensor(0.5))
mint.sum: mint.sum(x, 1, True)
ops.sum: ops.sum(x, dim=0)
mint.mean: mint.mean(x, 1)
ops.mean: ops.mean(x, 1, True)
mint.prod: mint.prod(x, 1)
ops.prod: ops.prod(x, 1)
mint.var: mint.var(x, 1, correction=0)
mint.std: mint.std(x, 1)
ops.var: ops.var(x, 1)
ops.std: ops.std(x, 1)
mint.norm: mint.norm(x, 2, 1)
mint.max: mint.max(x, 1)
mint.min: mint.min(x, 1)
mint.argmax: mint.argmax(x, 1)
mint.argmin: mint.argmin(x, 1)
mint.logsumexp: mint.logsumexp(x, 1)
mint.all: mint.all(m, 1)
mint.any: mint.any(m, 1)
mint.cumsum: mint.cumsum(x, 1)
ops.cumsum: ops.cumsum(x, 1)
mint.topk: mint.topk(x, 2, 1)
ops.topk: ops.topk(x, 2, 1)
mint.sort: mint.sort(x, dim=1)
ops.sort: ops.sort(x, 1)
mint.cat: mint.cat([x, y], 1)
ops.cat: ops.cat([x, y], 1)
ops.concat: ops.concat([x, y], 1)
mint.stack: mint.stack([x, y], 1)
ops.stack: ops.stack([x, y], 1)
mint.split: mint.split(x, 2, 1)
ops.split: ops.split(x, 2, 1)
mint.chunk: mint.chunk(x, 2, 1)
ops.chunk: ops.chunk(x, 2, 1)
mint.transpose: mint.transpose(b, 1, 2)
ops.transpose: ops.transpose(b, (1, 2, 0))
ops.swapaxes: ops.swapaxes(b, 0, 2)
mint.permute: mint.permute(b, (1, 2, 0))
ops.permute: ops.permute(b, (1, 2, 0))
mint.reshape: mint.reshape(x, (4, 3))
ops.reshape: ops.reshape(x, (2, 6))
mint.flatten: mint.flatten(b, 1)
mint.squeeze: mint.squeeze(c, 0)
ops.squeeze: ops.squeeze(c, 0)
mint.unsqueeze: mint.unsqueeze(x, 1)
ops.unsqueeze: ops.unsqueeze(x, 1)
ops.expand_dims: ops.expand_dims(x, 1)
mint.broadcast_to: mint.broadcast_to(v, (3, 4))
ops.broadcast_to: ops.broadcast_to(v, (3, 4))
mint.tile: mint.tile(x, (2, 1))
ops.tile: ops.tile(x, (2, 1))
mint.flip: mint.flip(x, (1,))
mint.roll: mint.roll(x, 1, 1)
mint.narrow: mint.narrow(x, 1, 1, 2)
mint.unbind: mint.unbind(x, 1)
mint.where: mint.where(m, x, y)
ops.where: ops.where(m, x, y)
mint.tril: mint.tril(s, 1)
ops.tril: ops.tril(s, -1)
mint.triu: mint.triu(s, 1)
ops.triu: ops.triu(s)
mint.gather: mint.gather(x, 1, g)
ops.gather_elements: ops.gather_elements(x, 1, g)
ops.gather_d: ops.gather_d(x, 1, g)
ops.gather: ops.gather(x, i, 0)
mint.index_select: mint.index_select(x, 0, i)
ops.index_select: ops.index_select(x, 0, i)
mint.scatter_add: mint.scatter_add(x, 1, g, p[:, :2])
mint.masked_select: mint.masked_select(x, m)
ops.masked_fill: ops.masked_fill(x, m, 0.5)
mint.repeat_interleave: mint.repeat_interleave(x, 2, 1)
mint.zeros: mint.zeros((2, 3))
ops.zeros: ops.zeros((2, 3), ms.float32)
ops.ones: ops.ones((2, 3), ms.float32)
mint.full: mint.full((2, 3), 1.5)
ops.full: ops.full((2, 3), 1.5)
mint.full_like: mint.full_like(x, 1.5)
mint.arange: mint.arange(1, 7, 2)
mint.eq: mint.eq(x, y)
mint.logical_and: mint.logical_and(m, m)
mint.logical_or: mint.logical_or(m, m)
mint.logical_not: mint.logical_not(m)
ops.cast: ops.cast(x, ms.float16)
Primitive.Dense: ops.Dense()(x, s, v)
Primitive.MatMul: ops.MatMul()(x, s)
Primitive.BatchMatMul: ops.BatchMatMul()(b, w)
Primitive.Add: ops.Add()(x, y)
Primitive.Sub: ops.Sub()(x, y)
Primitive.Mul: ops.Mul()(x, y)
Primitive.RealDiv: ops.RealDiv()(x, p)
Primitive.ReLU: ops.ReLU()(x)
Primitive.Tanh: ops.Tanh()(x)
Primitive.Sigmoid: ops.Sigmoid()(x)
Primitive.Exp: ops.Exp()(x)
Primitive.Sqrt: ops.Sqrt()(p)
Primitive.Reshape: ops.Reshape()(x, (2, 6))
Primitive.Transpose: ops.Transpose()(b, (1, 2, 0))
Primitive.Cast: ops.Cast()(x, ms.float16)
Tensor.__getitem__: x[1]
Tensor.__setitem__: put(x * 1, y[0])
Tensor.__radd__: 2.0 + x
Tensor.__rsub__: 2.0 - x
Tensor.__rmul__: 2.0 * x
Tensor.__rtruediv__: 2.0 / p
Tensor.__rpow__: 2.0 ** x
Tensor.__matmul__: x @ s
Tensor.__pow__: p ** 2.5
Tensor.__iadd__: (x * 1).__iadd__(y)
Tensor.__isub__: (x * 1).__isub__(y)
Tensor.__imul__: (x * 1).__imul__(y)
Tensor.__itruediv__: (x * 1).__itruediv__(p)
Tensor.add: x.add(y, alpha=2)
Tensor.add_: (x * 1).add_(y)
Tensor.sub: x.sub(y, alpha=2)
Tensor.sub_: (x * 1).sub_(y)
Tensor.mul_: (x * 1).mul_(y)
Tensor.div_: (x * 1).div_(p)
Tensor.pow: p.pow(2.5)
Tensor.matmul: x.matmul(s)
Tensor.sum: x.sum(1)
Tensor.mean: x.mean(1, True)
Tensor.max: x.max(axis=1)
Tensor.min: x.min(axis=1)
Tensor.argmax: x.argmax(1)
Tensor.softmax: x.softmax(1)
Tensor.reshape: x.reshape(2, 6)
Tensor.view: x.view(2, 6)
Tensor.transpose: b.transpose(1, 2)
Tensor.permute: b.permute(1, 2, 0)
Tensor.swapaxes: b.swapaxes(0, 2)
Tensor.flatten: b.flatten(start_dim=1)
Tensor.squeeze: c.squeeze(0)
Tensor.unsqueeze: x.unsqueeze(1)
Tensor.expand_dims: x.expand_dims(1)
Tensor.broadcast_to: v.broadcast_to((3, 4))
Tensor.tile: x.tile((2, 1))
Tensor.chunk: x.chunk(2, 1)
Tensor.split: x.split(2, 1)
Tensor.masked_fill: x.masked_fill(m, 0.5)
Tensor.astype: x.astype(ms.float16)
Tensor.to: x.to(ms.float16)
"""


def values() -> dict[str, Any]:
    """The inputs of all examples as arrays: sixteenths, so that every framework has the same."""

    def made(shape: tuple[int, ...], first: int, by: int) -> np.ndarray[Any, Any]:
        return ((np.arange(first, first + by * int(np.prod(shape)), by) * 7 % 61 - 30) / 16).astype(np.float32).reshape(shape)

    def positive(shape: tuple[int, ...], first: int) -> np.ndarray[Any, Any]:
        return ((np.arange(first, first + int(np.prod(shape))) * 5 % 13 + 1) / 16).astype(np.float32).reshape(shape)

    return {
        "x": made((3, 4), 1, 1),
        "y": made((3, 4), 5, 3),
        "z": made((3, 4), 2, 5),
        "p": positive((3, 4), 0),
        "q": positive((3, 4), 7),
        "r": positive((3, 4), 3) * 0.9,
        "s": made((4, 4), 3, 1),
        "v": made((4,), 4, 1),
        "b": made((2, 3, 4), 0, 1),
        "w": made((2, 4, 3), 9, 1),
        "c": made((1, 2, 4, 4), 6, 1),
        "k": made((3, 2, 2, 2), 2, 1),
        "i": np.array([2, 0, 1, 2], np.int32),
        "t": np.array([3, 0, 2], np.int64),
        "u": np.array([3, 0, 2], np.int32),
        "g": np.array([[1, 0], [3, 2], [0, 0]], np.int64),
        "m": np.arange(12).reshape(3, 4) % 3 == 0,
    }


def inputs() -> dict[str, Any]:
    return {name: Tensor(array.astype(np.float32) if array.dtype == np.float64 else array) for name, array in values().items()}


def example_of(row: NameRow) -> str:
    """The call of a row, as Python."""
    return _explicit().get(row.name) or _call_of(row)


def _explicit() -> dict[str, str]:
    return dict(line.split(": ", 1) for line in EXAMPLES.splitlines() if line)


def _call_of(row: NameRow) -> str:
    name = row.name.rpartition(".")[2]
    letters = "pq" if name in _POSITIVE else "xyz"
    required = [
        names[0]
        for names, _ in row.parameters
        if names[0] in ("self", "input", "other", "x", "exponent", "value", "tensor", "mat2", "target")
    ]
    required = required or [row.parameters[0][0][0]]
    given = list(letters[: len(required)])
    if row.name.startswith("Tensor."):
        return f"{given[0]}.{name}({', '.join(given[1:])})"
    return f"{row.name.replace('mint.nn.functional', 'F')}({', '.join(given)})"


def cell(made: Any, **parameters: Any) -> Any:
    """A cell with these values for its parameters."""
    for name, tensor in parameters.items():
        getattr(made, name).set_data(Tensor(tensor.asnumpy().copy()))
    return made


def fixed(tensor: Any) -> Any:
    """The same values, of which nobody asks for a gradient."""
    return Tensor(tensor.asnumpy().copy())


def put(tensor: Any, value: Any) -> Any:
    tensor[1] = value
    return tensor


def evaluate(row: str, text: str, given: dict[str, Any]) -> Any:
    """Run an example; the frame that it runs in bears the name of the row, and so do the stacks of its records."""
    names = {
        "F": mint.nn.functional,
        "mint": mint,
        "nn": nn,
        "ops": ops,
        "ms": ms,
        "Tensor": Tensor,
        "cell": cell,
        "fixed": fixed,
        "put": put,
    }
    return eval(compile(text, f"<{row}>", "eval"), names, given)


ROWS = {name: rows[0] for name, rows in name_rows().items()}
