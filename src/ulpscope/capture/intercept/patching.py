# SPDX-License-Identifier: Apache-2.0
"""Stand in the way of torch's own functions; only this file does, and it puts back the very object it found.

A function written in Python stays the same object, and we stand around it (`stand_ins`): code that compares, inspects, wraps or pickles it,
by any name, finds nothing changed. A function without Python code, or one that is wanted under one name only, is replaced as an attribute.
Each patch is for something that neither a mode nor a public hook can see:

- `nn.Module.__call__`: which module runs, with its keyword arguments, also when forward raises;
- `autograd.Function._register_hook`, where the hot path is compiled: a step registers hundreds of hooks, and ours need no handle;
- `autograd.Function.apply`: modes see only the calls inside a Function, not the Function;
- `HigherOrderOperator.__call__`: `torch.cond`, `flex_attention` and their kin are compiled even in eager mode, and no function mode sees
  the calls in a compiled region;
- `torch.autograd._engine_run_backward`: modes are off inside their own handler, and `Tensor.backward` is such a handler, so recomputed
  forwards would be missed; it also shows when a backward pass is over;
- the collectives of `torch.distributed`, plain Python functions that no mode sees, the functions that wait for them, and the one by which
  a pipeline finds out its shapes. torch compares such functions by identity (`P2POp(isend, ...)`), and programs import them by name: so
  each stays the same object, wherever it was imported, and only its code is exchanged (`stand_in`);
- the methods that wait for a handle of a collective (`Work.wait`): until then nobody may read the memory that the collective writes to;
- `GradScaler.step`: a step that the scaler skips never reaches the optimizer's hooks;
- the operators of `Tensor` (`__add__` ...), only on request: a mode reports `a + b` and `a.add(b)` alike, and older tools tell them apart;
- functions of a vendor's package, only on request: no mode sees a function written in Python as one call;
- `DataLoader` batches, only on request: an older tool takes each for the beginning of a step;
- `functional.dropout`, `dropout2d` and `dropout3d`, only on request: an older tool promises to switch dropout off.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

from ulpscope._torch_private import (
    PIPELINE_PREPARATIONS,
    PIPELINE_STAGES,
    SHARDED_PARAMETERS,
    HigherOrderOperator,
    batch_iterator,
    coalescing_manager,
    engine_run_backward,
    register_hook,
)
from ulpscope.capture.intercept.collectives import ASYNCHRONOUS_MODULE, collective_functions
from ulpscope.capture.intercept.depth import Depth
from ulpscope.capture.torch_internals import COMPILER, is_tracing_program, keep_from_compiler
from ulpscope.recording.stand_ins import leave, stand_around, stand_in_code

__all__ = ["MODULE_CALL", "Patches"]

_INHERITED = object()

_OPERATORS = (
    *(f"__{name}__" for name in "neg pos abs invert eq ne lt le gt ge getitem setitem".split()),
    *(
        f"__{way}{name}__"
        for way in ("", "r", "i")
        for name in "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split()
    ),
)

_WAITING = ("wait", "synchronize", "block_current_stream", "value", "is_completed", "done", "get_future")
"""Methods by which a program waits for a handle; `is_completed` and `done` only answer, and `get_future` hands the waiting to another
object.
"""

_PIPELINE = "torch.distributed.pipelining.stage"
_LATE = (ASYNCHRONOUS_MODULE, "torch.distributed.nn.functional")
"""Modules that torch imports only where there is a group of processes."""


class Patches:
    """A set of patches that is undone as a whole, last first."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._stood_around: dict[FunctionType, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
        self._handles: set[type] = set()
        self._depths: list[Depth] = []
        self._around_operators: list[Callable[..., Any]] = []

    def module_calls(self, around: Callable[..., Any]) -> None:
        """Call `around(original, module, args, kwargs)` for every call of a module."""
        depth = Depth()
        self._depths.append(depth)
        depth.begin()
        self.stand_in(torch.nn.Module.__call__, lambda original: _module_call(original, around, depth))

    def functions(self, around: Callable[..., Any]) -> None:
        """Call `around(apply, cls, args, kwargs)` for every `Function.apply`."""

        def standing_for(original: Callable[..., Any]) -> Callable[..., Any]:
            def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return original(cls, *args, **kwargs)
                return around(MethodType(original, cls), cls, args, kwargs)

            return apply

        found = inspect.getattr_static(torch.autograd.Function, "apply")
        if isinstance(found, classmethod):
            self.stand_in(found.__func__, standing_for)
        else:  # written in C++ from torch 2.15 on
            self._replace(torch.autograd.Function, "apply", classmethod(standing_for(functools.partial(_bound, found))))

    def higher_order_operators(self, around: Callable[..., Any]) -> None:
        """Call `around(original, operator, args, kwargs)` for every call of a higher-order operator, also for the operators inside it."""
        function: Any = HigherOrderOperator.__call__

        def standing_for(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_dynamo_compiling() or COMPILER.get("_is_compiling_flag"):
                    return original(self, *args, **kwargs)
                return around(original, self, args, kwargs)

            return call

        keep_from_compiler(standing_for.__code__)
        keep_from_compiler(stand_in_code(function))
        self.stand_in(function, standing_for)

    def hook_registration(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function by which torch registers a hook on a node of the graph with `around(original)`."""
        if register_hook is not None:
            self._replace(torch.autograd.Function, register_hook.__name__, around(register_hook))

    def backward_passes(self, around: Callable[..., Any]) -> None:
        """Call `around(original, args, kwargs)` for every pass of the autograd engine that Python starts."""

        def standing_for(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return original(*args, **kwargs)
                return around(original, args, kwargs)

            return run

        if engine_run_backward is not None:
            self.stand_in(engine_run_backward, standing_for)

    def collectives(self, around: Callable[..., Any], around_wait: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        """Call `around(name, original, args, kwargs)` for every collective of torch.distributed.

        `around_wait(name, original, args)` is called for waiting for memory (`wait_tensor`), and for each handle that a coalescing manager
        gets to wait for (`append`).
        """
        if not torch.distributed.is_available():
            return
        if torch.distributed.is_initialized():
            for module in _LATE:
                importlib.import_module(module)
        for name, function in collective_functions().items():
            self.stand_in(function, functools.partial(_outermost, name, around=around))
        waits = [(sys.modules.get(ASYNCHRONOUS_MODULE), "wait_tensor"), (coalescing_manager(), "append")]
        for owner, name in waits:
            wait = vars(owner).get(name) if owner is not None else None
            if isinstance(wait, FunctionType):
                self.stand_in(wait, functools.partial(_waiting, name, around=around_wait))
        again = functools.partial(self.collectives, around, around_wait)
        self.stand_in(torch.distributed.init_process_group, functools.partial(_beginning, again=again))

    def handles(self, kind: type, around: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        """Call `around(name, original, args)` for every method by which a program waits for a handle of this kind, the first argument."""
        if kind in self._handles:
            return
        self._handles.add(kind)
        for name in _WAITING:
            owner = next((ancestor for ancestor in kind.__mro__ if name in vars(ancestor)), None)
            method = None if owner is None else vars(owner)[name]
            if isinstance(method, FunctionType):
                self.stand_in(method, functools.partial(_waiting, name, around=around))
            elif owner is not None and not any(replaced[:2] == (owner, name) for replaced in self._replaced):
                self._replace(owner, name, _waiting(name, getattr(owner, name), around))

    def pipelines(self, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> bool:
        """Call `around(original, args, kwargs)` for the run by which a pipeline finds out its shapes; return True when that is in place."""
        module = sys.modules.get(_PIPELINE)
        for stage in PIPELINE_STAGES:
            for name in PIPELINE_PREPARATIONS:
                method = vars(getattr(module, stage, object)).get(name)
                if isinstance(method, FunctionType):
                    self.stand_in(method, lambda original: lambda *args, **kwargs: around(original, args, kwargs))
        return module is not None

    def allocations(self, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> bool:
        """Call `around(original, args, kwargs)` when a tensor gets new memory, as FSDP does; return True when that is in place."""
        module = sys.modules.get(SHARDED_PARAMETERS)
        function = vars(module).get("alloc_storage") if module is not None else None
        if isinstance(function, FunctionType):
            self.stand_in(function, lambda original: lambda *args, **kwargs: around(original, args, kwargs))
        return module is not None

    def stand_in(self, function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have `make(original)` called in place of this function, for every holder of it; the function stays the same object."""
        if function not in self._stood_around:
            stand_around(function, make)
            self._stood_around[function] = make

    def scaler_steps(self, around: Callable[..., Any]) -> None:
        """Call `around(original, scaler, optimizer, args, kwargs)` for every `GradScaler.step`."""

        def standing_for(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                return around(original, self, optimizer, args, kwargs)

            return step

        self.stand_in(torch.amp.GradScaler.step, standing_for)

    def operators(self, around: Callable[..., Any]) -> None:
        """Call `around(name, original, args)` for every operator of a tensor, by Python's name for it."""
        torch.overrides.is_tensor_method_or_property(torch.Tensor.add)  # torch lists its functions now, once, while they are its own
        self._around_operators.append(around)
        for name in _OPERATORS:
            original = getattr(torch.Tensor, name, None)
            if original is not None:
                self._replace(torch.Tensor, name, _operator(name, original, self._around_operators))

    def single_functions(self, functions: Sequence[tuple[Any, str, str]], around: Callable[..., Any]) -> None:
        """Call `around(op, original, args, kwargs)` for every call of these functions, given as owner, attribute and name of the call."""
        for owner, attribute, op in functions:
            function = getattr(owner, attribute)
            if isinstance(function, FunctionType):
                self.stand_in(function, functools.partial(_collective, op, around=around))
            else:
                self._replace(owner, attribute, _collective(op, function, around))

    def batches(self, around: Callable[..., Any]) -> None:
        """Call `around(next_batch)` for every batch that an iterator over a DataLoader gives."""
        if batch_iterator is None:
            return

        def standing_for(original: Callable[..., Any]) -> Callable[..., Any]:
            def fetch(self: Any) -> Any:
                return around(functools.partial(original, self))

            return fetch

        self.stand_in(batch_iterator.__next__, standing_for)

    def no_dropout(self) -> None:
        """Let the functions that every dropout module calls drop nothing; they are still called, and seen."""
        for name in ("dropout", "dropout2d", "dropout3d"):
            self.stand_in(getattr(torch.nn.functional, name), _without_dropping)

    def undo(self) -> None:
        """Leave every function, and put every attribute back; an inherited one is inherited again."""
        while self._stood_around:
            leave(*self._stood_around.popitem())
        self._handles.clear()
        self._around_operators.clear()
        while self._depths:
            self._depths.pop().end()
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._replaced.append((owner, name, owner.__dict__.get(name, _INHERITED)))
        setattr(owner, name, replacement)


def _bound(descriptor: Any, cls: type, /, *args: Any, **kwargs: Any) -> Any:
    """Call a class method of C++ as the method of a class."""
    return descriptor.__get__(None, cls)(*args, **kwargs)


def _module_call(original: Callable[..., Any], around: Callable[..., Any], depth: Depth) -> Callable[..., Any]:
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile traces this function, and nothing below it.
        if torch.compiler.is_dynamo_compiling() or COMPILER.get("_is_compiling_flag") or is_tracing_program():
            return original(self, *args, **kwargs)
        entered = depth.enter()
        try:
            return around(original, self, args, kwargs)
        finally:
            depth.leave(entered)

    return call


MODULE_CALL = stand_in_code(torch.nn.Module.__call__)  # type: ignore[arg-type]
"""The code that runs for the call of every module."""


def _beginning(original: Callable[..., Any], again: Callable[[], None]) -> Callable[..., Any]:
    def begin(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        again()
        return result

    return begin


def _waiting(
    name: str, original: Callable[..., Any], around: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(name, functools.partial(original, **kwargs) if kwargs else original, args)

    return call


def _collective(name: str, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(name, original, args, kwargs)

    return call


def _outermost(name: str, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Make the wrapper of a collective that torch hands to function modes, which call it again: only the outermost call counts."""

    running = threading.local()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(running, "is_inside", False):
            return original(*args, **kwargs)
        running.is_inside = True
        try:
            return around(name, original, args, kwargs)
        finally:
            running.is_inside = False

    return call


def _without_dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drop_nothing(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return original(input, 0.0, training, inplace)

    return drop_nothing


def _operator(name: str, original: Callable[..., Any], around: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Indexing shows this function to modes, and caches keep it for good: so it does not hold on to `around`, which is empty afterwards."""

    @functools.wraps(original)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args)
        standing = next(iter(around), None)
        return original(*args) if standing is None else standing(name, original, args)

    return call
