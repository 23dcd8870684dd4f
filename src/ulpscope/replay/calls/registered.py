# SPDX-License-Identifier: Apache-2.0
"""Import modules of the user's own at the user's request, and find their `autograd.Function`s by the names of their records."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ulpscope.errors import InputError

__all__ = ["REGISTERED", "import_and_register"]

REGISTERED: dict[str, Callable[..., Any]] = {}


def import_and_register(module: str) -> None:
    """Import a module, so that the operations it registers with torch and its Functions can be replayed."""
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise InputError(
            f"cannot import '{module}' ({type(error).__name__}: {error}); give a module that python finds, with --import"
        ) from error
    for value in vars(found).values():
        if isinstance(value, type) and issubclass(value, torch.autograd.Function) and not value.__module__.startswith("torch."):
            REGISTERED[f"Function.{value.__qualname__}"] = value.apply
