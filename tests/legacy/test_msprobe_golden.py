# SPDX-License-Identifier: Apache-2.0
"""The program of tests/golden under our door, beside the dumps that mindstudio-probe 1.0, 1.3 and 26.2 left of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msprobe.pytorch import PrecisionDebugger

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    "msprobe-1.0/statistics-L1",
    "msprobe-1.3/tensor-mix",
    "msprobe-26/statistics-L1",
    "msprobe-26/statistics-L0",
    "msprobe-26/tensor-mix",
]
# The calls inside the optimizer; what 1.x calls itself, to hook modules and to begin a backward pass.
NOT_OURS = ("Tensor.add_.", "Tensor.view_as.", "Torch.ones_like.")
# The gradients of composite calls are taken elsewhere by the peer (see test_msprobe_peer).
COMPOSITE = ("Functional.cross_entropy.0.backward", "Functional.linear.0.backward", "Functional.linear.1.backward")

# 1.0 reads the inputs of a call in place after it.
LATE = ("msprobe-1.0", "Tensor.__iadd__.0.forward", ".input_args.0")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict) and value.get("type") == "torch.Tensor":
        yield path, value
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}.{key}")


@pytest.mark.promise("E16", "E17", "E36")
@pytest.mark.parametrize("case", CASES)
def test_the_golden_program(tmp_path: Path, case: str) -> None:
    line, _, rest = case.partition("/")
    task, level = rest.split("-")
    specification = importlib.util.spec_from_file_location("golden_train", GOLDEN / "train.py")
    assert specification is not None
    assert specification.loader is not None
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    layout = "26.x" if line == "msprobe-26" else "1.x"
    program.train(PrecisionDebugger(dump_path=str(tmp_path), task=task, level=level, layout=layout))
    PrecisionDebugger.forget()
    (mine,), (other,) = ([*folder.glob("step0/*/dump.json")] for folder in (tmp_path, GOLDEN / case))
    assert mine.parent.name.startswith("proc" if layout == "26.x" else "rank")
    ours, theirs = (json.loads(file.read_text())["data"] for file in (mine, other))
    assert sorted(ours) == sorted(name for name in theirs if not name.startswith(NOT_OURS))
    number = 0
    for name in ours:
        own = dict(leaves(ours[name]))
        for path, leaf in leaves(theirs[name]):
            if (name in COMPOSITE and path.startswith(".output")) or (line, name, path) == LATE:
                continue
            number += 1
            assert (own[path]["dtype"], own[path]["shape"]) == (leaf["dtype"], leaf["shape"]), (name, path)
            for key in ("Max", "Min", "Mean", "Norm"):
                near = leaf[key] if leaf[key] is None else pytest.approx(leaf[key], rel=1e-5, abs=1e-6)
                assert own[path][key] == near, (name, path, key)
            assert own[path].get("data_name") == leaf.get("data_name"), (name, path)
    assert number > len(ours)
