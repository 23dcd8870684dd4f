# SPDX-License-Identifier: Apache-2.0
"""Make dataclasses with slots, mostly frozen, in a tenth of the time that the standard library takes.

Every command makes some sixty of them before it does anything. The library compiles six methods for each class. Here only `__init__` is
compiled, because it must be quick, and not before the first object is made; the other methods are shared. The result is a dataclass to
every caller: `fields`, `replace`, `asdict`, `==`, `hash` and `repr` work as they do for the library's.
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

    def dataclass(*, slots: bool, frozen: bool = False, kw_only: bool = False, order: bool = False) -> Any:
        """Decorate a class: the arguments are those of `dataclasses.dataclass`."""
        assert slots, "a noun has slots"
        return lambda cls: _slotted(cls, _fields(cls, kw_only), frozen, order)


def _fields(cls: Any, kw_only: bool) -> dict[str, dataclasses.Field[Any]]:
    """Read the fields from the annotations of a class, as the library does."""
    assert cls.__bases__ == (object,), "a noun inherits from nothing"
    found = {}
    for name, kind in cls.__annotations__.items():
        given = cls.__dict__.get(name, dataclasses.MISSING)
        field: Any = given if isinstance(given, dataclasses.Field) else dataclasses.field(default=given)
        field.name, field.type = name, kind
        field._field_type = _PLAIN_FIELD
        if field.kw_only is dataclasses.MISSING:
            field.kw_only = kw_only
        found[name] = field
    return found


def _slotted(cls: Any, fields: dict[str, dataclasses.Field[Any]], frozen: bool, order: bool) -> Any:
    """Build the class again with slots in place of the annotated names."""
    own = {name: value for name, value in cls.__dict__.items() if name not in fields and name not in ("__dict__", "__weakref__")}
    compared = [name for name, field in fields.items() if field.compare]
    content = {**(_FROZEN if frozen else _CHANGING), **_comparing(compared, order), **own}
    if not frozen:
        content["__hash__"] = None
    content["__slots__"] = tuple(fields)
    content["__match_args__"] = tuple(name for name, field in fields.items() if not field.kw_only)
    content["__init__"] = _Init()
    content["__dataclass_fields__"] = fields
    content["__dataclass_params__"] = _PARAMETERS[frozen, order]
    made = type(cls)(cls.__name__, cls.__bases__, content)
    made.__qualname__ = cls.__qualname__
    return made


class _Init:
    """Stand for `__init__` until the first object is made, and compile it then: a command makes objects of only a few nouns."""

    def __get__(self, noun: Any, cls: Any) -> Any:
        names: dict[str, Any] = {"made": _Made}
        exec("\n".join(_init_lines(dataclasses.fields(cls), cls, names)), names)
        init = cls.__init__ = names["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        init.__module__ = cls.__module__
        return init if noun is None else init.__get__(noun)


class _Made:
    """Stand for a default that is made anew for each object."""


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


_CHANGING = {"__repr__": _repr, "__getstate__": _state, "__setstate__": _set_state}
_FROZEN = {**_CHANGING, "__setattr__": _refuse_set, "__delattr__": _refuse_delete}


def _parameters(frozen: bool, order: bool) -> Any:
    """Return the library's own record of the decorator's arguments."""
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(type("Noun", (), {"__doc__": "A noun."}))
    parameters = made.__dataclass_params__
    parameters.init = parameters.repr = parameters.eq = True
    parameters.frozen, parameters.order = frozen, order
    return parameters


_PARAMETERS = {words: _parameters(*words) for words in ((True, False), (True, True), (False, False))}
_PLAIN_FIELD: Any = vars(dataclasses)["_FIELD"]
