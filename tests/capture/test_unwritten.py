# SPDX-License-Identifier: Apache-2.0
"""Unwritten memory is known element by element until it is whole: equal runs agree, and no written value is hidden."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ulpscope.capture import CaptureSession
from ulpscope.model import Comparison
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.comparing import compare_runs

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce")  # torch warns of it once in a process, whichever test comes first

LEVELS: Any = ("api", "op")
_garbage = itertools.cycle(range(0x41, 0x7A))
X = torch.arange(32.0).reshape(8, 4) / 7


def poisoned(tensor: Tensor, begin: int = 0) -> Tensor:
    """Leave values in fresh memory that no other run finds there, unseen by any mode, as an allocator does."""
    with torch._C.DisableTorchFunction():
        ctypes.memset(tensor.data_ptr() + begin, _byte[0], tensor.untyped_storage().nbytes() - begin)
    return tensor


_byte = [0x41]


def recorded(program: Callable[[], Any], level: Any = "api", keep: Any = "tensors") -> MemoryRun:
    _byte[0] = next(_garbage)
    run = MemoryRun()
    session = CaptureSession(run.sink(), keep=keep, level=level)
    session.start()
    try:
        program()
        session.step()
    finally:
        session.stop()
    assert run.ledger(0) == ()
    return run


def compared(subject: Callable[[], Any], reference: Callable[[], Any], level: Any = "api", keep: Any = "tensors") -> Comparison:
    return compare_runs(recorded(subject, level, keep), recorded(reference, level, keep))


def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return poisoned(torch.empty(*shape, dtype=dtype))


# ---- programs that define all they use; the argument changes a value that is written


def in_pieces(scale: float) -> Tensor:
    k = fresh(8, 8)
    k[:, :4].copy_(X)
    k[:, 4:].copy_(X * scale)
    return (k * 2).sum()


def by_narrow_and_chunk(scale: float) -> Tensor:
    k = fresh(8, 12)
    k.narrow(1, 0, 4).copy_(X)
    for part in k[:, 4:].chunk(2, dim=1):
        part.copy_(X * scale)
    return k.softmax(-1)


def by_transposes(scale: float) -> Tensor:
    k = fresh(4, 8)
    k.t()[:5] = X[:5]
    torch.as_strided(k, (4, 3), (8, 1), 5).copy_(X[5:].t() * scale)
    return k @ X


def by_index(scale: float) -> Tensor:
    k = fresh(8, 4)
    k.index_copy_(0, torch.tensor([1, 3, 5, 7]), X[:4])
    k[torch.tensor([0, 2])] = X[4:6] * scale
    k.index_put_((torch.tensor([4]),), X[6:7])
    k.index_fill_(0, torch.tensor([6]), 3.0)
    return torch.linalg.vector_norm(k)


def by_mask(scale: float) -> Tensor:
    mask = X > 2
    k = torch.where(mask, X * scale, fresh(8, 4))
    k.masked_fill_(~mask, 0.5)
    return k.softmax(0)


def by_scatter(scale: float) -> Tensor:
    places = torch.arange(8).flip(0)[:, None].expand(8, 4)
    return fresh(8, 4).scatter_(0, places, X * scale).exp() + fresh(8, 4).scatter(0, places, X)


def by_out(scale: float) -> Tensor:
    k = fresh(8, 8)
    torch.mul(X, scale, out=k[:, :4])
    torch.cat([X[:4], X[4:]], out=k[:, 4:])
    return k.cumsum(0)


def by_drawing(seed: float) -> Tensor:
    torch.manual_seed(int(seed))
    w, b = fresh(4, 8), fresh(4)
    nn.init.kaiming_uniform_(w)
    nn.init.zeros_(b)
    b.uniform_(-1, 1)
    return F.linear(torch.ones(2, 8), w, b)


def by_beta(scale: float) -> Tensor:
    return torch.baddbmm(fresh(2, 4, 4), X.view(2, 4, 4), X.view(2, 4, 4), beta=0, alpha=scale).softmax(-1)


def by_growing(scale: float) -> Tensor:
    k = X.clone()
    known = 4 * k.numel()
    k.resize_(10, 4)
    poisoned(k, known)
    k[8:] = scale
    return k.sum(0)


def by_other_dtype(scale: float) -> Tensor:
    k = fresh(8, 4, dtype=torch.complex64)
    torch.view_as_real(k)[..., 0] = X
    torch.view_as_real(k)[..., 1] = X * scale
    return k.abs()


def by_parts_moved(scale: float) -> Tensor:
    k = fresh(8, 8)
    k[:, :4] = X * scale
    moved = torch.cat([k.flip(0), torch.zeros(1, 8)]).clone().roll(1, 0).contiguous()
    return (moved[:, :4] + moved[:, 4:].zero_()).relu()


def by_data(scale: float) -> Tensor:
    weight = nn.Parameter(fresh(8, 4))
    weight.data[:4].copy_(X[:4] * scale)
    weight.data[4:].normal_(generator=torch.Generator().manual_seed(1))
    return F.linear(X, weight)


def by_new_and_strided(scale: float) -> Tensor:
    one = poisoned(X.new_empty(8, 4)).copy_(X)
    other = poisoned(torch.empty_strided((8, 4), (1, 8))).fill_(scale)
    permuted = poisoned(torch.empty_permuted((8, 4), (1, 0)))
    permuted[::2], permuted[1::2] = X[::2], X[1::2]
    return one + other + permuted + poisoned(torch.empty_like(X)).copy_(X * scale)


def in_inference(scale: float) -> Tensor:
    with torch.inference_mode():
        k = fresh(8, 8)
        k[:, :4].copy_(X)
        k[:, 4:] = X * scale
        return k.softmax(-1)


def by_adding(scale: float) -> Tensor:
    k = fresh(8, 4)
    k[:4] = 0
    k[4:].zero_()
    k.index_add_(0, torch.tensor([0, 0, 7]), X[:3] * scale)
    return k.tanh()


def by_reducing(scale: float) -> Tensor:
    rows = torch.arange(8)
    k = fresh(8, 4).scatter_reduce_(0, rows[:, None].expand(8, 4), X, "sum", include_self=False)
    return fresh(8, 4).index_reduce_(0, rows.flip(0), X * scale, "mean", include_self=False).sigmoid() * k


def by_other_sizes(scale: float) -> Tensor:
    k = fresh(8, 4)
    k.resize_(2, 4)
    k.resize_as_(X)
    k.copy_(X * scale)
    return k.log_softmax(-1)


PROGRAMS = [
    in_pieces, by_narrow_and_chunk, by_transposes, by_index, by_mask, by_scatter, by_out, by_drawing, by_beta, by_growing, by_other_dtype,
    by_parts_moved, by_data, by_new_and_strided, in_inference, by_adding, by_reducing,
    by_other_sizes,
]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_what_is_written_is_compared(program: Callable[[float], Any], level: Any) -> None:
    """Equal runs agree bitwise, and a value that differs is a fault: neither garbage nor a value hidden behind it decides."""
    same = compared(lambda: program(1.0), lambda: program(1.0), level)
    assert (same.verdict, [one.headline for one in same.faults]) == ("same", [])
    other = compared(lambda: program(3.0), lambda: program(1.0), level)
    assert [slot.verdict.rule for call in other.calls for slot in call.slots if slot.verdict.rule == "unwritten"] == []
    if program is by_drawing:  # what is made of other random numbers is not compared (tests/explain/test_rng.py)
        return
    last = [call for call in other.calls if call.pair.record.phase == "forward"][-1]
    assert last.level == "differs", "what was made of it differs, and is seen to"


@pytest.mark.parametrize("keep", ["statistics", "fingerprint"])
def test_without_values_too(keep: Any) -> None:
    assert compared(lambda: in_pieces(1.0), lambda: in_pieces(1.0), keep=keep).verdict == "same"
    assert compared(lambda: in_pieces(3.0), lambda: in_pieces(1.0), keep=keep).verdict != "same"


# ---- what stays unknown


def half_written(scale: float, rows: int = 4) -> Tensor:
    k = fresh(8, 4)
    k[:rows] = X[:rows] * scale
    return k


def rules(comparison: Comparison, op: str) -> list[tuple[str, str]]:
    """Return level and rule of the result of the last call of that name."""
    calls = [call for call in comparison.calls if call.pair.record.call.short == op and call.pair.record.phase == "forward"]
    return [(slot.verdict.level, slot.verdict.rule) for slot in calls[-1].slots if slot.pair.slot.is_output]


@pytest.mark.parametrize("level", LEVELS)
def test_what_hangs_on_unwritten_memory_is_not_compared_and_the_rest_is(level: Any) -> None:
    def program(scale: float) -> None:
        k = half_written(scale)
        mixed = k @ torch.ones(4, 4)  # row by row, of which capture does not know
        (mixed[:, :2] * 2).sqrt()
        (k[:4] * 5).tanh()

    same = compared(lambda: program(1.0), lambda: program(1.0), level)
    assert same.faults == ()
    assert rules(same, "matmul" if level == "api" else "mm") == [("unmeasured", "unwritten")]
    assert rules(same, "sqrt")[0][0] == "unmeasured"
    assert rules(same, "tanh") == [("same", "derived")]
    other = compared(lambda: program(1.5), lambda: program(1.0), level)
    assert rules(other, "tanh")[0][0] == "differs"
    assert other.faults != ()


def test_it_ends_where_the_values_agree() -> None:
    def program() -> None:
        mixed = half_written(1.0) @ torch.ones(4, 4)
        (mixed * 0 + 1).cumsum(0)

    same = compared(program, program)
    assert rules(same, "matmul") == [("unmeasured", "unwritten")]
    assert rules(same, "cumsum") == [("same", "derived")]


def test_a_reduction_leaves_unwritten_what_it_does_not_reach() -> None:
    def program(scale: float) -> Tensor:
        k = fresh(8, 4)
        k.index_reduce_(0, torch.tensor([0, 0, 1]), X[:3] * scale, "amax", include_self=False)
        k.index_reduce_(0, torch.tensor([2]), X[:1], "amax", include_self=True)
        return k[:2].exp()

    same = compared(lambda: program(1.0), lambda: program(1.0))
    assert same.verdict == "same"
    reached = [slot.subject.note for call in same.calls for slot in (one.pair for one in call.slots) if slot.subject and slot.subject.note]
    assert reached[-1] == "uninitialised memory in 24 of 32 elements, which are taken for zero"
    assert compared(lambda: program(3.0), lambda: program(1.0)).verdict == "diverges"


def test_memory_that_was_lent_is_read_again() -> None:
    """Code that was handed an array may write to it unseen: the next call's input has the written values."""

    def program(scale: float) -> Tensor:
        k = fresh(8, 4)
        k.numpy()[:] = X.numpy() * scale
        return k.softmax(-1)

    fault = compared(lambda: program(3.0), lambda: program(1.0)).faults[0]
    assert (fault.headline, fault.slot) == ("a value changes between calls: softmax (call 0, forward, input 0), step 0, rank 0", "input.0")


def test_a_fault_among_rows_that_were_written_is_seen() -> None:
    """Experts write their rows into fresh memory; one of them computes something else, and a row that no expert writes is left out."""

    def program(factor: float) -> None:
        out = torch.empty_like(X)
        poisoned(out)
        for expert in range(3):
            rows = torch.tensor([expert, expert + 4])
            out = out.index_copy(0, rows, F.gelu(X[rows]) * (factor if expert == 1 else 1.0))
        out[[0, 1, 2, 4, 5, 6]].sum()

    assert compared(lambda: program(1.0), lambda: program(1.0)).verdict == "same"
    assert compared(lambda: program(1.01), lambda: program(1.0)).faults != ()


def test_memory_that_only_one_side_wrote_to_is_a_fault() -> None:
    """A weight that was never initialised on the subject."""

    def program(is_initialised: bool) -> None:
        w = fresh(4, 4)
        if is_initialised:
            w.fill_(0.5)
        F.linear(X, w)

    comparison = compared(lambda: program(False), lambda: program(True))
    assert comparison.faults != ()
    assert any("nobody wrote to this memory on the subject" in line for line in comparison.faults[0].evidence), comparison.faults


def test_one_side_that_writes_less_is_a_fault() -> None:
    comparison = compared(lambda: half_written(1.0, rows=3) * 2, lambda: half_written(1.0, rows=4) * 2)
    assert comparison.faults != ()


def test_a_gradient_through_unwritten_memory_is_not_compared() -> None:
    def program() -> None:
        w = torch.ones(4, requires_grad=True)
        (half_written(1.0) * w).sum().backward()

    assert compared(program, program).faults == ()


def test_a_buffer_is_followed_over_steps() -> None:
    def run() -> MemoryRun:
        _byte[0] = next(_garbage)
        made = MemoryRun()
        session = CaptureSession(made.sink(), keep="tensors", level="api")
        session.start()
        cache = fresh(8, 4)
        for step in range(4):
            cache[2 * step : 2 * step + 2] = X[2 * step : 2 * step + 2]
            (cache[: 2 * step + 2] * 2).sum()
            cache.exp()
            session.step()
        session.stop()
        return made

    assert compare_runs(run(), run()).verdict == "same"


def test_older_runs_say_less_and_what_was_overwritten_is_compared_all_the_same() -> None:
    """In runs whose notes do not say what became of the memory, a call that writes over it does not depend on it."""
    old = "uninitialised memory: values are not read"

    def older(run: MemoryRun) -> MemoryRun:
        made = MemoryRun(run.info)
        sink = made.sink()
        sink.begin_step(0)
        for record in run.records(0, 0):
            slots = tuple(replace(slot, note=old) if slot.note else slot for slot in record.slots)
            sink.write(replace(record, slots=slots))
        sink.end_step()
        sink.close()
        return made

    def program(seed: int) -> None:
        torch.manual_seed(seed)
        nn.init.kaiming_uniform_(fresh(8, 4))
        fresh(8, 4) + 1

    runs = [older(recorded(lambda seed=seed: program(seed), keep="statistics")) for seed in (1, 2)]
    comparison = compare_runs(*runs)
    assert rules(comparison, "kaiming_uniform_")[0][1] == "random"


# ---- what is followed, and how long


def followed(program: Callable[[], Any]) -> list[int]:
    """Count the storages that are followed after each call of a program."""
    session = CaptureSession(MemoryRun().sink(), keep="statistics", level="api")
    session.start()
    counts = []
    try:
        for _ in program():
            counts.append(len(session._recorder.tensors.unwritten))
    finally:
        session.stop()
    return counts


def test_a_storage_is_forgotten_when_it_is_whole_or_lent() -> None:
    def program() -> Iterator[None]:
        k = torch.empty(8, 4)
        yield
        k[:4] = 1
        yield
        k[4:] = 1
        yield
        other = torch.empty(4)
        yield
        other.numpy()[:] = 3
        yield
        unseen = torch.empty(4)
        with torch._C.DisableTorchFunction():
            unseen.fill_(2)
        unseen + 1
        yield

    assert followed(program) == [1, 1, 0, 1, 0, 0]


def test_what_is_written_through_numpy_is_a_value_like_any_other() -> None:
    def program(value: float) -> Tensor:
        memory = torch.empty(8, 4)
        memory.numpy()[:] = value
        return memory * X

    assert compared(lambda: program(1.0), lambda: program(1.0)).verdict == "same"
    assert compared(lambda: program(1.0), lambda: program(2.0)).verdict == "diverges"


@pytest.mark.parametrize(
    ("reads", "level", "verdicts"),
    [
        ("the part", "api", ("same", "rounding")),
        ("the part", "op", ("same", "rounding")),
        ("all of it", "api", ("diverges",)),
        ("all of it", "op", ("unknown",)),
    ],
)
def test_what_is_written_through_numpy_counts_where_something_is_made_of_it(reads: str, level: Any, verdicts: tuple[str, ...]) -> None:
    """Below Python no mode sees `numpy()`: there such memory stays unwritten, which is never a pass."""

    def program(value: float) -> None:
        weight = torch.ones(4, requires_grad=True)
        memory = torch.empty(8, 4)
        memory.numpy()[:] = value
        memory[:6] = X[:6]
        (weight * (memory[:6] if reads == "the part" else memory)).sum().backward()

    assert compared(lambda: program(1.0), lambda: program(2.0), level).verdict in verdicts


def test_nothing_is_followed_where_nothing_is_unwritten() -> None:
    def program() -> Iterator[None]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
        for _ in range(2):
            model(X).sum().backward()
            yield

    assert followed(program) == [0, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_transforms_are_recorded_while_something_is_unwritten(level: Any) -> None:
    """A tensor that a transform wraps has no memory of its own; the calls are recorded all the same."""

    def program() -> None:
        half = half_written(1.0)
        torch.func.vmap(lambda row: row.sin().sum())(X)
        torch.func.vmap(lambda row: torch.empty_like(row).copy_(row).sum())(X)
        torch.func.grad(lambda x: (x * x).sum())(X)
        half * 2

    assert compared(program, program, level).faults == ()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_the_program_computes_what_it_computes(program: Callable[[float], Tensor], level: Any) -> None:
    found = []
    recorded(lambda: found.append(program(2.0)), level)
    assert torch.equal(found[0], program(2.0))
