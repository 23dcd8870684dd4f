# SPDX-License-Identifier: Apache-2.0
"""Find faults of known size on the emulated device, and blame no other call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.check.faulty import CASES, GROSS
from ulpscope.replay.yardstick.coarseness import leeway


def _strike(folder: Path, sizes: list[float], names: str, dtype: str = "float32") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.check.faulty", str(folder), ",".join(map(str, sizes)), names, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _missed(report: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (one["case"], one["phase"], one["size"], sorted({*one["struck"]} ^ {*one["failed"]}))
        for one in report
        if not one["struck"] or {*one["struck"]} != {*one["failed"]}
    ]


def test_ten_times_the_honest_error_is_found_and_nobody_else_blamed(tmp_path: Path) -> None:
    report = _strike(tmp_path, [10, GROSS], "gelu,linear,layer_norm")
    assert len(report) == 12
    assert _missed(report) == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_faults_are_found_and_nobody_else_blamed(tmp_path: Path, dtype: str, record_property: Any) -> None:
    assert len(CASES) >= 25
    report = _strike(tmp_path, [4, 10, 30, GROSS], "all", dtype)
    assert _missed([one for one in report if one["size"] >= 30]) == []
    coarse = {name for name in CASES if leeway(f"x.{name}", dtype, is_rounding=False) > 1}
    assert {one[0] for one in _missed([one for one in report if one["size"] == 10])} <= coarse
    small = [one for one in report if one["size"] == 4]
    assert not any({*one["failed"]} - {*one["struck"]} for one in small)
    share = sum({*one["struck"]} == {*one["failed"]} for one in small) / len(small)
    record_property("share found at 4x", share)
    print(f"{dtype}: {share:.0%} of faults of 4 times the honest error are found")
