# SPDX-License-Identifier: Apache-2.0
"""Stand around a function of torch without replacing it: the function stays the same object, and only its code is exchanged meanwhile.

So code that took the function under another name, compares it, looks at its signature or source, wraps it or pickles it finds the same
function as always, and calls through every name are seen. The code that stands in looks up here what to call. A thread may enter that code
just as the last session leaves: it then finds the original function here. Sessions that stand around a function can leave in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

__all__ = ["leave", "own_code", "stand_around", "stand_in_code", "stands_in"]

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original function and returns the one to call instead of it."""

CALLED: dict[str, Callable[..., Any]] = {}
"""Maps the key in each stand-in code to the function that the code calls."""

_codes: dict[FunctionType, CodeType] = {}
_known: set[int] = set()  # the ids of the codes: comparing them as values would take long
_around: dict[FunctionType, tuple[CodeType, list[Around]]] = {}


def stands_in(code: CodeType) -> bool:
    """Tell whether a frame of this code is one of ours under the name of a function of torch."""
    return id(code) in _known


def stand_in_code(function: FunctionType) -> CodeType:
    """Return the code that stands in for that of a function: the same signature, name, file and first line; made once."""
    code = _codes.get(function)
    if code is None:
        code = _codes[function] = _made_for(function.__code__, _key(function))
        _known.add(id(code))
    return code


def stand_around(function: FunctionType, around: Around) -> None:
    """Let `around` decide what calls of a function do, until it is given to `leave`; a later one stands further outside."""
    stand_in_code(function)  # made while the function still has its own code
    own, everyone = _around.setdefault(function, (function.__code__, []))
    everyone.append(around)
    _link(function, own, everyone)
    function.__code__ = _codes[function]


def leave(function: FunctionType, around: Around) -> None:
    """Stop standing around a function; after the last one it has its own code again."""
    own, everyone = _around[function]
    everyone[:] = [other for other in everyone if other is not around]
    if everyone:
        _link(function, own, everyone)
        return
    function.__code__ = own
    del _around[function]
    CALLED[_key(function)] = _copy(function, own)


def own_code(function: FunctionType) -> CodeType:
    """The code that a function has when nobody stands around it."""
    return _around[function][0] if function in _around else function.__code__


def _link(function: FunctionType, own: CodeType, everyone: list[Around]) -> None:
    called: Callable[..., Any] = _copy(function, own)
    for around in everyone:
        called = around(called)
    CALLED[_key(function)] = called


def _copy(function: FunctionType, own: CodeType) -> FunctionType:
    copy = FunctionType(own, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__dict__.update(function.__dict__)
    return copy


def _key(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__} at {id(function)}"


def _made_for(code: CodeType, key: str) -> CodeType:
    """Compile code with the parameters of another, which passes them all on to `CALLED[key]`."""
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    keywords = [next(names) for _ in range(code.co_kwonlyargcount)]
    parameters, passed = list(positional), list(positional)
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if code.co_flags & 0x04:
        rest = next(names)
        parameters.append(f"*{rest}")
        passed.append(f"*{rest}")
    elif keywords:
        parameters.append("*")
    parameters += keywords
    passed += [f"{keyword}={keyword}" for keyword in keywords]
    if code.co_flags & 0x08:
        rest = next(names)
        parameters.append(f"**{rest}")
        passed.append(f"**{rest}")
    closed = "".join(f"{each}, " for each in code.co_freevars)
    held = f"({closed}); " if closed else ""
    look = f"from {__name__} import CALLED as __ulpscope_called__"
    inner = f" def inner({', '.join(parameters)}): {held}{look}; return __ulpscope_called__[{key!r}]({', '.join(passed)})"
    room: dict[str, Any] = {}
    exec(f"def outer({closed}):\n{inner}\n return inner", room)  # safe: Python compiled a function with these names before
    made: CodeType = room["outer"](*code.co_freevars).__code__
    assert made.co_freevars == code.co_freevars
    told: dict[str, Any] = {"co_filename": code.co_filename, "co_firstlineno": code.co_firstlineno, "co_name": code.co_name}
    if hasattr(code, "co_qualname"):  # since Python 3.11
        told["co_qualname"] = code.co_qualname
    return made.replace(**told)
