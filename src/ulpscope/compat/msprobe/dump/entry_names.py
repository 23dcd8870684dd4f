# SPDX-License-Identifier: Apache-2.0
"""Give calls the names of msprobe: `Functional.conv2d.0.forward`; a module by path, class and own count, `Module.fc1.Linear.forward.0`.

Names are given when a call begins, in the order of execution; each step starts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ulpscope.compat.ptdbg.files.line_names import api_name
from ulpscope.model import CallName, Phase

__all__ = ["CUSTOM", "Names", "OldName", "old_name"]

CUSTOM = "custom."
"""What the operations begin with that a script registers itself: `custom.prefix.function`."""


@dataclass(frozen=True, slots=True)
class OldName:
    """A name without its phase; `count` is that of a module, and stands behind the phase."""

    stem: str
    count: int | None = None

    def of(self, phase: Phase | str) -> str:
        return f"{self.stem}.{phase}" if self.count is None else f"{self.stem}.{phase}.{self.count}"


@lru_cache(maxsize=8192)
def old_name(op: str) -> str | None:
    """Return the old name of an operation without its count; None where the old tool has no name.

    >>> old_name("functional.conv2d"), old_name("Tensor.__add__"), old_name("torch._assert"), old_name("state.rng")
    ('Functional.conv2d', 'Tensor.__add__', None, None)
    """
    namespace, _, name = op.partition(".")
    if op.startswith(CUSTOM):
        return name
    if namespace == "Function":
        return f"Function.{name}"
    if name.startswith("_") and not name.startswith("__") and namespace in ("torch", "Tensor", "functional"):
        return None
    known = api_name(op)  # the two tools share prefixes: ptdbg's `Functional_conv2d`
    return None if known is None else known.replace("_", ".", 1)


class Names:
    """The names of one step. `models` are those given to `start`: several have their number before each path."""

    def __init__(self, models: Any = None) -> None:
        self.units: dict[str, str] = {}
        self._numbers = _numbers(models)
        self.begin_step()

    def begin_step(self) -> None:
        self._modules: dict[str, OldName] = {}
        self._running: dict[str, OldName] = {}
        self._counts: Counter[str] = Counter()

    def name(self, module: str, call: CallName) -> OldName | None:
        """Return the name of a call; the model itself has none."""
        if not call.op.startswith("module."):
            stem = old_name(call.op)
            return OldName(f"{stem}.{call.index}") if stem is not None else None
        return self._modules.get(str(call)) or self._new_module(module, call)

    def known(self, call: str) -> OldName | None:
        """Return the name of a module call that has begun."""
        return self._modules.get(call)

    def around(self, module: str) -> Iterator[OldName]:
        """Yield the modules that a module path lies in, from the outermost, with their current counts."""
        parts = module.split(".")
        paths = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        return (self._running[path] for path in paths if path in self._running)

    def _new_module(self, module: str, call: CallName) -> OldName | None:
        unit = self.units.get(call.op)
        if not module and unit is None:
            return None
        stem = unit or f"Module.{self._numbered(module)}.{call.op.partition('.')[2]}"
        name = self._modules[str(call)] = self._running[module] = OldName(stem, self._counts[stem])
        self._counts[stem] += 1
        return name

    def _numbered(self, module: str) -> str:
        for prefix, number in self._numbers:
            if not prefix or module == prefix or module.startswith(f"{prefix}."):
                rest = module.removeprefix(prefix).removeprefix(".")
                return f"{number}.{rest}" if rest else str(number)
        return module


def _numbers(models: Any) -> Sequence[tuple[str, int]]:
    """Return the path that capture gives each of several models, with its number; the first has the empty path and is tried last."""
    if not isinstance(models, list | tuple):
        return ()
    from ulpscope.capture.intercept.modules import ModuleStack

    return sorted(_entered(ModuleStack(list(models)), models), reverse=True)


def _entered(stack: Any, models: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for number, model in enumerate(models):
        yield stack.enter(model), number
        stack.leave(model)
