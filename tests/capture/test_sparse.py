# SPDX-License-Identifier: Apache-2.0
"""A sparse tensor is recorded by the values of the dense tensor that it stands for, and torch's zero tensors as zeros."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ulpscope import Capture, check_run, compare_runs, open_run
from ulpscope.model import TensorRecord
from ulpscope.model.layouts import is_sparse

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* (support is in beta|are implicitly disabled):UserWarning")

DENSE = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, -3.0, 0.5]])
TWICE = torch.sparse_coo_tensor([[0, 1, 1, 1], [1, 2, 3, 2]], [2.0, -1.0, 0.5, -2.0], (2, 4), check_invariants=True)
"""The sparse form of `DENSE`, with the element at [1, 2] given in two parts."""


def _recorded(into: Path, tensor: torch.Tensor) -> TensorRecord:
    with Capture(into, keep="tensors"):
        torch.square(tensor) if tensor.layout is torch.strided else tensor.to_dense()
    [record] = [one for one in open_run(into).records(0, 0) if one.phase == "forward"]
    return record.slots[0]


def _values(into: Path, slot: TensorRecord) -> Any:
    return np.frombuffer(open_run(into).tensor(0, 0, slot.content or "").buffer, np.float32).reshape(2, 4)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "coo": DENSE.to_sparse,
    "uncoalesced": lambda: TWICE,
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((1, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 2)),
    "mkldnn": DENSE.to_mkldnn,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_values_are_those_of_the_dense_tensor(tmp_path: Path, layout: str) -> None:
    tensor = LAYOUTS[layout]()
    sparse, dense = _recorded(tmp_path / "sparse", tensor), _recorded(tmp_path / "dense", DENSE)
    assert is_sparse(sparse)
    assert not is_sparse(dense)
    assert sparse.summary == dense.summary
    assert sparse.fingerprint == dense.fingerprint
    assert np.array_equal(_values(tmp_path / "sparse", sparse), DENSE.numpy())


def test_indices_outside_of_the_shape_are_a_note(tmp_path: Path) -> None:
    """torch lets a program make such a tensor, and writes where the indices point when it is made dense."""
    wild = torch.sparse_coo_tensor(torch.tensor([[0, 10**9]]), torch.ones(2), (4,), check_invariants=False)
    with Capture(tmp_path / "run", keep="tensors"):
        wild.neg()
    slots = [slot for one in open_run(tmp_path / "run").records(0, 0) for slot in one.slots]
    assert all(slot.summary is None and "not read" in slot.note and "size" in slot.note for slot in slots)


def test_one_that_would_unfold_into_gigabytes_is_a_note(tmp_path: Path) -> None:
    huge = torch.sparse_coo_tensor([[0], [5]], [1.0], (2**20, 2**20), check_invariants=True)
    with Capture(tmp_path / "run", keep="tensors"):
        huge.neg()
    slots = [slot for one in open_run(tmp_path / "run").records(0, 0) for slot in one.slots]
    assert [slot.note.endswith("4096.0 GiB") for slot in slots] == [True] * len(slots)


def _train(into: Path, factor: float = 1.0) -> None:
    """Train an embedding whose gradient is sparse; `factor` scales that gradient without raising its version."""
    torch.manual_seed(1)
    table = torch.nn.Embedding(50, 4, sparse=True)
    if factor != 1:
        table.weight.register_hook(lambda gradient: gradient * factor)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with Capture(into, model=table, optimizer=optimizer, keep="tensors") as capture:
        for _ in range(2):
            table(torch.tensor([3, 7, 3, 1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()


def test_two_runs_with_sparse_gradients_are_the_same_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    for name, factor in {"one": 1.0, "other": 1.0, "wrong": 1.01}.items():
        _train(tmp_path / name, factor)
    same = compare_runs(tmp_path / "one", tmp_path / "other")
    assert same.verdict == "same"
    assert same.coverage.is_whole
    wrong = compare_runs(tmp_path / "wrong", tmp_path / "one")
    assert wrong.verdict == "diverges"


def test_check_judges_a_sparse_gradient(tmp_path: Path) -> None:
    _train(tmp_path / "run")
    check = check_run(tmp_path / "run")
    [judged] = {call.status for call in check.calls if "embedding" in str(call.call) and call.phase == "backward"}
    assert judged == "passed"


def test_a_gradient_that_torch_knows_to_be_zero_has_values(tmp_path: Path) -> None:
    given = torch.arange(4.0, requires_grad=True)
    with Capture(tmp_path / "run", keep="tensors"):
        torch.sgn(given).sum().backward()
    [record] = [one for one in open_run(tmp_path / "run").records(0, 0) if one.phase == "backward" and one.call.op == "torch.sgn"]
    [gradient] = [slot.summary for slot in record.slots if slot.slot.role == "output"]
    assert gradient is not None
    assert (gradient.numel, gradient.num_zero) == (4, 4)
