# SPDX-License-Identifier: Apache-2.0
"""Measure what recording health adds to a training step, and print one table of ratios.

    python bench/health.py [--device cuda] [--peer-python PATH] [--quick]

On CUDA the model is a GPT of 24 layers, width 1024, batch 8 x 1024, bfloat16 (405 million parameters in 294 tensors); on the CPU that of
gpt.py. Each way of recording takes its turns between bare turns of the same process, and a step is the time of a whole turn over its steps,
with one wait for the device at its end, as training does it; in `waiting every step` the loss is read after each step. Noise only ever
adds, so the best turn counts. The peer is the monitor of mindstudio-probe 26.2.0 with gradients, parameters and moments, in an environment
of its own, whose Python is PATH; it is measured against bare turns there. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    dtype: torch.dtype


LARGE = Size(24, 1024, 16, 50304, 8, 1024, torch.bfloat16)
SMALL = Size(4, 256, 8, 1000, 8, 128, torch.float32)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A model, its optimizer, and steps on one batch."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(size).to(device, size.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.batch = torch.randint(0, size.vocabulary, (size.batch, size.length + 1), device=device)
        self.device = device

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        logits = self.model(self.batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def turn(self, steps: int, after: Callable[[Tensor], Any], before: Callable[[], Any] = lambda: None) -> float:
        """Return the seconds of a step, over so many."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            before()
            after(self.step())
        self.wait()
        return (time.perf_counter() - begin) / steps

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


Opening = Callable[[Training, Path], AbstractContextManager[Any]]


def watched(**wishes: Any) -> Opening:
    def opening(training: Training, into: Path) -> AbstractContextManager[Any]:
        from ulpscope.workflows.health_recording import record_health

        return record_health(training.model, training.optimizer, into=into, quiet=True, **wishes)

    return opening


def nothing(training: Training, into: Path) -> AbstractContextManager[Any]:
    return nullcontext()


def peer(training: Training, into: Path) -> AbstractContextManager[Any]:
    """Attach the peer's monitor for good; nothing detaches it."""
    from msprobe.pytorch import TrainerMon

    into.mkdir(parents=True)
    os.environ["MONITOR_OUTPUT_DIR"] = str(into / "out")
    config = {
        "targets": {},
        "wg_distribution": True,
        "mv_distribution": True,
        "param_distribution": True,
        "format": "csv",
        "ops": ["min", "max", "mean", "norm", "zeros", "nans"],
        "step_interval": 1,
    }
    file = into / "config.json"
    file.write_text(json.dumps(config))
    monitor = TrainerMon(str(file), params_have_main_grad=False)
    monitor.set_monitor(training.model, training.optimizer, grad_acc_steps=1)
    return nullcontext()


OURS: dict[str, tuple[Opening, bool]] = {
    "gradients": (watched(kinds=("gradient",)), False),
    "all, the default": (watched(), False),
    "all, waiting every step": (watched(), True),
    "all, every 10th step": (watched(every=10), False),
    "all, histograms of 4 intervals": (watched(bounds=(-1e-3, 0.0, 1e-3)), False),
    "all, exact updates": (watched(exact_updates=True), False),
}


def measure(training: Training, ways: dict[str, tuple[Opening, bool]], *, rounds: int, steps: int, scratch: Path) -> dict[str, float]:
    """Measure the best step of each way, and of the bare training with and without waiting."""
    best: dict[str, float] = {}
    turns: dict[str, tuple[Opening, bool]] = {"bare": (nothing, False), "bare, waiting every step": (nothing, True), **ways}
    training.turn(3, lambda loss: None)
    for number in range(rounds):
        for name, (opening, is_waiting) in turns.items():
            with opening(training, scratch / f"{number}-{len(best)}-{len(name)}-{hash(name) % 997}"):
                training.turn(3, lambda loss: None)  # the first steps compile kernels and make tables
                seconds = training.turn(steps, Tensor.item if is_waiting else lambda loss: None)
            best[name] = min(best.get(name, seconds), seconds)
    return best


def print_table(best: dict[str, float], title: str, asked: str = "") -> None:
    print(f"\n{title}\n\n| what | ms a step | over bare |{' asked |' if asked else ''}\n|---|---|---|{'---|' if asked else ''}")
    for name, seconds in best.items():
        bare = best["bare, waiting every step" if name.endswith("waiting every step") else "bare"]
        cell = f" {asked if 'default' in name else ''} |" if asked else ""
        print(f"| {name} | {1000 * seconds:.2f} | {seconds / bare:.4f} |{cell}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peer-python", metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="shows that it works, not how fast it is")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds, steps = (1, 4) if options.quick else (3, 30 if options.device == "cuda" else 10)
    training = Training(LARGE if options.device == "cuda" else SMALL, options.device)
    scratch = Path(tempfile.mkdtemp(prefix="ulpscope-bench-"))
    try:
        if options.as_peer:
            best = measure(training, {}, rounds=rounds, steps=steps, scratch=scratch)
            peer(training, scratch / "peer")
            training.turn(3, lambda loss: None)
            best["peer's monitor"] = min(training.turn(steps, lambda loss: None) for _ in range(rounds))
            print(json.dumps(best))
            return
        print(f"{torch.__version__}, {options.device}, {sum(p.numel() for p in training.model.parameters()) / 1e6:.0f} million parameters")
        print_table(
            measure(training, OURS, rounds=rounds, steps=steps, scratch=scratch), "recording health", asked="at most 1.05 on the H200"
        )
        from ulpscope.capture.health import readings_triton as statistics_triton

        if statistics_triton.failure:
            print(f"\nthe Triton kernels were not used: {statistics_triton.failure}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.peer_python:
        command = [options.peer_python, __file__, "--as-peer", "--device", options.device, *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            print_table(json.loads(done.stdout.strip().splitlines()[-1]), "mindstudio-probe's monitor, in its own environment")
        except (IndexError, ValueError):
            print(f"\nthe peer did not run: {(done.stderr.strip() or done.stdout.strip() or 'it said nothing').splitlines()[-1][:200]}")


if __name__ == "__main__":
    sys.exit(main())
