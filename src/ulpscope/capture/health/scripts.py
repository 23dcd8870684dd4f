# SPDX-License-Identifier: Apache-2.0
"""Watch a script that was not written for it: models, losses, clipping and loss scaling are found as they happen.

Torch's global hooks report the optimizers. Four things are replaced while the script runs, and put back afterwards: `nn.Module.__call__`
(which model runs; a global hook would make torch.compile warn), the entry into the autograd engine (the scalar it starts from is the loss),
`GradScaler.step` (a step that it leaves out reaches no optimizer) and the two functions that clip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ulpscope.capture.health.monitor import HealthSession
from ulpscope.capture.intercept.modules import ByModule, has_parameters, modules_in
from ulpscope.capture.intercept.patching import Patches
from ulpscope.capture.torch_internals import graph_task

__all__ = ["ScriptHealth"]


class _HealthPatches(Patches):
    """Patches for the clipping functions, which only the health session needs."""

    def clipping(self, before: Callable[[Any], None]) -> None:
        """Call `before(parameters)` in front of every clipping of gradients."""
        for function in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            self.stand_in(function, lambda original: _clipping(original, before))


def _clipping(original: Callable[..., Any], before: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(parameters, (torch.Tensor, list, tuple)):
            parameters = list(parameters)  # an iterator can be walked once only
        before([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        return original(parameters, *args, **kwargs)

    return clip


class ScriptHealth:
    """A context in which a session sees a whole script."""

    def __init__(self, session: HealthSession) -> None:
        self._session = session
        self._patches = _HealthPatches()
        self._seen: ByModule[bool] = ByModule()

    def __enter__(self) -> ScriptHealth:
        self._patches.module_calls(self._around_module)
        self._patches.backward_passes(self._around_backward)
        self._patches.scaler_steps(self._around_scaler)
        self._patches.clipping(self._session.before_clip)
        self._session.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._patches.undo()
        self._session.stop()

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adopt a module that runs and belongs to none that ran before: it is a model."""
        if module not in self._seen:
            for _, each in modules_in(module):
                self._seen[each] = True
            if has_parameters(module):
                self._session.adopt(module)
        return original(module, *args, **kwargs)

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if graph_task() == -1 and kwargs.get("accumulate_grad") and args:
            roots = args[0] if isinstance(args[0], (tuple, list)) else (args[0],)
            if len(roots) == 1 and isinstance(roots[0], torch.Tensor) and roots[0].numel() == 1:
                self._session.log({"loss": roots[0]})
        return original(*args, **kwargs)

    def _around_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._session.scaler = scaler
        self._session.unscale_loss(scaler)
        before = self._session.num_optimizer_steps
        result = original(scaler, optimizer, *args, **kwargs)
        if self._session.num_optimizer_steps == before:
            self._session.skip(optimizer)
        return result
