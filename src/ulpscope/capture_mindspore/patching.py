# SPDX-License-Identifier: Apache-2.0
"""The only file that stands in the way of MindSpore's own functions; it puts back the very object it found.

A function that is written in Python stays the object that it is, and we stand around it (`recording.stand_ins`), so a program that did
`from mindspore.ops import gelu` long before is seen too. A method that is written in C is replaced as an attribute of `Tensor`, which has
none of its own, and removed again.

- `nn.Cell.__call__`: which cell runs;
- the functions of `mint`, `mint.nn.functional` and `ops`, and `__call__` of every primitive: MindSpore has no mode that sees calls;
- methods and operators of `Tensor`;
- what runs a backward pass, which tells when one is over;
- what runs a function that `ms.jit` has compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeAlias

from mindspore import Tensor, mint, nn, ops
from mindspore.ops import Primitive

from ulpscope.capture_mindspore.framework import BACKWARD_PASS, COMPILED_CALL
from ulpscope.model.operations.mindspore_names import NOT_ARITHMETIC, name_rows
from ulpscope.recording.stand_ins import leave, own_code, stand_around

__all__ = ["AroundCall", "Patches"]

AroundCall: TypeAlias = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Given MindSpore's name of what is called, the function as it was, and the arguments."""

_NAMESPACES = (("mint.nn.functional", mint.nn.functional), ("mint", mint), ("ops", ops))
_NO_CALLS = ("grad_func", "primitive", "op_info_register", "debug_func", "comm_func", "_ms_kernel", "_utils", "other_func")
"""Modules whose functions transform functions, register operators, print or communicate."""
_OPERATORS = frozenset(
    [f"__{name}__" for name in "neg pos abs invert eq ne lt le gt ge getitem setitem".split()]
    + [f"__{way}{name}__" for way in ("", "r", "i") for name in "add sub mul truediv floordiv mod pow matmul and or xor".split()]
)


class Patches:
    """All that stands in the way of MindSpore between `install` and `undo`."""

    def __init__(self) -> None:
        self._stood_around: list[tuple[FunctionType, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []
        self._replaced: list[tuple[type, str]] = []
        self._is_away = False

    def cells(self, around: Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """`around(original, cell, args, kwargs)` stands for every call of a cell."""
        self._stand_in(nn.Cell.__call__, lambda original: lambda self, *args, **kwargs: around(original, self, args, kwargs))

    def functions(self, around: AroundCall) -> None:
        """`around(name, original, args, kwargs)` stands for every function and primitive."""
        for name, function in _functions():
            self._stand_in(function, functools.partial(_standing, name, around))
        for function in _primitive_calls():
            self._stand_in(function, functools.partial(_standing_for_primitive, around))

    def methods(self, around: AroundCall) -> None:
        """The same for methods and operators of a tensor."""
        for name in dir(Tensor):
            if name in NOT_ARITHMETIC or (name.startswith("_") and name not in _OPERATORS):
                continue
            found = getattr(Tensor, name)
            if isinstance(found, FunctionType):
                self._stand_in(found, functools.partial(_standing, f"Tensor.{name}", around))
            elif type(found).__name__ in ("method_descriptor", "wrapper_descriptor") and getattr(object, name, None) is not found:
                self._replace(Tensor, name, _method(f"Tensor.{name}", found, around))

    def backward_passes(self, around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """`around(original, args, kwargs)` stands for every backward pass."""
        self._stand_in(BACKWARD_PASS, lambda original: lambda *args, **kwargs: around(original, args, kwargs))

    def compiled_calls(self, around: Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """`around(original, executor, args, kwargs)` stands for every call of what `ms.jit` compiled."""
        self._stand_in(COMPILED_CALL, lambda original: lambda self, *args, **kwargs: around(original, self, args, kwargs))

    @contextlib.contextmanager
    def out_of_the_way(self) -> Iterator[None]:
        """Meanwhile every function has its own code, and every method is MindSpore's: a compiler reads both."""
        if self._is_away:
            yield
            return
        standing = [(function, function.__code__) for function, _ in self._stood_around]
        methods = [(owner, name, vars(owner)[name]) for owner, name in self._replaced]
        self._is_away = True
        for function, _ in standing:
            function.__code__ = own_code(function)
        for owner, name, _ in methods:
            delattr(owner, name)
        try:
            yield
        finally:
            self._is_away = False
            for function, code in standing:
                function.__code__ = code
            for owner, name, method in methods:
                setattr(owner, name, method)

    def undo(self) -> None:
        """Leave every function, and remove every attribute."""
        while self._stood_around:
            leave(*self._stood_around.pop())
        while self._replaced:
            owner, name = self._replaced.pop()
            delattr(owner, name)

    def _stand_in(self, function: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if isinstance(function, FunctionType):
            stand_around(function, make)
            self._stood_around.append((function, make))

    def _replace(self, owner: type, name: str, replacement: Any) -> None:
        assert name not in vars(owner), "what a class has of its own is stood around"
        setattr(owner, name, replacement)
        self._replaced.append((owner, name))


def _functions() -> Iterator[tuple[str, FunctionType]]:
    """Every function once, by the first of its names that the table knows, or else by its first name."""
    rows = name_rows()
    names: dict[FunctionType, list[str]] = {}
    for namespace, module in _NAMESPACES:
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or name in NOT_ARITHMETIC or not isinstance(function, FunctionType):
                continue
            if f"{namespace}.{name}" in rows or _is_a_call(function):
                names.setdefault(function, []).append(f"{namespace}.{name}")
    for function, known in names.items():
        yield next((name for name in known if name in rows), known[0]), function


def _is_a_call(function: FunctionType) -> bool:
    home = function.__module__ or ""
    return home.startswith("mindspore.") and home.rpartition(".")[2] not in _NO_CALLS


def _primitive_calls() -> Iterator[FunctionType]:
    """The `__call__` of every class of primitives that has one."""
    seen: set[type] = set()
    ahead: list[type] = [Primitive]
    while ahead:
        cls = ahead.pop()
        if cls in seen:
            continue
        seen.add(cls)
        ahead += cls.__subclasses__()
        call = vars(cls).get("__call__")
        if isinstance(call, FunctionType) and call.__module__.startswith("mindspore."):
            yield call


@functools.cache
def _named_primitives() -> dict[int, str]:
    """Primitives that stand in a namespace like a function, by identity: they live as long as their module."""
    found: dict[int, str] = {}
    for namespace, module in _NAMESPACES:
        for name in dir(module):
            value = getattr(module, name)
            if isinstance(value, Primitive) and not name.startswith("_"):
                found.setdefault(id(value), f"{namespace}.{name}")
    return found


def _standing(name: str, around: AroundCall, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: around(name, original, args, kwargs)


def _standing_for_primitive(around: AroundCall, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(primitive: Any, *args: Any, **kwargs: Any) -> Any:
        name = _named_primitives().get(id(primitive)) or f"Primitive.{primitive.name}"
        return around(name, functools.partial(original, primitive), args, kwargs)

    return call


def _method(name: str, original: Any, around: AroundCall) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(name, original, args, kwargs)

    return call
