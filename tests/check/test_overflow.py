# SPDX-License-Identifier: Apache-2.0
"""Clean inputs, results that are not finite: normal in that dtype, abnormal, or not seen again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.check.command import invoke
from ulpscope import Capture, InputError
from ulpscope.report.check.console import verdict_line
from ulpscope.workflows.check.checking import check_run


def _record(into: Path, keep: str = "tensors") -> Path:
    """Record float16 that overflows where it must, forward and backward, a log of a negative number, and results that stay finite."""
    with Capture(into, keep=keep) as capture:  # type: ignore[arg-type]
        torch.exp(torch.full((8,), 12.0, dtype=torch.float16))
        torch.log(torch.tensor([-1.0, 2.0]))
        torch.exp(torch.ones(8, dtype=torch.float16))
        leaf = torch.full((4,), 300.0, dtype=torch.float16).requires_grad_()
        leaf.pow(1.5).backward(torch.full((4,), 60000.0, dtype=torch.float16))
        torch.exp(torch.full((8,), float("inf")))
        capture.step()
    return into


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_an_overflow_that_the_dtype_demands_is_normal(tmp_path: Path, keep: str) -> None:
    check = check_run(_record(tmp_path / "run", keep), overflow=True, isolated=False)
    found = {f"{call.call}.{call.phase}": call.overflow for call in check.calls}
    assert found == {"torch.exp.0.forward": "normal", "torch.log.0.forward": "normal", "Tensor.pow.0.backward": "normal"}
    assert check.counts["failed"] == 0


def test_a_run_without_overflow_is_sound(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", keep="tensors") as capture:
        torch.exp(torch.ones(3))
        capture.step()
    check = check_run(tmp_path / "run", overflow=True, isolated=False)
    assert not check.calls
    assert verdict_line(check).endswith("no call made inf or NaN from clean inputs")
    result = invoke(tmp_path / "run", "--overflow", "--resume")
    assert (result.exit_code, result.stdout.startswith("sound: ")) == (0, True)
    assert "the check begins anew" in result.stderr
    with pytest.raises(InputError, match="nothing to check"):
        check_run(tmp_path / "run", overflow=True, isolated=False, select="*conv*")


_ON_DEVICE = """
import json, sys, torch
from pathlib import Path
from ulpscope import Capture
from ulpscope.testing import npu
from ulpscope.workflows.check.checking import check_run

npu.install()
path = Path(sys.argv[1])
leaf = torch.randn(16, device="npu").requires_grad_()
with npu.inject("aten.exp.default", "inf"), npu.inject("aten.tanh_backward.default", "nan", phase="backward"):
    with Capture(path, keep="tensors") as capture:
        torch.exp(leaf)
        torch.tanh(leaf).sum().backward()
        capture.step()
    wrong = check_run(path, overflow=True, device="npu", isolated=False)
    after = check_run(path, overflow=True, device="cpu", isolated=False)
gone = check_run(path, overflow=True, device="npu", isolated=False)
print(json.dumps([{f"{call.call}.{call.phase}": [call.overflow, call.status] for call in one.calls} for one in (wrong, after, gone)]))
"""


def test_a_device_that_overflows_alone_is_abnormal(tmp_path: Path) -> None:
    """Forward and backward, on the device and after the fact on the CPU; a device that was mended does not do it again."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_DEVICE, str(tmp_path / "run")], capture_output=True, text=True, timeout=300, check=True
    )
    wrong, after, gone = json.loads(done.stdout.splitlines()[-1])
    expected = {"torch.exp.0.forward", "torch.tanh.0.backward"}
    assert wrong == after == {name: ["abnormal", "failed"] for name in expected}
    assert gone == {name: ["not reproduced", "warning"] for name in expected}
