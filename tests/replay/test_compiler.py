# SPDX-License-Identifier: Apache-2.0
"""A process that runs calls again does not load torch's compiler. If this fails, checks start slowly and are right all the same."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import sys
import torch
from ulpscope.replay.calls.compiler import without_compiler

told = without_compiler()
found = torch._refs.softmax(torch.zeros(2), 0)
weights = []
for kind in (torch.optim.AdamW, torch.optim.SGD):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    kind([weight], lr=0.5).step()
    weights.append(round(weight[0].item(), 3))
print(told > 100, found.tolist(), weights, "torch._dynamo" in sys.modules)
import torch._dynamo
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item(), without_compiler())
"""


def test_references_and_optimizers_run_without_the_compiler_which_is_still_there_for_others() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines() == ["True [0.5, 0.5] [0.495, 0.5] False", "1.0 0"]
