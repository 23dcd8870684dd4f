# SPDX-License-Identifier: Apache-2.0
"""Choose the calls that a dump takes, by their old names: `scope`, `list`, `data_mode` and `tensor_list` of a task.

`scope` opens with the first full name and closes after the second. An item of `list` stands for every name that contains it, and at level
mix a module stands for everything inside it as well. If `data_mode` names only a phase, or only input or output, it means both halves of
the other: "input" is the inputs of both phases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ulpscope.compat.msprobe.config import DebuggerConfig, TaskConfig
from ulpscope.compat.msprobe.dump.entry_names import Names, OldName
from ulpscope.errors import InputError
from ulpscope.model import CallName, CallRecord

__all__ = ["Choice", "check_scope"]

_API = re.compile(r"[A-Za-z]\w*\..+\.\d+\.(forward|backward)")
_MODULE = re.compile(r"(Module|Cell)\..+\.(forward|backward)\.\d+")


def check_scope(config: DebuggerConfig) -> None:
    """Check that a scope holds full names that its level can have."""
    for name in config.options.scope:
        is_module, is_api = bool(_MODULE.fullmatch(name)), bool(_API.fullmatch(name))
        fits = {"L0": is_module, "L1": is_api and not is_module}.get(config.level, is_module or is_api)
        if not fits:
            example = "Module.fc1.Linear.forward.0" if config.level == "L0" else "Functional.conv2d.0.forward"
            raise InputError(f"scope holds {name!r}, no full name of level {config.level}; write for example {example!r}")


class Choice:
    """The calls that one dump wants. `begins` is asked as each call begins, `wants` when its record is written."""

    def __init__(self, options: TaskConfig, names: Names, *, expands: bool) -> None:
        self._first, self._last = options.scope or ("", "")
        self._words = options.list
        self._saved = options.tensor_list
        modes = frozenset(options.data_mode)
        self._modes = (modes & {"forward", "backward"} or {"forward", "backward"}) | (modes & {"input", "output"} or {"input", "output"})
        self._expands = expands and bool(options.list)
        self._names = names
        self.only_unit = False
        self.begin_step()

    def begin_step(self) -> None:
        self._is_open = not self._first
        self._closes_at: str | None = None
        self._forward: set[str] = set()
        self._inside: dict[str, tuple[OldName, ...]] = {}

    @property
    def needs_backward(self) -> bool:
        """Tell whether anything of a backward pass can be wanted."""
        is_in_scope = not self._first or "backward" in self._first or "backward" in self._last
        return "backward" in self._modes and is_in_scope

    def has_part(self, phase: str, role: str) -> bool:
        return phase in self._modes and role in self._modes

    def keeps_values(self, name: str) -> bool:
        """Tell whether tensor_list asks for the values of this call too."""
        return any(word in name for word in self._saved)

    def begins(self, module: str, call: CallName) -> bool:
        """Tell whether a call may be wanted in either phase."""
        name = self._names.name(module, call)
        if name is None or (self.only_unit and call.op not in self._names.units):
            return False
        around = tuple(self._names.around(module)) if self._expands else ()
        if around:
            self._inside[str(call)] = around
        is_forward = self._is_within(name.of("forward"), module) and self._is_listed(name, around, "forward")
        if is_forward and "forward" in self._modes:
            self._forward.add(str(call))
        return is_forward or (self.needs_backward and self._is_listed(name, around, "backward"))

    def wants(self, record: CallRecord, name: OldName) -> bool:
        if record.phase == "forward":
            return str(record.call) in self._forward
        is_within = self._is_within_backward(name, record.module)
        return "backward" in self._modes and is_within and self._is_listed(name, self._inside.get(str(record.call), ()), "backward")

    def _is_listed(self, name: OldName, around: Iterable[OldName], phase: str) -> bool:
        if not self._words:
            return True
        candidates = (name.of(phase), *(module.of(phase) for module in around))
        return any(word in candidate for word in self._words for candidate in candidates)

    def _is_within(self, name: str, module: str) -> bool:
        """Tell whether a forward call is in scope as it begins; a module stays open until something outside it begins."""
        if not self._first:
            return True
        if self._closes_at is not None and not f"{module}.".startswith(f"{self._closes_at}."):
            self._is_open, self._closes_at = False, None
        self._is_open = self._is_open or name == self._first
        is_within = self._is_open
        if is_within and name == self._last:
            self._closes_at = module if name.startswith(("Module.", "Cell.")) else None
            self._is_open = self._closes_at is not None
        return is_within

    def _is_within_backward(self, name: OldName, module: str) -> bool:
        """Tell whether a backward call, which is known once it is over, is in scope; a module's contents come before the module itself."""
        if not self._first:
            return True
        if self._closes_at is not None:
            self._is_open, self._closes_at = False, None
        names = [name.of("backward"), *(each.of("backward") for each in self._names.around(module))]
        self._is_open = self._is_open or self._first in names
        is_within = self._is_open
        if name.of("backward") == self._last:
            self._is_open = False
        return is_within
