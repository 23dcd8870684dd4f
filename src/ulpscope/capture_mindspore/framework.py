# SPDX-License-Identifier: Apache-2.0
"""All that is asked of MindSpore beyond its public interface, and the forms in which it gives tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore.graph import api

__all__ = [
    "BACKWARD_PASS",
    "COMPILED_CALL",
    "Edge",
    "array_of",
    "buffers_of",
    "device_of",
    "dtype_name",
    "edge_of",
    "is_grad_enabled",
    "is_in_backward",
    "is_in_graph_mode",
    "is_recording_gradients",
    "node_id",
    "node_of",
    "own_parameters",
    "requires_grad",
    "sequence_number",
    "strides_of",
    "wait_for",
]

_EXECUTOR = api._pynative_executor
BACKWARD_PASS = type(_EXECUTOR).grad
"""The function that runs every backward pass of PyNative mode."""
COMPILED_CALL = api._JitExecutor.__call__
"""The function that runs whatever `ms.jit` has compiled."""

Edge: TypeAlias = tuple[int, int]
"""A place in the graph: a node, and which of its outputs."""


def is_in_graph_mode() -> bool:
    """Whether cells are compiled as a whole, so that no call inside them is seen."""
    return bool(ms.get_context("mode") == ms.GRAPH_MODE)


def is_in_backward() -> bool:
    """Whether a backward pass is under way, and a hook of somebody's runs."""
    return bool(_EXECUTOR.get_current_autodiff_engine_id() != -1)


def is_recording_gradients() -> bool:
    """Whether what is called now will be differentiated."""
    return bool(_EXECUTOR.requires_grad())


def is_grad_enabled() -> bool:
    return bool(_EXECUTOR.enable_grad())


def requires_grad(tensor: Any) -> bool:
    if isinstance(tensor, ms.Parameter):
        return bool(tensor.requires_grad)
    return bool(tensor._requires_grad) and dtype_name(tensor).startswith(("float", "bfloat", "complex"))


def node_of(tensor: Any) -> Any:
    """The node of the graph that a tensor comes from; None where it has none."""
    return tensor._grad_node if tensor._requires_grad else None


def edge_of(tensor: Any) -> Edge | None:
    """Where a tensor stands in the graph."""
    node = node_of(tensor)
    return None if node is None else (node_id(node), int(tensor._output_index))


def node_id(node: Any) -> int:
    return int(node._unique_id())


def sequence_number(node: Any) -> int:
    """Nodes are numbered as they are made; leaves have no number of use."""
    return int(node._sequence_nr())


def dtype_name(tensor: Any) -> str:
    """The canonical name: `float32`, `bfloat16`, `int64`, `bool`."""
    return str(tensor.dtype).lower()


def device_of(tensor: Any) -> str:
    return str(tensor.device).lower()


def strides_of(tensor: Any) -> tuple[int, ...]:
    return tuple(int(stride) for stride in tensor.stride())


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """The values in row-major order; memory of the tensor's own where it lies so already."""
    return np.ascontiguousarray(tensor.asnumpy()).reshape(tuple(tensor.shape))


def wait_for(tensors: Iterable[Any]) -> None:
    """Wait until these have values. A kernel runs after its call has returned, and what it raises is raised here, in the program."""
    for tensor in tensors:
        tensor.asnumpy()


def own_parameters(cell: Any) -> list[tuple[str, Any]]:
    """The parameters of a cell itself, with the cell's names for them."""
    return [(name, parameter) for name, parameter in cell._params.items() if parameter is not None]


def buffers_of(cell: Any) -> list[tuple[str, Any]]:
    """The buffers of a cell itself."""
    return [(name, buffer) for name, buffer in getattr(cell, "_buffers", {}).items() if buffer is not None]
