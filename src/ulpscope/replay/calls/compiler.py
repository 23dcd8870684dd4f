# SPDX-License-Identifier: Apache-2.0
"""Keep torch's compiler out of a process that only runs calls again.

Functions that torch keeps away from its compiler load all of it when the first of them is called, only to learn that no compiler is at
work; that takes as long as loading torch itself. Every optimizer's step does the same. This module relies on two private names: torch
stores that answer as `__dynamo_disable` on the function, and wraps a step in a function named `_use_grad`. Without them nothing breaks, but
a process takes twice as long to start. Only processes of ulpscope's own call this: in one that trains, torch stays as it is.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

__all__ = ["without_compiler"]

_ANSWER = "__dynamo_disable"


def without_compiler() -> int:
    """Set the compiler's answer on each function, unless the process has loaded the compiler; return how many functions got it."""
    marked = _marked()
    if marked is None or "torch._dynamo" in sys.modules:
        return 0
    wrappers = [one for one in gc.get_objects() if type(one) is FunctionType and one.__code__ is marked]
    functions = [cell.cell_contents for one in wrappers for cell in one.__closure__ or ()]
    told = [one for one in functions if isinstance(one, FunctionType)]
    for function in told:
        setattr(function, _ANSWER, function)
    return len(told) + _tell_optimizers()


def _tell_optimizers() -> int:
    import torch

    told = 0
    for cls in list(vars(torch.optim).values()):
        step = vars(cls).get("step") if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) else None
        inner = getattr(step, "__wrapped__", None)
        if getattr(getattr(step, "__code__", None), "co_name", "") == "_use_grad" and isinstance(inner, FunctionType):
            cls.step = _as_it_was(inner)
            told += 1
    return told


def _as_it_was(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step so that it sets gradients on or off as torch's own wrapper does."""
    import torch

    @functools.wraps(step)
    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            return step(self, *args, **kwargs)

    return plain


def _marked() -> CodeType | None:
    """Find the code object that all such wrappers share."""
    from ulpscope._torch_private import disable_dynamo as decorator

    constants = decorator.__code__.co_consts if isinstance(decorator, FunctionType) else ()
    codes = [one for one in constants if isinstance(one, CodeType) and _ANSWER in one.co_consts]
    return codes[0] if codes else None
