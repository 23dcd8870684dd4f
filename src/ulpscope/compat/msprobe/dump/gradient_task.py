# SPDX-License-Identifier: Apache-2.0
"""Run the task grad_probe: write the gradients of a model as its optimizer is about to use them, in the files of the old probe.

A step is a call of an optimizer that has a parameter of the model, counted from 0; `main_grad` takes precedence over `grad`, as in
Megatron.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.dump.tasks import process_rank
from ulpscope.errors import InputError
from ulpscope.report.escaping import visible
from ulpscope.report.health.grad_probe import GradLevel, gradient_row, write_mask, write_summary

if TYPE_CHECKING:
    import torch

__all__ = ["GradientTask"]


class GradientTask:
    """One running probe; implements Task. It begins when it is made, and ignores start and stop."""

    def __init__(self, config: DebuggerConfig, model: Any) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if not isinstance(model, torch.nn.Module):
            raise InputError(f"the task grad_probe wants debugger.monitor(model) with a torch.nn.Module, not a {type(model).__name__}")
        self._model = model
        self._steps = frozenset(config.step)
        self._ranks = frozenset(config.rank)
        self._names = config.options.param_list
        self._level: GradLevel = config.options.grad_level  # type: ignore[assignment]
        self._bounds = config.options.bounds
        self._folder = Path(config.dump_path)
        self._count = 0
        self._has_failed = False
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def resume(self) -> None:
        """Do nothing: gradients are taken at optimizer steps alone."""

    def pause(self) -> None:
        """Do nothing: gradients are taken at optimizer steps alone."""

    def next_step(self, iteration: int) -> None:
        """Do nothing: steps are those of the optimizer."""

    def stop(self) -> None:
        self._handle.remove()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._is_ours(optimizer):
                self._count += 1
                self._take(self._count - 1)
        except Exception as error:  # a failing probe must not end a training
            if not self._has_failed:
                print(visible(f"msprobe: could not take gradients: {error}"), file=sys.stderr)
            self._has_failed = True

    def _is_ours(self, optimizer: Any) -> bool:
        own = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _take(self, step: int) -> None:
        rank = process_rank()
        if (self._steps and step not in self._steps) or (self._ranks and rank not in self._ranks):
            return
        rows = []
        for name, parameter in self._model.named_parameters():
            gradient = _gradient(parameter) if not self._names or name in self._names else None
            if gradient is not None:
                rows.append(gradient_row(name, gradient, self._level, self._bounds))
                if self._level != "L0":
                    write_mask(self._folder, rank, step, name, gradient)
        write_summary(self._folder, rank, step, rows, self._level, self._bounds)


def _gradient(parameter: torch.Tensor) -> Any:
    """Return the gradient as an array of float32; None where there is none."""
    import torch

    from ulpscope.capture.health.cohorts import local_part
    from ulpscope.capture.torch_internals import blind

    found = getattr(parameter, "main_grad", None)
    gradient = found if isinstance(found, torch.Tensor) else parameter.grad
    if gradient is None:
        return None
    with blind():
        return local_part(gradient).detach().to("cpu", torch.float32).contiguous().numpy()
