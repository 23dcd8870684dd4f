# SPDX-License-Identifier: Apache-2.0
"""Collectives are seen without being replaced, torch itself gives the list of them, and memory under way is never read."""

from __future__ import annotations

import functools
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as differentiable
from torch.distributed import all_reduce, distributed_c10d, irecv, isend

from tests.capture.test_operators import ListSink
from ulpscope import Capture
from ulpscope.capture.intercept import collectives
from ulpscope.capture.intercept.patching import Patches
from ulpscope.model import TensorRecord

# They take a group and move no tensor.
EXCUSED = set(
    """
    barrier monitored_barrier destroy_process_group get_backend get_backend_config get_rank get_world_size get_group_rank get_global_rank
    get_process_group_ranks init_process_group new_subgroups shrink_group
    """.split()
)
KNOWN = set(
    """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single
    batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend recv recv_object_list reduce reduce_scatter
    reduce_scatter_tensor scatter scatter_object_list send send_object_list _all_gather_base _reduce_scatter_base
    nn.functional.all_gather nn.functional.all_reduce nn.functional.all_to_all nn.functional.all_to_all_single nn.functional.broadcast
    nn.functional.gather nn.functional.reduce nn.functional.reduce_scatter nn.functional.scatter
    _functional_collectives.all_gather_tensor _functional_collectives.all_reduce _functional_collectives.all_reduce_coalesced
    _functional_collectives.all_to_all_single _functional_collectives.broadcast _functional_collectives.permute_tensor
    _functional_collectives.reduce_scatter_tensor
    """.split()
)


class NotedSink(ListSink):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, entry: Any) -> None:
        self.notes.append(f"{entry.what}: {entry.why}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a group of one process, in which each collective does what it does elsewhere."""
    folder = tmp_path_factory.mktemp("group")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Slow(dist._Work):
    """A handle whose collective writes when the program waits for it, and fails when anybody looks earlier."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.write, self.is_done = write, False

    def wait(self, timeout: Any = None) -> bool:
        if not self.is_done:
            self.write()
        self.is_done = True
        return True

    def is_completed(self) -> bool:
        return self.is_done


def slots(sink: ListSink, call: str) -> dict[str, TensorRecord]:
    return {
        str(each.slot): each for record in sink.records if str(record.call) == call and record.phase == "forward" for each in record.slots
    }


def first(record: TensorRecord) -> float | None:
    return None if record.summary is None else record.summary.max


def test_every_function_that_takes_a_group_is_a_collective_or_excused() -> None:
    """A collective that torch adds is recorded if it moves a tensor, and makes this test fail if it seems to move none."""
    with_group = dict(collectives.group_functions())
    assert with_group.keys() - collectives.collective_functions().keys() - EXCUSED == set()
    assert KNOWN - collectives.collective_functions().keys() == set()


def test_a_collective_that_torch_adds_is_recorded(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_shuffle(tensor: torch.Tensor, group: Any = None) -> None:
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_shuffle", all_shuffle, raising=False)
    sink, x = ListSink(), torch.ones(2)
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        dist.all_shuffle(x)  # type: ignore[attr-defined]
    assert first(slots(sink, "distributed.all_shuffle.0")["mutated.0"]) == 2.0


@pytest.mark.parametrize("name", ["all_gather_single", "reduce_scatter_single"])
def test_new_names_of_torch_are_recorded(name: str, alone: None) -> None:
    function = getattr(dist, name, None)
    if function is None:
        pytest.skip("this torch has no such name yet")
    sink, output = ListSink(), torch.zeros(2)
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        function(output, torch.ones(2))
    assert first(slots(sink, f"distributed.{name}.0")["mutated.0"]) == 1.0


def facts(function: Any) -> tuple[Any, ...]:
    return (
        id(function),
        inspect.signature(function),
        inspect.getfullargspec(function),
        inspect.getsource(function),
        function.__qualname__,
        function.__doc__,
        function.__defaults__,
        function.__kwdefaults__,
        pickle.dumps(function),
    )


@pytest.mark.parametrize("level", ["api", "module", "op"])
def test_what_stands_in_is_not_to_be_told_from_what_was_there(level: Any) -> None:
    functions = [*collectives.collective_functions().values(), funcol.wait_tensor, dist.init_process_group]
    before, codes, names = (
        [facts(each) for each in functions],
        [each.__code__ for each in functions],
        [vars(each).copy() for each in functions],
    )

    @functools.wraps(isend)
    def mine(*args: Any, **kwargs: Any) -> Any:
        return isend(*args, **kwargs)

    sink = ListSink()
    with Capture.into_sink(lambda rank: sink, level=level):
        assert [facts(each) for each in functions] == before
        assert isend.__code__ is not codes[functions.index(isend)], "it is seen"
        assert dist.isend is isend is distributed_c10d.isend is inspect.unwrap(mine)
        assert inspect.signature(mine) == inspect.signature(isend)
        assert pickle.loads(pickle.dumps(dist.irecv)) is irecv
    assert [facts(each) for each in functions] == before
    assert [each.__code__ for each in functions] == codes
    assert all(now is then for now, then in zip((each.__code__ for each in functions), codes, strict=True))
    assert [vars(each) for each in functions] == names


def test_operations_of_a_batch_are_made_of_any_name(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compares these functions by identity: batches are made before a capture or inside, by names imported before or after."""
    before, x = dist.P2POp(isend, torch.ones(2), 0), torch.zeros(2)
    monkeypatch.setattr(dist.group.WORLD.__class__, "send", lambda *_: Slow(lambda: None))
    monkeypatch.setattr(dist.group.WORLD.__class__, "recv", lambda *_: Slow(lambda: x.numpy().fill(1.0)))
    sink = ListSink()
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        received = dist.P2POp(distributed_c10d.irecv, x, 0)
        works = dist.batch_isend_irecv([before, received])
        for work in works:
            work.wait()
        y = x + 1
    assert y.tolist() == [2.0, 2.0]
    found = slots(sink, "distributed.batch_isend_irecv.0")
    assert first(found["input.0.0.tensor"]) == 1.0
    assert first(found["mutated.0.1.tensor"]) == 1.0
    assert "mutated.0.0.tensor" not in found
    assert sink.calls() == ["distributed.batch_isend_irecv.0", "Tensor.add.0"]


@pytest.mark.parametrize("level", ["api", "both"])
def test_a_name_imported_before_is_recorded(level: Any, alone: None) -> None:
    sink, x = ListSink(), torch.ones(2)
    with Capture.into_sink(lambda rank: sink, level=level, select=["phase:forward"]):
        all_reduce(x)
    assert sink.calls() == ["distributed.all_reduce.0"]
    assert sink.records[0].stack[0].function == "test_a_name_imported_before_is_recorded"


def test_memory_under_way_is_read_when_the_program_has_waited(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective takes its time: every record of its memory in between has the values that it gives."""
    x = torch.full((4,), 1.0)
    handle = Slow(lambda: x.numpy().fill(5.0))
    monkeypatch.setattr(dist.group.WORLD.__class__, "allreduce", lambda *_: handle)
    sink = NotedSink()
    with Capture.into_sink(lambda rank: sink, keep="tensors", select=["phase:forward"]):
        work = dist.all_reduce(x, async_op=True)
        assert work is handle
        view = x.view(2, 2)
        assert not handle.is_done, "nobody waited but the program"
        waiting = len(sink.records)
        work.wait()
        assert len(sink.records) > waiting
        x.mul_(2)
    found = slots(sink, "distributed.all_reduce.0")
    assert (first(found["input.0"]), first(found["mutated.0"])) == (1.0, 5.0)
    assert [first(each) for each in slots(sink, "Tensor.view.0").values()] == [5.0, 5.0]
    assert [first(each) for each in slots(sink, "Tensor.mul_.0").values()] == [5.0, 10.0]
    assert sink.notes == []
    assert view.tolist() == [[10.0, 10.0], [10.0, 10.0]]


def test_memory_of_which_a_part_is_under_way_is_not_read(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other part may change meanwhile."""
    whole = torch.zeros(4)
    lower, upper = whole[:2], whole[2:]
    handle = Slow(lambda: lower.numpy().fill(5.0))
    monkeypatch.setattr(dist.group.WORLD.__class__, "allreduce", lambda *_: handle)
    sink = ListSink()
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        work = dist.all_reduce(lower, async_op=True)
        whole.view(-1)
        upper.add_(3)
        work.wait()
        whole.view(-1)
    assert "nobody has waited for" in slots(sink, "Tensor.view.0")["input.0"].note
    assert [first(each) for each in slots(sink, "Tensor.add_.0").values()] == [0.0, 3.0]
    assert first(slots(sink, "Tensor.view.1")["input.0"]) == 5.0


@pytest.mark.parametrize("asked", [True, False])
def test_a_handle_that_nobody_waits_for_stands_in_the_ledger(asked: bool, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    handle = Slow(lambda: None)
    monkeypatch.setattr(dist.group.WORLD.__class__, "recv", lambda *_: handle)
    sink = NotedSink()
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]) as capture:
        work = dist.irecv(x, 0)
        handle.is_done = asked
        assert work is not None
        assert work.is_completed() is asked  # a program that asks until the answer is yes has waited
        capture.step()
        x + 1
    found = slots(sink, "distributed.irecv.0")
    assert (first(found["mutated.0"]) is None) is not asked
    complaint = "read what distributed.irecv received: nobody had waited for it when the step ended"
    assert sink.notes == ([] if asked else [complaint, complaint])  # in the second step it is under way still
    assert (first(slots(sink, "Tensor.add.0")["input.0"]) is None) is not asked, "it is still under way"


@pytest.mark.parametrize("level", ["api", "op"])
def test_what_is_written_over_is_no_input(level: Any, alone: None) -> None:
    """It may be memory that was never written, made where no mode saw it: two runs of one program would differ in it."""
    sink, output, summed = ListSink(), torch.full((2,), 7.0), torch.full((2,), 3.0)
    with Capture.into_sink(lambda rank: sink, level=level, select=["phase:forward"]):
        dist.all_gather([output], torch.ones(2))
        dist.all_reduce(summed)
    gather, reduce = [next(each for each in sink.records if word in str(each.call)) for word in ("gather", "reduce")]
    assert [each.summary for each in gather.slots if str(each.slot) in ("input.0.0", "input.0.0.0")] == [None]
    assert {first(each) for each in gather.slots if each.summary is not None} == {1.0}
    assert {first(each) for each in reduce.slots} == {3.0}


def test_a_future_of_a_handle_is_waited_for_too(alone: None) -> None:
    sink, x = NotedSink(), torch.ones(3)
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.get_future().wait()
        x.mul_(2)
    assert first(slots(sink, "distributed.all_reduce.0")["mutated.0"]) == 1.0
    assert first(slots(sink, "Tensor.mul_.0")["input.0"]) == 1.0
    assert sink.notes == []


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated")
def test_results_of_functional_collectives_are_recorded_once_they_are_waited_for(alone: None) -> None:
    sink, x = NotedSink(), torch.ones(2, requires_grad=True)
    with Capture.into_sink(lambda rank: sink, select=["phase:forward", "phase:backward"]):
        summed = funcol.all_reduce(x.detach(), "sum", dist.group.WORLD)
        assert isinstance(summed, funcol.AsyncCollectiveTensor)
        assert not summed.completed
        early = summed.view(-1)
        assert not summed.completed, "recording waits for nothing"
        y = early + x
        (differentiable.all_reduce(y) * 3).sum().backward()
    assert sink.notes == []
    assert [first(each) for each in slots(sink, "distributed._functional_collectives.all_reduce.0").values()] == [1.0, 1.0]
    assert [first(each) for each in slots(sink, "Tensor.view.0").values()] == [1.0, 1.0]
    assert [first(each) for each in slots(sink, "distributed.nn.functional.all_reduce.0").values()] == [2.0, 2.0]
    assert "distributed.nn.functional.all_reduce.0" in sink.calls("backward")
    assert not [call for call in sink.calls() if "wrap_tensor" in call]


def test_functional_collectives_called_by_their_operation(alone: None) -> None:
    sink, x = NotedSink(), torch.ones(2)
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        name = dist.group.WORLD.group_name
        y = torch.ops._c10d_functional.all_reduce(x, "sum", name)
        z = torch.ops._c10d_functional.wait_tensor(y)
        z + 1
    assert [first(each) for each in slots(sink, "ops._c10d_functional.all_reduce.0").values()] == [1.0, 1.0]
    assert sink.notes == []


def test_coalesced_collectives(alone: None) -> None:
    sink, tensors = NotedSink(), [torch.ones(2), torch.ones(3)]
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        with distributed_c10d._coalescing_manager():
            for each in tensors:
                dist.all_reduce(each)
        with distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for each in tensors:
                assert dist.all_reduce(each, async_op=True) is not None
        manager.wait()
        tensors[0] + 1
    assert [first(slots(sink, f"distributed.all_reduce.{number}")["mutated.0"]) for number in range(4)] == [1.0] * 4
    assert sink.notes == []


def test_a_wait_in_another_thread(alone: None) -> None:
    sink, x = NotedSink(), torch.ones(3)
    with Capture.into_sink(lambda rank: sink, select=["phase:forward"]):
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        thread = threading.Thread(target=work.wait)
        thread.start()
        thread.join()
        x + 1
    assert first(slots(sink, "distributed.all_reduce.0")["mutated.0"]) == 1.0
    assert sink.notes == []


def test_a_handle_of_a_users_own_class_is_put_back(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, wait, code = Slow(lambda: None), Slow.wait, Slow.wait.__code__
    theirs = vars(dist.Work).copy()
    monkeypatch.setattr(dist.group.WORLD.__class__, "allreduce", lambda *_: handle)
    with Capture.into_sink(lambda rank: ListSink()):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        assert Slow.wait is wait
        work.wait()
    assert handle.is_done
    assert Slow.wait.__code__ is code
    assert all(vars(dist.Work)[name] is value for name, value in theirs.items())


def test_functions_with_closures_defaults_and_keywords_are_stood_in_for() -> None:
    outer = 10

    def plain(a: int, /, b: int = 2, *rest: int, c: int = 3, **more: int) -> Any:
        return a, b, rest, c, more, outer

    seen: list[Any] = []
    patches, before, signature = Patches(), plain.__code__, inspect.signature(plain)
    assert isinstance(plain, FunctionType)

    def make(original: Any) -> Any:
        return lambda *args, **kwargs: seen.append((args, kwargs)) or original(*args, **kwargs)

    for _ in range(2000):  # the interpreter has made the calls of this place fast
        expected = plain(1, 5, 6, c=7, d=8), plain(1)
    patches.stand_in(plain, make)
    patches.stand_in(plain, make)
    try:
        for _ in range(2000):
            assert (plain(1, 5, 6, c=7, d=8), plain(1)) == expected
        assert inspect.signature(plain) == signature
        assert len(seen) == 4000
    finally:
        patches.undo()
    assert plain.__code__ is before
    assert vars(plain) == {}
    assert (plain(1, 5, 6, c=7, d=8), plain(1)) == expected
    assert len(seen) == 4000


BEGUN_LATER = """
import sys; sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
import ulpscope
with ulpscope.Capture({into!r}, keep="statistics") as capture:
    dist.init_process_group("gloo", init_method="file://" + {meeting!r}, rank=0, world_size=1)
    from torch.distributed.nn.functional import all_reduce
    x = all_reduce(torch.ones(2)) + 1
dist.destroy_process_group()
print("modules:", "torch.distributed.pipelining" in sys.modules)
"""


def test_a_group_that_is_made_inside_of_a_capture(tmp_path: Path) -> None:
    code = BEGUN_LATER.format(root=str(Path(__file__).parents[2]), into=str(tmp_path / "run"), meeting=str(tmp_path / "meeting"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "modules: False\n"), done.stderr
    import ulpscope

    run = ulpscope.open_run(tmp_path / "run")
    assert "distributed.nn.functional.all_reduce.0" in [str(record.call) for record in run.records(0, 0)]
