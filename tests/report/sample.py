# SPDX-License-Identifier: Apache-2.0
"""Make up a comparison of a small GPT whose second gelu is wrong: tests draw their reports from it.

`sample_comparison(num_calls=100_000)` is the same model with more layers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from zlib import crc32

from ulpscope.model import (
    ArgumentDifference,
    Arguments,
    CallName,
    CallRecord,
    Comparison,
    Contribution,
    Finding,
    FingerprintMeasurement,
    Frame,
    Histogram,
    JudgedCall,
    JudgedSlot,
    Level,
    Modes,
    NotMeasured,
    Pair,
    Phase,
    RunInfo,
    Slot,
    SlotPair,
    Summary,
    SummaryMeasurement,
    TensorMeasurement,
    TensorRecord,
    Undefined,
    Verdict,
    VerdictLevel,
)

__all__ = ["sample_comparison", "sample_run_info"]

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 128, 256, 1000
HIDDEN = (BATCH, LENGTH, WIDTH)
WIDE = (BATCH, LENGTH, 4 * WIDTH)
LOGITS = (BATCH, LENGTH, VOCABULARY)


@dataclass(frozen=True)
class _Step:
    """One call of the model: its module, operation and tensor shapes, and the line that made it."""

    module: str
    op: str
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    line: int
    code: str


def _layer(index: int) -> Iterator[_Step]:
    at = f"layers.{index}"
    yield _Step(f"{at}.ln1", "functional.layer_norm", (HIDDEN, (WIDTH,), (WIDTH,)), HIDDEN, 44, "x = x + self.attention(self.ln1(x))")
    yield _Step(
        f"{at}.attention",
        "functional.linear",
        (HIDDEN, (3 * WIDTH, WIDTH)),
        (BATCH, LENGTH, 3 * WIDTH),
        30,
        "q, k, v = self.qkv(x).chunk(3, -1)",
    )
    yield _Step(
        f"{at}.attention",
        "functional.scaled_dot_product_attention",
        ((BATCH, 8, LENGTH, 32),) * 3,
        (BATCH, 8, LENGTH, 32),
        33,
        "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    )
    yield _Step(f"{at}.attention", "functional.linear", (HIDDEN, (WIDTH, WIDTH)), HIDDEN, 34, "return self.out(y)")
    yield _Step(at, "Tensor.add", (HIDDEN, HIDDEN), HIDDEN, 44, "x = x + self.attention(self.ln1(x))")
    yield _Step(f"{at}.ln2", "functional.layer_norm", (HIDDEN, (WIDTH,), (WIDTH,)), HIDDEN, 45, "return x + self.mlp(self.ln2(x))")
    yield _Step(f"{at}.mlp", "functional.linear", (HIDDEN, (4 * WIDTH, WIDTH)), WIDE, 48, "return self.fc2(F.gelu(self.fc1(x)))")
    yield _Step(f"{at}.mlp", "functional.gelu", (WIDE,), WIDE, 48, "return self.fc2(F.gelu(self.fc1(x)))")
    yield _Step(f"{at}.mlp", "functional.linear", (WIDE, (WIDTH, 4 * WIDTH)), HIDDEN, 48, "return self.fc2(F.gelu(self.fc1(x)))")


def _forward(num_layers: int) -> Iterator[_Step]:
    yield _Step("embedding", "functional.embedding", ((BATCH, LENGTH), (VOCABULARY, WIDTH)), HIDDEN, 60, "x = self.embedding(tokens)")
    for index in range(num_layers):
        yield from _layer(index)
    yield _Step("head", "functional.linear", (HIDDEN, (VOCABULARY, WIDTH)), LOGITS, 63, "return self.head(x)")
    yield _Step("", "functional.cross_entropy", (LOGITS, (BATCH, LENGTH)), (), 71, "loss = F.cross_entropy(logits, targets)")


def sample_run_info(device: str = "npu:0") -> RunInfo:
    return RunInfo(
        tool="ulpscope 0.1.0",
        created="2026-03-01T12:00:00+00:00",
        command=("train.py", "--epochs", "1"),
        versions={"python": "3.11.7", "torch": "2.13.0", "ulpscope": "0.1.0"},
        devices=(device,),
        options={"level": "api", "keep": "tensors", "steps": [0]},
        seed=1234,
        environment={"OMP_NUM_THREADS": "1"},
    )


def sample_comparison(num_calls: int = 40) -> Comparison:
    """Make a comparison with exactly `num_calls` judged calls (at least 30): state, forward, backward, optimizer, one unmatched a side."""
    calls = tuple(_renumbered(_calls(max(num_calls, 30))))
    culprit = next(call for call in calls if call.contribution == "contributed")
    num_inherited = sum(call.contribution == "inherited" for call in calls)
    return Comparison(
        subject=sample_run_info("npu:0"),
        reference=sample_run_info("cuda:0"),
        subject_path="runs/npu",
        reference_path="runs/gpu",
        rules="derived",
        findings=(_contributed(culprit, num_inherited), *_notes()),
        calls=calls,
        elapsed_s=1.25,
    )


def _calls(num_calls: int) -> Iterator[JudgedCall]:
    chance = random.Random(7)
    num_between = num_calls - 5
    num_forward = num_between // 2 + num_between % 2 if num_between > 50 else num_between * 3 // 5 + 1
    program = list(_forward(max(2, (num_forward - 3 + 8) // 9)))[:num_forward]
    if not any(step.module == "layers.1.mlp" and step.op == "functional.gelu" for step in program):
        program = list(_forward(2))
    named = _named(program)
    yield _state("state.parameters", "start", ("parameter", ("head.weight", (VOCABULARY, WIDTH))), chance)
    yield _state("state.batch", "start", ("input", (0, (BATCH, LENGTH))), chance)
    culprit = next(place for place, (step, _) in enumerate(named) if step.module == "layers.1.mlp" and step.op == "functional.gelu")
    for place, (step, call) in enumerate(named):
        state: Contribution = "clean" if place < culprit else "contributed" if place == culprit else "inherited"
        yield _judged(step, call, "forward", state, chance)
    for step, call in list(reversed(named))[: num_between - len(named)]:
        yield _judged(step, call, "backward", "inherited", chance)
    yield _unmatched("functional.dropout", on_subject=True, chance=chance)
    yield _unmatched("Tensor.contiguous", on_subject=False, chance=chance)
    yield _state("optimizer.AdamW", "optimizer", ("state", ("head.weight", (VOCABULARY, WIDTH))), chance)


def _named(program: list[_Step]) -> list[tuple[_Step, CallName]]:
    counts: dict[str, int] = {}
    named = []
    for step in program:
        named.append((step, CallName(step.op, counts.get(step.op, 0))))
        counts[step.op] = counts.get(step.op, 0) + 1
    return named


def _renumbered(calls: Iterator[JudgedCall]) -> Iterator[JudgedCall]:
    for order, call in enumerate(calls):
        subject = call.pair.subject and replace(call.pair.subject, order=order)
        reference = call.pair.reference and replace(call.pair.reference, order=order)
        yield replace(call, pair=replace(call.pair, subject=subject, reference=reference))


def _judged(step: _Step, call: CallName, phase: Phase, contribution: Contribution, chance: random.Random) -> JudgedCall:
    places = [Slot("input", (index,)) for index in range(len(step.inputs))]
    shapes = dict(zip(places, step.inputs, strict=True)) | {Slot("output", (0,)): step.output}
    if phase == "backward":
        shapes = {Slot("input", (0,)): step.output} | {Slot("output", (index,)): shape for index, shape in enumerate(step.inputs)}
    judged = []
    for slot, shape in shapes.items():
        is_moved = slot.is_output if contribution == "contributed" else slot in (Slot("input", (0,)), Slot("output", (0,)))
        multiple = _multiple(contribution, chance) if is_moved else chance.uniform(0.1, 0.9)
        judged.append(_slot(slot, shape, multiple, contribution == "clean" and not slot.is_output, chance))
    pair = _pair(step, call, phase, tuple(slot.pair for slot in judged))
    differences = (ArgumentDifference("approximate", "'tanh'", "'none'"),) if contribution == "contributed" else ()
    worst = max((slot.verdict.multiple or 0.0 for slot in judged), default=0.0)
    return JudgedCall(pair=pair, slots=tuple(judged), differences=differences, contribution=contribution, multiple=worst)


def _multiple(contribution: Contribution, chance: random.Random) -> float:
    if contribution == "clean":
        return chance.uniform(0.05, 0.95)
    return 212.0 if contribution == "contributed" else chance.uniform(20.0, 180.0)


def _slot(slot: Slot, shape: tuple[int, ...], multiple: float, is_equal: bool, chance: random.Random) -> JudgedSlot:
    level: VerdictLevel = "same" if is_equal else "rounding" if multiple <= 1 else "differs"
    subject, reference = (_tensor(slot, shape, device, chance, is_equal) for device in ("npu:0", "cuda:0"))
    measurement = _measurement(math.prod(shape), 0.0 if is_equal else multiple * 3e-6, is_equal, chance)
    reason = {"same": "bitwise equal", "rounding": "within rounding of float32", "differs": f"{multiple:.3g}x the rounding of float32"}[
        level
    ]
    verdict = Verdict(level, "derived", reason, 0.0 if is_equal else multiple)
    return JudgedSlot(SlotPair(slot, subject, reference), measurement, verdict)


def _tensor(slot: Slot, shape: tuple[int, ...], device: str, chance: random.Random, is_equal: bool) -> TensorRecord:
    numel = math.prod(shape)
    summary = Summary(numel, -3.5, 3.25, 0.0125, 1.0, 0, 0, 0, 3, 0)
    key = f"{crc32(f'{slot} {shape}'.encode()):032x}" if is_equal else f"{chance.getrandbits(128):032x}"
    return TensorRecord(slot=slot, dtype="float32", shape=shape, device=device, summary=summary, fingerprint=f"u1:{key}")


def _measurement(numel: int, distance: float, is_equal: bool, chance: random.Random) -> TensorMeasurement:
    zero = Undefined("the tensors are equal")
    return TensorMeasurement(
        numel=numel,
        equal=is_equal,
        distance=distance,
        max_abs=distance * 8,
        max_rel=Undefined("the reference holds zeros") if chance.random() < 0.1 else distance * 20,
        mean_abs=distance / 2,
        rms_error=distance,
        rel_l2=distance,
        cosine=1.0 - distance**2,
        snr_db=zero if is_equal else -20 * math.log10(distance),
        within_1e4=1.0 if distance < 1e-4 else 0.4,
        within_1e3=1.0 if distance < 1e-3 else 0.6,
        within_5e3=1.0,
        ulp_max=distance * 2**24,
        ulp_p50=distance * 2**21,
        ulp_p99=distance * 2**23,
        num_different=0 if is_equal else numel // 2,
        num_sign_flips=0,
        num_nan_disagree=0,
        num_inf_disagree=0,
        worst_index=None if is_equal else (0,),
        worst_subject=None if is_equal else 1.0 + distance,
        worst_reference=None if is_equal else 1.0,
        rms_subject=1.0,
        rms_reference=1.0,
    )


def _pair(step: _Step, call: CallName, phase: Phase, slots: tuple[SlotPair, ...]) -> Pair:
    stack = (Frame("train.py", step.line, "forward", step.code), Frame("train.py", 88, "main", "loss = model(tokens)"))
    arguments = Arguments(args=({"$tensor": "input.0"},), kwargs={"approximate": "none"} if step.op == "functional.gelu" else {})

    def record(which: str) -> CallRecord:
        tensors = tuple(tensor for slot in slots if (tensor := getattr(slot, which)) is not None)
        return CallRecord(
            rank=0,
            step=0,
            order=0,
            call=call,
            phase=phase,
            module=step.module,
            parent=step.module.rpartition(".")[0],
            arguments=arguments,
            modes=Modes(training=True),
            slots=tensors,
            stack=stack,
        )

    return Pair(subject=record("subject"), reference=record("reference"), matched_by="name", slots=slots)


def _state(op: str, phase: Phase, what: tuple[str, tuple[int | str, tuple[int, ...]]], chance: random.Random) -> JudgedCall:
    role, (path, shape) = what
    slot = Slot(role, (path,))  # type: ignore[arg-type]
    tensor = _tensor(slot, shape, "npu:0", chance, True)
    slot_pair = SlotPair(slot, tensor, tensor)
    level: Level = "state"
    record = CallRecord(rank=0, step=0, order=0, call=CallName(op, 0), phase=phase, level=level, slots=(tensor,))
    pair = Pair(subject=record, reference=record, matched_by="name", slots=(slot_pair,))
    measured = (
        FingerprintMeasurement(equal=True)
        if op != "optimizer.AdamW"
        else SummaryMeasurement(equal=False, distance=2e-7, differences={"mean": 2e-7, "max": Undefined("the reference took no maximum")})
    )
    verdict = (
        Verdict("same", "derived", "fingerprints are equal", 0.0)
        if measured.equal
        else Verdict("rounding", "derived", "within rounding", 0.4)
    )
    return JudgedCall(pair=pair, slots=(JudgedSlot(slot_pair, measured, verdict),), contribution="clean", multiple=verdict.multiple)


def _unmatched(op: str, *, on_subject: bool, chance: random.Random) -> JudgedCall:
    slot = Slot("output", (0,))
    tensor = _tensor(slot, HIDDEN, "npu:0" if on_subject else "cuda:0", chance, False)
    slot_pair = SlotPair(slot, tensor if on_subject else None, None if on_subject else tensor)
    record = CallRecord(
        rank=0,
        step=0,
        order=0,
        call=CallName(op, 0),
        phase="forward",
        module="layers.0",
        parent="layers",
        slots=(tensor,),
        stack=(Frame("train.py", 44, "forward", ""),),
    )
    pair = Pair(subject=record if on_subject else None, reference=None if on_subject else record, matched_by="nothing", slots=(slot_pair,))
    missing = "reference" if on_subject else "subject"
    verdict = Verdict("unmatched", "derived", f"the {missing} has no such call")
    return JudgedCall(
        pair=pair, slots=(JudgedSlot(slot_pair, NotMeasured(f"the {missing} has no such call"), verdict),), contribution="unmatched"
    )


def _contributed(call: JudgedCall, num_inherited: int) -> Finding:
    record = call.pair.record
    edges = tuple(-4.0 + index * 0.5 for index in range(17))
    bell = tuple(int(20000 * math.exp(-((edge + 0.25) ** 2))) for edge in edges[:-1])
    narrow = tuple(edge / 400 for edge in edges)
    return Finding(
        level="fault",
        kind="contributed",
        headline="first contributed error: layers.1.mlp  gelu (call 1, forward, output 0), step 0, rank 0",
        step=0,
        rank=0,
        phase="forward",
        module=record.module,
        call=str(record.call),
        slot="output.0",
        source=record.source,
        evidence=(
            "output errs 212x what rounding of float32 explains",
            f"inputs agree (0.6x); {num_inherited} later differences are inherited",
        ),
        next="run this call alone on both devices: ulpscope show runs/npu 'layers.1.mlp/functional.gelu.1' --arguments",
        stack=record.stack,
        order=record.order,
        histograms=(Histogram("subject", edges, bell), Histogram("reference", edges, bell[::-1]), Histogram("difference", narrow, bell)),
    )


def _notes() -> tuple[Finding, ...]:
    return (
        Finding(
            level="note",
            kind="arguments",
            headline="layers.1.mlp gelu: argument approximate is 'tanh' on the subject and 'none' on the reference",
            step=0,
            rank=0,
            phase="forward",
            module="layers.1.mlp",
            call="functional.gelu.1",
            evidence=("subject 'tanh', reference 'none'",),
            next="make the arguments equal on both sides",
        ),
        Finding(
            level="note",
            kind="calls",
            headline="1 call only on the subject, 1 only on the reference",
            step=0,
            rank=0,
            evidence=("functional.dropout.0", "Tensor.contiguous.0"),
        ),
        Finding(level="note", kind="coverage", headline="step 1 was recorded by the subject only and was not compared", step=1),
    )
