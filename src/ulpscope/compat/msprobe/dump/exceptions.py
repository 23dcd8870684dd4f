# SPDX-License-Identifier: Apache-2.0
"""Define the exception that the old debugger raises to end a training."""

from __future__ import annotations

from ulpscope.errors import UlpscopeError

__all__ = ["MsprobeException"]


class MsprobeException(UlpscopeError):
    """Raised when the job is done: the last step is dumped, or as many overflows were seen as config.json allows."""
