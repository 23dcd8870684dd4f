# SPDX-License-Identifier: Apache-2.0
"""The same script under mindstudio-probe and under our door: records, statistics and tensors agree but for what is listed here.

Needs a Python with mindstudio-probe 26.2.0, named by ULPSCOPE_PEER_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PEER = os.environ.get("ULPSCOPE_PEER_PYTHON", "")
pytestmark = [pytest.mark.long, pytest.mark.skipif(not PEER, reason="ULPSCOPE_PEER_PYTHON names no Python with mindstudio-probe")]
SCRIPT = Path(__file__).parent / "scripts" / "msprobe_train.py"

NOT_WRAPPED = ("Tensor.__getitem__.", "Tensor.view.")
"""Calls that the peer's list of names leaves out."""

SEVERAL_NODES = ("Functional.cross_entropy.", "Functional.linear.", "Torch.matmul.", "Tensor.__matmul__.")
"""Calls of several autograd nodes: the peer shows what its last node passes on, we what the call passes on to its inputs."""

LATE_CHECKSUMS = ("Tensor.__imul__.", "Tensor.mean.")
"""The peer takes checksums in another thread, when an operator in place has written to the tensor already."""


def dumped(folder: Path, python: str, task: str, level: str, block: dict[str, Any]) -> Path:
    folder.mkdir()
    common = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [1], "level": level, "risk_level": "ALL"}
    (folder / "config.json").write_text(json.dumps({**common, task: {"scope": [], "list": [], "data_mode": ["all"], **block}}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, str(SCRIPT), str(folder / "config.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (rank,) = (folder / "dump" / "step1").iterdir()
    return rank


def data(rank: Path, name: str = "dump") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((rank / f"{name}.json").read_text())
    return found.get("data", found)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict) and value.get("type") == "torch.Tensor":
        yield path, value
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}.{key}")


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return the tensors of both, except gradients that the peer takes elsewhere."""
    for name, entry in theirs.items():
        own = dict(leaves(ours[name]))
        for path, leaf in leaves(entry):
            if name.startswith(SEVERAL_NODES) and "backward" in name and path.startswith(".output"):
                continue
            yield f"{name}{path}", own[path], leaf


CASES = {
    "statistics-L1": ("statistics", "L1", {}),
    "statistics-L0": ("statistics", "L0", {}),
    "tensor-mix": ("tensor", "mix", {}),
    "md5-L1": ("statistics", "L1", {"summary_mode": "md5"}),
    "scope": ("statistics", "L1", {"scope": ["Functional.layer_norm.0.forward", "Torch.softmax.0.forward"]}),
    "list-mix": ("statistics", "mix", {"list": ["Module.attention.Attention"]}),
    "data_mode": ("statistics", "mix", {"data_mode": ["forward", "input"]}),
}


@pytest.mark.promise("E16", "E17")
@pytest.mark.parametrize("case", CASES)
def test_both_tools_record_the_same(tmp_path: Path, case: str) -> None:
    mine, other = (dumped(tmp_path / who, python, *CASES[case]) for who, python in (("ours", sys.executable), ("peer", PEER)))
    ours, theirs = data(mine), data(other)
    assert len(theirs) > 3
    assert [name for name in theirs if name not in ours] == []
    assert [name for name in ours if name not in theirs and not name.startswith(NOT_WRAPPED)] == []
    number = 0
    for name, own, leaf in compared(ours, theirs):
        number += 1
        assert [key for key in ("dtype", "shape", "requires_grad") if own[key] != leaf[key]] == [], name
        assert (own["Max"], own["Min"]) == (leaf["Max"], leaf["Min"]), name
        for key in ("Mean", "Norm"):  # ours are summed in float64
            near = leaf[key] if leaf[key] is None else pytest.approx(leaf[key], rel=1e-5, abs=1e-7)
            assert own[key] == near, (name, key)
        if "md5" in leaf and not name.startswith(LATE_CHECKSUMS):
            assert own["md5"] == leaf["md5"], name
        if "data_name" in leaf:
            assert own["data_name"] == leaf["data_name"]
            both = [torch.load(rank / "dump_tensor_data" / leaf["data_name"], weights_only=True) for rank in (mine, other)]
            assert torch.equal(*both), name
    assert number > len(theirs)


def test_parents_agree(tmp_path: Path) -> None:
    mine, other = (dumped(tmp_path / who, python, "structure", "mix", {}) for who, python in (("ours", sys.executable), ("peer", PEER)))
    ours, theirs = data(mine, "construct"), data(other, "construct")
    differing = {name for name, parent in theirs.items() if ours.get(name, "") != parent}
    assert differing <= {"Functional.embedding.0.backward"}  # it ends after its module in the peer
    assert data(mine) == data(other) == {}
