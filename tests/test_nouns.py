# SPDX-License-Identifier: Apache-2.0
"""A noun is to everybody what a frozen dataclass of the standard library is."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field
from inspect import signature
from typing import Any

import msgspec
import pytest

from ulpscope.model.nouns import dataclass


def _class(decorator: Any) -> Any:
    @decorator(frozen=True, slots=True)
    class Noun:
        """A noun."""

        name: str
        size: int = 3
        parts: dict[str, int] = field(default_factory=dict, hash=False, compare=False)
        shown: int = field(default=1, repr=False, kw_only=True)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("negative")

        @property
        def half(self) -> float:
            return self.size / 2

    return Noun


Ours, Theirs = _class(dataclass), _class(dataclasses.dataclass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Travelling:
    """One that is at the top of a module, as pickle wants it."""

    what: str
    many: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alone:
    """One field, and a repr of its own."""

    what: str

    def __repr__(self) -> str:
        return f"<{self.what}>"


@pytest.mark.parametrize("noun", [Ours, Theirs])
def test_both_do_the_same(noun: Any) -> None:
    one, other = noun("a", 4), noun(name="a", size=4, shown=1)
    assert (one.name, one.size, one.parts, one.shown, one.half) == ("a", 4, {}, 1, 2.0)
    assert one == other
    assert hash(one) == hash(other) == hash(("a", 4, 1))
    assert one != noun("a", 5)
    assert one != noun("a", 4, shown=2)
    assert one == noun("a", 4, {"left": 1})
    assert one != ("a", 4)
    assert one.parts is not other.parts
    assert repr(one) == "_class.<locals>.Noun(name='a', size=4, parts={})"
    assert dataclasses.asdict(one) == {"name": "a", "size": 4, "parts": {}, "shown": 1}
    assert dataclasses.replace(one, size=9) == noun("a", 9)
    assert copy.deepcopy(one) == one
    assert noun.__match_args__ == ("name", "size", "parts")
    assert noun.__dataclass_params__.frozen
    assert not hasattr(one, "__dict__")
    assert list(signature(noun).parameters) == ["name", "size", "parts", "shown"]
    assert msgspec.convert({"name": "a", "size": 4}, noun) == one
    assert msgspec.json.decode(msgspec.json.encode(one), type=noun) == one


@pytest.mark.parametrize("noun", [Ours, Theirs])
def test_both_refuse_the_same(noun: Any) -> None:
    one = noun("a")
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'name'"):
        one.name = "b"
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'name'"):
        del one.name
    with pytest.raises(ValueError, match="negative"):
        noun("a", -1)
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'name'"):
        noun()
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        noun("a", other=1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "size": "many"}, noun)


def test_travels() -> None:
    one = Travelling(what="x", many=(1, 2))
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.copy(one) == one


def test_methods_of_its_own_stay() -> None:
    assert repr(Alone("a")) == "<a>"
    assert {Alone("a"), Alone("a"), Alone("b")} == {Alone("b"), Alone("a")}


@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_orders_where_asked_to(decorator: Any) -> None:
    @decorator(frozen=True, slots=True, order=True)
    class Place:
        """A place."""

        row: int
        column: int = 0

    assert sorted([Place(2), Place(1, 5), Place(1)]) == [Place(1), Place(1, 5), Place(2)]
    assert Place(1) <= Place(1) < Place(1, 1)
    assert Place(2) >= Place(2) > Place(1, 9)
    with pytest.raises(TypeError, match="not supported"):
        Place(1) < (1, 0)  # noqa: B015
    with pytest.raises(TypeError):
        _class(decorator)("a") < _class(decorator)("b")  # noqa: B015


@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_one_that_is_not_frozen_changes(decorator: Any) -> None:
    @decorator(slots=True)
    class Count:
        """A count."""

        many: int = 0
        seen: list[int] = field(default_factory=list)

    one, other = Count(), Count()
    one.many += 2
    one.seen.append(1)
    assert (one.many, one.seen, other.seen) == (2, [1], [])
    assert one != other
    assert one == Count(2, [1])
    assert repr(one).endswith("Count(many=2, seen=[1])")
    assert dataclasses.replace(one, many=3).seen is one.seen
    assert not Count.__dataclass_params__.frozen
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(AttributeError):
        one.other = 1


def test_how_objects_are_made_is_told_before_the_first_is() -> None:
    @dataclass(frozen=True, slots=True)
    class Early:
        """One that nobody has made yet."""

        name: str
        size: int = 1

    assert str(signature(Early)) == "(name, size=1)"
    assert Early.__init__.__qualname__.endswith("Early.__init__")
    assert Early("a").size == 1
