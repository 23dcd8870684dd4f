# SPDX-License-Identifier: Apache-2.0
"""Classes of tensors of the user's see the calls that they would have seen: none of their code is run by a recording.

Each class here writes down every question and draws a random number for it, so that one call too many changes all that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

import ulpscope
from tests.capture.recording import recording, slot_of
from ulpscope.capture.torch_internals import foreign_facts
from ulpscope.model import NonFinite

LEVELS = ("api", "module", "both", "op")
KEEPS = ("fingerprint", "statistics", "tensors")
SEEN: list[str] = []


def saw(what: Any) -> None:
    SEEN.append(str(what))
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        torch.rand(1)


class Wrapper(torch.Tensor):
    """Has no memory of its own; asked for its shape, it is silent."""

    policy: ClassVar[dict[str, Any]] = {}

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device, strides=values.stride(), **cls.policy
        )
        made.values_inside = values.detach()
        return made

    def __repr__(self, **_: Any) -> str:
        saw("repr")
        return "Wrapper"

    def __tensor_flatten__(self) -> Any:
        saw("flatten")
        return ["values_inside"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        saw(func)
        plain = tree_map(lambda value: value.values_inside if isinstance(value, Wrapper) else value, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        result = tree_map(lambda value: cls.of(value) if isinstance(value, torch.Tensor) else value, result)
        return return_and_correct_aliasing(func, args, kwargs or {}, result)


class OwnShape(Wrapper):
    """Answers by itself for shape, strides, device and layout, each of which is a call that it sees."""

    policy: ClassVar[dict[str, Any]] = {"dispatch_sizes_strides_policy": "sizes", "dispatch_device": True, "dispatch_layout": True}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or "size" in str(func) or "stride" in str(func) or "dim" in str(func) or "numel" in str(func):
            saw(func)
            return func(args[0].values_inside, *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)


class Picky(Wrapper):
    """Knows the operations that this program needs and refuses every other one."""

    refused: ClassVar[frozenset[str]] = frozenset(
        "aten.to.dtype_layout aten.resolve_conj.default aten.resolve_neg.default aten._to_copy.default aten.contiguous.default".split()
    )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in cls.refused:
            raise NotImplementedError(f"{func} is not known here")
        return super().__torch_dispatch__(func, types, args, kwargs)


class WithMemory(torch.Tensor):
    """An ordinary tensor with a dispatch of its own."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, values.detach())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        saw(func)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        return tree_map(lambda value: cls.of(value) if type(value) is torch.Tensor else value, result)


class Functions(torch.Tensor):
    """Sees functions only."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        return values.detach().as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        saw(getattr(func, "__name__", func))
        return super().__torch_function__(func, types, args, kwargs)


class Both(TwoTensor):
    """Two tensors that go through everything side by side, as torch's own tests have it."""

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        return cls(values.detach(), values.detach().clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        saw(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


KINDS: list[Any] = [Wrapper, OwnShape, Picky, WithMemory, Functions, Both]


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        saw(f"mode {func}")
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        weight, scale = kind.of(torch.randn(4, 4)), kind.of(torch.ones(4))
        self.weight = nn.Parameter(weight) if kind is not Functions else nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)  # three dimensions: a view of an inner result
        y = torch.relu(y) * self.scale
        return y * y + torch.cat([y, y])[:2]


def train(kind: Any, step: Callable[[], None]) -> tuple[list[str], list[Any]]:
    """Train two steps, and return all that a class of tensors saw in them, and the results."""
    torch.manual_seed(0)
    x, model = kind.of(torch.randn(2, 3, 4)), Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    SEEN.clear()
    losses = []
    for _ in range(2):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        step()
    return list(SEEN), [torch.get_rng_state(), *(_plain(each) for each in (*losses, model.weight))]


def _plain(tensor: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        for inside in ("values_inside", "a"):
            if hasattr(tensor, inside):
                return getattr(tensor, inside)
        return tensor.detach().as_subclass(torch.Tensor).clone()


def check(kind: Any, options: dict[str, Any], folder: Path, around: Any = None, inside: Any = None) -> None:
    import contextlib

    with around or contextlib.nullcontext(), inside or contextlib.nullcontext():
        expected, results = train(kind, lambda: None)
    with (
        around or contextlib.nullcontext(),
        ulpscope.Capture(folder / "run", **options) as capture,
        inside or contextlib.nullcontext(),
    ):
        found, results_found = train(kind, capture.step)
    assert found == expected
    assert len(found) > 15
    assert all(torch.equal(one, other) for one, other in zip(results, results_found, strict=True))
    run = ulpscope.open_run(folder / "run")
    assert [f"{entry.what}: {entry.why}" for entry in run.ledger(0)] == []


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_the_users_sees_what_it_would_have_seen(kind: Any, level: str, keep: str, tmp_path: Path) -> None:
    check(kind, {"level": level, "keep": keep}, tmp_path)


@pytest.mark.parametrize("calls", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_does_under_a_watch(kind: Any, calls: bool | None, tmp_path: Path) -> None:
    check(kind, {"watch": NonFinite(limit=None, calls=calls)}, tmp_path)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", ["above", "below"])
@pytest.mark.parametrize("kind", [Wrapper, WithMemory])
def test_so_do_modes_of_theirs(kind: Any, place: str, level: str, tmp_path: Path) -> None:
    mode = {"inside" if place == "above" else "around": Operations()}
    check(kind, {"level": level}, tmp_path, **mode)


def test_what_lies_in_memory_is_recorded_all_the_same() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    for kind in (WithMemory, Functions):
        with recording() as run:
            torch.exp(kind.of(values).t())
        record = run.one("torch.exp")
        assert torch.equal(run.array(record, "input.0"), values.t())
        assert torch.equal(run.array(record, "output.0"), values.t().exp())
        summary = slot_of(record, "input.0").summary
        assert summary is not None
        assert summary.max == 5.0


def test_what_is_written_to_is_read_again() -> None:
    x = WithMemory.of(torch.zeros(3))
    with recording() as run:
        torch.exp(x)
        x.add_(1)
        torch.exp(x)
    first, second = run.calls("torch.exp")
    assert torch.equal(run.array(first, "input.0"), torch.zeros(3))
    assert torch.equal(run.array(second, "input.0"), torch.ones(3))


@pytest.mark.parametrize(
    ("kind", "shape", "note"), [(Wrapper, (2, 3), "Wrapper has no memory of its own"), (OwnShape, (), "OwnShape alone knows its shape")]
)
def test_what_lies_nowhere_is_recorded_without_values_and_says_so(kind: Any, shape: Any, note: str) -> None:
    with recording() as run:
        torch.exp(kind.of(torch.ones(2, 3)))
    tensor = slot_of(run.one("torch.exp"), "input.0")
    assert note in tensor.note
    assert (tensor.shape, tensor.summary, tensor.content) == (shape, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_asked_for_the_facts_of_a_tensor(kind: Any) -> None:
    x = kind.of(torch.randn(3, 4))
    SEEN.clear()
    depth = torch._C._len_torch_dispatch_stack()
    facts = foreign_facts(x)
    assert SEEN == []
    assert torch._C._len_torch_dispatch_stack() == depth
    assert (facts.alias is not None) == (kind in (WithMemory, Functions))


@pytest.mark.parametrize("values", [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag])
def test_mirrored_values_are_read_as_they_are(values: torch.Tensor) -> None:
    x = torch.Tensor._make_subclass(Functions, values)
    alias = foreign_facts(x).alias
    assert alias is not None
    assert type(alias) is torch.Tensor
    assert torch.equal(alias, values)


@pytest.mark.parametrize("exact", [False, True])
def test_parameters_of_a_class_of_the_users_under_a_watch_of_health(tmp_path: Path, exact: bool) -> None:
    def train() -> tuple[list[str], torch.Tensor]:
        torch.manual_seed(0)
        SEEN.clear()
        with_memory = nn.Parameter(torch.randn(3, 3).as_subclass(WithMemory))
        without = nn.Parameter(Wrapper.of(torch.randn(3, 3)))
        plain = nn.Parameter(torch.randn(3, 3))
        optimizer = torch.optim.Adam([with_memory, without, plain], foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            (without @ without).sum().backward()
            (with_memory @ plain).sum().backward()
            optimizer.step()
        return list(SEEN), torch.stack([plain.detach(), torch.rand(3, 3)])

    bare, values = train()
    told = pytest.warns(ulpscope.CaptureWarning, match="Wrapper has no memory of its own")
    with told, ulpscope.watch(into=tmp_path / "run", quiet=True, exact_updates=exact):
        watched, others = train()
    assert bare == watched
    assert torch.equal(values, others)
    names = {target.name for target in next(ulpscope.open_health(tmp_path / "run").steps(0)).layout.targets}
    assert names == {"group0.0", "group0.2"}
