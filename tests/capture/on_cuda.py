# SPDX-License-Identifier: Apache-2.0
"""Compare summaries by a CUDA device with the host's: `python tests/capture/on_cuda.py FOLDER [DTYPE or PROGRAM ...]`.

No test runs it, since the machines that run the tests have no such device. Every dtype and layout has to give the same bits, and every
program of `tests/harmless` the same records, whether the device reads its tensors some calls later or the host at once. It ends with code 1
if anything differs.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import ulpscope
from tests.capture import tensor_cases
from tests.harmless import programs
from tests.harmless.test_harmless import recording
from ulpscope.capture.device.queue import Devices
from ulpscope.capture.device.summaries import CudaSummaries
from ulpscope.capture.device.values import LOST
from ulpscope.capture.record import recorder
from ulpscope.capture.record.tensor_reader import TensorReader
from ulpscope.model import Slot

CASES = [("api", "statistics"), ("module", "statistics"), ("both", "fingerprint"), ("op", "statistics")]


def main() -> int:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward is not deterministic
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or [*tensor_cases.DTYPE_NAMES, *sorted(programs.PROGRAMS)]
    wrong = kernels([name for name in names if name in tensor_cases.DTYPE_NAMES])
    print(*wrong, sep="\n", flush=True)
    num_cases = num_lost = 0
    for name in names:
        for level, keep in CASES if name in programs.PROGRAMS else ():
            num_cases += 1
            found, lost = program(name, level, keep, folder / f"{name}-{level}")
            num_lost += lost
            wrong += found
            print(f"{name}, level {level}: {'different' if found else 'the same'}", file=sys.stderr, flush=True)
            for text in found:
                print(f"{name}, level {level}, keep {keep}: {text}", flush=True)
    print(f"{num_cases} programs, {num_lost} tensors lost, {len(wrong)} differences")
    return 1 if wrong else 0


def kernels(names: list[str]) -> list[str]:
    """Compare every layout of these dtypes."""
    tensors = [(name, layout, tensor_cases.block(name)) for name in names for layout in tensor_cases.LAYOUTS]
    moved = [(f"{name} {layout}", tensor_cases.LAYOUTS[layout](block.cuda())) for name, layout, block in tensors]
    moved += [("special", tensor.cuda()) for tensor in tensor_cases.special() if str(tensor.dtype).removeprefix("torch.") in names]
    moved += [("large", torch.randn(3000, 32_000, device="cuda").bfloat16()), ("large", torch.randn(1000, 32_001, device="cuda").t())]
    heads = torch.randn(4, 256, 3072, device="cuda").bfloat16()
    moved += [("heads", part.view(4, 256, 16, 64).transpose(1, 2)) for part in heads.chunk(3, dim=-1)] + [
        ("part", heads.chunk(3, dim=-1)[1])
    ]
    complaints: list[str] = []
    devices = Devices(statistics=True, complain=lambda what, why: complaints.append(f"{what}: {why}"))
    reader = TensorReader("statistics", lambda *_: None, devices)
    taken = [(name, tensor, reader.take(Slot("input", (0,)), tensor)) for name, tensor in moved]
    devices.send()
    devices.collect(wait=True)
    assert all(isinstance(device, CudaSummaries) for device in devices._devices.values()), complaints
    print(f"{len(taken)} tensors on {torch.cuda.get_device_name()} with torch {torch.__version__}")
    return complaints + [
        f"{name}: {text}"
        for name, tensor, one in taken
        for text in tensor_cases.wrong(tensor, one.values.summary_object(), one.values.fingerprint)
    ]


def program(name: str, level: str, keep: str, folder: Path) -> tuple[list[str], int]:
    """Tell how the records of a program differ between device and host, and how many values were lost."""
    try:
        programs.run(name, programs.Nothing, "cuda")  # what torch makes when a thing is used for the first time is seen too
        programs.run(name, recording(folder / "device", level, keep), "cuda")
        recorder.Devices = functools.partial(Devices, make=lambda *_, **__: None)  # type: ignore[assignment, misc]
        try:
            programs.run(name, recording(folder / "host", level, keep), "cuda")
            again = folder / "again"
            programs.run(name, recording(again, level, keep), "cuda")
        finally:
            recorder.Devices = Devices  # type: ignore[misc]
    except Exception:
        return [traceback.format_exc()], 0
    device, host, repeated = (_prints(folder / which) for which in ("device", "host", "again"))
    if list(device) != list(host):
        return [f"{len(device)} values on the device, {len(host)} on the host, first {set(device) ^ set(host)}"[:300]], 0
    lost = [key for key, (_, note, _) in device.items() if note == LOST]
    wrong = [key for key, value in device.items() if value != host[key] and host[key] == repeated.get(key) and key not in lost]
    return [f"{key}: {device[key]}, on the host {host[key]}" for key in wrong[:3]] + [f"lost {key}" for key in lost[:3]], len(lost)


def _prints(folder: Path) -> dict[Any, Any]:
    found = {}
    for path in sorted(folder.glob("run*")):
        run = ulpscope.open_run(path)
        for entry in run.ledger(0):
            found[path.name, "ledger", entry.what] = (entry.why, "", None)
        for step in run.steps(0):
            for record in run.records(0, step):
                for slot in record.slots:
                    counts = slot.summary and (slot.summary.min, slot.summary.max, slot.summary.num_zero)
                    found[path.name, step, record.order, str(record.call), record.phase, str(slot.slot)] = (
                        slot.fingerprint,
                        slot.note,
                        counts,
                    )
    return found


if __name__ == "__main__":
    sys.exit(main())
