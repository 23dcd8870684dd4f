# SPDX-License-Identifier: Apache-2.0
"""See calls through modes: Python-level calls (`api`) and aten operations (`op`)."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from ulpscope._torch_private import (
    HigherOrderOperator,
    TorchDispatchMode,
    current_dispatch_modes,
    current_function_modes,
    pop_function_mode,
    push_function_mode,
    without_function_subclasses,
)
from ulpscope.capture.device.queue import Devices
from ulpscope.capture.intercept.naming import caller, higher_order_name, lends_memory, never_writes, op_name, written_arguments
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.torch_internals import COMPILER
from ulpscope.model import Level

__all__ = ["ApiMode", "FunctionMode", "OpMode", "WriteGuard", "remove_mode"]

_COMMUNICATION = ("c10d", "_c10d_functional")
"""Operations that return before the results that they write are there."""


class _Recorder(Protocol):
    def open_call(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        level: Level = ...,
        frame: FrameType | None = ...,
        written: frozenset[int | str] = ...,
    ) -> Any: ...

    def close_call(self, opened: Any, result: Any) -> None: ...

    def expect_below(self, opened: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def launch_below(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def lend_memory(self, args: tuple[Any, ...]) -> None: ...

    def run_whole(
        self, op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, level: Level = ...
    ) -> Any: ...


class FunctionMode(TorchFunctionMode):
    """A mode that can be taken off and entered at any time, and always returns to the place on the stack where it was made.

    If it stood above a mode that the user entered later, leaving that mode would take ours off instead.
    """

    def __init__(self, handler: _Handler | _Announcer) -> None:
        super().__init__()
        self._place = len(current_function_modes())
        self._handler = handler
        self._call = handler.call

    def __enter__(self) -> FunctionMode:
        stack = current_function_modes()
        _insert(self, stack[self._place :])
        return self

    @property
    def is_at_work(self) -> bool:
        """Tell whether it handles a call: then it is off the stack, and torch puts it back."""
        return self._handler.depth > 0

    def is_on(self) -> bool:
        return any(mode is self for mode in current_function_modes())

    def is_on_top(self) -> bool:
        stack = current_function_modes()
        return bool(stack) and stack[-1] is self


class _Handler:
    """Runs each call and has it recorded; `depth` counts the calls under way."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self.depth = 0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.depth += 1
        try:
            op = op_name(func)
            opened = self._recorder.open_call(op, args, kwargs, frame=caller(2)) if op is not None else None
            if op is None and lends_memory(func):
                self._recorder.lend_memory(args)
            result = func(*args, **kwargs)
            if opened is not None:
                self._recorder.close_call(opened, result)
            return result
        finally:
            self.depth -= 1


class _Announcer:
    """Announces calls that write, while `devices` wait to read; other calls pass."""

    def __init__(self, announce: Callable[[str, tuple[Any, ...], dict[str, Any]], None], devices: Devices) -> None:
        self._announce = announce
        self._devices = devices
        self.depth = 0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.depth += 1
        try:
            if self._devices.num_pending:
                op = op_name(func)
                if op is not None and (kwargs or not never_writes(op)):
                    self._announce(op, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.depth -= 1


if COMPILED is not None and not TYPE_CHECKING:
    _Handler, _Announcer = COMPILED.Handler, COMPILED.Announcer


class ApiMode(FunctionMode):
    """Sees the outermost Python-level torch calls: it is off inside its own handler, so inner calls stay inside."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__(_Handler(recorder))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # torch.compile traces this function, and nothing below it.
        if torch.compiler.is_dynamo_compiling() or COMPILER.get("_is_compiling_flag"):
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})


class WriteGuard(FunctionMode):
    """Announces Python-level torch calls before they run, while `devices` wait to read memory that a call may write to; records none."""

    def __init__(self, announce: Callable[[str, tuple[Any, ...], dict[str, Any]], None], devices: Devices) -> None:
        super().__init__(_Announcer(announce, devices))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling() or COMPILER.get("_is_compiling_flag"):
            return func(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every aten operation, forward and backward; a higher-order operator, which holds a part of the user's program, counts as one."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to compile as if this mode were not there: otherwise it gives up, and the program computes other bits."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch.compile not to stop at this mode: code that the user compiles inside an operation of theirs stays compiled."""
        return False

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def is_on(self) -> bool:
        return any(mode is self for mode in current_dispatch_modes())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, op = kwargs or {}, str(func)
        if isinstance(func, HigherOrderOperator):
            return self._recorder.run_whole(higher_order_name(func), func, args, kwargs, level="op")
        opened = self._recorder.open_call(op, args, kwargs, level="op", written=written_arguments(func))
        if opened is not None and op.startswith("c10d."):
            self._recorder.expect_below(opened, func, args, kwargs)
        with without_function_subclasses():  # below autograd, where a subclass of the user's sees nothing without us either
            result = func(*args, **kwargs)
        if op.startswith(_COMMUNICATION):
            self._recorder.launch_below(op, func, args, kwargs, result)
        if opened is not None:
            self._recorder.close_call(opened, result)
        return result


def remove_mode(mode: FunctionMode | OpMode) -> bool:
    """Take a mode off the stack of this thread wherever it stands; modes that the user entered later keep their order."""
    if isinstance(mode, FunctionMode):
        return _remove(mode)
    stack = current_dispatch_modes()
    if not any(entered is mode for entered in stack):
        return False
    above = []
    while stack[-1] is not mode:
        above.append(stack.pop())
        above[-1].__exit__(None, None, None)
    mode.__exit__(None, None, None)
    for entered in reversed(above):
        entered.__enter__()
    return True


def _insert(mode: TorchFunctionMode, above: list[Any]) -> None:
    """Put a mode on the stack below those in `above`, without their noticing."""
    for _ in above:
        pop_function_mode()
    for entered in (mode, *above):
        push_function_mode(entered)


def _remove(mode: TorchFunctionMode) -> bool:
    stack = current_function_modes()
    places = [place for place, entered in enumerate(stack) if entered is mode]
    if not places:
        return False
    for _ in stack[places[-1] :]:
        pop_function_mode()
    for entered in stack[places[-1] + 1 :]:
        push_function_mode(entered)
    return True
