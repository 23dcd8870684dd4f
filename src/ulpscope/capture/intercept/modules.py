# SPDX-License-Identifier: Apache-2.0
"""Know which module of the model is running: paths by identity, a stack for each thread.

A class of the user's may compare and hash its modules as it likes, or not at all, and may hide its submodules. So modules are told apart by
identity, and their contents are read where `nn.Module` keeps them: none of the user's code runs for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ulpscope.capture.native.compiled import COMPILED

__all__ = ["ByModule", "ModuleStack", "RunningModule", "clean_path", "has_parameters", "modules_in", "own_parameters"]

# Segments that wrappers add to names; without them a wrapped model compares with a bare one.
_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


_MOST_RECENT = 65_536

_Value = TypeVar("_Value")


class ByModule(Generic[_Value]):
    """A dictionary by module identity; an entry lasts as long as its module is alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.nn.Module], _Value]] = {}

    def __setitem__(self, module: torch.nn.Module, value: _Value) -> None:
        known, key = self._known, id(module)
        self._known[key] = weakref.ref(module, lambda gone: _forget(known, key, gone)), value

    def __contains__(self, module: torch.nn.Module) -> bool:
        return id(module) in self._known

    def get(self, module: torch.nn.Module) -> _Value | None:
        found = self._known.get(id(module))
        return None if found is None else found[1]

    def items(self) -> list[tuple[torch.nn.Module, _Value]]:
        alive = [(reference(), value) for reference, value in list(self._known.values())]
        return [(module, value) for module, value in alive if module is not None]

    def clear(self) -> None:
        self._known.clear()


def _forget(known: dict[int, Any], key: int, gone: Any) -> None:
    if key in known and known[key][0] is gone:
        del known[key]


class RunningModule:
    """A running module, its path, and the place of its call as `StackReader` remembers it."""

    __slots__ = ("called_from", "inside", "module", "path", "stack")

    def __init__(self, module: torch.nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        self.stack: Any = None
        self.called_from: tuple[int, int] | None = None
        self.inside = 0

    def runs(self, code: CodeType) -> bool:
        """Tell whether this is the code of its forward."""
        return getattr(type(self.module).forward, "__code__", None) is code


if COMPILED is not None and not TYPE_CHECKING:
    RunningModule = COMPILED.RunningModule


class ModuleStack:
    """The paths of modules, named from the model given or from the outermost module called."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._paths: ByModule[str] = ByModule()
        self._recent: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}  # by identity: a weak dictionary is slow to ask
        self._roots: list[str] = []
        self._root_modules: list[weakref.ref[torch.nn.Module]] = []
        self._local = threading.local()
        for model in models:
            self._name_all(model)

    @property
    def current(self) -> str:
        """Return the path of the innermost running module of this thread."""
        stack = self.all_running()
        return stack[-1].path if stack else ""

    @property
    def running(self) -> torch.nn.Module | None:
        stack = self.all_running()
        return stack[-1].module if stack else None

    def roots(self) -> list[torch.nn.Module]:
        """Return the models whose modules have names, oldest first."""
        return [root for reference in self._root_modules if (root := reference()) is not None]

    def is_empty(self) -> bool:
        return not self.all_running()

    def enter(self, module: torch.nn.Module) -> str:
        recent = self._recent.get(id(module))
        if recent is not None and recent[0]() is module:
            path = recent[1]
        else:
            path = self._path(module)
            if len(self._recent) >= _MOST_RECENT:
                self._recent.clear()
            self._recent[id(module)] = (weakref.ref(module), path)
        self.all_running().append(RunningModule(module, path))
        return path

    def leave(self, module: torch.nn.Module) -> None:
        stack = self.all_running()
        while stack:
            if stack.pop().module is module:
                return

    def named_parameters(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named(module, _held_in(module, "_parameters"))

    def named_buffers(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named(module, _held_in(module, "_buffers"))

    def _named(self, module: torch.nn.Module, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = self._paths.get(module) or ""
        for name, tensor in items:
            path = clean_path(name, inside_wrapper=isinstance(module, _WRAPPERS))
            yield (f"{prefix}.{path}" if prefix else path), tensor

    def all_running(self) -> list[RunningModule]:
        """Return the modules that run on this thread, the innermost last."""
        try:
            return self._local.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._local.stack = []
            return self._local.stack  # type: ignore[no-any-return]

    def _path(self, module: torch.nn.Module) -> str:
        path = self._paths.get(module)
        if path is not None:
            return path
        stack = self.all_running()
        if stack:
            path = f"{stack[-1].path}.{type(module).__name__}".lstrip(".")
            self._paths[module] = path
            return path
        self._name_all(module)
        return self._paths.get(module) or ""

    def _name_all(self, root: torch.nn.Module) -> None:
        """Name a root's modules; the first root has the empty path, later roots the name of their class."""
        prefix = ""
        if self._roots:
            name = type(root).__name__
            count = sum(known.partition("#")[0] == name for known in self._roots)
            prefix = f"{name}#{count + 1}" if count else name
        self._roots.append(prefix)
        self._root_modules.append(weakref.ref(root))
        for name, module in modules_in(root):
            path = clean_path(name, inside_wrapper=isinstance(root, _WRAPPERS))
            if module not in self._paths:
                self._paths[module] = ".".join(filter(None, (prefix, path)))


def modules_in(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and all below it, each once, by name and in the order of `named_modules`."""
    seen: set[int] = set()
    ahead = [("", root)]
    while ahead:
        path, module = ahead.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None]
        ahead += reversed(below)


def own_parameters(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a module itself."""
    return [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]


def has_parameters(root: torch.nn.Module) -> bool:
    """Tell whether a module or one below it has a parameter."""
    return any(own_parameters(module) for _, module in modules_in(root))


def _held_in(root: torch.nn.Module, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for path, module in modules_in(root):
        for name, tensor in getattr(module, where).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor


@lru_cache(maxsize=65_536)
def clean_path(name: str, *, inside_wrapper: bool = False) -> str:
    """Remove the segments that wrappers put into a module's path.

    >>> clean_path("layers.0._orig_mod.fc")
    'layers.0.fc'
    """
    if inside_wrapper:
        name = "" if name == "module" else name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)
