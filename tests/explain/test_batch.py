# SPDX-License-Identifier: Apache-2.0
"""Batches that differ, and where else they are found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.explain.programs import compared, views_of
from tests.match.building import Where, train
from ulpscope import Capture
from ulpscope.explain.entries.batch import clue_batch, explain_batch
from ulpscope.model import Comparison, Finding
from ulpscope.workflows.compare.comparing import compare_runs


def batch_fault(comparison: Comparison) -> Finding:
    found = explain_batch(views_of(comparison)[0])
    assert found is not None
    return found


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_batch_that_the_program_draws_with_another_seed(keep: str) -> None:
    comparison = compared({"data": 1}, {"data": 2}, keep=keep)
    assert batch_fault(comparison).headline == "the batches differ: input 0, step 0, rank 0"


def test_a_loader_that_is_one_batch_ahead() -> None:
    comparison = compare_runs(_shifted(1), train(steps=(0, 1, 2)))
    assert clue_batch(batch_fault(comparison), views_of(comparison)) == ["the subject's batch is the reference's of step 1, rank 0"]


def test_all_ranks_read_the_same_batch() -> None:
    def same(where: Where, value: np.ndarray) -> np.ndarray:
        return np.ones_like(value) if where.op == "state.batch" else value

    comparison = compare_runs(train(ranks=(0, 1), change=same), train(ranks=(0, 1)))
    assert clue_batch(batch_fault(comparison), views_of(comparison)) == [
        "all 2 ranks of the subject were given the same batch; in the reference each has its own"
    ]


def test_other_faults_have_no_such_clue() -> None:
    fault = Finding(level="fault", kind="calls", headline="", step=0, rank=0)
    assert clue_batch(fault, views_of(compare_runs(_shifted(1), train(steps=(0, 1, 2))))) == []


def _shifted(by: int):  # type: ignore[no-untyped-def]
    data = np.random.default_rng(1)
    batches = []
    for _ in range(3 + by):
        batches.append(data.standard_normal((32, 16)).astype("f4"))
        data.standard_normal((32, 16))

    def change(where: Where, value: np.ndarray) -> np.ndarray:
        return batches[where.step + by] if where.op == "state.batch" else value

    return train(steps=(0, 1, 2), change=change)


def test_modules_that_are_called_in_another_order_are_no_other_batch_and_no_other_parameters(tmp_path: Path) -> None:
    """Where nobody calls the model as a whole, each of its modules is outermost: what it is given was made on the way."""

    def record(into: Path, order: tuple[int, ...]) -> Path:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        with Capture(into, model=layers, keep="tensors"):
            x = torch.randn(3, 4)
            for layer in order:
                x = layers[layer](x).tanh()
            x.sum().backward()
        return into

    comparison = compare_runs(record(tmp_path / "a", (0, 2, 1, 3)), record(tmp_path / "b", (0, 1, 2, 3)))
    [fault] = comparison.faults
    assert (fault.kind, fault.module, fault.call) == ("calls", "1", "functional.linear.1")


def _parts(path: Path, approximate: str) -> Path:
    """Call the parts of a model one by one, as an encoder and a decoder are: each call of a part looks like a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    with Capture(path, model=model, keep="tensors"):
        hidden = nn.functional.gelu(model[0](torch.randn(16, 8)), approximate=approximate)
        model[1](hidden).square().mean().backward()
    return path


def test_what_enters_the_second_part_of_a_model_is_no_batch(tmp_path: Path) -> None:
    comparison = compare_runs(_parts(tmp_path / "a", "tanh"), _parts(tmp_path / "b", "none"))
    [fault] = comparison.faults
    assert (fault.kind, fault.call) == ("arguments", "functional.gelu.0")


def _sliced(path: Path, first: int) -> Path:
    torch.manual_seed(0)
    model, data = nn.Linear(8, 4), torch.randn(64, 8)
    with Capture(path, model=model, keep="tensors"):
        model(data[first : first + 16]).square().mean().backward()
    return path


def test_another_slice_of_the_data_is_another_batch(tmp_path: Path) -> None:
    comparison = compare_runs(_sliced(tmp_path / "a", 16), _sliced(tmp_path / "b", 0))
    assert [fault.kind for fault in comparison.faults] == ["batch"]
