# SPDX-License-Identifier: Apache-2.0
"""List the programs, and run each inside `record(model, optimizer)`, in one of several ways.

A way is a place and a precision: the same program on another device, with TF32 or under autocast is the other side of a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["FEW", "KINDS", "Kind", "Program", "Way", "all_programs", "kept_short", "run"]

Kind: TypeAlias = Literal["architecture", "operator", "layout"]
KINDS: tuple[Kind, ...] = ("architecture", "operator", "layout")
DTYPES = ("float32", "bfloat16")

FEW: dict[Kind, tuple[str, ...]] = {
    "architecture": ("qwen3_moe", "bert", "convnext"),
    "operator": tuple(
        """
        __getitem__ __rmatmul__ abs addcdiv addmm amax argsort atan2 baddbmm bernoulli bmm cat clamp complex copysign
        cov cumsum diff einsum empty_like erfinv expand fft.fft gather index_add index_copy kthvalue lerp
        linalg.cholesky linalg.qr linalg.svd logaddexp masked_fill masked_select max.reduction_with_dim multinomial
        native_layer_norm nextafter nn.functional.batch_norm nn.functional.conv2d nn.functional.cross_entropy
        nn.functional.dropout nn.functional.embedding_bag nn.functional.interpolate.bilinear nn.functional.layer_norm
        nn.functional.linear nn.functional.max_pool2d nn.functional.rrelu nn.functional.scaled_dot_product_attention
        normal.in_place resize_ scatter_reduce.amax softmax sort split_with_sizes std take_along_dim topk unique where
        """.split()
    ),
    "layout": ("asynchronous", "pipeline_1f1b"),
}
"""What `make test` runs: of the operators some of every family, with draws, memory that nobody wrote to and writing in place."""


@dataclass(frozen=True, slots=True)
class Way:
    """The device and the precision in which a program runs."""

    device: str = "cpu"
    autocast: str | None = None
    attention: str | None = None
    tf32: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Program:
    """A program by name; `dtype` is that of an operator's samples, and that of autocast for everything else."""

    kind: Kind
    name: str
    dtype: str = "float32"
    most: int | None = None

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}/{self.dtype}" + ("" if self.most is None else f"/{self.most} samples")

    @property
    def way(self) -> Way:
        """Return the way it runs where nothing else is asked for."""
        return Way(autocast="bfloat16" if self.kind == "architecture" and self.dtype == "bfloat16" else None)


def all_programs(kinds: tuple[Kind, ...] = KINDS, patterns: tuple[str, ...] = ("*",), dtypes: tuple[str, ...] = DTYPES) -> list[Program]:
    """List every program of these kinds whose name fits one of the patterns, architectures first."""
    found = [Program(kind, name, dtype) for kind in kinds for dtype in dtypes for name in _names(kind, dtype)]
    return [one for one in found if any(fnmatchcase(one.name, pattern) for pattern in patterns)]


def kept_short(programs: list[Program]) -> list[Program]:
    """Choose the sample of these that `make test` runs: two samples of an operator, and no two dtypes of anything."""
    chosen = [one for one in programs if one.name in FEW[one.kind] and (one.dtype == "float32" or one.kind != "operator")]
    return [Program(one.kind, one.name, one.dtype, 2 if one.kind == "operator" else None) for one in chosen]


def _names(kind: Kind, dtype: str) -> Iterator[str]:
    if kind == "architecture" and find_spec("transformers") is not None:
        from bench.architectures import ARCHITECTURES

        yield from ARCHITECTURES
    if kind == "operator" and find_spec("expecttest") is not None:
        from bench.opinfo import samples

        yield from dict.fromkeys(name for name, _ in samples(getattr(torch, dtype)))
    if kind == "layout" and dtype == "float32":
        from tests.harmless.layouts import LAYOUTS

        yield from LAYOUTS


def run(program: Program, record: Callable[[Any, Any], Any], way: Way) -> Any:
    """Run a program from its seed; return everything that has to be the same with and without a capture."""
    if program.kind == "operator":
        return _operator(program, record)
    with _tf32(way.tf32) if way.device != "cpu" else contextlib.nullcontext():
        return _architecture(program, record, way)


def _architecture(program: Program, record: Callable[[Any, Any], Any], way: Way) -> Any:
    from bench.architectures import train

    return train(program.name, record, autocast=way.autocast, device=way.device, attention=way.attention)


def _operator(program: Program, record: Callable[[Any, Any], Any]) -> Any:
    from bench.opinfo import samples

    [(_, sampled)] = samples(getattr(torch, program.dtype), [program.name], most=program.most)
    with record(None, None) as capture:
        found = sampled()
        capture.step()
    return {"results": found, "generator": torch.get_rng_state()}


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
