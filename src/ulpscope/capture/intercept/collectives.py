# SPDX-License-Identifier: Apache-2.0
"""Tell which functions of torch.distributed move tensors between ranks, and which of their arguments they write to.

The list is read off torch: every public function that takes a group and something to send or receive. A function that torch adds tomorrow
is on it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

__all__ = [
    "ASYNCHRONOUS_MODULE",
    "collective_functions",
    "group_functions",
    "is_collective",
    "overwritten_below",
    "overwritten_values",
    "readable_arguments",
    "written_below",
    "written_values",
]

ASYNCHRONOUS_MODULE = "torch.distributed._functional_collectives"
"""Its functions return before their results are there: `wait_tensor` waits for a result."""

_HOMES = {
    "torch.distributed.distributed_c10d": "",
    "torch.distributed": "",
    "torch.distributed.nn.functional": "nn.functional.",
    ASYNCHRONOUS_MODULE: "_functional_collectives.",
}
_OLD_NAMES = frozenset({"_all_gather_base", "_reduce_scatter_base"})
"""These names are private, and every older program for parallel training calls them."""

_GROUPS = frozenset({"group", "groups", "group_name", "process_group", "pg", "p2p_op_list"})
_MOVED = ("tensor", "object", "input", "output", "p2p_op")
_MOVED_BY_NAME = frozenset({"self", "obj", "objects"})
_SENDERS = frozenset({"isend", "send", "isend_inplace"})
_RECEIVERS = frozenset({"irecv", "recv", "scatter"})
_RECEIVING_LISTS = frozenset({"tensor_list", "gather_list"})


def group_functions() -> Iterator[tuple[str, FunctionType]]:
    """Yield every public function of the modules for collectives that takes a group of ranks, by its name in records; only modules imported
    by now count.
    """
    seen: set[int] = set()
    for home, prefix in _HOMES.items():
        module = sys.modules.get(home)
        for name, function in list(vars(module).items()) if module is not None else ():
            is_public = not name.startswith("_") or name in _OLD_NAMES
            if not is_public or type(function) is not FunctionType or id(function) in seen:
                continue
            seen.add(id(function))
            if _GROUPS & _parameters(function).keys():
                yield prefix + name, function


def collective_functions() -> dict[str, FunctionType]:
    """Return the functions that take a group and also something to send or receive."""
    return {name: function for name, function in group_functions() if is_collective(function)}


def is_collective(function: Callable[..., Any]) -> bool:
    """Tell whether a function that takes a group also takes something to send or to receive."""
    return any(name in _MOVED_BY_NAME or any(part in name for part in _MOVED) for name in _parameters(function))


def written_values(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a collective that it may write to, of any kind: a tensor, a list of them, operations of a batch."""
    base, given = name.rpartition(".")[2], _by_name(function, args, kwargs)
    if base in _SENDERS:
        return []
    if base == "batch_isend_irecv":
        return [each.tensor for each in given.get("p2p_op_list", ()) if not _is_send(each)]
    takes_list = bool(_RECEIVING_LISTS & _parameters(function).keys())
    only_read = {"scatter_list", "tensor" if takes_list else ""}
    return [value for key, value in given.items() if not key.startswith("input") and key not in only_read]


def overwritten_values(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the written arguments whose old values the collective does not read: they may be memory that was never written."""
    given = _by_name(function, args, kwargs)
    if name == "batch_isend_irecv":
        return written_values(name, function, args, kwargs)
    found = [value for key, value in given.items() if key.startswith("output") or key in _RECEIVING_LISTS]
    is_received = name in _RECEIVERS or (name == "broadcast" and not _is_source(given))
    return [*found, given.get("tensor")] if is_received else found


def _is_source(given: dict[str, Any]) -> bool:
    group, source, of_group = given.get("group"), given.get("src"), given.get("group_src")
    return torch.distributed.get_rank(group) == of_group if source is None else torch.distributed.get_rank() == source


def written_below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation of c10d below Python may write to."""
    if str(func).startswith("c10d.send"):
        return []
    return [value for name, value in _by_schema(func, args, kwargs) if not name.startswith("input")]


def overwritten_below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the written arguments whose old values the operation does not read."""
    op, given = str(func), dict(_by_schema(func, args, kwargs))
    found = [value for name, value in given.items() if name.startswith("output")]
    is_received = op.startswith("c10d.recv") or (
        op.startswith("c10d.broadcast_") and _rank_in(given["process_group"]) != given["root_rank"]
    )
    return [*found, given.get("tensors")] if is_received else found


def _rank_in(group: Any) -> int:
    return int(torch.distributed.ProcessGroup.unbox(group).rank())


def _by_schema(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*zip((argument.name for argument in func._schema.arguments), args, strict=False), *kwargs.items()]


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of its parameters; none if they do not fit, which the call itself will report."""
    try:
        return inspect.Signature(list(_parameters(function).values())).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}


def readable_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as a record shows them: operations of a batch with their tensors, which stand inside of objects."""
    if name != "batch_isend_irecv":
        return args, kwargs
    return tuple(_opened(each) for each in args), {key: _opened(value) for key, value in kwargs.items()}


def _opened(operations: Any) -> Any:
    if not isinstance(operations, (list, tuple)):
        return operations
    return [
        {"op": each.op.__name__, "tensor": each.tensor, "peer": each.peer, "tag": each.tag} if hasattr(each, "group_peer") else each
        for each in operations
    ]


def _is_send(operation: Any) -> bool:
    return getattr(operation.op, "__name__", "") == "isend"


@functools.lru_cache(maxsize=512)
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
