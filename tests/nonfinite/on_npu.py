# SPDX-License-Identifier: Apache-2.0
"""Hunt on the emulated device: `on_npu.py FOLDER` prints the events, and how often the device was waited for, as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import ulpscope
from ulpscope.model import NonFinite
from ulpscope.testing import npu
from ulpscope.workflows.nonfinite import find_nonfinite

TO_THE_HOST = ("aten._local_scalar_dense.default", "aten._to_copy.default")
STEPS = 3
CASES: dict[str, tuple[str, str, dict[str, Any]] | None] = {
    "healthy": None,
    "gelu": ("aten.gelu.default", "inf", {"call": 1}),
    "addmm": ("aten.addmm.default", "nan", {"call": 2}),
    "gelu_backward": ("aten.gelu_backward.default", "nan", {"call": 1}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(folder: Path, fault: Any, calls: bool | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to("npu")
    optimizer = torch.optim.AdamW(model.parameters())
    waits: list[int] = []
    with ExitStack() as stack:
        counts = [stack.enter_context(npu.inject(op, "scale", call=10**9)) for op in TO_THE_HOST]
        capture = stack.enter_context(ulpscope.Capture(folder, model, watch=NonFinite(calls=calls)))
        for step in range(STEPS):
            if step == 2 and fault is not None:
                stack.enter_context(npu.inject(fault[0], fault[1], **fault[2]))
            optimizer.zero_grad()
            model(torch.randn(4, 8, device="npu")).square().mean().backward()
            optimizer.step()
            capture.step()
            waits.append(sum(count.num_calls for count in counts))
    report = find_nonfinite(folder)
    first = report.first
    found = None if first is None else {"headline": first.headline, "evidence": first.evidence, "step": first.step, "kind": first.kind}
    ledger = [f"{entry.what}: {entry.why}" for entry in ulpscope.open_run(folder).ledger(0)]
    return {"waits": waits, "first": found, "num_faults": len(report.faults), "ledger": ledger}


def again(folder: Path) -> dict[str, Any]:
    """Train with a kernel that fails twice, leaving out steps whose loss is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to("npu")
    optimizer = torch.optim.AdamW(model.parameters())
    with ulpscope.Capture(folder, model, watch="nonfinite") as capture:
        for step in range(8):
            with npu.inject("aten.gelu.default", "inf", call=1) if step in (2, 6) else ExitStack():
                loss = model(torch.randn(4, 8, device="npu")).square().mean()
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            capture.step()
    report = find_nonfinite(folder)
    ledger = [f"{entry.what}: {entry.why}" for entry in ulpscope.open_run(folder).ledger(0)]
    return {"headlines": [event.headline for event in report.faults], "evidence": report.faults[0].evidence, "ledger": ledger}


def main() -> None:
    warnings.simplefilter("error")
    npu.install()
    folder = Path(sys.argv[1])
    found = {
        f"{name}-{'calls' if calls else 'modules'}": train(folder / f"{name}-{calls}", fault, calls)
        for name, fault in CASES.items()
        for calls in (None, True)
    }
    print(json.dumps(found | {"again": again(folder / "again")}))


if __name__ == "__main__":
    main()
