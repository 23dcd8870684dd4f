# SPDX-License-Identifier: Apache-2.0
"""Operators that hold a part of the user's program (`torch.cond`, `flex_attention` ...): they run, and each is one record."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.out_dtype import out_dtype
from torch._higher_order_ops.strict_mode import strict_mode
from torch._ops import _higher_order_ops
from torch._prims import rng_prims
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ulpscope
from tests.capture.recording import recording, slots_of

LEVELS = ("api", "module", "both", "op")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def backward(result: Any, *leaves: torch.Tensor) -> list[Any]:
    sum(each.sum() for each in tree_leaves(result)).backward()
    return [result, *(each.grad for each in leaves)]


def cond() -> Any:
    """The second operand is found by the closure of the branches."""
    x, w = leaf(3, 4), leaf(4)
    return backward(torch.cond(x.sum() > 0, lambda a: (a * w).sin(), lambda a: a * w.exp(), (x,)), x, w)


def loop() -> Any:
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.sin() * 1.1), (torch.tensor(0), torch.randn(3)))


def each_row() -> Any:
    x, w = leaf(3, 4), leaf(4)
    return backward(mapped(lambda a, b: (a * b).tanh(), x, w), x, w)


def scanned() -> Any:
    x, begin = leaf(5, 4), leaf(4)
    return backward(scan(lambda c, a: ((c * 0.5 + a).tanh(), c * a), begin, x), x, begin)


def attention() -> Any:
    q, bias = torch.randn(1, 2, 16, 8), torch.randn(2)
    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h] * (i - j), return_lse=True)


def masked_attention() -> Any:
    q = torch.randn(1, 2, 256, 8)
    return flex_attention(q, q, q, block_mask=create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu"))


def compiled_cond() -> Any:
    x, w = leaf(3, 4), leaf(4)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a, b: (a * b).sin(), lambda a, b: a * b.exp(), (x, w)) * 2

    return backward(torch.compile(function, backend="aot_eager")(x, w), x, w)


def compiled_attention() -> Any:
    q = torch.randn(1, 2, 16, 8)
    return torch.compile(flex_attention, backend="aot_eager")(q, q, q)


def other_dtype() -> Any:
    x = torch.randint(-5, 5, (4, 4), dtype=torch.int8)
    return out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)


def strict() -> Any:
    return strict_mode(lambda a: (a.sin(),), (torch.randn(3),))


def saved_state() -> Any:
    return rng_prims.run_and_save_rng_state(torch.ops.aten.rand.default, (3,), device=torch.device("cpu"))


def many() -> Any:
    from torch._higher_order_ops.foreach_map import foreach_map

    return foreach_map(torch.add, [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)])


PROGRAMS: dict[str, Callable[[], Any]] = {
    "cond": cond,
    "while_loop": loop,
    "map_impl": each_row,
    "scan": scanned,
    "flex_attention": attention,
    "flex_attention with a block mask": masked_attention,
    "cond compiled": compiled_cond,
    "flex_attention compiled": compiled_attention,
    "out_dtype": other_dtype,
    "strict_mode": strict,
    "run_and_save_rng_state": saved_state,
}
if importlib.util.find_spec("torch._higher_order_ops.foreach_map") is not None:  # torch 2.7 on
    PROGRAMS["foreach_map"] = many


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.cache
def bare(name: str) -> list[Any]:
    """Return what a program computes without a recording."""
    torch.manual_seed(0)
    return tree_leaves(PROGRAMS[name]())


@pytest.mark.parametrize("level", ["api", "module", pytest.param("both", marks=pytest.mark.long), "op"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_runs_as_it_does_and_is_one_record(name: str, level: str) -> None:
    expected = bare(name)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with recording(level=level) as run:
        found = tree_leaves(PROGRAMS[name]())
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert run.ledger == []
    op = f"higher_order.{name.split()[0]}"
    record = run.one(op)
    assert any(slot.startswith("output") for slot in slots_of(record))
    assert not any("eval_with_key" in frame.file for frame in record.stack)
    assert any(frame.file.endswith("test_higher_order.py") for frame in record.stack)
    if level == "module" and "compiled" not in name:
        assert [record.call.op for record in run.records if record.level != "state" and record.phase == "forward"] == [op]


@pytest.mark.parametrize("level", ["api", "module"])
@pytest.mark.parametrize("name", ["cond", "map_impl", "scan"])
def test_its_backward_side_has_the_gradients_of_what_it_was_given(name: str, level: str) -> None:
    with recording(level=level) as run:
        _, *gradients = PROGRAMS[name]()
    record = run.one(f"higher_order.{name}", "backward")
    found = [run.array(record, slot) for slot in slots_of(record) if slot.startswith("output")]
    for gradient in gradients:
        assert any(gradient.shape == each.shape and torch.equal(gradient, each) for each in found)


def test_the_operations_of_a_backward_pass_are_one_record_each_too() -> None:
    with recording(level="op") as run:
        cond()
    assert len(run.calls("higher_order.cond", "backward")) == 1


def test_every_operator_that_torch_knows_is_recorded_at_the_level_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks a dispatch mode what it may do with an operator, for each of them; torch 2.13 knows some forty."""
    assert len(_higher_order_ops) > 20
    for name, operator in sorted(_higher_order_ops.items()):
        monkeypatch.setattr(type(operator), "__call__", lambda self, x: x * 2)
        with recording(level="op") as run:
            operator.dispatch(torch._C.DispatchKey.Python, torch.ones(2))
        assert slots_of(run.one(f"higher_order.{name}")) == ["input.0", "output.0"], name
        assert not run.calls("aten.mul.Tensor")
        monkeypatch.undo()


def test_what_torch_runs_as_plain_calls_is_recorded_as_those() -> None:
    x = leaf(5, 4)
    with recording() as run:
        associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")
        torch.compiler.nested_compile_region(lambda a: a.sin())(x)
    assert run.calls("Tensor.add")
    assert run.calls("Tensor.sin")


class Users(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_above", [True, False])
def test_a_mode_of_the_users_sees_what_it_would_have_seen(level: str, is_above: bool) -> None:
    def program(users: Users) -> None:
        out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)
        strict_mode(lambda a: (a.sin(),), (x.float(),))

    x = torch.ones(2, 2, dtype=torch.int8)
    alone, seen = Users(), Users()
    with alone:
        program(alone)
    if is_above:
        with recording(level=level) as run, seen:
            program(seen)
    else:
        with seen, recording(level=level) as run:
            program(seen)
    assert seen.seen == alone.seen
    assert len(run.calls("higher_order.out_dtype")) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_compiled_stays_compiled(level: str) -> None:
    """A compiled program differs from the eager one in the last bits: falling back would change training."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x: (x * 2).sin() + 1, backend=counter)
    with recording(level=level) as run:
        function(torch.ones(3))
    assert counter.frame_count == 1
    assert run.ledger == []


class _Descent(torch.optim.Optimizer):
    """One of the user's own, which compiles without a break: torch's own break the graph themselves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("how", [{"level": level} for level in LEVELS] + [{"watch": "nonfinite"}], ids=str)
def test_a_compiled_step_of_an_optimizer_stays_one_graph(how: dict[str, Any], tmp_path: Path) -> None:
    """Torch calls the hooks of optimizers in the middle of the step, and the compiler follows them: calls in our hooks would break the
    graph.
    """

    def train() -> tuple[int, list[float]]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = _Descent(model.parameters())
        step = torch.compile(lambda: optimizer.step(), backend=counter, fullgraph=True)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            step()
            optimizer.zero_grad()
        return counter.op_count, model.weight.flatten().tolist()

    expected = train()
    with ulpscope.Capture(tmp_path / "run", **how):
        found = train()
    assert found == expected
    assert not list(tmp_path.rglob("ledger.jsonl"))


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_compiled_function_refuses_is_refused_with_the_same_words(level: str) -> None:
    """Torch goes back to eager mode there and meets our mode, which it must not compile."""
    q = leaf(1, 2, 16, 8)
    with pytest.raises(NotImplementedError) as expected:
        torch.compile(flex_attention, backend="eager")(q, q, q)
    torch._dynamo.reset()
    with recording(level=level), pytest.raises(NotImplementedError) as found:
        torch.compile(flex_attention, backend="eager")(q, q, q)
    assert str(found.value) == str(expected.value)


def test_a_compiled_module_is_still_one_call() -> None:
    class Choice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))

    model = torch.compile(Choice(), backend="eager")
    with recording() as run:
        model(torch.ones(3))
    assert [record.call.op for record in run.records if record.level == "module"] == ["module.OptimizedModule"]
    assert not run.calls("higher_order.cond")
