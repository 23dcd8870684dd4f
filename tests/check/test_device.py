# SPDX-License-Identifier: Apache-2.0
"""Check a run on the device where it was recorded, if that device is here; the answer names the device, and says if it is not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check.command import invoke

RECORD = """
import sys
import torch
import torch.nn.functional as F
from ulpscope import Capture
from ulpscope.testing import npu
from ulpscope.workflows.check.checking import check_run

npu.install()
with npu.inject("aten.gelu.default", "scale", value=0.01):
    with Capture(sys.argv[1], keep="tensors") as capture:
        F.gelu(torch.randn(64, 64, device="npu").requires_grad_()).sum().backward()
        capture.step()
    check = check_run(sys.argv[1], isolated=False)
print(check.device, check.verdict, [call.call.short for call in check.failures])
print(check_run(sys.argv[1], isolated=False).failures[0].reason)
"""
HERE = "from ulpscope.testing import npu\nnpu.install()\n"


def test_the_device_of_the_recording_is_the_one_under_test(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = subprocess.run([sys.executable, "-c", RECORD, str(run)], capture_output=True, text=True, timeout=300, check=True)
    first, second = found.stdout.splitlines()[:2]
    assert first == "npu wrong ['gelu']"
    assert "what was recorded errs" in second
    gone = invoke(run, "--json", tmp_path / "gone.json")
    assert gone.exit_code == 1
    assert f"{run} on cpu, 1 of" in gone.stdout
    assert "recorded on npu, which is not here" in gone.stdout
    assert json.loads((tmp_path / "gone.json").read_text())["device"] == "cpu"


@pytest.mark.long
def test_a_module_that_registers_it_makes_it_here(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", RECORD, str(run)], capture_output=True, text=True, timeout=300, check=True)
    (tmp_path / "npu_is_here.py").write_text(HERE)
    words = [sys.executable, "-m", "ulpscope", "check", str(run), "--import", "npu_is_here"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert f"{run} on npu, 1 of" in found.stdout, found.stderr
