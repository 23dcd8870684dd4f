# SPDX-License-Identifier: Apache-2.0
"""Following the training by the batches that a DataLoader hands out, as the older tools do: the one attribute that the doors replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["follow_batches"]


def follow_batches(on_batch: Callable[[], None]) -> Callable[[], None]:
    """Call `on_batch` each time any DataLoader has fetched a batch, before the training gets it; returns what puts torch back.

    An exception that `on_batch` raises reaches the training: that is how the older tools leave it.
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original = _BaseDataLoaderIter.__next__

    @functools.wraps(original)
    def fetch(self: Any) -> Any:
        batch = original(self)
        on_batch()
        return batch

    _BaseDataLoaderIter.__next__ = fetch  # type: ignore[method-assign]

    def undo() -> None:
        if _BaseDataLoaderIter.__next__ is fetch:
            _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]

    return undo
