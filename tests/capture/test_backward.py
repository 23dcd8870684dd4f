# SPDX-License-Identifier: Apache-2.0
"""Backward belongs to its forward call: the gradients that a call received, and those that it contributed to each of its inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.capture.recording import Recording, recording, slot_of, slots_of


def test_a_composite_call_contributes_to_all_its_inputs() -> None:
    logits = torch.randn(6, 5, requires_grad=True)
    target = torch.randint(0, 5, (6,))
    with recording() as run:
        F.cross_entropy(logits, target).backward()
    backward = run.one("functional.cross_entropy", "backward")

    expected = (logits.detach().softmax(-1) - F.one_hot(target, 5)) / 6
    torch.testing.assert_close(run.array(backward, "output.0"), expected)
    assert torch.equal(run.array(backward, "output.0"), logits.grad)
    assert run.array(backward, "input.0").item() == 1.0


def test_linear_on_a_three_dimensional_input_has_weight_and_bias_gradients() -> None:
    layer = nn.Linear(4, 3)
    x = torch.randn(2, 5, 4, requires_grad=True)
    with recording() as run:
        layer(x).square().sum().backward()
    backward = run.one("functional.linear", "backward")

    assert slots_of(backward) == ["input.0", "output.0", "output.1", "output.2"]
    assert torch.equal(run.array(backward, "output.0"), x.grad)
    assert torch.equal(run.array(backward, "output.1"), layer.weight.grad)
    assert torch.equal(run.array(backward, "output.2"), layer.bias.grad)
    assert slot_of(backward, "input.0").shape == (2, 5, 3)


def test_a_contribution_is_not_the_accumulated_gradient() -> None:
    x = torch.randn(3, requires_grad=True)
    with recording() as run:
        (x * 2 + x * 5).sum().backward()
    first, second = sorted(run.calls("Tensor.mul", "backward"), key=lambda record: record.call)

    assert run.array(first, "output.0").tolist() == [2.0] * 3
    assert run.array(second, "output.0").tolist() == [5.0] * 3
    assert x.grad is not None
    assert x.grad.tolist() == [7.0] * 3


@pytest.mark.parametrize("level", ["api", "both"])
def test_each_call_has_its_own_part_of_a_weight_that_autocast_casts_once_for_all(level: str) -> None:
    """Autocast hands the cast of the first call to all later ones, and the gradient that leaves the cast is the sum of all their
    contributions.
    """
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 5, 4)
    with recording(level=level) as run:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(layer(layer(x)))
        y.float().square().sum().backward()
    backward = run.calls("functional.linear", "backward")
    forward = {record.call: record for record in run.calls("functional.linear")}

    assert len(backward) == 3
    for record in backward:
        gradient = run.array(record, "input.0").reshape(-1, 4)
        given = run.array(forward[record.call], "input.0").reshape(-1, 4)
        own = (gradient.t() @ given.to(torch.bfloat16)).float()
        assert run.array(record, "output.1").dtype is torch.float32
        torch.testing.assert_close(run.array(record, "output.1"), own, rtol=0, atol=2.0**-8 * float(own.abs().max()))
    assert layer.weight.grad is not None
    total = sum(run.array(record, "output.1") for record in backward)
    torch.testing.assert_close(total, layer.weight.grad, rtol=0, atol=2.0**-6 * float(layer.weight.grad.abs().max()))


def test_a_weight_that_only_one_call_casts_has_the_very_gradient_that_leaves_the_cast() -> None:
    layer = nn.Linear(4, 3)
    with recording() as run:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(torch.randn(5, 4))
        y.float().square().sum().backward()
    backward = run.one("functional.linear", "backward")
    assert torch.equal(run.array(backward, "output.1"), layer.weight.grad)
    assert torch.equal(run.array(backward, "output.2"), layer.bias.grad)


@pytest.mark.parametrize(
    ("op", "program"),
    [
        ("Tensor.mul", lambda x: x * x),
        ("torch.cat", lambda x: torch.cat([x, x])),
        ("torch.einsum", lambda x: torch.einsum("i,i->i", x, x)),
    ],
)
def test_one_tensor_given_twice_has_one_contribution(op: str, program: object) -> None:
    x = torch.randn(4, requires_grad=True)
    with recording() as run:
        program(x).sum().backward()  # type: ignore[operator]
    backward = run.one(op, "backward")

    outputs = [slot for slot in slots_of(backward) if slot.startswith("output")]
    assert len(outputs) == 1
    assert torch.equal(run.array(backward, outputs[0]), x.grad)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def test_an_autograd_function_is_a_call_with_its_inner_calls_below_it() -> None:
    x = torch.randn(4, requires_grad=True)
    with recording() as run:
        _Cube.apply(x).sum().backward()
    forward, backward = run.one("Function._Cube"), run.one("Function._Cube", "backward")

    assert torch.equal(run.array(backward, "output.0"), x.grad)
    assert [record.parent for record in run.calls("Tensor.mul")] == [str(forward.call)] * 2
    assert len(run.calls("Tensor.mul")) == 2, "the arithmetic of its backward is not recorded as calls"


def test_multi_head_attention_is_one_call_with_the_gradients_of_its_parameters() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8, requires_grad=True)
    with recording() as run:
        layer(x, x, x)[0].sum().backward()
    backward = run.one("functional.multi_head_attention_forward", "backward")
    forward = run.one("functional.multi_head_attention_forward")

    weight = next(slot for slot in slots_of(forward) if slot_of(forward, slot).shape == (24, 8) and slot.startswith("input"))
    assert torch.equal(run.array(backward, weight.replace("input", "output")), layer.in_proj_weight.grad)


@pytest.mark.parametrize("name", ["relu_on_view", "write_slice", "residual", "unbind", "transposed"])
def test_contributions_add_up_to_the_gradient_of_every_parameter(name: str) -> None:
    """With any write in place, every part of a parameter's gradient is credited to a call."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)

    def program() -> torch.Tensor:
        y = layer(x)
        if name == "relu_on_view":
            return F.relu_(layer(y)).sum()
        if name == "write_slice":
            y = y * 1.0
            y[:, 0] = layer(y[:, 1].clone())
            return y.square().sum()
        if name == "residual":
            y = y * 1.0
            y += layer(y.clone())
            return y.sum()
        if name == "unbind":
            first, second, _ = y.unbind(1)
            return (first * second).sum()
        return (y @ layer.weight.T).sum()

    with recording() as run:
        program().backward()
    for parameter in (layer.weight, layer.bias):
        torch.testing.assert_close(_contributed(run, parameter), parameter.grad)
    assert not run.ledger


def _contributed(run: Recording, parameter: nn.Parameter) -> torch.Tensor:
    """Sum the contributions of all calls to a parameter, found by the fingerprint of the parameter in their inputs."""
    total = torch.zeros_like(parameter)
    (print_of_parameter,) = {
        slot.fingerprint
        for record in run.calls("functional.linear")
        for slot in record.slots
        if slot.slot.is_input and slot.shape == tuple(parameter.shape) and slot.slot.path == ((1,) if parameter.dim() == 2 else (2,))
    }
    for record in run.records:
        if record.phase != "forward":
            continue
        for slot in record.slots:
            if slot.slot.is_input and slot.fingerprint == print_of_parameter and slot.requires_grad:
                for backward in run.calls(record.call.op, "backward"):
                    wanted = str(slot.slot).replace("input", "output")
                    if backward.call == record.call and wanted in slots_of(backward):
                        total += run.array(backward, wanted)
    return total


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_marked_and_keeps_the_name_of_the_call_it_repeats(reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with recording(models=[layer]) as run:
        checkpoint(lambda value: F.gelu(layer(value)), x, use_reentrant=reentrant).sum().backward()

    linears = run.calls("functional.linear")
    assert [(str(record.call), record.recompute) for record in linears] == [("functional.linear.0", False), ("functional.linear.0", True)]
    assert torch.equal(run.array(run.one("functional.linear", "backward"), "output.1"), layer.weight.grad)


def test_two_passes_over_one_graph_are_two_records() -> None:
    x = torch.randn(3, requires_grad=True)
    with recording() as run:
        y = x.exp()
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert len(run.calls("Tensor.exp", "backward")) == 2


def test_double_backward_runs_and_records_the_first_order() -> None:
    x = torch.randn(3, requires_grad=True)
    with recording() as run:
        (first,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        first.sum().backward()
    assert torch.equal(run.array(run.calls("Tensor.pow", "backward")[0], "output.0"), first)


def test_gradients_that_enter_are_those_after_the_hooks_of_the_user() -> None:
    x = torch.randn(3, requires_grad=True)
    with recording() as run:
        y = x * 2
        y.register_hook(lambda gradient: gradient * 10)
        y.sum().backward()
    assert run.array(run.one("Tensor.mul", "backward"), "input.0").tolist() == [10.0] * 3


def test_a_backward_pass_after_the_end_of_capture_is_left_alone() -> None:
    x = torch.randn(3, requires_grad=True)
    with recording() as run:
        y = (x * 2).sum()
    y.backward()
    assert not run.calls("Tensor.mul", "backward")
    assert x.grad is not None


def test_passes_that_do_not_finish_are_written_in_the_order_in_which_they_began() -> None:
    """Of the two results of each call only one takes part in the backward pass, so no call sees all of its gradients."""
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with recording() as run:
        chain = x
        for _ in range(40):
            chain = torch.meshgrid(chain, other, indexing="ij")[0][:, 0]
        chain.sum().backward()
    numbers = [record.call.index for record in run.calls("torch.meshgrid", "backward")]

    assert numbers == list(reversed(range(40)))


class HookedView(torch.nn.Module):
    """Looks at its input in another shape, and doubles the gradient on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.view(6)
        seen.register_hook(lambda gradient: 2 * gradient)
        return seen.sin()


@pytest.mark.parametrize("level", ["module", "both"])
def test_a_hook_of_the_users_inside_a_module_counts(level: str) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with recording(level=level) as made:
        HookedView()(x.exp()).sum().backward()
    record = made.one("module.HookedView", "backward")
    inner = x.detach().exp()
    assert torch.equal(made.array(record, "output.0"), 2 * inner.cos())


def test_hooks_of_users_on_nodes_run_and_are_removed_while_ours_are_there() -> None:
    seen: list[str] = []
    registration = torch.autograd.Function._register_hook
    with recording() as run:
        x = torch.ones(3, requires_grad=True)
        y = x.sin()
        assert y.grad_fn is not None
        removed = y.grad_fn.register_hook(lambda *_: seen.append("removed"))
        y.grad_fn.register_hook(lambda *_: seen.append("kept"))
        y.grad_fn.register_prehook(lambda *_: seen.append("before"))
        removed.remove()
        y.sum().backward()
    assert seen == ["before", "kept"]
    assert torch.autograd.Function._register_hook is registration
    assert "_register_hook" not in vars(torch.autograd.Function)
    assert [record.call.op for record in run.records if record.phase == "backward"] == ["Tensor.sum", "Tensor.sin"]
