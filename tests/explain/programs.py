# SPDX-License-Identifier: Apache-2.0
"""Small torch programs that are recorded for real, with faults that are switched on by a word, and the views of their comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ulpscope.capture import CaptureSession
from ulpscope.explain.contributions import with_contributions
from ulpscope.explain.views import StepView, first_divergence
from ulpscope.model import Comparison, RunInfo
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.comparing import compare_runs

WIDTH, WORDS = 8, 12


class Block(nn.Module):
    """Attention-like mixing through a buffer, then a small perceptron."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if "dropout" in mode else 0.0)
        self.mode, self.kept, self.num_calls = mode, torch.zeros(0), 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.mix(self.norm(x)))
        if "buffered" in self.mode:
            if "stale" not in self.mode or self.num_calls == 0:
                self.kept = y.detach() * 0.5
            self.num_calls += 1
            y = y + self.kept
        if "detached" in self.mode:
            y = y.detach()
        y = self.drop(y)
        with torch.no_grad() if "no_grad" in self.mode else contextlib.nullcontext():
            y = self.out(y)
        return x + y


class Net(nn.Module):
    """The words of `mode` reach the second block only, unless they begin with an asterisk."""

    def __init__(self, mode: str = "") -> None:
        super().__init__()
        everywhere = " ".join(word[1:] for word in mode.split() if word.startswith("*"))
        self.embed, self.first, self.second = nn.Embedding(WORDS, WIDTH), Block(everywhere), Block(f"{everywhere} {mode}")
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if "tied" in mode.split():
            self.head.weight = self.embed.weight
        if "copied" in mode:
            self.head.weight = nn.Parameter(self.embed.weight.detach().clone())
        if "frozen" in mode:
            self.second.mix.weight.requires_grad_(False)
        self.mode = mode

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        x = (
            checkpoint(self.second, x, use_reentrant=False, preserve_rng_state="forgetful" not in self.mode)
            if "checkpoint" in self.mode
            else self.second(x)
        )
        return self.head(x)


def train(
    done: Callable[[], None],
    mode: str = "",
    *,
    steps: int = 3,
    seed: int = 0,
    data: int = 0,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    before_optimizer: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> None:
    torch.manual_seed(0)
    model = Net(mode).to(dtype)
    model.train("evaluating" not in mode)
    stepper = optimizer(model)
    batches = torch.randint(0, WORDS, (steps, accumulate, 4, 7), generator=torch.Generator().manual_seed(data))
    torch.manual_seed(seed)
    for step in range(steps):
        for ids in batches[step]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            if "balanced" in mode:
                share = logits.softmax(-1).mean((0, 1))
                balance = torch.ones_like(share).mean() if "constant" in mode else share.square().sum() * WORDS
                loss = loss + 0.1 * balance
            if accumulate > 1 and "undivided" not in mode:
                loss = loss / accumulate
            loss.backward()
        before_optimizer(model, step)
        stepper.step()
        stepper.zero_grad()
        done()


def recorded(
    mode: str = "", *, keep: Any = "tensors", level: Any = "api", program: Callable[..., None] = train, **options: Any
) -> MemoryRun:
    run = MemoryRun(RunInfo(seed=options.get("seed")))
    session = CaptureSession(run.sink(), keep=keep, level=level)
    session.start()
    try:
        program(session.step, mode, **options)
    finally:
        session.stop()
    return run


def compared(subject: str | dict[str, Any], reference: str | dict[str, Any], **common: Any) -> Comparison:
    """Two recordings by their modes, or by their options with the mode among them."""
    sides = [side if isinstance(side, dict) else {"mode": side} for side in (subject, reference)]
    subject_run, reference_run = (recorded(**{**common, **side}) for side in sides)
    return compare_runs(subject_run, reference_run, replay="none")


def views_of(comparison: Comparison) -> list[StepView]:
    """What explanations are asked with: one view for each step and rank."""
    parts: dict[tuple[int, int], list[Any]] = {}
    for call in comparison.calls:
        parts.setdefault((call.pair.record.step, call.pair.record.rank), []).append(call)
    views: list[StepView] = []
    for step, rank in sorted(parts):
        calls = with_contributions(parts[step, rank])
        previous = next((view for view in reversed(views) if view.rank == rank), None)
        views.append(
            StepView(
                rank=rank,
                step=step,
                calls=calls,
                subject=comparison.subject,
                reference=comparison.reference,
                divergence=first_divergence(calls),
                previous=previous,
            )
        )
    return views
