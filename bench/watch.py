# SPDX-License-Identifier: Apache-2.0
"""Measure what leaving the non-finite hunt on costs: a training step with it over the bare step, in turns, in one process.

    python bench/watch.py                          GPT of gpt.py on the CPU
    python bench/watch.py --device cuda            24 layers, width 1024, batch 8 x 1024, bfloat16
    python bench/watch.py --peer-python ~/peer/bin/python     beside what mindstudio-probe needs to find the same (peer_watch.py)

Each round runs every variant for a few steps; a figure is the median over rounds of the round's fastest step over the bare one's. One step
in sixteen also takes the ranges of all results, which costs more; the figure that counts is the average over sixteen.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import gpt

PEER = Path(__file__).with_name("peer_watch.py")
ASKED = 1.10
RANGES = "  a step that takes ranges"
STEPS_BETWEEN_RANGES = 16


class _GPT(gpt.GPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _NoOp(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def build(device: str, dtype: torch.dtype, autocast: bool) -> tuple[Any, Any, Callable[[], None]]:
    torch.manual_seed(0)
    model = _GPT().to(device, torch.float32 if autocast else dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda" or None)
    batch = torch.randint(0, gpt.VOCABULARY, (gpt.BATCH, gpt.LENGTH + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=autocast):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, gpt.VOCABULARY), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def _watching(folder: Path, model: Any, **options: Any) -> Any:
    import ulpscope
    from ulpscope.model import NonFinite

    return ulpscope.Capture(folder / f"run{time.monotonic_ns()}", model, nonfinite=NonFinite(**options))


@contextlib.contextmanager
def _with(answer: Any, *functions: tuple[Any, str]) -> Iterator[None]:
    """Replace some functions with this answer for a while: the rest of the cost is that of the others."""
    saved = [owner.__dict__[name] for owner, name in functions]
    for owner, name in functions:
        setattr(owner, name, lambda *args, **kwargs: answer)
    try:
        yield
    finally:
        for (owner, name), function in zip(functions, saved, strict=True):
            setattr(owner, name, function)


def variants(folder: Path, model: Any, only: list[str]) -> dict[str, Callable[[], Any]]:
    from ulpscope.capture.nonfinite import hunt
    from ulpscope.capture.nonfinite.hunt_calls import CallHunt
    from ulpscope.capture.nonfinite.hunt_state import StateHunt

    def watch_with(answer: Any, *functions: tuple[Any, str]) -> Any:
        @contextlib.contextmanager
        def both() -> Iterator[Any]:
            with _with(answer, *functions), _watching(folder, model) as capture:
                yield capture

        return both()

    every = {
        "bare": contextlib.nullcontext,
        "nonfinite": lambda: _watching(folder, model),
        "  as above, modules only": lambda: _watching(folder, model, calls=False),
        "  as above, every call": lambda: _watching(folder, model, calls=True),
        RANGES: lambda: watch_with(True, (hunt, "takes_ranges")),
        "  seen, nothing added up": lambda: watch_with(True, (hunt.Hunt, "glance"), (hunt.Hunt, "are_finite")),
        "  without gradients' hooks": lambda: watch_with(None, (CallHunt, "_hook_nodes")),
        "  without optimizer": lambda: watch_with(None, (StateHunt, "_look_at_optimizer")),
        "no-op TorchFunctionMode": _NoOp,
        "torch detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    }
    return {name: make for name, make in every.items() if name == "bare" or not only or any(word in name for word in only)}


def measure(device: str, step: Callable[[], None], make: Callable[[], Any], steps: int, clock: Callable[[], float]) -> float:
    """Return the fastest of some steps; the first is left out."""
    seconds = []
    gc.collect()
    with make() as entered:
        for _ in range(steps + 1):
            begin = clock()
            step()
            if hasattr(entered, "step"):
                entered.step()
            seconds.append(clock() - begin)
    return min(seconds[1:])


def throughput(device: str, step: Callable[[], None], make: Callable[[], Any], steps: int, clock: Callable[[], float]) -> float:
    """Measure seconds a step without waiting for the device in between, as training runs."""
    with make() as entered:
        step()
        torch.cuda.synchronize()
        begin = clock()
        for _ in range(steps):
            step()
            if hasattr(entered, "step"):
                entered.step()
        torch.cuda.synchronize()
        return (clock() - begin) / steps


def peer_ratio(python: str, rounds: int) -> float | None:
    command = [python, str(PEER), "--as-peer", "watch", "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the peer failed: {done.stderr.splitlines()[-1:]}", file=sys.stderr)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["watched"] / found["bare"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under autocast instead of bfloat16 weights (cuda)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=None, help="timed steps of each variant in a round")
    parser.add_argument("--only", action="append", default=[], help="variants whose name has this word")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: for a machine that does other work too")
    parser.add_argument("--peer-python")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        gpt.LAYERS, gpt.WIDTH, gpt.HEADS, gpt.LENGTH = 24, 1024, 16, 1024
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model, _, step = build(options.device, dtype, options.autocast)
    time_of = throughput if options.device == "cuda" else measure
    clock = time.process_time if options.cpu_time else time.perf_counter
    steps = options.steps or (20 if options.device == "cuda" else 3)
    for _ in range(3):
        step()
    ratios: dict[str, list[float]] = {}
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        chosen = variants(Path(scratch), model, options.only)
        for _ in range(options.rounds):
            seconds = {name: time_of(options.device, step, make, steps, clock) for name, make in chosen.items()}
            bare.append(seconds["bare"])
            for name, value in seconds.items():
                ratios.setdefault(name, []).append(value / seconds["bare"])
    print(f"bare step {statistics.median(bare) * 1e3:.1f} ms on {options.device}, torch {torch.__version__}, {options.rounds} rounds")
    for name, found in ratios.items():
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{name:<32}{statistics.median(found):>8.3f}x   {spread}")
    if {RANGES, "nonfinite"} <= set(ratios) and options.device == "cpu":
        plain, ranged = (statistics.median(ratios[name]) for name in ("nonfinite", RANGES))
        average = plain + (ranged - plain) / STEPS_BETWEEN_RANGES
        print(f"{'nonfinite, of 16 steps':<32}{average:>8.3f}x   asked at most {ASKED}")
    if options.peer_python:
        ratio = peer_ratio(options.peer_python, options.rounds)
        print(f"{'peer: dump for overflow_check':<32}{ratio if ratio is None else f'{ratio:>8.3f}x'}")
    if options.json:
        options.json.write_text(json.dumps({"bare_s": statistics.median(bare), "ratios": ratios}))


if __name__ == "__main__":
    main()
