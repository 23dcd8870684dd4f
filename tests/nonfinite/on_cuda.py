# SPDX-License-Identifier: Apache-2.0
"""Hunt on a CUDA device: `python tests/nonfinite/on_cuda.py FOLDER`. It ends with code 1 if anything is wrong.

No test runs it, since the machines that run the tests have no such device. It tries the faulty and the harmless programs call by call,
checks that training a model under the hunt never makes the host wait, and that every program of tests/harmless gives the same bits as
without it.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import torch.nn.functional as F
from torch import nn

import ulpscope
from tests.harmless import programs as harmless
from tests.nonfinite.programs import FAULTY, HARMLESS, Expected
from ulpscope.model import NonFinite, NonFiniteReport
from ulpscope.workflows.nonfinite import find_nonfinite

# Results of a device's own kernels that differ: no fault of the hunt.
DIFFERENT_THERE = {"every_target_ignored"}


@contextmanager
def on_the_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device("cpu")


def watched(program: Callable[..., None], folder: Path, **options: Any) -> NonFiniteReport:
    torch.manual_seed(0)
    with on_the_device():
        program(lambda model=None, optimizer=None: ulpscope.Capture(folder, model, optimizer=optimizer, watch=NonFinite(**options)))
    return find_nonfinite(folder)


def wrong_with(report: NonFiniteReport, expected: Expected | None, folder: Path) -> str:
    first = report.first
    ledger = [f"{entry.what}: {entry.why}" for entry in ulpscope.open_run(folder).ledger(0) if "GradScaler" not in entry.why]
    if ledger:
        return f"the ledger says {ledger}"
    if expected is None or first is None:
        return "" if (expected is None) == (first is None) else f"found {first.headline if first else 'nothing'}"
    op = first.call.rpartition(".")[0].rpartition(".")[2]
    is_right = first.kind == expected.kind and expected.op in ("", op) and expected.phase in ("", first.phase)
    return "" if is_right else f"found {first.headline}"


def check_programs(folder: Path) -> list[str]:
    wrong = []
    cases: dict[str, tuple[Any, Expected | None]] = {**FAULTY, **{name: (program, None) for name, program in HARMLESS.items()}}
    for name, (program, expected) in cases.items():
        place = folder / name
        try:
            problem = wrong_with(watched(program, place, calls=True), expected, place)
        except Exception:
            problem = traceback.format_exc()
        if problem and name not in DIFFERENT_THERE:
            wrong.append(f"{name}: {problem}")
        elif problem:
            print(f"{name}: {problem} (known to differ)")
    print(f"{len(cases)} programs, {len(wrong)} wrong")
    return wrong


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def check_waiting(folder: Path, calls: bool | None) -> list[str]:
    """Raise an error if anything makes the host wait for the device while the healthy steps run."""
    model = nn.Sequential(*(Block() for _ in range(12))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(8, 32, 64, device="cuda", dtype=torch.bfloat16)
    path = folder / f"waiting-{calls}"
    try:
        with ulpscope.Capture(path, model, watch=NonFinite(calls=calls)) as capture:
            for step in range(6):
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
                optimizer.zero_grad()
                model(data).float().square().mean().backward()
                optimizer.step()
                capture.step()
            torch.cuda.set_sync_debug_mode("default")
            with torch.no_grad():
                model[5].up.weight.fill_(1e38)
            for _ in range(2):
                optimizer.zero_grad()
                model(data).float().square().mean().backward()
                optimizer.step()
                capture.step()
    except Exception:
        return [traceback.format_exc()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ledger = [f"{entry.what}: {entry.why}" for entry in ulpscope.open_run(path).ledger(0)]
    first = find_nonfinite(path).first
    print(f"calls={calls}: {first.headline if first else 'nothing found'}")
    is_named = first is not None and first.module == "5.up" and first.step == 6
    return [*ledger, *([] if is_named else [f"calls={calls}: the overflow in 5.up at step 6 was not named"])]


def check_harmless(folder: Path) -> list[str]:
    from tests.harmless.test_harmless import watching

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward is not deterministic
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    wrong: list[str] = []
    num_cases = 0
    for name in sorted(harmless.PROGRAMS):
        without = harmless.run(name, harmless.Nothing, "cuda")
        if harmless.differences(without, harmless.run(name, harmless.Nothing, "cuda")):
            print(f"{name}: two answers without a watch, left out")
            continue
        for calls in (None, True):
            num_cases += 1
            try:
                found = list(harmless.differences(without, harmless.run(name, watching(folder / f"{name}-{calls}", calls), "cuda")))
            except Exception:
                found = [traceback.format_exc()]
            wrong += [f"{name}, calls={calls}: {text}" for text in found]
    print(f"{num_cases} cases of harmlessness, {len(wrong)} differences")
    return wrong


def main() -> int:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    wrong = check_programs(folder / "programs")
    for calls in (None, True):
        wrong += check_waiting(folder, calls)
    wrong += check_harmless(folder / "harmless")
    print(f"on {torch.cuda.get_device_name()} with torch {torch.__version__}: {len(wrong)} problems", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
