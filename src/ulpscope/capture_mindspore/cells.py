# SPDX-License-Identifier: Apache-2.0
"""Which cell of the model is running, and what torch calls cells and their parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from mindspore import mint, nn

from ulpscope.capture_mindspore.framework import buffers_of, own_parameters
from ulpscope.model.operations.mindspore_names import CELL_NAMES, PARAMETER_NAMES, name_rows

__all__ = ["CellStack", "parameter_name", "table_name", "torch_class"]

_HOMES = (("nn", nn), ("mint.nn", mint.nn))


class CellStack:
    """Paths of cells, named from the models given or from the outermost cell called, and those that run."""

    def __init__(self, models: list[Any]) -> None:
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._roots: list[str] = []
        self._running: list[tuple[Any, str]] = []
        for model in models:
            self._name_all(model)

    @property
    def current(self) -> str:
        """The path of the innermost running cell."""
        return self._running[-1][1] if self._running else ""

    @property
    def is_training(self) -> bool | None:
        return bool(self._running[-1][0].training) if self._running else None

    def is_empty(self) -> bool:
        return not self._running

    def is_named(self, cell: Any) -> bool:
        known = self._paths.get(id(cell))
        return known is not None and known[0]() is cell

    def enter(self, cell: Any) -> None:
        if not self.is_named(cell):
            if self._running:
                self._paths[id(cell)] = weakref.ref(cell), f"{self.current}.{type(cell).__name__}".lstrip(".")
            else:
                self._name_all(cell)
        self._running.append((cell, self._paths[id(cell)][1]))

    def leave(self) -> None:
        self._running.pop()

    def forget_running(self) -> None:
        self._running.clear()

    def parameters(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Every parameter below a cell once, under torch's name."""
        yield from self._held(root, own_parameters)

    def buffers(self, root: Any) -> Iterator[tuple[str, Any]]:
        yield from self._held(root, buffers_of)

    def _held(self, root: Any, held_by: Any) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for _, cell in root.cells_and_names():
            path = self._paths[id(cell)][1] if self.is_named(cell) else ""
            for name, tensor in held_by(cell):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield ".".join(filter(None, (path, parameter_name(cell, name)))), tensor

    def _name_all(self, root: Any) -> None:
        """Name a root's cells; the first root has the empty path, later ones the name of their class."""
        prefix = ""
        if self._roots:
            name = type(root).__name__
            count = sum(known.partition("#")[0] == name for known in self._roots)
            prefix = f"{name}#{count + 1}" if count else name
        self._roots.append(prefix)
        for path, cell in root.cells_and_names():
            if not self.is_named(cell):
                self._paths[id(cell)] = weakref.ref(cell), ".".join(filter(None, (prefix, path)))


def table_name(cell: Any) -> str:
    """The name of a cell's class in the table of names: `nn.Dense`, `mint.nn.Linear`; that of a user's class as it is."""
    return _class_names().get(type(cell), type(cell).__name__)


@functools.lru_cache(maxsize=1)
def _class_names() -> dict[type, str]:
    """What the classes of cells are called where programs find them; one that stands in both namespaces by the name that has a row."""
    names: dict[type, str] = {}
    for short, home in _HOMES:
        for name, value in vars(home).items():
            if isinstance(value, type) and issubclass(value, nn.Cell) and names.get(value) not in name_rows():
                names[value] = f"{short}.{name}"
    return names


def torch_class(cell: Any) -> str:
    """The name of torch's class: `Linear` for `nn.Dense`."""
    known = _class_names().get(type(cell))
    if known is None:
        return type(cell).__name__
    name = known.rpartition(".")[2]
    return CELL_NAMES.get(name, name)


def parameter_name(cell: Any, name: str) -> str:
    """What torch calls a parameter of this cell: `weight` for the `gamma` of a LayerNorm."""
    return PARAMETER_NAMES.get(name, name) if type(cell).__module__.startswith("mindspore.") else name
