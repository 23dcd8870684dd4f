# SPDX-License-Identifier: Apache-2.0
"""From statistics to a second, small recording that names the same culprit by its values."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.match.building import record, scale, train
from ulpscope.model import CallName, RunInfo
from ulpscope.recording.selection import Selection
from ulpscope.store import open_run
from ulpscope.workflows.compare.comparing import compare_runs
from ulpscope.workflows.compare.refining import ChosenCall, Refinement, pattern_of, refine_runs
from ulpscope.workflows.record.capturing import Capture


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Faulty(TorchDispatchMode):
    """Makes the eighth gelu one per cent off."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_calls += func is torch.ops.aten.gelu.default
        return result * 1.01 if func is torch.ops.aten.gelu.default and self.num_calls == 8 else result


def recorded(path: Path, *, is_faulty: bool, **options: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    with Capture(path, model=model, steps=[0], **options) as capture, Faulty() if is_faulty else nullcontext():
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return path


def size_kept(path: Path) -> int:
    run = open_run(path)
    contents = {slot.content for record in run.records(0, 0) for slot in record.slots if slot.content}
    return sum(len(memoryview(run.tensor(0, 0, content).buffer).cast("B")) for content in contents)


def test_statistics_lead_to_a_small_recording_with_the_right_culprit(tmp_path: Path) -> None:
    subject, reference = (recorded(tmp_path / name, is_faulty=name == "subject") for name in ("subject", "reference"))
    refinement = refine_runs(subject, reference)
    file = tmp_path / "closer.txt"
    file.write_text(refinement.text())
    closer = {"keep": "tensors", "select": f"@{file}"}
    subject, reference = (recorded(tmp_path / f"{name}-closer", is_faulty=name == "subject", **closer) for name in ("subject", "reference"))
    comparison = compare_runs(subject, reference)
    assert [(one.kind, one.module, one.call) for one in comparison.faults] == [("contributed", "7", "functional.gelu.7")]
    whole = size_kept(recorded(tmp_path / "whole", is_faulty=True, keep="tensors"))
    assert size_kept(subject) / whole < 0.06
    assert (refinement.size_bytes, refinement.whole_bytes) == (size_kept(subject), pytest.approx(whole, rel=0.01))


def test_fingerprints_alone_choose_what_makes_a_difference() -> None:
    wrong = train(steps=(0,), keep="fingerprint", change=scale(1.01, phase="forward", module="layers.1", op="functional.linear"))
    refinement = refine_runs(wrong, train(steps=(0,), keep="fingerprint"))
    assert ("layers.1/functional.linear.1",) in [call.names for call in refinement.chosen]
    assert refinement.phases == ("forward", "backward")


def test_a_suspect_among_parameters_selects_the_phase_and_no_call() -> None:
    wrong = train(steps=(0,), keep="statistics", change=scale(1.5, phase="start", slot="parameter.layers.1.weight"))
    refinement = refine_runs(wrong, train(steps=(0,), keep="statistics"))
    assert (refinement.patterns, refinement.chosen) == (("phase:start", "phase:optimizer"), ())


def test_renamed_calls_are_named_as_each_side_does() -> None:
    wrong = train(
        steps=(0,), keep="statistics", prefix="blocks", change=scale(1.5, phase="forward", module="blocks.1", op="functional.linear")
    )
    refinement = refine_runs(wrong, train(steps=(0,), keep="statistics"))
    assert ("blocks.1/functional.linear.1", "layers.1/functional.linear.1") in [call.names for call in refinement.chosen]


def test_commands_repeat_how_a_side_was_recorded() -> None:
    info = RunInfo(command=("train.py", "--name", "two words"), world_size=2, seed=7, options={"level": "both"})
    wrong = train(
        steps=(0,), ranks=(0, 1), keep="statistics", info=info, path="runs/npu", change=scale(1.5, phase="forward", module="layers.1")
    )
    subject, reference = refine_runs(wrong, train(steps=(0,), ranks=(0, 1), keep="statistics", path="runs/gpu")).commands(Path("c.txt"))
    assert subject == (
        "torchrun --nproc-per-node 2 -m ulpscope run --into runs/npu-closer --keep tensors --steps 0 --level both --ranks 0 --seed 7 "
        "--select @c.txt train.py --name 'two words'"
    )
    assert reference == "ulpscope run --into runs/gpu-closer --keep tensors --steps 0 --select @c.txt SCRIPT"


@settings(deadline=None)
@given(module=st.text(max_size=20), op=st.text(min_size=1, max_size=20), index=st.integers(0, 99))
def test_a_pattern_selects_exactly_its_call(module: str, op: str, index: int) -> None:
    name = f"{module}/{op}.{index}"
    pattern = pattern_of(name)
    assert not set(pattern) & set("#\n\r@ ")
    assert not pattern.startswith("!")
    chosen = Selection.parse(select=pattern)
    assert chosen.wants_call(module, CallName(op, index))
    assert not chosen.wants_call(module, CallName(op, index + 1))
    assert not chosen.wants_call(f"{module}x", CallName(op, index))


def test_a_file_with_hostile_names_reads_as_what_it_says(tmp_path: Path) -> None:
    names = ("a#b/torch.add.0", "!x/torch.add.1", "@y/torch.add.2", "m[0]/torch.add.3", "two\nlines/torch.add.4", "re:z/torch.add.5")
    comparison = compare_runs(train(steps=(0,)), train(steps=(0,)))
    file = tmp_path / "closer.txt"
    refinement = Refinement(
        comparison=comparison, reason="why\n!layers*", chosen=tuple(ChosenCall(names=(one,), why="a\nb") for one in names)
    )
    file.write_text(refinement.text())
    chosen = Selection.parse(select=f"@{file}")
    for name in names:
        module, _, call = name.rpartition("/")
        assert chosen.wants_call(module, CallName.parse(call))
    assert not chosen.wants_call("layers.0", record("torch.add").call)
