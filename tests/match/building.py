# SPDX-License-Identifier: Apache-2.0
"""Hand-made records, and a small training program in NumPy that records itself, so that faults can be planted anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ulpscope.model import Arguments, CallName, CallRecord, Frame, Modes, RunInfo, Slot, TensorRecord
from ulpscope.numerics.summary.summary import summarize
from ulpscope.store import MemoryRun


def record(
    op: str = "torch.add",
    index: int = 0,
    *,
    order: int = 0,
    module: str = "",
    shapes: Sequence[tuple[int, ...]] = ((4, 8),),
    dtype: str = "float32",
    values: Sequence[str] = (),
    code: str = "",
    **rest: Any,
) -> CallRecord:
    """One record: an input for each of `shapes` and an output like the first; `values` are fingerprints, inputs first."""
    slots = [Slot("input", (at,)) for at in range(len(shapes))] + [Slot("output", (0,))]
    prints = [*values, *[None] * len(slots)]
    tensors = [
        TensorRecord(slot=slot, dtype=dtype, shape=shape, fingerprint=prints[at])
        for at, (slot, shape) in enumerate(zip(slots, [*shapes, shapes[0]], strict=True))
    ]
    rest = {"rank": 0, "step": 0, "phase": "forward", **rest}
    stack = (Frame("train.py", 1, "forward", code),) if code else ()
    return CallRecord(order=order, call=CallName(op, index), module=module, slots=tuple(tensors), stack=stack, **rest)


def numbered(records: Sequence[CallRecord]) -> list[CallRecord]:
    """The same calls as a run of their own would count them."""
    counts: Counter[str] = Counter()
    result = []
    for order, one in enumerate(records):
        result.append(replace(one, order=order, call=CallName(one.call.op, counts[one.call.op])))
        counts[one.call.op] += 1
    return result


@dataclass(frozen=True)
class Where:
    """The place of a value that a call makes."""

    step: int
    rank: int
    phase: str
    module: str
    op: str
    slot: str


Change = Callable[[Where, np.ndarray], np.ndarray]


def scale(factor: float, **place: Any) -> Change:
    """A fault: multiply every value made at a place."""
    return at(lambda value: value * np.asarray(factor, value.dtype), **place)


def at(function: Callable[[np.ndarray], np.ndarray], **place: Any) -> Change:
    def change(where: Where, value: np.ndarray) -> np.ndarray:
        fits = all(getattr(where, name) in (wanted if isinstance(wanted, tuple) else (wanted,)) for name, wanted in place.items())
        return function(value) if fits else value

    return change


def noise(relative: float, seed: int = 7) -> Change:
    """Honest rounding of another kernel: every floating value a call makes is a little off."""
    random = np.random.default_rng(seed)

    def change(where: Where, value: np.ndarray) -> np.ndarray:
        if where.phase == "start" or value.dtype.kind != "f":
            return value
        return (value * (1 + relative * random.standard_normal(value.shape))).astype(value.dtype)

    return change


class Recorder:
    """Writes calls of a NumPy program into a MemoryRun."""

    def __init__(self, run: MemoryRun, rank: int, keep: str, change: Change) -> None:
        self.sink = run.sink(rank)
        self.rank, self.keep, self.change = rank, keep, change
        self.modes = Modes()

    def begin(self, step: int) -> None:
        self.sink.begin_step(step)
        self.step, self.order = step, 0
        self.counts: Counter[str] = Counter()

    def made(self, phase: str, module: str, op: str, slot: str, value: np.ndarray) -> np.ndarray:
        return self.change(Where(self.step, self.rank, phase, module, op, slot), value)

    def write(self, phase: str, module: str, op: str, slots: dict[str, np.ndarray], *, index: int | None = None, **rest: Any) -> int:
        if index is None:
            index = self.counts[op]
            self.counts[op] += 1
        level = "state" if phase in ("start", "optimizer") else rest.pop("level", "api")
        self.sink.write(
            CallRecord(
                rank=self.rank,
                step=self.step,
                order=self.order,
                call=CallName(op, index),
                phase=phase,  # type: ignore[arg-type]
                level=level,
                module=module,
                modes=self.modes if level != "state" else None,
                stack=(Frame("train.py", 10 + len(op), "forward", f"y = {op}(x)"),) if phase == "forward" else (),
                slots=tuple(self._tensor(Slot.parse(name), value) for name, value in slots.items()),
                **rest,
            )
        )
        self.order += 1
        return index

    def _tensor(self, slot: Slot, value: np.ndarray) -> TensorRecord:
        value = np.ascontiguousarray(value)
        dtype, raw = str(value.dtype), value.reshape(-1).view(np.uint8)
        summary, fingerprint = summarize(dtype, raw)
        return TensorRecord(
            slot=slot,
            dtype=dtype,
            shape=value.shape,
            strides=tuple(stride // value.itemsize for stride in value.strides),
            device="cpu",
            summary=summary if self.keep != "fingerprint" else None,
            fingerprint=fingerprint,
            content=self.sink.keep(dtype, value.shape, value) if self.keep == "tensors" else None,
        )


def train(
    *,
    steps: Sequence[int] = (0, 1),
    ranks: Sequence[int] = (0,),
    layers: int = 3,
    keep: str = "tensors",
    change: Change = lambda where, value: value,
    data_seed: int = 1,
    seed: int = 0,
    rate: float = 0.1,
    slope: float = 0.1,
    prefix: str = "layers",
    extra: bool = False,
    dropout: int | None = None,
    training: bool = True,
    info: RunInfo | None = None,
    path: str = "memory",
) -> MemoryRun:
    """A little network of `linear` and `leaky` layers with a mean square loss and plain gradient descent, recorded."""
    run = MemoryRun(info, path)
    for rank in ranks:
        with np.errstate(all="ignore"):
            _train_rank(
                Recorder(run, rank, keep, change), steps, layers, data_seed + rank, seed, rate, slope, prefix, extra, dropout, training
            )
    return run


def _train_rank(r, steps, layers, data_seed, seed, rate, slope, prefix, extra, dropout, training):  # type: ignore[no-untyped-def]
    random, data = np.random.default_rng(seed), np.random.default_rng(data_seed)
    weights = [random.standard_normal((16, 16)).astype("f4") / 4 for _ in range(layers)]
    r.modes = Modes(training=training)
    for step in range(max(steps) + 1):
        x, target = data.standard_normal((32, 16)).astype("f4"), data.standard_normal((32, 16)).astype("f4")
        if step in steps:
            r.begin(step)
            weights = _train_step(r, x, target, weights, rate, slope, prefix, extra, dropout)
    r.sink.close()


def _train_step(r, x, target, weights, rate, slope, prefix, extra, dropout):  # type: ignore[no-untyped-def]
    r.write("start", "", "state.rng", {}, arguments=Arguments(kwargs={"torch": f"state {dropout}"}))
    names = [f"{prefix}.{at}.weight" for at in range(len(weights))]
    weights = [r.made("start", "", "state.parameters", f"parameter.{name}", w) for name, w in zip(names, weights, strict=True)]
    r.write("start", "", "state.parameters", {f"parameter.{name}": w for name, w in zip(names, weights, strict=True)})
    x = r.made("start", "", "state.batch", "input.0", x)
    r.write("start", "", "state.batch", {"input.0": x})
    behind = []
    for at_layer, w in enumerate(weights):
        module = f"{prefix}.{at_layer}"
        y = r.made("forward", module, "functional.linear", "output.0", x @ w.T)
        linear = r.write("forward", module, "functional.linear", {"input.0": x, "input.1": w, "output.0": y})
        if extra and at_layer == 1:
            z = r.made("forward", module, "torch.mul", "output.0", y)
            r.write("forward", module, "torch.mul", {"input.0": y, "output.0": z})
            y = z
        z = r.made("forward", module, "functional.leaky_relu", "output.0", np.where(y > 0, y, np.float32(slope) * y))
        arguments = Arguments(args=({"$tensor": "input.0"}, slope))
        leaky = r.write("forward", module, "functional.leaky_relu", {"input.0": y, "output.0": z}, arguments=arguments)
        if dropout is not None:
            mask = np.random.default_rng(dropout).random(z.shape) > 0.5
            r.write("forward", module, "functional.dropout", {"input.0": z, "output.0": (z * mask).astype("f4")})
            z = (z * mask).astype("f4")
        behind.append((module, x, w, y, linear, leaky))
        x = z
    loss = r.made("forward", "", "functional.mse_loss", "output.0", np.asarray(((x - target) ** 2).mean(), "f4"))
    last = r.write("forward", "", "functional.mse_loss", {"input.0": x, "input.1": target, "output.0": loss})
    g = r.made("backward", "", "functional.mse_loss", "output.0", (2 * (x - target) / np.float32(x.size)).astype("f4"))
    r.write("backward", "", "functional.mse_loss", {"input.0": np.ones((), "f4"), "output.0": g}, index=last)
    gradients = {}
    for (module, x, w, y, linear, leaky), name in zip(reversed(behind), reversed(names), strict=True):
        entering = g
        g = r.made("backward", module, "functional.leaky_relu", "output.0", np.where(y > 0, g, np.float32(slope) * g))
        r.write("backward", module, "functional.leaky_relu", {"input.0": entering, "output.0": g}, index=leaky)
        to_x = r.made("backward", module, "functional.linear", "output.0", g @ w)
        to_w = r.made("backward", module, "functional.linear", "output.1", g.T @ x)
        r.write("backward", module, "functional.linear", {"input.0": g, "output.0": to_x, "output.1": to_w}, index=linear)
        g, gradients[name] = to_x, to_w
    gradients = {name: r.made("between", "", "clip", f"gradient.{name}", gradients[name]) for name in names}
    after = [(w - np.float32(rate) * gradients[name]).astype("f4") for name, w in zip(names, weights, strict=True)]
    after = [r.made("optimizer", "", "optimizer.SGD", f"mutated.{name}", w) for name, w in zip(names, after, strict=True)]
    slots = {f"gradient.{name}": gradients[name] for name in names} | {f"mutated.{n}": w for n, w in zip(names, after, strict=True)}
    r.write("optimizer", "", "optimizer.SGD", slots, arguments=Arguments(kwargs={"groups": [{"lr": rate, "params": names}]}))
    return after
