# SPDX-License-Identifier: Apache-2.0
"""A function that a capture stands around stays the same object: compared, inspected, wrapped, pickled, and under every name that it
has.
"""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.capture.recording import recording
from ulpscope.capture.health.scripts import _HealthPatches
from ulpscope.capture.intercept.patching import Patches
from ulpscope.recording.stand_ins import leave, stand_around, stands_in

CALLED: list[str] = []

APPLY_IS_PYTHON = isinstance(inspect.getattr_static(torch.autograd.Function, "apply"), classmethod)
"""From torch 2.15 on it is written in C++."""


def passing_on(name: str) -> Callable[..., Any]:
    """Make a function that stands around another and calls it, wherever it is among the arguments."""

    def around(*given: Any) -> Any:
        CALLED.append(name)
        arguments = list(given)
        function = next(value for value in arguments if callable(value) and not isinstance(value, (type, nn.Module)) and value is not None)
        arguments.remove(function)
        if name in ("functions", "operators", "single_functions", "collectives", "batches"):  # these are given something to name the call
            arguments = [value for value in arguments if isinstance(value, (tuple, dict))]
        rest = [value for value in arguments if not isinstance(value, (tuple, dict))]
        packed = [value for value in arguments if isinstance(value, tuple)]
        named = [value for value in arguments if isinstance(value, dict)]
        return function(*rest, *(packed[0] if packed else ()), **(named[0] if named else {}))

    return around


def _waiting(name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return original(*args)


def _running(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(*args, **kwargs)


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "single_functions": (
        [(torch.nn.functional, "gelu", "functional.gelu"), (torch.nn.functional, "normalize", "functional.normalize")],
        passing_on("single_functions"),
    ),
    "collectives": (passing_on("collectives"), _waiting),
    "handles": (torch.distributed.Work, _waiting),
    "pipelines": (_running,),
    "allocations": (_running,),
    "hook_registration": (lambda original: lambda *args: original(*args),),
    "no_dropout": (),
    "clipping": (lambda parameters: None,),
}


class Noted(_HealthPatches):
    """Notes every function that the patches stand around, by the patch that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.functions_stood_around: list[tuple[str, FunctionType]] = []
        self.attributes_replaced: list[tuple[str, Any, str]] = []
        self.asked = ""

    def stand_in(self, function: Any, make: Any) -> None:
        self.functions_stood_around.append((self.asked, function))
        super().stand_in(function, make)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self.attributes_replaced.append((self.asked, owner, name))
        super()._replace(owner, name, replacement)

    def everything(self) -> None:
        for name, method in inspect.getmembers(self, inspect.ismethod):
            if not name.startswith("_") and name not in ("undo", "everything", "stand_in"):
                self.asked = name
                method(*ARGUMENTS.get(name, (passing_on(name),)))


@pytest.fixture
def everything() -> Iterator[Noted]:
    patches = Noted()
    patches.everything()
    try:
        yield patches
    finally:
        patches.undo()


def facts(function: FunctionType) -> dict[str, Any]:
    return {
        "signature": inspect.signature(function),
        "source": inspect.getsource(function),
        "file": inspect.getsourcefile(function),
        "line": inspect.getsourcelines(function)[1],
        "defaults": (function.__defaults__, function.__kwdefaults__),
        "name": (function.__name__, function.__qualname__, function.__module__, function.__doc__),
        "attributes": dict(vars(function)),
        "unwrapped": inspect.unwrap(function),
        "arguments": inspect.getfullargspec(function),
    }


def names_of(functions: list[FunctionType]) -> set[tuple[str, str]]:
    """Find every place of torch at which one of the functions itself stands."""
    homes = {name: vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch" and module is not None}
    homes |= {f"{kind.__module__}.{kind.__qualname__}": vars(kind) for kind in gc.get_objects() if issubclass(type(kind), type)}
    wanted = {id(function): function.__qualname__ for function in functions}
    found = set()
    for home, names in homes.items():
        for name, value in list(names.items()):
            place = id(value.__func__ if type(value) is classmethod else value)
            if place in wanted:
                found.add((wanted[place], f"{home}.{name}"))
    return found


def test_each_stays_the_object_it_is_under_every_name() -> None:
    first = Noted()
    first.everything()
    functions = first.functions_stood_around
    first.undo()
    expected = {"module_calls", "higher_order_operators", "backward_passes", "scaler_steps", "batches"}
    assert expected | ({"functions"} if APPLY_IS_PYTHON else set()) <= {asked for asked, _ in functions}
    before = [(facts(function), function.__code__) for _, function in functions]
    names = names_of([function for _, function in functions])
    assert {function for function, _ in names} == {function.__qualname__ for _, function in functions}
    second = Noted()
    second.everything()
    try:
        assert names_of([function for _, function in functions]) == names
        for (_, function), (told, code) in zip(functions, before, strict=True):
            assert facts(function) == told
            assert function.__code__ is not code
            assert stands_in(function.__code__)
            assert function.__code__.co_freevars == code.co_freevars
    finally:
        second.undo()
    for (_, function), (_, code) in zip(functions, before, strict=True):
        assert function.__code__ is code
        assert not [name for name in function.__globals__ if "ulpscope" in name]


def test_each_is_pickled_and_wrapped_as_ever(everything: Noted) -> None:
    for asked, function in everything.functions_stood_around:
        if asked not in ("functions",):  # a class method is pickled by its class
            assert pickle.loads(pickle.dumps(function)) is function

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> None: ...

        assert inspect.unwrap(wrapper) is inspect.unwrap(function)
        assert inspect.signature(wrapper) == inspect.signature(function)
    bound = nn.Linear(2, 2).__call__
    assert torch.equal(pickle.loads(pickle.dumps(bound))(torch.zeros(2)), bound(torch.zeros(2)))
    assert pickle.loads(pickle.dumps(_Doubled.apply)) == _Doubled.apply


def test_only_what_has_no_code_of_python_is_replaced_as_an_attribute(everything: Noted) -> None:
    wrong = [
        f"{owner.__name__}.{name}"
        for asked, owner, name in everything.attributes_replaced
        if asked not in ("handles", "operators", "hook_registration", "single_functions")
    ]
    assert wrong == ([] if APPLY_IS_PYTHON else ["Function.apply"])
    assert [name for asked, _, name in everything.attributes_replaced if asked == "single_functions"] == ["gelu"]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_a_name_that_was_taken_before_is_seen_too() -> None:
    call: Any = nn.Module.__call__
    apply: Any = torch.autograd.Function.__dict__["apply"].__func__ if APPLY_IS_PYTHON else lambda cls, x: cls.apply(x)
    cond, x = torch.ops.higher_order.strict_mode, torch.ones(2)
    with recording(level="both") as run:
        call(nn.Linear(2, 2), torch.ones(2))
        apply(_Doubled, torch.ones(2, requires_grad=True))
        cond(lambda a: (a.sin(),), (x,))
    assert len(run.calls("module.Linear")) == 1
    assert len(run.calls("Function._Doubled")) == 1
    assert len(run.calls("higher_order.strict_mode")) == 1


def test_what_torch_compares_is_as_it_was() -> None:
    """The compiler checks whether a module is called in the ordinary way, and torch.fx took that function when it was imported."""
    with recording():
        assert torch._dynamo.utils.unpatched_nn_module_call is nn.Module.__call__
        assert fx._symbolic_trace._orig_module_call is nn.Module.__call__


@pytest.mark.parametrize("level", ["api", "module", "both"])
def test_tracing_a_program_is_not_recorded_as_running_it(level: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    expected = fx.symbolic_trace(model).code
    with recording(level=level) as run:
        assert fx.symbolic_trace(model).code == expected
    assert [record for record in run.records if record.level != "state"] == []
    assert not run.calls("state.parameters", "start")


def test_who_stands_around_may_leave_in_any_order() -> None:
    def function(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> Any:
        return a, b, rest, c, more

    def adding(name: str) -> Any:
        return lambda original: lambda *args, **kwargs: (name, original(*args, **kwargs))

    own, outer, inner = function.__code__, adding("outer"), adding("inner")
    plain = (1, 5, (6,), 7, {"d": 8})
    assert isinstance(function, FunctionType)
    stand_around(function, inner)
    stand_around(function, outer)
    assert function(1, 5, 6, c=7, d=8) == ("outer", ("inner", plain))
    assert str(inspect.signature(function)) == "(a: 'int', /, b: 'int' = 2, *rest: 'int', c: 'int' = 3, **more: 'int') -> 'Any'"
    leave(function, inner)
    assert function(1, 5, 6, c=7, d=8) == ("outer", plain)
    assert function(1) == ("outer", (1, 2, (), 3, {}))
    leave(function, outer)
    assert function.__code__ is own
    assert function(1, 5, 6, c=7, d=8) == plain


def test_an_error_keeps_its_traceback_and_the_way_through_stays_usable() -> None:
    class Failing(nn.Module):
        def forward(self) -> None:
            raise ValueError("in the middle")

    with recording() as run:
        with pytest.raises(ValueError, match="in the middle"):
            Failing()()
        nn.Linear(2, 2)(torch.ones(2))
    assert len(run.calls("functional.linear")) == 1
    assert nn.Module.__call__.__code__.co_name == "_wrapped_call_impl"


def test_patches_are_undone_as_a_whole() -> None:
    patches = Patches()
    patches.module_calls(passing_on("module_calls"))
    patches.undo()
    patches.undo()
    CALLED.clear()
    nn.Linear(2, 2)(torch.ones(2))
    assert CALLED == []
