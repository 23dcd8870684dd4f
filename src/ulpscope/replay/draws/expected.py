# SPDX-License-Identifier: Apache-2.0
"""Judge a call that draws random numbers: not its values, but whether they are of the distribution that it was asked for.

Each element must meet what is certain: a dropout scales what it keeps by 1 / (1 - p), a permutation names each number once, a category of
probability 0 is never drawn, a fractional pooling gives maxima of regions that some draw makes (`pooling`). All elements together must meet
bounds on chance, which an honest draw crosses in less than one of 4e13 cases (`chance`). Fills, whose elements are drawn alike, are
compared with draws of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ulpscope.model import Slot
from ulpscope.model.operations.randomness import silenced
from ulpscope.replay.calls.arguments import Decoding, decode_arguments, read_tensor
from ulpscope.replay.calls.evaluate import _Backward, _Forward
from ulpscope.replay.draws.chance import IMPOSSIBLE, apart_as_samples, share_surprise, sum_surprise, worst_of
from ulpscope.replay.draws.pooling import Pooled, Scattered
from ulpscope.replay.program import NotReplayable, Program

__all__ = ["Surprise", "drawing_before", "hangs_on_rounding", "surprises", "without_draws"]

Tensors = Mapping[Slot, torch.Tensor]
Surprise = tuple[float, str]
"""How surprising a result is (see `chance`), and what is."""

_ENOUGH = 1 << 12
_MOST_DRAWS = 64
_MOST_CATEGORIES = 256
_ROUNDINGS = 4.0
_SEED = 0x5DEECE66D
_FILLS = frozenset(
    """
    rand rand_like randn randn_like randint randint_like normal normal_ uniform uniform_ exponential exponential_ geometric geometric_
    cauchy cauchy_ log_normal log_normal_ random random_ bernoulli bernoulli_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_
    kaiming_normal_
    """.split()
)
_DROPOUTS = frozenset(
    """
    dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout native_dropout _fused_dropout
    """.split()
)
_POOLINGS = ("fractional_max_pool2d", "fractional_max_pool3d")
_ALPHA = -1.7580993408473766
"""What alpha dropout puts for what it drops, before it scales: SELU's value far below zero."""


def without_draws(program: Program) -> Program | None:
    """Return the same call with a dropout of 0, where dropout is only a part of it (attention, recurrent layers); None for other calls."""
    if not isinstance(program, (_Forward, _Backward)):
        return None
    arguments = silenced(program.call.record.call.op, program.call.arguments)
    return None if arguments is None else replace(program, call=replace(program.call, arguments=arguments))


def hangs_on_rounding(program: Program) -> bool:
    """Tell whether a pooling in 16 bits gets its draws as input: where its regions begin depends on how those draws are rounded.

    Nothing is left to chance then, and still no computation in another precision says where the regions begin.
    """
    if not isinstance(program, (_Forward, _Backward)) or program.call.record.call.short.removesuffix("_with_indices") not in _POOLINGS:
        return False
    return any(one.is_floating_point() and one.dtype.itemsize < 4 for one in program.inputs.values())


def drawing_before(program: Program) -> Program | None:
    """Return the forward call of a gradient that says little without what its forward call drew; None for any other."""
    if not isinstance(program, _Backward) or not program.call.record.call.short.startswith(_POOLINGS):
        return None
    return _Forward(program.call, program.read)


def surprises(program: Program, made: Tensors, *, is_recorded: bool = False, before: Tensors | None = None) -> dict[Slot, Surprise]:
    """Judge every result whose distribution is known; raise NotReplayable if none is.

    `is_recorded` says that `made` was recorded beside the inputs of `program`, and not drawn now: a recorded gradient shows what its
    forward call dropped (after a relu it is 0 there). `before` holds the results of a gradient's forward call on the same draw, where
    they are not recorded.
    """
    draw = replace(_Draw.of(program), is_recorded=is_recorded, made=made, before=before)
    judge = _judge_of(draw)
    if judge is None:
        raise NotReplayable("it draws random numbers of a distribution that is not known here")
    found = {slot: told for slot, value in made.items() if (told := judge(draw, slot, value)) is not None}
    if not found:
        raise NotReplayable("it draws random numbers, and nothing can be said of its results")
    return found


@dataclass(frozen=True, slots=True)
class _Draw:
    """A random call with its arguments as values. It works on `entered`: an argument, or in a backward call its result's gradient."""

    program: _Forward | _Backward
    args: list[Any]
    kwargs: dict[str, Any]
    is_recorded: bool = False
    made: Tensors = field(default_factory=dict)
    before: Tensors | None = None

    @classmethod
    def of(cls, program: Program) -> _Draw:
        if not isinstance(program, (_Forward, _Backward)):
            raise NotReplayable("it draws random numbers, and is no call of torch's")
        return cls(program, *decode_arguments(program.call.arguments, Decoding(program.inputs)))

    @property
    def name(self) -> str:
        return self.program.call.record.call.short

    @property
    def plain_name(self) -> str:
        return self.name.rstrip("_")

    @property
    def is_backward(self) -> bool:
        return isinstance(self.program, _Backward)

    @property
    def first(self) -> torch.Tensor:
        """Return the first argument of the call."""
        found = self.argument("input", 0)
        return found if isinstance(found, torch.Tensor) else next(iter(self.program.inputs.values()))

    @property
    def entered(self) -> torch.Tensor | None:
        if not self.is_backward:
            return self.first
        return next((value for slot, value in self.program.inputs.items() if slot.role == "gradient"), None)

    @property
    def drawn_before(self) -> torch.Tensor | None:
        """Return what the forward call of a recorded gradient made; None where that was not kept."""
        return self.made_before(Slot("output", (0,)), Slot("mutated", (0,)))

    def made_before(self, *slots: Slot) -> torch.Tensor | None:
        """Return the first of these results that the forward call of a gradient has; None where it was not kept."""
        if self.before is not None or not self.is_recorded:
            return next((self.before[slot] for slot in slots if slot in self.before), None) if self.before is not None else None
        results = {record.slot: record for record in self.program.call.record.slots}
        found = next((results[slot] for slot in slots if slot in results), None)
        return None if found is None or found.content is None else read_tensor(found, self.program.read)

    def argument(self, name: str, place: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[place] if place < len(self.args) else default)

    def has_tensor(self, *places: tuple[str, int]) -> bool:
        return any(isinstance(self.argument(name, place), torch.Tensor) for name, place in places)

    def again(self, like: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Draw on the CPU several times, one after the other, until there are enough draws to tell more than the tested ones do."""
        many = min(_MOST_DRAWS, max(1, math.ceil(_ENOUGH / max(1, like.numel()))))
        with _seeded():
            drawn = []
            for number in range(many):
                torch.default_generator.manual_seed(_SEED + number)
                drawn.append(self.program(self.program.inputs)[slot].reshape(-1))
        return torch.cat(drawn)


@contextmanager
def _seeded() -> Iterator[None]:
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


_Judge = Callable[[_Draw, Slot, torch.Tensor], Surprise | None]


def _judge_of(draw: _Draw) -> _Judge | None:
    name = draw.plain_name
    if name in _DROPOUTS:
        return _dropped
    if name == "rrelu":
        return _leaked
    if name == "gumbel_softmax":
        return _softened_backward if draw.is_backward else _softened
    if name.startswith(_POOLINGS):
        return _scattered if draw.is_backward else _pooled
    if draw.is_backward:
        return None
    if name == "bernoulli" and (draw.name != "bernoulli_" or draw.has_tensor(("p", 1))):
        return _flipped if draw.argument("p", 1) is None or draw.has_tensor(("p", 1)) else _filled
    if name == "normal" and draw.program.call.record.call.op != "torch.nn.init.normal_" and draw.has_tensor(("mean", 0), ("std", 1)):
        return _normal if draw.name == "normal" else _filled
    if draw.name in _FILLS:
        return _filled
    return _OTHERS.get(name)


# ------------------------------------------------------------------------------------------------------------- dropout


def _dropped(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge a dropout: each element is scaled or 0 (in an alpha dropout, a constant), and the share of dropped units is as asked."""
    share, given = draw.argument("p", 1, 0.5), draw.entered
    if not isinstance(share, (int, float)) or given is None or given.shape != value.shape or not 0 < share < 1:
        return None
    if value.dtype == torch.bool:
        return _share_of(int((~value).sum()), value.numel(), float(share), "drops")
    kept, dropped, size = _kept_and_dropped(draw, given.to(torch.float64), float(share))
    found = value.to(torch.float64)
    slack = _ROUNDINGS * torch.finfo(value.dtype).eps * size + torch.finfo(value.dtype).tiny
    is_kept, is_dropped = ((found - one).abs() <= slack for one in (kept, dropped))
    is_kept |= (found == kept.to(value.dtype)) & ~torch.isfinite(found)  # it overflows
    is_open = ~torch.isfinite(given)  # the result of NaN, or of infinity times 0, is not known
    if wrong := int((~(is_kept | is_dropped | is_open)).sum()):
        text = "by another factor than 1 / (1 - p)" if not _is_alpha(draw) else "otherwise than an alpha dropout does"
        return IMPOSSIBLE, f"scales {wrong} of the elements that it keeps {text}"
    if draw.is_backward and draw.is_recorded:
        return _dropped_as_before(draw, float(share), is_kept | is_open, is_dropped | is_open)
    is_known, is_dropped = _by_unit(draw, ~(is_kept & is_dropped) & ~is_open), _by_unit(draw, is_dropped & ~is_kept & ~is_open)
    return _share_of(int((is_dropped & is_known).sum()), int(is_known.sum()), float(share), "drops")


def _dropped_as_before(draw: _Draw, share: float, is_kept: torch.Tensor, is_dropped: torch.Tensor) -> Surprise:
    """Check that a recorded gradient passes exactly where the forward call kept an element: nothing is left to chance.

    How many of its elements are 0 says nothing: an operation after the dropout (a relu, an absolute value) gives no gradient where it got a
    0.
    """
    before = draw.drawn_before
    if before is None or before.shape != is_kept.shape or before.dtype == torch.bool:
        return 0.0, ""
    forward = replace(draw, program=_Forward(draw.program.call, draw.program.read))
    kept, dropped, size = _kept_and_dropped(forward, draw.first.to(torch.float64), share)
    slack = _ROUNDINGS * torch.finfo(before.dtype).eps * size + torch.finfo(before.dtype).tiny
    is_told = torch.isfinite(draw.first)  # an infinity tells nothing: any distance is within its slack
    was_kept, was_dropped = (((before.to(torch.float64) - one).abs() <= slack) & is_told for one in (kept, dropped))
    wrong = int(((was_kept & ~was_dropped & ~is_kept) | (was_dropped & ~was_kept & ~is_dropped)).sum())
    return (IMPOSSIBLE, f"drops {wrong} gradients otherwise than its forward call dropped") if wrong else (0.0, "")


def _is_alpha(draw: _Draw) -> bool:
    return "alpha" in draw.name


def _kept_and_dropped(draw: _Draw, given: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what each element becomes if it is kept, what if it is dropped, and the size of the numbers that are rounded on the way."""
    if not _is_alpha(draw):
        scaled = given / (1 - share)
        return scaled, torch.zeros_like(given), scaled.abs()
    scale = 1 / math.sqrt((_ALPHA**2 * share + 1) * (1 - share))
    if draw.is_backward:
        return given * scale, torch.zeros_like(given), (given * scale).abs()
    shift = -scale * _ALPHA * share
    return given * scale + shift, torch.full_like(given, scale * _ALPHA + shift), (given * scale).abs() + abs(shift) + abs(scale * _ALPHA)


def _by_unit(draw: _Draw, flags: torch.Tensor) -> torch.Tensor:
    """Return one flag for each unit that is dropped together: an element, or a whole channel."""
    name = draw.plain_name
    if name in ("dropout", "alpha_dropout", "native_dropout", "_fused_dropout") or flags.dim() < 2:
        return flags
    has_batch = {"dropout1d": flags.dim() > 2, "dropout3d": flags.dim() > 4}.get(name, True)
    return flags.flatten(2 if has_batch else 1).any(-1) if flags.dim() > (2 if has_batch else 1) else flags


def _share_of(count: int, total: int, share: float, verb: str) -> Surprise:
    return share_surprise(count, total, share), f"{verb} {count / max(total, 1):.3g} of {total} where the share is {share:.3g}"


# ------------------------------------------------------------------------------------------------------------- fills


def _filled(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge elements that are all drawn alike by comparing them with draws of the CPU."""
    theirs = draw.again(value, slot)
    if value.is_complex():
        value, theirs = torch.view_as_real(value.resolve_conj()), torch.view_as_real(theirs.resolve_conj())
    if not bool(torch.isfinite(value.to(torch.float64)).all()) and bool(torch.isfinite(theirs.to(torch.float64)).all()):
        return IMPOSSIBLE, "draws inf or NaN"
    text = "draws another distribution than the CPU"
    if value.dtype is theirs.dtype and (outside := _num_outside(draw, value)):
        return IMPOSSIBLE, f"draws {outside} numbers out of range"
    return apart_as_samples(value, theirs, value.dtype), text


def _num_outside(draw: _Draw, value: torch.Tensor) -> int:
    """Count the numbers that lie outside of the range that the call draws from."""
    low, high = _range(draw)
    found = value.to(torch.float64)
    room = torch.finfo(value.dtype).eps * max(abs(low), abs(high), 0.0) if value.is_floating_point() and math.isfinite(high) else 0.0
    return int(((found < low - room) | (found > high + room)).sum())


def _range(draw: _Draw) -> tuple[float, float]:
    name = draw.plain_name
    if name in ("rand", "rand_like", "bernoulli"):
        return 0.0, 1.0
    if name == "uniform":
        is_init = draw.program.call.record.call.op.startswith("torch.nn.init")
        low, high = ("a", "b") if is_init else ("from", "to")
        return float(draw.argument(low, 1, 0.0)), float(draw.argument(high, 2, 1.0))
    if name == "exponential":
        return 0.0, math.inf
    return (1.0, math.inf) if name == "geometric" else (-math.inf, math.inf)


def _normal(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge normal numbers with a mean and a deviation for each element: without these, all elements are drawn alike."""
    mean, deviation = (
        one.to(torch.float64) if isinstance(one, torch.Tensor) else torch.tensor(float(one), dtype=torch.float64)
        for one in (draw.argument("mean", 0, 0.0), draw.argument("std", 1, 1.0))
    )

    def without(drawn: torch.Tensor) -> torch.Tensor:
        is_drawn = (deviation > 0).expand(value.shape)
        return ((drawn.to(torch.float64) - mean) / deviation)[is_drawn]

    size = float((mean.abs() / deviation.clamp(min=1e-300)).max()) if mean.numel() and deviation.numel() else 0.0
    if size * torch.finfo(value.dtype).eps > 1e-3:
        return 0.0, ""  # rounding would hide the deviation
    theirs = torch.randn(max(_ENOUGH, value.numel()), dtype=torch.float64, generator=torch.Generator().manual_seed(_SEED))
    return apart_as_samples(without(value), theirs, value.dtype), "draws another distribution than its means and deviations make"


# ------------------------------------------------------------------------------------------------------------- counts


def _flipped(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge ones and zeros, each drawn with a probability of its own."""
    shares = draw.argument("p", 1)
    shares = (shares if isinstance(shares, torch.Tensor) else draw.first).to(torch.float64)
    if slot.role == "mutated" and slot.path != (0,):
        return None
    shares, drawn = shares.expand(value.shape), value.to(torch.float64)
    if not bool(((drawn == 0) | (drawn == 1)).all()):
        return IMPOSSIBLE, "draws other numbers than 0 and 1"
    if bool(((drawn == 1) & (shares == 0)).any()) or bool(((drawn == 0) & (shares == 1)).any()):
        return IMPOSSIBLE, "draws what has probability 0"
    off, variance = drawn - shares, shares * (1 - shares)
    weights = shares - shares.mean() if shares.numel() else shares
    largest = float(weights.abs().max()) if weights.numel() else 0.0
    all_alike = sum_surprise(float(off.sum()), float(variance.sum()))
    by_share = sum_surprise(float((off * weights).sum()), float((variance * weights**2).sum()), largest) if largest else 0.0
    return worst_of([all_alike, by_share]), f"draws {float(drawn.sum()):.6g} ones where {float(shares.sum()):.6g} are expected"


def _chosen(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge categories by how often they are drawn; without replacement by the first of a row, and no category may come twice."""
    weights = draw.first.to(torch.float64)
    weights, drawn = (one.reshape(-1, one.shape[-1]) for one in (weights, value))
    count, is_repeated = weights.shape[-1], bool(draw.argument("replacement", 2, False))
    if not drawn.numel():
        return 0.0, ""
    if bool(((drawn < 0) | (drawn >= count)).any()):
        return IMPOSSIBLE, "draws categories that there are not"
    if bool((weights.gather(1, drawn) <= 0).any()):
        return IMPOSSIBLE, "draws a category of weight 0"
    if not is_repeated and bool((drawn.sort(-1).values.diff(dim=-1) == 0).any()):
        return IMPOSSIBLE, "draws a category twice without replacement"
    shares = weights / weights.sum(-1, keepdim=True)
    return _frequencies(drawn if is_repeated else drawn[:, :1], shares, torch.finfo(draw.first.dtype).eps)


def _frequencies(drawn: torch.Tensor, shares: torch.Tensor, eps: float) -> Surprise:
    """Compare each category's count over all rows with the count that the rows' shares predict."""
    per_row = drawn.shape[-1]
    found = torch.bincount(drawn.reshape(-1), minlength=shares.shape[-1]).to(torch.float64)
    expected, variance = shares.sum(0) * per_row, (shares * (1 - shares)).sum(0) * per_row
    several = expected.topk(min(_MOST_CATEGORIES, expected.numel())).indices.tolist()
    slack = _ROUNDINGS * eps * drawn.numel()
    told = {at: sum_surprise(float(found[at] - expected[at]), float(variance[at]), slack=slack) for at in several}
    worst = max(told, key=told.__getitem__)
    text = f"draws category {worst} {int(found[worst])} times where {float(expected[worst]):.4g} are expected"
    return worst_of(list(told.values())), text


def _counted(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge numbers of events: `poisson` by its rates, `binomial` by its counts and probabilities."""
    drawn, rates = value.to(torch.float64), draw.first.to(torch.float64)
    if bool(((drawn < 0) | (drawn != drawn.round())).any()):
        return IMPOSSIBLE, "draws other numbers than counts"
    if draw.plain_name == "poisson":
        expected, variance, impossible = rates, rates, (rates == 0) & (drawn > 0)
    else:
        shares = draw.argument("prob", 1).to(torch.float64)
        expected, variance, impossible = rates * shares, rates * shares * (1 - shares), drawn > rates
    if bool(impossible.any()):
        return IMPOSSIBLE, "draws counts that have probability 0"
    slack = torch.finfo(value.dtype).eps * float(drawn.sum())
    text = f"counts {float(drawn.sum()):.6g} where {float(expected.sum()):.6g} are expected"
    return sum_surprise(float(drawn.sum() - expected.sum()), float(variance.sum()), slack=slack), text


def _permuted(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    if value.is_floating_point():
        return None
    is_whole = torch.equal(value.to(torch.int64).sort().values, torch.arange(value.numel()))
    return (0.0, "") if is_whole else (IMPOSSIBLE, "does not name each number once")


# ------------------------------------------------------------------------------------------------------------- regions

_VALUES, _INDICES = Slot("output", (0,)), Slot("output", (1,))


def _pooled(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge a pooling's maxima, and their places, by regions that one draw for each plane makes."""
    pooled = _pooling(draw, value.shape)
    if slot == _VALUES:
        wrong, text = pooled.num_unexplained(value), "gives no maxima of regions that a draw makes"
    elif slot == _INDICES:
        results = draw.made.get(_VALUES)
        results = results if results is not None and results.shape == value.shape else None
        wrong, text = pooled.num_unexplained(results, value), "names other places than those of its maxima"
    else:
        return None
    return (IMPOSSIBLE, f"{text} in {wrong} of {pooled.num_planes} planes") if wrong else (0.0, "")


def _scattered(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge the gradient of a pooling: each region's must go to the place of its maximum, which the forward call knows."""
    entered, results, indices = draw.entered, draw.made_before(_VALUES), draw.made_before(_INDICES)
    if entered is None or results is None or results.shape != entered.shape or value.shape != draw.first.shape:
        return None
    wrong = Scattered(_pooling(draw, results.shape), results, indices, entered).num_wrong(value)
    return (IMPOSSIBLE, f"gives {wrong} places other gradients than those of their regions") if wrong else (0.0, "")


def _pooling(draw: _Draw, result: torch.Size) -> Pooled:
    return Pooled.of(draw.first, draw.argument("kernel_size", 1), result, 3 if "3d" in draw.name else 2)


# ------------------------------------------------------------------------------------------------------------- slopes and softmaxes


def _leaked(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge a randomized leaky relu: positive numbers stay as they are, others are scaled by a slope of the range."""
    given, entered = draw.first.to(torch.float64), draw.entered
    if entered is None or entered.shape != value.shape or given.shape != value.shape:
        return None
    low, high = float(draw.argument("lower", 1, 1 / 8)), float(draw.argument("upper", 2, 1 / 3))
    entered, found = entered.to(torch.float64), value.to(torch.float64)
    eps, is_steep = _ROUNDINGS * torch.finfo(value.dtype).eps, (given < 0) & (entered.abs() > torch.finfo(value.dtype).tiny / _eps(value))
    if bool(((found - entered).abs() > eps * entered.abs())[given > 0].any()):
        return IMPOSSIBLE, "changes numbers above 0"
    slopes = (found / entered)[is_steep]
    room = eps * max(abs(low), abs(high))
    if bool(((slopes < low - room) | (slopes > high + room)).any()):
        return IMPOSSIBLE, f"has slopes outside of {low:.3g} to {high:.3g}"
    if high - low <= 8 * room:
        return 0.0, ""
    ranks = torch.arange(_ENOUGH, dtype=torch.float64).add(0.5) / _ENOUGH
    return apart_as_samples(slopes, low + (high - low) * ranks, value.dtype), "draws slopes that are not spread evenly"


def _eps(value: torch.Tensor) -> float:
    return float(torch.finfo(value.dtype).eps)


def _softened(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge a Gumbel softmax: each row's shares add up to 1, and a category is the largest as often as the softmax of its row says.

    That holds for any temperature.
    """
    dim, is_hard = int(draw.argument("dim", 4, -1)), bool(draw.argument("hard", 2, False))
    if not value.numel() or not value.dim():
        return 0.0, ""
    rows, logits = (one.to(torch.float64).movedim(dim, -1).reshape(-1, one.shape[dim]) for one in (value, draw.first))
    room = _ROUNDINGS * rows.shape[-1] * _eps(value)
    if not bool(torch.isfinite(rows).all()) or bool((rows < -room).any()) or bool(((rows.sum(-1) - 1).abs() > room).any()):
        return IMPOSSIBLE, "does not give shares that add up to 1"
    if is_hard and bool((torch.minimum(rows.abs(), (rows - 1).abs()) > room).any()):
        return IMPOSSIBLE, "gives other shares than 0 and 1"
    return _frequencies(rows.argmax(-1, keepdim=True), logits.softmax(-1), _eps(value))


def _softened_backward(draw: _Draw, slot: Slot, value: torch.Tensor) -> Surprise | None:
    """Judge the gradient of a Gumbel softmax, whatever was drawn: rows add up to 0, and no element exceeds the steepest slope."""
    dim, entered = int(draw.argument("dim", 4, -1)), draw.entered
    if entered is None or not value.numel() or not value.dim():
        return 0.0, ""
    rows, given = (one.to(torch.float64).movedim(dim, -1).reshape(-1, one.shape[dim]) for one in (value, entered))
    steepest = 2 * given.abs().amax(-1) / abs(float(draw.argument("tau", 1, 1.0)))
    room = _ROUNDINGS * rows.shape[-1] * _eps(value) * steepest + torch.finfo(value.dtype).tiny
    is_sound = (rows.sum(-1).abs() <= room) & (rows.abs().amax(-1) <= steepest + room)
    return (0.0, "") if bool(is_sound.all()) else (IMPOSSIBLE, "gives gradients that no draw explains")


_OTHERS: dict[str, _Judge] = {
    "multinomial": _chosen,
    "poisson": _counted,
    "binomial": _counted,
    "randperm": _permuted,
}
