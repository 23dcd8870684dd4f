# SPDX-License-Identifier: Apache-2.0
"""Which module of the model is running: paths by identity, a stack for each thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch

__all__ = ["ModuleStack", "clean_path"]

# Segments that wrappers add to names; without them a wrapped model compares with a bare one.
_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


class ModuleStack:
    """Paths of modules, named from the model given or from the outermost module called."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._paths: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._roots: list[str] = []
        self._root_modules: list[weakref.ref[torch.nn.Module]] = []
        self._local = threading.local()
        for model in models:
            self._name_all(model)

    @property
    def current(self) -> str:
        """The path of the innermost running module of this thread."""
        stack = self._stack()
        return stack[-1][1] if stack else ""

    @property
    def running(self) -> torch.nn.Module | None:
        stack = self._stack()
        return stack[-1][0] if stack else None

    def roots(self) -> list[torch.nn.Module]:
        """The models whose modules have names, oldest first."""
        return [root for reference in self._root_modules if (root := reference()) is not None]

    def is_empty(self) -> bool:
        return not self._stack()

    def enter(self, module: torch.nn.Module) -> str:
        path = self._path(module)
        self._stack().append((module, path))
        return path

    def leave(self, module: torch.nn.Module) -> None:
        stack = self._stack()
        while stack:
            if stack.pop()[0] is module:
                return

    def named_parameters(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named(module, module.named_parameters())

    def named_buffers(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named(module, module.named_buffers())

    def _named(self, module: torch.nn.Module, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        prefix = self._paths.get(module, "")
        for name, tensor in items:
            path = clean_path(name, inside_wrapper=isinstance(module, _WRAPPERS))
            yield (f"{prefix}.{path}" if prefix else path), tensor

    def _stack(self) -> list[tuple[torch.nn.Module, str]]:
        try:
            return self._local.stack  # type: ignore[no-any-return]
        except AttributeError:
            self._local.stack = []
            return self._local.stack  # type: ignore[no-any-return]

    def _path(self, module: torch.nn.Module) -> str:
        path = self._paths.get(module)
        if path is not None:
            return path
        stack = self._stack()
        if stack:
            path = self._paths[module] = f"{stack[-1][1]}.{type(module).__name__}".lstrip(".")
            return path
        self._name_all(module)
        return self._paths[module]

    def _name_all(self, root: torch.nn.Module) -> None:
        """Name a root's modules; the first root has the empty path, later ones the name of their class."""
        prefix = ""
        if self._roots:
            name = type(root).__name__
            count = sum(known.partition("#")[0] == name for known in self._roots)
            prefix = f"{name}#{count + 1}" if count else name
        self._roots.append(prefix)
        self._root_modules.append(weakref.ref(root))
        for name, module in root.named_modules():
            path = clean_path(name, inside_wrapper=isinstance(root, _WRAPPERS))
            self._paths.setdefault(module, ".".join(filter(None, (prefix, path))))


def clean_path(name: str, *, inside_wrapper: bool = False) -> str:
    """A module's path without what wrappers put into it.

    >>> clean_path("layers.0._orig_mod.fc")
    'layers.0.fc'
    """
    if inside_wrapper:
        name = "" if name == "module" else name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)
