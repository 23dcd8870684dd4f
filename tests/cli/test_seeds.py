# SPDX-License-Identifier: Apache-2.0
"""Seeds, devices and fresh memory through the real commands: equal runs are 0, other numbers are 1, and what cannot be compared is 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ulpscope.cli import cli

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

device, p = sys.argv[1], float(sys.argv[2])
if device == "npu":
    from ulpscope.testing import npu
    npu.install()
weight = torch.empty(16, 16)
nn.init.kaiming_uniform_(weight)
weight = nn.Parameter(weight.to(device))
optimizer = torch.optim.SGD([weight], lr=0.1)
if device == "npu":
    torch.manual_seed(77)  # from here on the device draws from a generator of its own
for step in range(2):
    x = torch.linspace(-1, 1, 64 * 16).reshape(64, 16).to(device)
    both = torch.empty(64, 32, device=device)
    both[:, :16].copy_(F.dropout(x, p) @ weight)
    both[:, 16:].copy_(x)
    loss = both.softmax(-1).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("seeds")
    (folder / "train.py").write_text(SCRIPT)
    wanted = {
        "one": ("1", "cpu", "0.2"),
        "again": ("1", "cpu", "0.2"),
        "other": ("2", "cpu", "0.2"),
        "plain": ("1", "cpu", "0"),
        "npu": ("1", "npu", "0.2"),
        "npu_plain": ("1", "npu", "0"),
    }
    for name, (seed, *arguments) in wanted.items():
        command = [sys.executable, "-m", "ulpscope", "run", "--into", name, "--keep", "tensors", "--seed", seed, "train.py", *arguments]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return {name: folder / name for name in wanted}


@pytest.mark.parametrize(
    ("subject", "reference", "code", "told"),
    [
        ("again", "one", 0, "no difference"),
        ("other", "one", 1, "other random numbers were drawn: kaiming_uniform_"),
        ("npu_plain", "plain", 0, ""),
        ("npu", "one", 2, "draw on the CPU"),
    ],
)
def test_exit_codes(runs: dict[str, Path], subject: str, reference: str, code: int, told: str) -> None:
    result = CliRunner().invoke(cli, ["compare", str(runs[subject]), str(runs[reference])])
    assert result.exit_code == code, result.output
    assert told in " ".join(result.output.split())
