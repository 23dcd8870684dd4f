# SPDX-License-Identifier: Apache-2.0
"""Test each private name of torch that capture uses, and say what breaks when it goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.capture.recording import recording
from ulpscope.capture import torch_internals


def test_sequence_numbers_grow_with_nodes_and_lie_in_the_range_of_their_call() -> None:
    """Without them a backward node cannot be tied to the call that made it."""
    x = torch.ones(2, requires_grad=True)
    first = torch_internals.next_sequence_number()
    y = x.exp().sin()
    last = torch_internals.next_sequence_number()
    assert y.grad_fn is not None
    assert first <= torch_internals.sequence_number(y.grad_fn) < last


def test_the_node_of_a_leaf_has_the_largest_number() -> None:
    """Without it the walk over a call's nodes would run on into the parameters."""
    x = torch.ones(2, requires_grad=True)
    grad_fn = x.exp().grad_fn
    assert grad_fn is not None
    node = grad_fn.next_functions[0][0]
    assert torch_internals.sequence_number(node) == torch_internals.ACCUMULATE_GRAD
    assert node.variable is x  # type: ignore[union-attr]


def test_autocast_casts_a_weight_once_by_a_node_of_this_name() -> None:
    """Without the name, the contributions of several calls to one weight would stand with the first of them."""
    w, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (torch.mm(x, w).grad_fn for _ in range(2))
    assert first is not None
    assert second is not None
    (cast,) = {node for call in (first, second) for node, _ in call.next_functions if node is not None}
    assert cast.name() == torch_internals.CAST
    assert cast.next_functions[0][0].variable is w  # type: ignore[union-attr]


def test_a_backward_pass_has_a_number_and_a_current_node() -> None:
    """Without it a recomputed forward looks like a new call, and operations of the backward pass have no place."""
    seen: list[tuple[int, int]] = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda _: seen.append((torch_internals.graph_task(), torch_internals.sequence_number(torch_internals.current_node()))))
    assert torch_internals.graph_task() == -1
    y.sum().backward()
    assert seen[0][0] >= 0
    assert y.grad_fn is not None
    assert seen[0][1] == torch_internals.sequence_number(y.grad_fn)


def test_a_storage_keeps_its_identity_across_views_and_while_it_is_watched() -> None:
    """Without it every tensor would be read again at every use."""
    x = torch.ones(4)
    watch = StorageWeakRef(x.untyped_storage())
    identity = torch_internals.storage_identity(x)
    assert identity == torch_internals.storage_identity(x[1:]) == torch_internals.storage_identity(x.detach())
    del x
    assert watch.expired()
    others = [torch.ones(4) for _ in range(1000)]
    assert identity not in {torch_internals.storage_identity(other) for other in others}, "a watched address is not used again"


def test_transforms_are_noticed() -> None:
    """Without it values inside vmap would be read from memory that is not there."""
    seen: list[tuple[bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_internals.inside_transform(), torch_internals.is_traced(x)))
        return x * 2

    torch.vmap(function)(torch.ones(3, 2))
    assert seen == [(True, True)]
    assert not torch_internals.inside_transform()


def test_nobody_sees_what_happens_in_the_blind() -> None:
    """Without it the user's own modes would count our arithmetic."""
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    with Functions(), Operations(), torch.autocast("cpu", dtype=torch.bfloat16), torch_internals.blind():
        y = torch.mm(x, x)
    assert not seen
    assert not y.requires_grad
    assert y.dtype == torch.float32


def test_the_quick_way_to_be_unseen() -> None:
    """Without it a look at every result would cost as much as `blind`, or be seen by the user's own modes."""
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 2, requires_grad=True)
    with Functions(), Operations(), torch_internals.Quiet():
        y = torch.mm(x, x)
    with Functions(), torch_internals.Quiet():
        torch.mm(x, x)
    assert not seen
    assert not y.requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad(), torch_internals.Quiet():
        pass
    assert torch.is_grad_enabled()


def test_dispatch_modes_are_noticed_and_gradients_switched_off_in_no_time() -> None:
    """Without the one a sum of ours would be counted by the user's profiler; without the other it would join the user's graph."""

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert not torch_internals.has_dispatch_modes()
    with Operations():
        assert torch_internals.has_dispatch_modes()
    torch_internals.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        torch_internals.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_what_a_node_keeps_of_its_forward_call_can_be_asked() -> None:
    """Without it a non-finite gradient could not be explained by the tensors that its forward call saved."""
    x = torch.full((2,), 4.0, requires_grad=True)
    y = x.sqrt()
    assert {name: value.tolist() for name, value in torch_internals.saved_tensors(y.grad_fn)} == {"result": [2.0, 2.0]}
    y.sum().backward()
    assert list(torch_internals.saved_tensors(y.grad_fn)) == []


def test_an_alias_made_inside_a_transform_has_memory() -> None:
    """Without it a tensor of the user's that a transform only looks at could not be read later."""
    plain, addresses = torch.ones(3), []

    def function(x: torch.Tensor) -> torch.Tensor:
        addresses.append(torch_internals.detached(plain).data_ptr())
        return (x * plain).sum()

    torch.func.grad(function)(torch.ones(3))
    assert addresses == [plain.data_ptr()]


def test_an_export_that_runs_the_program_raises_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it an export would trace the work of a recording as if the program did it."""
    assert torch_internals.COMPILER["_is_compiling_flag"] is False
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    assert torch_internals.COMPILER["_is_compiling_flag"] is True


@pytest.mark.parametrize("level", ["api", "both", "module"])
def test_nothing_is_recorded_while_that_flag_is_up(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with recording(level=level) as found:
        model(x)
        seen = len(found.records)
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        model(x).sin()
        monkeypatch.undo()
        assert len(found.records) == seen > 0
        model(x)
    assert len(found.records) > seen
