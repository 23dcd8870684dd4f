# SPDX-License-Identifier: Apache-2.0
"""Check runs that lie, lack things or name unknown things: each costs the call it is about, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.check.command import invoke
from ulpscope import Capture, InputError, open_run
from ulpscope.model import CallName, CallRecord, RunInfo, Slot, Summary, TensorRecord
from ulpscope.store import DirectorySink, create_run
from ulpscope.workflows.check.checking import check_run


def _recorded(path: Path, keep: str = "statistics") -> list[CallRecord]:
    with Capture(path, keep=keep) as capture:  # type: ignore[arg-type]
        F.gelu(torch.randn(4, 4).requires_grad_()).sum().backward()
        capture.step()
    return list(open_run(path).records(0, 0))


def _written(path: Path, records: list[CallRecord], info: RunInfo) -> Path:
    created = create_run(path, info)
    sink = DirectorySink(created, 0)
    sink.begin_step(0)
    for record in records:
        sink.write(record)
    sink.end_step()
    sink.close()
    return created


def _huge(slot: TensorRecord) -> TensorRecord:
    return replace(slot, shape=(10**6, 10**6), strides=(10**6, 1), summary=Summary(numel=10**12, min=0.0, max=1.0))


CHANGES: dict[str, tuple[Callable[[CallRecord], CallRecord], str]] = {
    "huge": (lambda record: replace(record, slots=tuple(map(_huge, record.slots))), "elements"),
    "unknown": (lambda record: replace(record, call=CallName("functional.no_such_thing", 0)), "none of torch's functions"),
    "collective": (lambda record: replace(record, call=CallName("distributed.all_reduce", 0)), "needs its other ranks"),
    "file": (lambda record: replace(record, call=CallName("torch.from_file", 0)), "none of torch's functions"),
    "no arguments": (lambda record: replace(record, arguments=None), "its arguments were not recorded"),
    "strange dtype": (lambda record: replace(record, slots=tuple(replace(one, dtype="int3") for one in record.slots)), "the dtype int3"),
    "no slot": (lambda record: replace(record, slots=()), "was not recorded before the call"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_replayed_is_skipped_with_the_reason(tmp_path: Path, name: str) -> None:
    change, reason = CHANGES[name]
    records = [one for one in _recorded(tmp_path / "run") if one.call.short == "gelu" and one.phase == "forward"]
    info = open_run(tmp_path / "run").info
    path = _written(tmp_path / "changed", [change(records[0]), replace(records[0], order=99, call=CallName("functional.gelu", 1))], info)
    check = check_run(path, isolated=False)
    assert [call.status for call in check.calls] == ["skipped", "passed"]
    assert reason in check.calls[0].reason
    assert check.coverage == 0.5


def test_a_backward_without_its_forward_is_skipped(tmp_path: Path) -> None:
    records = [one for one in _recorded(tmp_path / "run", "tensors") if one.phase == "backward" and one.call.short == "gelu"]
    path = _written(tmp_path / "changed", [replace(records[0], slots=())], open_run(tmp_path / "run").info)
    check = check_run(path, isolated=False)
    assert check.reasons == {"its forward call was not recorded": 1}


def test_tensors_that_are_gone_are_the_reason_of_their_calls(tmp_path: Path) -> None:
    _recorded(tmp_path / "run", "tensors")
    for shard in (tmp_path / "run").rglob("tensors-*.safetensors"):
        shard.unlink()
    check = check_run(tmp_path / "run", isolated=False, select="*gelu*")
    assert check.counts["skipped"] == len(check.calls) == 2


def test_broken_json_and_missing_paths_are_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    (folder / "dump.json").write_text('{"task": "statistics", "data": {')
    for path in (tmp_path, tmp_path / "nothing"):
        result = invoke(path)
        assert result.exit_code != 0
        assert result.exception is None or isinstance(result.exception, (InputError, SystemExit))
    assert not list(tmp_path.rglob("*.journal"))


def test_a_dump_of_msprobe_is_checked_from_its_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 6], "Max": 2.0, "Min": -2.0, "Mean": 0.1, "Norm": 4.0}
    data = {
        "Functional.gelu.0.forward": {"input_args": [{**tensor, "requires_grad": True}], "input_kwargs": {}, "output": [tensor]},
        "Functional.gelu.0.backward": {"input": [tensor], "output": [tensor]},
    }
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "dump_data_dir": None, "data": data}))
    check = check_run(tmp_path, isolated=False)
    assert [(call.call.short, call.phase, call.status) for call in check.calls] == [
        ("gelu", "forward", "passed"),
        ("gelu", "backward", "passed"),
    ]


def test_nothing_selected_is_said(tmp_path: Path) -> None:
    _recorded(tmp_path / "run")
    with pytest.raises(InputError, match="nothing to check"):
        check_run(tmp_path / "run", isolated=False, select="*conv*")
    with pytest.raises(InputError, match="no rules named 'mine'"):
        check_run(tmp_path / "run", isolated=False, rules="mine")


def test_slots_of_other_roles_do_no_harm(tmp_path: Path) -> None:
    records = _recorded(tmp_path / "run")
    gelu = next(one for one in records if one.call.short == "gelu" and one.phase == "forward")
    odd = TensorRecord(slot=Slot("state", ("x",)), dtype="float32", shape=(2,))
    path = _written(tmp_path / "changed", [replace(gelu, slots=(*gelu.slots, odd))], open_run(tmp_path / "run").info)
    assert check_run(path, isolated=False).counts["passed"] == 1
