# SPDX-License-Identifier: Apache-2.0
"""What the old debugger raises to end a training."""

from __future__ import annotations

from ulpscope.errors import UlpscopeError

__all__ = ["MsprobeException"]


class MsprobeException(UlpscopeError):
    """The job that was asked for is done: the last step is dumped, or as many overflows were seen as config.json allows."""
