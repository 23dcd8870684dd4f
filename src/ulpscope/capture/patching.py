# SPDX-License-Identifier: Apache-2.0
"""The only file that replaces an attribute of torch; it puts back the very object it found.

Each replacement stands for something that neither a mode nor a public hook can see:

- `nn.Module.__call__`: which module runs, with its keyword arguments, also when forward raises;
- `autograd.Function._register_hook`, where the hot path is compiled: a step registers hundreds of hooks, and ours need no handle;
- `autograd.Function.apply`: modes see only the calls inside a Function, not the Function;
- `torch.autograd._engine_run_backward`: modes are off inside their own handler, and `Tensor.backward` is such a handler, so recomputed
  forwards would be missed; it also tells when a backward pass is over;
- `torch.distributed.*`: plain Python functions that no mode sees;
- `GradScaler.step`: a step that the scaler skips never reaches the optimizer's hooks;
- the operators of `Tensor` (`__add__` ...), only where asked: a mode reports `a + b` and `a.add(b)` alike, and older tools tell them apart;
- functions of a vendor's package, only where asked: written in Python, they are seen by no mode as the one call that they are;
- `DataLoader` batches, only where asked: an older tool takes each for the beginning of a step;
- `functional.dropout`, `dropout2d` and `dropout3d`, only where asked: an older tool promises to switch dropout off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ulpscope.capture.torch_internals import COMPILER

__all__ = ["COLLECTIVES", "MODULE_CALL", "Patches"]

_INHERITED = object()

_OPERATORS = (
    *(f"__{name}__" for name in "neg pos abs invert eq ne lt le gt ge getitem setitem".split()),
    *(
        f"__{way}{name}__"
        for way in ("", "r", "i")
        for name in "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split()
    ),
)

COLLECTIVES = (
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


class Patches:
    """A set of replaced attributes that is undone as a whole, last first."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def module_calls(self, around: Callable[..., Any]) -> None:
        """`around(original, module, args, kwargs)` stands for every call of a module."""
        original = torch.nn.Module.__call__
        self._replace(torch.nn.Module, "__call__", functools.wraps(original)(_module_call(original, around)))

    def functions(self, around: Callable[..., Any]) -> None:
        """`around(apply, cls, args, kwargs)` stands for every `Function.apply`."""
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(None, cls)
            if torch.compiler.is_compiling():
                return bound(*args, **kwargs)
            return around(bound, cls, args, kwargs)

        self._replace(torch.autograd.Function, "apply", classmethod(apply))

    def hook_registration(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """`around(original)` stands for what torch calls to register a hook on a node of the graph."""
        self._replace(torch.autograd.Function, "_register_hook", around(torch.autograd.Function._register_hook))

    def backward_passes(self, around: Callable[..., Any]) -> None:
        """`around(original, args, kwargs)` stands for every pass of the autograd engine that Python starts."""
        original = vars(torch.autograd)["_engine_run_backward"]

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return around(original, args, kwargs)

        self._replace(torch.autograd, "_engine_run_backward", run)

    def collectives(self, around: Callable[..., Any]) -> None:
        """`around(name, original, args, kwargs)` stands for every collective of torch.distributed."""
        if not torch.distributed.is_available():
            return
        for name in COLLECTIVES:
            original = getattr(torch.distributed, name, None)
            if original is not None:
                self._replace(torch.distributed, name, _collective(name, original, around))

    def scaler_steps(self, around: Callable[..., Any]) -> None:
        """`around(original, scaler, optimizer, args, kwargs)` stands for every `GradScaler.step`."""
        original = torch.amp.GradScaler.step

        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return around(original, self, optimizer, args, kwargs)

        self._replace(torch.amp.GradScaler, "step", step)

    def operators(self, around: Callable[..., Any]) -> None:
        """`around(name, original, args)` stands for every operator of a tensor, by the name that Python has for it."""
        for name in _OPERATORS:
            original = getattr(torch.Tensor, name, None)
            if original is not None:
                self._replace(torch.Tensor, name, _operator(name, original, around))

    def single_functions(self, functions: Sequence[tuple[Any, str, str]], around: Callable[..., Any]) -> None:
        """`around(op, original, args, kwargs)` stands for every call of these functions, given as owner, attribute and name of the call."""
        for owner, attribute, op in functions:
            self._replace(owner, attribute, _collective(op, getattr(owner, attribute), around))

    def batches(self, around: Callable[..., Any]) -> None:
        """`around(next_batch)` stands for every batch that an iterator over a DataLoader gives."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original = _BaseDataLoaderIter.__next__

        @functools.wraps(original)
        def fetch(self: Any) -> Any:
            return around(functools.partial(original, self))

        self._replace(_BaseDataLoaderIter, "__next__", fetch)

    def no_dropout(self) -> None:
        """Let the functions that every dropout module calls drop nothing; they are still called, and seen."""
        for name in ("dropout", "dropout2d", "dropout3d"):
            self._replace(torch.nn.functional, name, _without_dropping(getattr(torch.nn.functional, name)))

    def undo(self) -> None:
        """Put every attribute back; what was inherited is inherited again."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, owner.__dict__.get(name, _INHERITED)))
        setattr(owner, name, replacement)


def _module_call(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The compiler follows this function, and nothing below it.
        if torch.compiler.is_dynamo_compiling() or COMPILER.get("_is_compiling_flag"):
            return original(self, *args, **kwargs)
        return around(original, self, args, kwargs)

    return call


MODULE_CALL = _module_call(repr, repr).__code__
"""The code of the function that stands around the call of every module."""


def _collective(name: str, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(name, original, args, kwargs)

    return call


def _without_dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drop_nothing(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return original(input, 0.0, training, inplace)

    return drop_nothing


def _operator(name: str, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args)
        return around(name, original, args)

    return call
