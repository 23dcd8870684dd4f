# SPDX-License-Identifier: Apache-2.0
"""The program of docs/mindspore.md runs as it stands, and leaves a run of three steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ulpscope.store import open_run

PAGE = Path(__file__).parents[2] / "docs" / "mindspore.md"


def test_the_quickstart_records_three_steps(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=120, capture_output=True)
    run = open_run(tmp_path / "runs" / "ms")
    assert run.steps(0) == (0, 1, 2)
    assert [run.is_complete(0, step) for step in run.steps(0)] == [True, True, True]
    calls = [(record.phase, record.call.op) for record in run.records(0, 0)]
    assert calls == [
        ("start", "state.parameters"),
        ("start", "state.batch"),
        *[("forward", f"functional.{name}") for name in ("linear", "relu", "linear", "cross_entropy")],
        *[("backward", f"functional.{name}") for name in ("cross_entropy", "linear", "relu", "linear")],
    ]
    assert run.ledger(0) == ()
