# SPDX-License-Identifier: Apache-2.0
"""Dump as api_accuracy_checker did: one iteration of the training, switched by the DataLoader or by hand.

Importing `api_accuracy_checker.dump` calls `follow_training`, since the old tool promised that this import alone is enough. Nothing else
changes until the iteration asked for begins.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ulpscope.capture.intercept.patching import Patches
from ulpscope.compat.checker.checker_config import msCheckerConfig
from ulpscope.compat.checker.checker_files import CheckerSink

if TYPE_CHECKING:
    from ulpscope.workflows.record.capturing import Capture

__all__ = ["follow_training", "set_dump_switch", "stop_following"]


class _Dumping:
    """The state that the old functions share in a process."""

    def __init__(self) -> None:
        self.iteration = -1
        self.capture: Capture | None = None
        self.patches: Patches | None = None


_dumping = _Dumping()


def follow_training() -> None:
    """Count the batches of every DataLoader from here on and dump the iteration asked for."""
    if _dumping.patches is None:
        _dumping.patches = Patches()
        _dumping.patches.batches(_around_batch)
        atexit.register(stop_following)


def stop_following() -> None:
    """End the dump and put torch back."""
    set_dump_switch("OFF")
    if _dumping.patches is not None:
        _dumping.patches.undo()
        _dumping.patches = None
    _dumping.iteration = -1


def set_dump_switch(switch: str) -> None:
    """Begin ("ON") or end ("OFF") the dump by hand.

    >>> import api_accuracy_checker.dump as DP  # doctest: +SKIP
    >>> DP.dump.set_dump_switch("ON")  # doctest: +SKIP
    """
    if switch not in ("ON", "OFF"):
        raise ValueError(f'set_dump_switch wants "ON" or "OFF", not {switch!r}')
    if switch == "OFF":
        if _dumping.capture is not None:
            _dumping.capture.stop()
            _dumping.capture = None
        return
    if _dumping.capture is None:
        _dumping.capture = _new_capture()
        _dumping.capture.start()


def _new_capture() -> Capture:
    from ulpscope.workflows.record.capturing import Capture

    folder, real_data = Path(msCheckerConfig.dump_path), msCheckerConfig.real_data
    keep = "tensors" if real_data else "statistics"
    return Capture.into_sink(lambda rank: CheckerSink(folder, real_data=real_data), operators=True, keep=keep)


def _around_batch(next_batch: Callable[[], Any]) -> Any:
    """Fetch the batch before its iteration begins, so that no dump holds what the DataLoader computes."""
    batch = next_batch()
    if msCheckerConfig.enable_dataloader:
        _next_iteration()
    return batch


def _next_iteration() -> None:
    _dumping.iteration += 1
    target = msCheckerConfig.target_iter
    set_dump_switch("ON" if _dumping.iteration == target else "OFF")
    if _dumping.iteration > target:
        stop_following()
        raise Exception(f"Model pretest: exit after iteration {target}.")
