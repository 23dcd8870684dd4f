# SPDX-License-Identifier: Apache-2.0
"""The emulated device, in processes of its own; the checks themselves are in on_npu.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.on_npu import CHECKS
from ulpscope.errors import InputError
from ulpscope.testing.faults import parse_injections


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    done = run_python(str(Path(__file__).with_name("on_npu.py")))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_on_the_emulated_device(check: str, failures: dict[str, str | None]) -> None:
    assert failures[check] is None, failures[check]


SCRIPT = """
import torch
from ulpscope.testing import npu
npu.install()
x = torch.full((2, 2), 1.0 + 2.0**-12, device="npu")
print(torch.nn.functional.gelu(x).isnan().sum().item(), (x @ x)[0, 0].item())
"""


def test_the_environment_sets_faults_and_arithmetic() -> None:
    assert run_python("-c", SCRIPT).stdout == f"0 {2 + 2**-10}\n"
    broken = run_python("-c", SCRIPT, ULPSCOPE_NPU_FAULTS="aten.gelu.default nan call=0 phase=forward;", ULPSCOPE_NPU_ARITHMETIC="reduced")
    assert broken.stdout == "1 2.0\n", broken.stderr


def test_importing_installs_nothing() -> None:
    done = run_python("-c", "import torch, ulpscope.testing.npu as npu; print(hasattr(torch, 'npu'), npu.is_installed())")
    assert done.stdout == "False False\n", done.stderr


def test_a_device_that_is_taken_is_left_alone() -> None:
    code = "import torch; torch.utils.rename_privateuse1_backend('mine'); from ulpscope.testing import npu; npu.install()"
    assert "to 'mine' already" in run_python("-c", code).stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("aten.gelu.default", "OPERATION FAULT"),
        ("aten.gelu.default melt", "there are scale"),
        ("aten.nothing.default nan", "no operation is called 'aten.nothing.default'"),
        ("aten.gelu.default nan when=1", "'when'"),
        ("aten.gelu.default nan phase=sideways", "'sideways'"),
        ("aten.gelu.default nan call=first", "not a number"),
        ("aten.gelu.default scale=much", "not a number"),
    ],
)
def test_a_bad_injection_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse_injections(text)
    assert "\n" not in str(caught.value)


def test_injections_are_read_from_text() -> None:
    first, second = parse_injections(" aten.gelu.default scale=0.5 call=3 ; aten.mm.default nan phase=backward;")
    assert (str(first.op), first.call, first.phase) == ("aten.gelu.default", 3, None)
    assert (str(second.op), second.call, second.phase) == ("aten.mm.default", None, "backward")
