# SPDX-License-Identifier: Apache-2.0
"""Test what the yardstick says of honest results, of injected faults, and of two kernels that are wrong in the installed torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ulpscope.judge.replayed import multiple_of
from ulpscope.model import Slot, SlotReplay
from ulpscope.replay.program import NotReplayable
from ulpscope.replay.yardstick.yardstick import Yardstick

MAX, RMS = 128.0, 16.0
OUT = Slot("output", (0,))


@dataclass(frozen=True)
class Call:
    """A function as a program; with a gradient, its backward."""

    function: Callable[..., Any]
    inputs: Mapping[Slot, Tensor]
    is_backward: bool = False
    name: str = "call"

    def __call__(self, inputs: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        if not self.is_backward:
            with torch.no_grad():
                result = self.function(*inputs.values())
            results = result if isinstance(result, tuple) else (result,)
            return {Slot("output", (place,)): one for place, one in enumerate(results)}
        *values, gradient = inputs.values()
        leaves = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in values]
        result = self.function(*[leaf.view_as(leaf) for leaf in leaves])
        places = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
        found = torch.autograd.grad(result, [leaves[place] for place in places], gradient.to(result.dtype))
        return {Slot("output", (place,)): one for place, one in zip(places, found, strict=True)}


def forward(function: Callable[..., Any], *values: Tensor) -> Call:
    return Call(function, {Slot("input", (place,)): one for place, one in enumerate(values)})


def backward(function: Callable[..., Any], *values: Tensor, gradient: Tensor | None = None) -> Call:
    if gradient is None:
        result = function(*values)
        gradient = _normal(*result.shape, seed=99).to(result.dtype)
    inputs = {Slot("input", (place,)): one for place, one in enumerate(values)} | {Slot("gradient", (0,)): gradient}
    return Call(function, inputs, is_backward=True)


def measure(call: Call, recorded: Mapping[Slot, Tensor] | None = None, **options: Any) -> SlotReplay:
    return Yardstick(call).measure(call(call.inputs) if recorded is None else recorded, **options)[0]


def is_bad(found: SlotReplay) -> bool:
    return found.max_ratio > MAX or found.rms_ratio > RMS or found.num_nonfinite > 0 or found.num_flipped > 0


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, W, B, MATRIX = _normal(24, 32), _normal(32, seed=1), _normal(32, seed=2), _normal(20, 32, seed=3)
HEADS = tuple(_normal(1, 2, 12, 8, seed=seed) for seed in (4, 5, 6))
PICTURE, FILTERS = _normal(2, 3, 9, 9, seed=7), _normal(4, 3, 3, 3, seed=8)
TARGET = torch.arange(24) % 32
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (X, MATRIX)),
    "softmax": (lambda x: x.softmax(-1), (X,)),
    "saturated softmax": (lambda x: x.softmax(-1), (50 * X,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), (X, W, B)),
    "batch_norm mean 100": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (X + 100, W, B)),
    "gelu": (F.gelu, (X,)),
    "saturated tanh": (torch.tanh, (20 * X,)),
    "sdpa": (F.scaled_dot_product_attention, HEADS),
    "sdpa huge": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), tuple(1000 * one for one in HEADS)),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET, reduction="none"), (X,)),
    "conv2d": (F.conv2d, (PICTURE, FILTERS)),
    "max_pool2d after relu": (lambda x: F.max_pool2d(x, 2), (PICTURE.relu(),)),
    "sum": (lambda x: x.sum(0), (X,)),
    "inverse": (torch.linalg.inv, (X[:, :24],)),
    "embedding": (lambda table: F.embedding(TARGET % 5, table), (X,)),
}


def call_of(name: str, phase: str, dtype: torch.dtype = torch.float32) -> Call:
    function, values = CALLS[name]
    values = tuple(one.to(dtype) for one in values)
    return (forward if phase == "forward" else backward)(function, *values)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_own_kernels_are_honest(name: str, phase: str) -> None:
    for found in Yardstick(call := call_of(name, phase)).measure(call(call.inputs)):
        assert not is_bad(found)
        assert (found.dtype, found.is_bound) == ("float32", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "softmax", "layer_norm", "gelu", "sdpa", "cross_entropy"])
def test_narrow_kernels_are_honest(name: str, dtype: torch.dtype) -> None:
    for phase in ("forward", "backward"):
        call = call_of(name, phase, dtype)
        found = measure(call)
        assert found.max_ratio < 8
        assert found.dtype == str(dtype).removeprefix("torch.")


def _scaled(value: Tensor) -> Tensor:
    return value * 1.01


def _one_row_lost(value: Tensor) -> Tensor:
    damaged = value.clone().contiguous()
    damaged.view(-1, damaged.shape[-1])[-1] = 0
    return damaged


def _bit_flipped(bit: int) -> Callable[[Tensor], Tensor]:
    def flip(value: Tensor) -> Tensor:
        damaged = value.clone().contiguous()
        largest = int(damaged.abs().argmax())
        bits = damaged.view(-1).view(torch.int32)
        bits[largest] ^= 1 << bit
        return damaged

    return flip


FAULTS = {"1 %": _scaled, "one row": _one_row_lost, "exponent bit": _bit_flipped(24), "mantissa bit": _bit_flipped(17)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", ["linear", "softmax", "layer_norm", "gelu", "sdpa", "cross_entropy", "conv2d"])
def test_faults_show(name: str, phase: str, fault: str) -> None:
    call = call_of(name, phase)
    right = call(call.inputs)
    assert is_bad(measure(call, {slot: FAULTS[fault](one) for slot, one in right.items()}))


def test_a_scale_that_no_element_shows_is_seen_in_the_projection() -> None:
    call = call_of("linear", "forward", torch.bfloat16)
    exact = Yardstick(call).exact()[OUT]
    honest, scaled = (measure(call, {OUT: (exact * factor).bfloat16()}) for factor in (1.0, 1.02))
    assert (scaled.bias or 0) > 10 * max(1.0, honest.bias or 0)
    assert scaled.scale == pytest.approx(0.02, rel=0.1)
    assert scaled.max_ratio < 8


# ------------------------------------------------------------------------------------------- a kernel is not its own judge


def test_layer_norm_of_one_element_is_wrong_in_this_torch() -> None:
    """pytorch#188375: the output does not depend on the weight, but the kernel gives it a gradient. The replay runs that very kernel."""
    rows, weight, bias = 1e3 * _normal(64, 1), _normal(1, seed=1), _normal(1, seed=2)
    call = backward(lambda x, w, b: F.layer_norm(x, (1,), w, b), rows, weight, bias)
    recorded = call(call.inputs)
    if float(recorded[Slot("output", (1,))].abs().max()) == 0:
        pytest.skip("this torch has the kernel mended")
    found = {one.slot: one for one in Yardstick(call).measure(recorded)}[Slot("output", (1,))]
    assert found.max_ratio > MAX
    assert (found.native_ratio or 0) > MAX


class _Filled(TorchDispatchMode):
    """Fills fresh memory with 7, so that it does not hold the right values by luck."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.fill_(7.0) if func in (torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format) else found


def test_rrelu_under_checkpoint_is_wrong_in_this_torch() -> None:
    """pytorch#193671: the slopes are saved before they are drawn, so the gradient is that of other numbers.

    A checkpoint recomputes up to the last tensor that is saved: here the slopes, while nothing has written to them yet. The allocator may
    hand out the memory where the slopes of the forward call stood, and then the gradient is right by luck.
    """
    values, gradient = _normal(256), torch.ones(256)
    leaf = values.clone().requires_grad_()
    with torch.random.fork_rng(), _Filled():
        torch.manual_seed(0)
        result = checkpoint(lambda x: F.rrelu(x, 0.1, 0.9, training=True), leaf, use_reentrant=False)
        recorded = torch.autograd.grad(result, leaf, gradient)[0]
    slopes = torch.where(values < 0, result.detach() / values, torch.ones(()))
    call = Call(lambda x, s: torch.where(x < 0, x * s, x), backward(lambda x: x, values, gradient=gradient).inputs, is_backward=True)
    with_slopes = {Slot("input", (0,)): values, Slot("input", (1,)): slopes, Slot("gradient", (0,)): gradient}
    call = Call(call.function, with_slopes, is_backward=True)
    if torch.allclose(recorded, slopes):
        pytest.skip("this torch has the kernel mended")
    assert measure(call, {OUT: recorded}).max_ratio > MAX
    assert measure(call, {OUT: slopes * gradient}).max_ratio < 8


def test_where_all_kernels_are_poor_nobody_is_blamed() -> None:
    call = call_of("saturated tanh", "backward")
    found = measure(call)
    assert (found.error or 0) > 1e-8
    assert found.max_ratio < 32


def test_what_cannot_be_taken_apart_has_no_independent_judge() -> None:
    assert measure(call_of("inverse", "forward")).native_ratio is None
    assert measure(call_of("softmax", "forward")).native_ratio is not None


def test_two_functions_that_disagree_in_any_precision_leave_the_kernel_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulpscope.replay.formulas import decompositions

    wrong = {**decompositions._table(), torch.ops.aten.gelu.default: lambda x, approximate="none": x * 0.5}
    monkeypatch.setattr(decompositions, "_table", lambda: wrong)
    call = call_of("gelu", "forward")
    as_kernel, as_decomposition, as_neither = (measure(call, {OUT: one}) for one in (F.gelu(X), X * 0.5, X * 0.7))
    assert [is_bad(one) for one in (as_kernel, as_decomposition, as_neither)] == [False, False, True]
    assert (as_kernel.native_ratio or 0) > MAX


# ------------------------------------------------------------------------------------------- integers, NaN, infinities


def test_indices_that_a_tie_decides_are_not_judged() -> None:
    rows = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, -1.0], [3.0, 1.0, 2.0]])
    call = forward(lambda x: x.argmax(-1), rows)
    assert measure(call, {OUT: torch.tensor([2, 1, 0])}).num_flipped == 0
    assert measure(call, {OUT: torch.tensor([1, 0, 1])}).num_flipped == 1


def test_booleans_and_integers_have_to_be_equal() -> None:
    signs = forward(lambda x: x > 0, torch.tensor([0.0, 1.0, -1.0]))
    assert measure(signs, {OUT: torch.tensor([False, True, False])}).num_flipped == 0
    assert measure(signs, {OUT: torch.tensor([True, True, True])}).num_flipped == 2
    counts = forward(lambda x: x * 2, torch.tensor([1, 2, 3]))
    found = measure(counts, {OUT: torch.tensor([2, 4, 7])})
    assert (found.num_flipped, found.dtype) == (1, "int64")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_to_stand_where_it_belongs(bad: float) -> None:
    values = torch.tensor([1.0, 0.0, 2.0, 3.0])
    call = forward(torch.log, values)
    right = call(call.inputs)[OUT]
    assert measure(call, {OUT: right}).num_nonfinite == 0
    misplaced = right.clone()
    misplaced[2] = bad
    assert measure(call, {OUT: misplaced}).num_nonfinite == 1
    missing = right.clone()
    missing[1] = -100.0
    assert measure(call, {OUT: missing}).num_nonfinite == 1


def test_beyond_the_largest_number_is_infinite() -> None:
    call = forward(lambda x: x * 8, torch.tensor([60000.0, 8185.0, 1.0]).half())
    assert measure(call, {OUT: torch.tensor([math.inf, 65472.0, 8.0]).half()}).num_nonfinite == 0
    assert measure(call, {OUT: torch.tensor([65504.0, 65472.0, 8.0]).half()}).num_nonfinite == 1


def test_overflow_on_the_way_is_excused_where_every_kernel_overflows() -> None:
    call = forward(lambda x: torch.linalg.vector_norm(x), torch.full((4,), 1e30))
    assert measure(call, {OUT: torch.tensor(math.inf)}).num_nonfinite == 0
    assert measure(call, {OUT: torch.tensor(2e30)}).max_ratio < 8
    assert measure(call, {OUT: torch.tensor(math.nan)}).num_nonfinite == 1


# ------------------------------------------------------------------------------------------- stages, shapes, dtypes


def test_work_ends_where_enough_is_known() -> None:
    call = call_of("linear", "forward")
    right = call(call.inputs)[OUT]
    yardstick = Yardstick(call)
    short, full = (yardstick.measure({OUT: right}, enough=enough)[0] for enough in (lambda dtype: (MAX, RMS), None))
    assert (short.is_bound, full.is_bound) == (True, False)
    assert short.max_ratio >= full.max_ratio
    assert short.rms_ratio >= full.rms_ratio
    assert not yardstick.measure({OUT: right * 1.01}, enough=lambda dtype: (MAX, RMS))[0].is_bound


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_a_longer_look_never_makes_a_ratio_larger(name: str, phase: str) -> None:
    call = call_of(name, phase)
    recorded = {slot: one * (1 + 1e-5) for slot, one in call(call.inputs).items()}
    yardstick = Yardstick(call)
    for slot in recorded:
        ratios = [yardstick._best(slot, recorded[slot], _float32(), stage) for stage in ("exact", "probes", "full")]
        assert ratios[0].max_ratio >= ratios[1].max_ratio * (1 - 1e-9) >= ratios[2].max_ratio * (1 - 1e-9) ** 2
        assert ratios[0].rms_ratio >= ratios[1].rms_ratio * (1 - 1e-9) >= ratios[2].rms_ratio * (1 - 1e-9) ** 2


def _float32() -> Any:
    from ulpscope.model import DTYPES

    return DTYPES["float32"]


@settings(max_examples=40, deadline=None)
@given(
    place=st.tuples(st.integers(0, 23), st.integers(0, 19)),
    sizes=st.tuples(st.floats(1e-12, 1e6), st.floats(1e-12, 1e6)),
    sign=st.sampled_from([-1.0, 1.0]),
)
def test_a_larger_error_never_has_a_smaller_ratio(place: tuple[int, int], sizes: tuple[float, float], sign: float) -> None:
    ratios = []
    for size in sorted(sizes):
        recorded = LINEAR.exact()[OUT].clone()
        recorded[place] += sign * size
        ratios.append(LINEAR.measure({OUT: recorded})[0])
    assert ratios[0].max_ratio <= ratios[1].max_ratio
    assert ratios[0].rms_ratio <= ratios[1].rms_ratio
    assert ratios[1].worst_index == place or sizes[0] < 1e-6


LINEAR = Yardstick(call_of("linear", "forward"))


def test_views_and_copies_are_compared_and_no_more() -> None:
    asked = []

    def transposed(x: Tensor) -> Tensor:
        asked.append(x.dtype)
        return x.T

    call = forward(transposed, X)
    assert measure(call, {OUT: X.T}).max_ratio == 0
    assert asked == [torch.float64]
    assert is_bad(measure(call, {OUT: X.T + 0.01}))


def test_worst_element_is_named() -> None:
    call = call_of("linear", "forward")
    recorded = call(call.inputs)[OUT].clone()
    recorded[3, 7] += 1
    found = measure(call, {OUT: recorded})
    assert found.worst_index == (3, 7)
    assert found.worst_recorded == float(recorded[3, 7])
    assert found.worst_exact == pytest.approx(float(recorded[3, 7]) - 1)


def test_a_tensor_of_many_blocks_is_measured_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from ulpscope.replay.yardstick import honest, ratios

    call = call_of("layer_norm", "forward")
    recorded = {OUT: call(call.inputs)[OUT] * (1 + 1e-4)}
    whole = measure(call, recorded)
    for block in (32, 20, 7):
        monkeypatch.setattr(ratios, "_BLOCK", block)
        monkeypatch.setattr(honest, "LARGE", 1 << 20)
        parts = measure(call, recorded)
        assert parts.max_ratio == pytest.approx(whole.max_ratio)
        assert parts.rms_ratio == pytest.approx(whole.rms_ratio)
        assert parts.worst_index == whole.worst_index


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    call = forward(torch.matmul, X.to(dtype), X.T.to(dtype))
    right = call(call.inputs)
    assert not is_bad(measure(call))
    assert is_bad(measure(call, {OUT: right[OUT] * 1.01}))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1, 1)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    call = forward(torch.exp, torch.ones(shape))
    found = measure(call)
    assert found.numel == math.prod(shape)
    assert found.max_ratio < 8


def test_another_shape_is_not_compared() -> None:
    with pytest.raises(NotReplayable, match="recorded with shape"):
        measure(forward(torch.exp, X), {OUT: X[:2]})


def test_nobody_s_random_numbers_are_touched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measure(call_of("sdpa", "backward"))
    assert torch.equal(torch.get_rng_state(), before)


def test_strides_of_the_recording_do_not_matter() -> None:
    wide = _normal(24, 64)
    call = forward(F.linear, wide[:, ::2], MATRIX.T.contiguous().T)
    assert not is_bad(measure(call))


@pytest.mark.parametrize("level", [0.0, 2.5])
@pytest.mark.parametrize("place", [0, 4, 8])
def test_a_tie_may_go_to_any_of_the_equals(level: float, place: int) -> None:
    call = backward(lambda x: F.max_pool2d(x, 3), torch.full((1, 1, 3, 3), level), gradient=torch.ones(1, 1, 1, 1))
    chosen = torch.zeros(9)
    chosen[place] = 1
    assert not is_bad(measure(call, {OUT: chosen.view(1, 1, 3, 3)}))
    assert is_bad(measure(call, {OUT: 20 * chosen.view(1, 1, 3, 3)}))


def test_the_slope_at_zero_is_a_convention_that_is_kept() -> None:
    relu = backward(torch.relu, torch.tensor([0.0, 1.0, -1.0]), gradient=torch.ones(3))
    assert is_bad(measure(relu, {OUT: torch.tensor([1.0, 1.0, 0.0])}))


def _running_sum_in(dtype: torch.dtype, values: Tensor) -> Tensor:
    total, found = torch.zeros(values.shape[0], dtype=dtype), []
    for column in values.unbind(1):
        total = (total + column).to(dtype)
        found.append(total)
    return torch.stack(found, 1)


@pytest.mark.parametrize(("length", "errs"), [(2048, True), (24, False)])
def test_several_evaluations_are_no_larger_a_yardstick_than_one(length: int, errs: bool) -> None:
    """The limits were measured with one; the largest of five would let a running sum pass that rounds each of its many steps."""
    values = torch.randn(64, length, generator=torch.Generator().manual_seed(1)).bfloat16()
    call = Call(lambda x: x.cumsum(1), {Slot("input", (0,)): values})
    [found] = Yardstick(call).measure({OUT: _running_sum_in(torch.bfloat16, values)})
    assert (found.rms_ratio > 5) == errs


@pytest.mark.parametrize("by", [1 + 1e-4, 1 - 1e-4, 1 + 1e-3])
def test_one_factor_is_no_rounding_of_operands(by: float) -> None:
    """Also where the question is only whether an error is no larger than such rounding."""
    draw = torch.Generator().manual_seed(2)
    x, w = torch.randn(24, 48, generator=draw), torch.randn(48, 32, generator=draw)
    product = x.bfloat16().float() @ w.bfloat16().float()
    call = Call(torch.matmul, {Slot("input", (0,)): x, Slot("input", (1,)): w})
    noise = product * (1 + 1e-4 * torch.randn(24, 32, generator=draw))
    [scaled], [rounded] = (Yardstick(call, operands="bfloat16", loosely=True).measure({OUT: one}) for one in (product * by, noise))
    assert rounded.is_rounding
    assert not scaled.is_rounding
    assert multiple_of(scaled) > 1 >= multiple_of(rounded)
