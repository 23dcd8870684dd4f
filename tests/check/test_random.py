# SPDX-License-Identifier: Apache-2.0
"""Calls that draw random numbers: no honest draw is failed by chance, and what can be known of one is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ulpscope import Capture, open_run
from ulpscope.judge import threshold
from ulpscope.model import Slot
from ulpscope.model.check.checks import Check
from ulpscope.replay import Program, backward_program, forward_program, is_random, recorded_results
from ulpscope.replay.draws.chance import IMPOSSIBLE, apart_as_samples, share_surprise, standard_errors, sum_surprise
from ulpscope.replay.draws.expected import surprises
from ulpscope.replay.draws.pooling import Pooled
from ulpscope.workflows.check.checking import check_run

pytestmark = pytest.mark.filterwarnings("ignore:dropout")
OUTPUT = Slot("output", (0,))
PHASES = ("forward", "backward")


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def _few() -> None:
    """Return so few elements, or shares so near 0 and 1, that two draws are often equal."""
    for share in (0.05, 0.95, 0.999):
        torch.zeros(3).bernoulli_(share)
        torch.bernoulli(torch.full((2,), share))
        torch.multinomial(torch.tensor([share, 1 - share]), 1)
    torch.randint(0, 2, (2,)), torch.randperm(3), torch.poisson(torch.full((4,), 0.02)), torch.empty(2).geometric_(0.95)


def _fills() -> None:
    torch.rand(3), torch.randn(50), torch.empty(9).exponential_(2.0), torch.empty(9).cauchy_(), torch.empty(9).log_normal_()
    torch.empty(30, dtype=torch.bfloat16).uniform_(-2, 3), torch.rand(2000, dtype=torch.float16), torch.randn(9, dtype=torch.complex64)
    torch.normal(torch.randn(6), torch.rand(6)), torch.normal(0.0, torch.rand(300)), torch.normal(1.0, 2.0, (5,))
    nn.init.kaiming_uniform_(torch.empty(5, 6)), nn.init.trunc_normal_(torch.empty(5, 6))
    torch.binomial(torch.full((9,), 5.0), torch.full((9,), 0.4)), torch.multinomial(torch.rand(6, 5), 7, replacement=True)


def _dropouts() -> torch.Tensor:
    x = _leaf(4, 6, 10)
    y = F.dropout(x, 0.05) + F.dropout1d(x, 0.3) + F.alpha_dropout(x, 0.2, True) + F.feature_alpha_dropout(x, 0.2, True)
    y = (
        y
        + F.dropout(x.bfloat16(), 0.1)
        + F.dropout(F.relu(x), 0.5)
        + F.dropout(x * 1, 0.5, True, True)
        + torch.native_dropout(x, 0.3, True)[0]
    )
    return y + F.rrelu(x, training=True) + F.dropout3d(x[None], 0.4)[0] + F.gumbel_softmax(x) + F.gumbel_softmax(x, 0.3, hard=True)


def _hidden() -> torch.Tensor:
    q, x = _leaf(2, 3, 5, 8), _leaf(3, 2, 8)
    layers = [nn.LSTM(8, 5, 2, dropout=0.3)(x)[0], nn.GRU(8, 5, 2, dropout=0.3)(x)[0], nn.MultiheadAttention(8, 2, dropout=0.2)(x, x, x)[0]]
    parts = [F.scaled_dot_product_attention(q, q, q, dropout_p=0.3), nn.TransformerEncoderLayer(8, 2, 16)(x), *layers]
    return torch.stack([one.sum() for one in parts])


def _checked(into: Path, program: Callable[[], Any], seed: int = 0, keep: Any = "tensors") -> Check:
    torch.manual_seed(seed)
    with Capture(into, keep=keep) as capture:
        made = program()
        if made is not None:
            made.sum().backward()
        capture.step()
    return check_run(into, isolated=False, seed=seed)


@pytest.mark.parametrize("program", [_few, _fills, _dropouts, _hidden])
@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_an_honest_draw_is_never_failed(tmp_path: Path, program: Callable[[], Any], keep: str) -> None:
    check = _checked(tmp_path / "run", program, keep=keep)
    assert [(str(call.call), call.phase, call.reason) for call in check.calls if call.status != "passed"] == []
    assert sum(call.is_random for call in check.calls) >= 12


@pytest.mark.long
@pytest.mark.parametrize("program", [_few, _fills, _dropouts, _hidden])
def test_nor_for_any_seed(tmp_path: Path, program: Callable[[], Any]) -> None:
    for seed in range(1, 40):
        check = _checked(tmp_path / f"run{seed}", program, seed)
        assert [(seed, str(call.call), call.reason) for call in check.calls if call.status != "passed"] == []


def test_what_a_dropout_is_given_may_be_nan_infinite_or_too_large_to_scale(tmp_path: Path) -> None:
    def program() -> torch.Tensor:
        x = torch.randn(8, 16)
        x[0], x[1], x[2, :4] = torch.nan, torch.inf, 65504.0
        return F.dropout(x.half().requires_grad_(), 0.3)

    check = _checked(tmp_path / "run", program)
    assert [(str(call.call), call.phase, call.reason) for call in check.calls if call.status != "passed"] == []


def test_so_may_the_gradient_be_that_a_dropout_is_given(tmp_path: Path) -> None:
    def program() -> torch.Tensor:
        x = torch.randn(8, 16)
        x[3] = torch.inf
        factor = torch.ones(8, 16)
        factor[0], factor[1], factor[2, :4] = torch.nan, torch.inf, 3e38
        return F.dropout(x.requires_grad_(), 0.3) * factor + F.alpha_dropout(x, 0.3, True) * factor

    check = _checked(tmp_path / "run", program)
    assert [(str(call.call), call.reason) for call in check.calls if call.is_random and call.status != "passed"] == []
    assert sum(call.is_random for call in check.calls) == 5


def test_a_draw_hidden_in_an_argument_leaves_the_rest_to_be_checked(tmp_path: Path) -> None:
    """With a dropout of 0 attention and recurrent layers are as exact as any call; the plain dropouts inside are judged as such."""
    check = _checked(tmp_path / "run", _hidden)
    found = Counter(call.call.short for call in check.calls if call.is_random and call.phase == "forward" and "dropout of 0" in call.reason)
    assert found == {"scaled_dot_product_attention": 1, "multi_head_attention_forward": 2, "lstm": 1, "gru": 1}


# ------------------------------------------------------------------------------------------------------------- wrong draws


def _program(into: Path, call: Callable[[], Any]) -> Program:
    torch.manual_seed(0)
    with Capture(into, keep="tensors", select="*") as capture:
        call()
        capture.step()
    run = open_run(into)
    record = [one for one in run.records(0, 0) if one.phase == "forward"][-1]
    return forward_program(record, lambda content: run.tensor(0, 0, content))


X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).expand(500, 4)
WRONG: list[tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda: F.dropout(X, 0.3), lambda y: y * 0.7, "another factor"),
    (lambda: F.dropout(X, 0.3), lambda y: F.dropout(X, 0.5) * 0.5 / 0.7, "where the share is 0.3"),
    (lambda: F.dropout(X, 0.3), lambda y: X.clone(), "another factor"),
    (lambda: F.dropout1d(X, 0.3), lambda y: F.dropout(X, 0.3), ""),
    (lambda: F.alpha_dropout(X, 0.3, True), lambda y: F.dropout(X, 0.3), "alpha"),
    (lambda: torch.bernoulli(X.sigmoid()), lambda y: torch.bernoulli(torch.full_like(X, 0.5)), "ones where"),
    (lambda: torch.bernoulli(X.clamp(0, 1)), lambda y: torch.ones_like(y), "probability 0"),
    (lambda: torch.empty(4000).bernoulli_(0.95), lambda y: torch.bernoulli(torch.full_like(y, 0.8)), "another distribution"),
    (lambda: torch.multinomial(WEIGHTS, 4, True), lambda y: torch.full_like(y, 3), "weight 0"),
    (lambda: torch.multinomial(WEIGHTS, 4, True), lambda y: torch.randint_like(y, 0, 3), "draws category"),
    (lambda: torch.multinomial(WEIGHTS, 2), lambda y: y[:, :1].expand(-1, 2), "twice"),
    (lambda: torch.rand(4000), lambda y: y * 1.2, "out of range"),
    (lambda: torch.randn(20000), lambda y: y * 1.5, "another distribution"),
    (lambda: torch.randn(20000), lambda y: y.index_fill(0, torch.tensor([3]), float("nan")), "NaN"),
    (lambda: torch.normal(X, X.abs()), lambda y: X + 2 * (y - X), "another distribution"),
    (lambda: torch.randperm(99), lambda y: y.clamp(max=97), "each number once"),
    (lambda: torch.poisson(X.exp()), lambda y: y + 1, "counts"),
    (lambda: F.rrelu(X, training=True), lambda y: F.leaky_relu(X, 0.5), "slopes outside"),
    (lambda: F.rrelu(X, training=True), lambda y: F.leaky_relu(X, 0.2), "spread evenly"),
    (lambda: F.gumbel_softmax(X), lambda y: y * 1.01, "add up to 1"),
    (lambda: F.gumbel_softmax(WEIGHTS, hard=True), lambda y: F.one_hot(WEIGHTS.argmax(-1), 4).float(), "draws category"),
]


@pytest.mark.parametrize("place", range(len(WRONG)))
def test_a_wrong_draw_is_seen(tmp_path: Path, place: int) -> None:
    call, spoil, reason = WRONG[place]
    program = _program(tmp_path / "run", call)
    assert is_random(program)
    honest = program(program.inputs)[OUTPUT]
    limit = threshold("drawn")
    assert standard_errors(surprises(program, {OUTPUT: honest})[OUTPUT][0]) <= limit
    torch.manual_seed(12345)
    size, told = surprises(program, {OUTPUT: spoil(honest)})[OUTPUT]
    if reason:
        assert standard_errors(size) > limit
        assert reason in told


# ------------------------------------------------------------------------------------------------------------- fractional pooling


def _pools() -> torch.Tensor:
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    y = torch.randn(4, 7, 6, 8, requires_grad=True)
    made = [
        F.fractional_max_pool2d(x, 2, output_size=(4, 5)),
        F.fractional_max_pool2d(x, (3, 2), output_ratio=(0.5, 0.7), return_indices=True)[0],
        F.fractional_max_pool2d(x.relu(), 3, output_size=(5, 1)),  # equal zeros: which one was taken is open
        F.fractional_max_pool2d(x[0].bfloat16(), 2, output_size=(6, 6)),
        F.fractional_max_pool2d(x[:, :, :2, :2], 2, output_size=1),
        F.fractional_max_pool3d(y, 2, output_size=(3, 4, 5), return_indices=True)[0],
        F.fractional_max_pool3d(y[None].half(), (1, 2, 3), output_size=3),
    ]
    return torch.stack([one.float().square().sum() for one in made])


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_an_honest_fractional_pooling_passes_forward_and_backward(tmp_path: Path, keep: str) -> None:
    for seed in range(5):
        check = _checked(tmp_path / f"run{seed}", _pools, seed, keep)
        assert [(str(call.call), call.phase, call.reason) for call in check.calls if call.status != "passed"] == []
        assert Counter(call.phase for call in check.calls if call.is_random and "pool" in str(call.call)) == {"forward": 7, "backward": 7}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_draw_of_a_fractional_pooling_is_explained_and_no_other_start_is(dtype: torch.dtype) -> None:
    """Also where the number drawn is next to one at which a start changes, and where places are rounded to few digits."""
    values = torch.randperm(2 * 40, generator=torch.Generator().manual_seed(0)).reshape(2, 1, 40).to(dtype)
    for regions in (2, 5, 13, 27):
        last, draws = 40 - 3, torch.arange(1024) / 1024
        near = (torch.arange(last + 1) * (regions - 1) / last).frac()
        for drawn in torch.cat([draws[::37], near]).to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2).tolist():
            samples = torch.full((1, 2, 2), drawn, dtype=dtype)
            result, places = F.fractional_max_pool2d(values, (1, 3), (1, regions), return_indices=True, _random_samples=samples)
            assert Pooled.of(values, (1, 3), result.shape, 2).num_unexplained(result, places) == 0
    result = F.max_pool2d(values, (1, 3), (1, 1))[..., :5]  # the starts 0, 1, 2, 3, 4
    assert Pooled.of(values, (1, 3), result.shape, 2).num_unexplained(result) == 2


def _gradient_moved(gradient: torch.Tensor) -> torch.Tensor:
    moved = gradient.clone().flatten()
    taken = int(moved.abs().argmax())
    moved[taken], moved[taken - 1 if taken else 1] = 0.0, moved[taken] + moved[taken - 1 if taken else 1]
    return moved.view_as(gradient)


def _one(values: torch.Tensor, place: int, value: Any) -> torch.Tensor:
    spoilt = values.clone()
    spoilt.view(-1)[place] = value
    return spoilt


_POOL_FAULTS: dict[str, tuple[str, Slot, Callable[[torch.Tensor], torch.Tensor]]] = {
    "wrong element": ("forward", OUTPUT, lambda y: _one(y, 3, float(y.min()) - 1)),
    "element of another plane": ("forward", OUTPUT, lambda y: y.flip(1)),
    "another step in one row": ("forward", OUTPUT, lambda y: torch.cat([y[..., :1, :].roll(1, -1), y[..., 1:, :]], -2)),
    "wrong index": ("forward", Slot("output", (1,)), lambda y: _one(y, 3, (int(y.view(-1)[3]) + 1) % 72)),
    "index of nothing": ("forward", Slot("output", (1,)), lambda y: _one(y, 0, -1)),
    "gradient at the wrong place": ("backward", OUTPUT, _gradient_moved),
    "half of a gradient": ("backward", OUTPUT, lambda y: y / 2),
    "gradient lost": ("backward", OUTPUT, lambda y: _one(y, int(y.abs().argmax()), 0.0)),
    "NaN in a gradient": ("backward", OUTPUT, lambda y: _one(y, 5, float("nan"))),
}


@pytest.mark.parametrize("return_indices", [False, True])
@pytest.mark.parametrize("fault", _POOL_FAULTS)
def test_a_wrong_fractional_pooling_is_seen(tmp_path: Path, fault: str, return_indices: bool) -> None:
    """As the device makes it now, and as it was recorded: either is told of the results of its own forward call."""
    phase, slot, spoil = _POOL_FAULTS[fault]
    if slot.path == (1,) and not return_indices:
        return
    torch.manual_seed(0)
    with Capture(tmp_path / "run", keep="tensors") as capture:
        made = F.fractional_max_pool2d(torch.randn(2, 3, 9, 8, requires_grad=True), 2, output_size=(4, 5), return_indices=return_indices)
        ((made[0] if return_indices else made) * torch.randn(2, 3, 4, 5)).sum().backward()
        capture.step()
    run = open_run(tmp_path / "run")
    forward, backward = (next(one for one in run.records(0, 0) if one.phase == part and "pool" in str(one.call)) for part in PHASES)

    def read(content: str) -> Any:
        return run.tensor(0, 0, content)

    program = forward_program(forward, read) if phase == "forward" else backward_program(forward, backward, read)
    recorded = recorded_results(forward if phase == "forward" else backward, read)
    now, before = program(program.inputs), forward_program(forward, read)
    assert is_random(program)
    for values, options in ((recorded, {"is_recorded": True}), (now, {"before": before(before.inputs)})):
        assert {told for told, _ in surprises(program, values, **options).values()} == {0.0}
        spoilt = {**values, slot: spoil(values[slot])}
        assert surprises(program, spoilt, **options)[slot][0] == IMPOSSIBLE


@pytest.mark.parametrize("level", ["api", "op"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_regions_that_are_rounded_in_16_bits_are_no_fault_where_the_draw_is_given(tmp_path: Path, dtype: torch.dtype, level: Any) -> None:
    torch.manual_seed(0)
    values, samples = torch.randn(2, 3, 60, 60, dtype=dtype, requires_grad=True), torch.rand(2, 3, 2, dtype=dtype)
    with Capture(tmp_path / "run", keep="tensors", level=level) as capture:
        made = F.fractional_max_pool2d(values, 2, output_size=(37, 37), return_indices=True, _random_samples=samples)
        made[0].square().sum().backward()
        capture.step()
    pools = [call for call in check_run(tmp_path / "run", isolated=False).calls if "pool" in str(call.call)]
    assert [(str(call.call), call.phase, call.reason) for call in pools if call.status in ("failed", "warning")] == []
    assert [call.status for call in pools] == [
        "passed",
        "passed" if level == "api" else "skipped",
    ]  # a gradient at level op has no forward call


def test_a_gradient_that_halves_itself_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is told what it drew itself: the forward call is run once more from the same state of its generator."""

    class Halving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] / 2

    torch.manual_seed(0)
    with Capture(tmp_path / "run", keep="tensors") as capture:
        F.fractional_max_pool2d(torch.randn(1, 2, 9, 8, requires_grad=True), 2, output_size=(4, 5)).square().sum().backward()
        capture.step()
    honest = torch._C._nn.fractional_max_pool2d
    monkeypatch.setattr(torch._C._nn, "fractional_max_pool2d", lambda x, *rest: honest(Halving.apply(x), *rest))
    [failed] = check_run(tmp_path / "run", isolated=False).failures
    assert (failed.phase, "cpu gives" in failed.reason, "other gradients" in failed.reason) == ("backward", True, True)


def test_no_bound_is_crossed_more_often_than_it_says() -> None:
    """At 3 standard errors, which an honest draw may cross once in 90 times; the bounds are looser than chance."""
    generator = torch.Generator().manual_seed(0)
    crossed = Counter[str]()
    for _ in range(2000):
        drawn = torch.rand(50, generator=generator)
        crossed["share"] += standard_errors(share_surprise(int((drawn < 0.05).sum()), 50, 0.05)) > 3
        crossed["sum"] += standard_errors(sum_surprise(float((drawn < 0.05).sum()) - 2.5, 50 * 0.05 * 0.95)) > 3
        crossed["apart"] += standard_errors(apart_as_samples(drawn, torch.rand(90, generator=generator), torch.float32)) > 3
    assert max(crossed.values()) <= 2000 / 90
