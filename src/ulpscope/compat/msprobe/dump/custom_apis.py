# SPDX-License-Identifier: Apache-2.0
"""Dump functions of the script's own as one call each, `{prefix}.{function}.0.forward`: `register_custom_api`."""

from __future__ import annotations

from typing import Any

from ulpscope.compat.msprobe.dump.entry_names import CUSTOM
from ulpscope.errors import InputError

__all__ = ["forget_custom_apis", "register_custom_api", "registered_functions", "restore_custom_api"]

_registered: dict[tuple[int, str], tuple[Any, str, str]] = {}


def register_custom_api(module: Any, api: str, api_prefix: str | None = None) -> None:
    """Dump each call of `module.api` from the next `start` on, under `api_prefix` or the name of the module.

    >>> register_custom_api(my_ops, "rotary", "MyOps")  # doctest: +SKIP
    """
    if not isinstance(api, str) or not callable(getattr(module, api, None)):
        raise InputError(f"register_custom_api takes a module and the name of one of its functions; {module!r} has no function {api!r}")
    prefix = api_prefix or getattr(module, "__name__", type(module).__name__).rpartition(".")[2]
    _registered[id(module), api] = (module, api, f"{CUSTOM}{prefix}.{api}")


def restore_custom_api(module: Any, api: str) -> None:
    """Dump the calls of this function no more, from the next `start` on."""
    _registered.pop((id(module), api), None)


def registered_functions() -> list[tuple[Any, str, str]]:
    """Return owner, attribute and ulpscope's name of each."""
    return list(_registered.values())


def forget_custom_apis() -> None:
    _registered.clear()
