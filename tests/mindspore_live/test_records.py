# SPDX-License-Identifier: Apache-2.0
"""What a record of MindSpore says: torch's name and order of arguments, MindSpore's own name, weights, sources and gradients."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import gelu  # imported before anything is recorded, and seen all the same

import ulpscope.mindspore
from tests.mindspore_live.programs import array, region
from ulpscope.errors import InputError
from ulpscope.model import CallRecord, TensorRecord
from ulpscope.store import MemoryRun


def records(program: Any, model: Any = None, **options: Any) -> tuple[list[CallRecord], MemoryRun]:
    run = MemoryRun()
    with ulpscope.mindspore.Capture.into_sink(run.sink, model=model, **{"keep": "tensors", **options}):
        program()
    return [record for step in run.steps(0) for record in run.records(0, step)], run


def value(run: MemoryRun, slot: TensorRecord) -> np.ndarray[Any, Any]:
    data = run.tensor(0, 0, str(slot.content))
    return np.frombuffer(data.buffer, data.dtype).reshape(data.shape)


def slots(record: CallRecord) -> dict[str, TensorRecord]:
    return {str(slot.slot): slot for slot in record.slots}


def test_a_cell_is_one_call_of_torch_with_its_weights() -> None:
    net, x = nn.SequentialCell(nn.Dense(5, 3)), Tensor(array(4, 5))
    found, run = records(lambda: net(x), net)
    assert [record.call.op for record in found] == ["state.parameters", "state.batch", "functional.linear"]
    assert [str(slot.slot) for slot in found[0].slots] == ["parameter.0.weight", "parameter.0.bias"]
    linear = found[2]
    assert (linear.module, linear.recorded_as, linear.level) == ("0", "nn.Dense", "api")
    assert list(slots(linear)) == ["input.0", "input.1", "input.2", "output.0"]
    x_, weight, bias, y = (value(run, slot) for slot in linear.slots)
    np.testing.assert_allclose(y, x_ @ weight.T + bias, rtol=1e-5, atol=1e-6)
    assert linear.source is not None
    assert "net(x)" in linear.source.code


def test_names_and_arguments_are_those_of_torch() -> None:
    x = Tensor(array(3, 4))
    found, _ = records(lambda: (gelu(x, approximate="tanh"), ops.concat([x, x], 1), x.swapaxes(0, 1), 2 * x, ops.softmax(x)))
    told = [(record.call.op, record.recorded_as, record.arguments and record.arguments.kwargs) for record in found]
    assert told == [
        ("functional.gelu", "ops.gelu", {"approximate": "tanh"}),
        ("torch.cat", "ops.concat", {"dim": 1}),
        ("Tensor.transpose", "Tensor.swapaxes", None),
        ("Tensor.mul", "Tensor.__rmul__", None),
        ("functional.softmax", "ops.softmax", {"dim": -1, "_stacklevel": 3, "dtype": None}),
    ]
    assert [str(slot.slot) for slot in found[1].slots] == ["input.0.0", "input.0.1", "output.0"]


def test_what_no_row_knows_keeps_its_name() -> None:
    x = Tensor(array(3, 4))
    found, _ = records(lambda: ops.xdivy(x, x))
    assert [(record.call.op, record.recorded_as) for record in found] == [("ops.xdivy", "")]


def test_facts_about_a_tensor_are_no_calls() -> None:
    x = Tensor(array(3, 4))
    found, _ = records(lambda: (x.shape, ops.shape(x), x.asnumpy(), x.dtype, ops.rank(x), len(x)))
    assert found == []


@pytest.mark.parametrize("call", [mint.matmul, lambda x, w: gelu(x) * w, lambda x, w: ops.softmax(x, 1) + w.sum(), lambda x, w: x * x - w])
def test_contributed_gradients_are_those_of_the_call_alone(call: Any) -> None:
    """Each gradient that a call contributes is, bit by bit, what `ms.vjp` of this call alone gives for the gradient that entered it."""
    x, w = Tensor(array(4, 4)), Tensor(array(4, 4, seed=1))
    loss = lambda x, w: (ops.tanh(call(x, w)) + call(x, w) * mint.matmul(x, w)).sum()  # noqa: E731
    found, run = records(lambda: ms.grad(loss, (0, 1))(x, w))
    forward = {record.call: record for record in found if record.phase == "forward"}
    backward = [record for record in found if record.phase == "backward"]
    assert len(backward) == len(forward)
    functions = {
        "mint.matmul": mint.matmul,
        "ops.tanh": ops.tanh,
        "Tensor.__mul__": lambda a, b: a * b,
        "Tensor.__add__": lambda a, b: a + b,
    }
    num_checked = 0
    for record in backward:
        function = functions.get(record.recorded_as)
        if function is None:
            continue
        given = [Tensor(value(run, slot).copy()) for slot in forward[record.call].slots if slot.slot.role == "input"]
        entered = [Tensor(value(run, slot).copy()) for slot in record.slots if slot.slot.role == "input"]
        expected = ms.vjp(function, *given)[1](*entered)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert [value(run, slot).tobytes() for slot in record.slots if slot.slot.role == "output"] == [
            one.asnumpy().tobytes() for one in expected
        ]
        num_checked += 1
    assert num_checked >= 2


def test_gradients_of_cells_have_the_weights_too() -> None:
    net, x = nn.Dense(5, 3), Tensor(array(4, 5))
    weights = net.trainable_params()
    found, run = records(lambda: ms.value_and_grad(lambda x: net(x).sum(), 0, weights)(x), net, level="both")
    api, module = (
        next(record for record in found if record.phase == "backward" and record.level == level and "inear" in record.call.op)
        for level in ("api", "module")
    )
    expected = np.ones((4, 3), np.float32).T @ array(4, 5)
    np.testing.assert_allclose(value(run, slots(api)["output.1"]), expected, rtol=1e-5)
    np.testing.assert_allclose(value(run, slots(module)["gradient.weight"]), expected, rtol=1e-5)
    assert list(slots(module)) == ["input.0", "output.0", "gradient.bias", "gradient.weight"]
    assert (module.call.op, module.recorded_as, api.parent) == ("module.Linear", "nn.Dense", "module.Linear.0")


def test_entering_gradients_are_seen_after_the_hooks_of_the_user() -> None:
    def loss(x: Any) -> Any:
        y = ops.tanh(x)
        y.register_hook(lambda gradient: gradient * 3)
        return y.sum()

    found, run = records(lambda: ms.grad(loss)(Tensor(array(2, 2))))
    tanh = next(record for record in found if record.phase == "backward" and record.recorded_as.endswith("tanh"))
    assert value(run, slots(tanh)["input.0"]).tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_tensor_given_twice_has_a_gradient_for_each_place() -> None:
    x = Tensor(array(2, 2))
    found, run = records(lambda: ms.grad(lambda x: (x * x).sum())(x))
    product = next(record for record in found if record.phase == "backward" and record.call.op == "Tensor.mul")
    assert np.array_equal(value(run, slots(product)["output.0"]), x.asnumpy())
    assert np.array_equal(value(run, slots(product)["output.1"]), x.asnumpy())


def test_a_compiled_region_is_one_record_and_the_ledger_says_so() -> None:
    x, w = Tensor(array(3, 4)), Tensor(array(4, 4, seed=1))
    found, run = records(lambda: region(ops.tanh(x), w) * 2)
    assert [record.call.op for record in found] == ["torch.tanh", "jit.region", "Tensor.mul"]
    assert [(entry.what, entry.why) for entry in run.ledger(0)] == [("see the calls inside jit.region", "it is compiled by ms.jit")]


def test_an_error_of_the_program_is_the_programs() -> None:
    x = Tensor(array(3, 4))

    def program() -> None:
        with pytest.raises(ValueError, match="approximate"):
            gelu(x, approximate="nonsense")
        with pytest.raises(RuntimeError, match="unregistered"):  # a kernel that the CPU has not, which is asked for after the call returned
            mint.roll(x, 1, 1)
        ops.tanh(x)

    found, run = records(program)
    assert [record.call.op for record in found] == ["torch.tanh"]
    assert run.ledger(0) == ()


def test_what_fails_here_never_reaches_the_program() -> None:
    class Full(MemoryRun):
        def sink(self, rank: int = 0) -> Any:
            sink = super().sink(rank)
            sink.keep = lambda *given: (_ for _ in ()).throw(OSError("disk full"))  # type: ignore[method-assign]
            return sink

    run, x = Full(), Tensor(array(3, 4))
    with pytest.warns(Warning, match="disk full"), ulpscope.mindspore.Capture.into_sink(run.sink, keep="tensors"):
        np.testing.assert_allclose(ops.tanh(x).asnumpy(), np.tanh(x.asnumpy()), rtol=1e-6)
    assert "disk full" in run.ledger(0)[0].why


def test_steps_and_selections() -> None:
    net, x, run = nn.Dense(5, 5), Tensor(array(4, 5)), MemoryRun()
    with ulpscope.mindspore.Capture.into_sink(run.sink, model=net, steps=[1, 2], select="functional.linear*") as capture:
        for _ in range(4):
            ops.tanh(net(x))
            capture.step()
    assert run.steps(0) == (1, 2)
    assert [record.call.op for record in run.records(0, 1) if record.level == "api"] == ["functional.linear"]


def test_what_cannot_be_asked_for_is_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="level='op' is not known for MindSpore; choose one of api, module, both"):
        ulpscope.mindspore.Capture("nowhere", level="op")  # type: ignore[arg-type]
