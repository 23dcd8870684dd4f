# SPDX-License-Identifier: Apache-2.0
"""Turn torch's own operator samples into programs: every operator of its test suite on the inputs that torch tests it with.

    for name, program in samples(torch.float32):
        with Capture(into, keep="tensors") as capture:
            program()

A program makes its inputs anew each time it runs, always the same ones and unseen by a capture that is on, and calls the operator
forward and backward. It gives back what it computed, so that a recorded run can be held against a bare one bit by bit; where torch
refuses a sample, its answer is the name of the error.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["Program", "Sampled", "Variant", "samples"]

Variant: TypeAlias = Literal["function", "method", "inplace"]
Program: TypeAlias = Callable[[], list[Any]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One operator in one dtype with the first `most` of the samples that torch has for it."""

    operator: Any
    dtype: torch.dtype
    most: int | None = None
    variant: Variant = "function"

    @property
    def name(self) -> str:
        return str(self.operator.full_name)

    @property
    def is_differentiable(self) -> bool:
        return self.dtype in self.operator.supported_backward_dtypes("cpu") and bool(self.operator.supports_autograd)

    def __call__(self) -> list[Any]:
        """Return each sample's results and the gradients of its inputs, or the name of the error that torch raised."""
        function = {"function": self.operator.op, "method": self.operator.method_variant, "inplace": self.operator.inplace_variant}
        with _unseen():
            given = self._inputs()
        return [self._answer(function[self.variant], sample, place) for place, sample in enumerate(given)]

    def _inputs(self) -> list[Any]:
        _seed(self.name)
        made = self.operator.sample_inputs("cpu", self.dtype, requires_grad=self.is_differentiable)
        return list(made if self.most is None else islice(made, self.most))

    def _answer(self, function: Any, sample: Any, place: int) -> Any:
        torch.manual_seed(place)
        try:
            first = _twin(sample.input) if self.variant == "inplace" else sample.input
            results = [one for one in tree_leaves(function(first, *sample.args, **sample.kwargs)) if isinstance(one, torch.Tensor)]
            leaves = [one for one in tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_leaf(one)]
            return results, _gradients(results, leaves, place) if leaves else []
        except Exception as error:  # any error: it has to be the same one under a capture
            return type(error).__name__


def samples(
    dtype: torch.dtype, names: Sequence[str] = (), *, most: int | None = None, variant: Variant = "function"
) -> Iterator[tuple[str, Program]]:
    """Yield every operator that torch tests in `dtype`, or those of these names, with its program; `most` samples of each."""
    from torch.testing._internal.common_methods_invocations import op_db

    flags = torch.backends.disable_global_flags.__globals__
    flags["__allow_nonbracketed_mutation_flag"] = True  # importing torch's tests forbids setting flags of cuDNN and others

    for operator in op_db:
        is_wanted = not names or operator.full_name in names
        has_variant = variant == "function" or getattr(operator, f"{variant}_variant") is not None
        if dtype in operator.supported_dtypes("cpu") and is_wanted and has_variant:
            yield operator.full_name, Sampled(operator, dtype, most, variant)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide torch's computations from the capture, since they are no part of the program."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _gradients(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor | None]:
    ends = [one for one in results if one.requires_grad]
    if not ends:
        return []
    with _unseen():
        generator = torch.Generator().manual_seed(seed)
        entering = [torch.randn(one.shape, dtype=_drawn(one.dtype), generator=generator).to(one.dtype) for one in ends]
    torch.autograd.backward(ends, entering)
    return [one.grad for one in leaves]


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _twin(value: Any) -> Any:
    """Copy a tensor, so that it may be written to: a leaf that requires a gradient may not."""
    return value.clone() if isinstance(value, torch.Tensor) else value
