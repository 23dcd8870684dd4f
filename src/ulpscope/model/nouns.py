# SPDX-License-Identifier: Apache-2.0
"""`dataclass` for nouns: that of the standard library with frozen and slots, made in a fifth of the time.

Every command makes some sixty of them before it does anything. The library compiles six methods for each; here it is the one
that has to be compiled to be quick, and the rest is shared. What comes out is a dataclass to everybody: `fields`, `replace`, `asdict`,
`==`, `hash` and `repr` do what they do for the library's.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False, order: bool = False) -> Any:
        """The decorator."""
        assert (frozen, slots) == (True, True), "a noun is frozen and has slots"
        plain = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)
        return lambda cls: _frozen(plain(cls), order)


def _frozen(cls: Any, order: bool) -> Any:
    fields = dataclasses.fields(cls)
    names: dict[str, Any] = {"made": _Made}
    exec("\n".join(_init_lines(fields, cls, names)), names)
    methods = {"__init__": names["__init__"], **_comparing([field.name for field in fields if field.compare], order), **_SHARED}
    for name, method in methods.items():
        if cls.__dict__.get(name) is None:
            setattr(cls, name, method)
    cls.__init__.__qualname__ = f"{cls.__qualname__}.__init__"
    parameters = cls.__dataclass_params__
    parameters.init = parameters.repr = parameters.eq = parameters.frozen = True
    parameters.order = order
    return cls


class _Made:
    """Stands for a default that is made anew for each object."""


def _init_lines(fields: tuple[dataclasses.Field[Any], ...], cls: Any, names: dict[str, Any]) -> list[str]:
    given: list[str] = []
    lines: list[str] = []
    for at, field in enumerate(sorted(fields, key=lambda one: bool(one.kw_only))):
        if field.kw_only and "*" not in given:
            given.append("*")
        names[f"set{at}"] = cls.__dict__[field.name].__set__
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            names[f"default{at}"] = field.default_factory
            value = f"default{at}() if {field.name} is made else {field.name}"
            given.append(f"{field.name}=made")
        elif field.default is not dataclasses.MISSING:
            names[f"default{at}"] = field.default
            given.append(f"{field.name}=default{at}")
        else:
            given.append(field.name)
        lines.append(f" set{at}(self, {value})")
    lines += [" self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    return [f"def __init__({', '.join(['self', *given])}):", *(lines or [" pass"])]


def _comparing(compared: list[str], order: bool) -> dict[str, Callable[..., Any]]:
    values: Callable[[Any], Any] = lambda noun: tuple(getattr(noun, name) for name in compared)  # noqa: E731
    if len(compared) > 1:
        values = attrgetter(*compared)

    def method(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda self, other: compare(values(self), values(other)) if other.__class__ is self.__class__ else NotImplemented

    orders = (operator.lt, operator.le, operator.gt, operator.ge) if order else ()
    methods = {f"__{compare.__name__}__": method(compare) for compare in (operator.eq, *orders)}
    return {**methods, "__hash__": lambda self: hash(values(self))}


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_set(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


_SHARED = {
    "__repr__": _repr,
    "__setattr__": _refuse_set,
    "__delattr__": _refuse_delete,
    "__getstate__": _state,
    "__setstate__": _set_state,
}
