# SPDX-License-Identifier: Apache-2.0
"""A live program to records: needs torch."""

from ulpscope.capture.active import is_one_active
from ulpscope.capture.selection import Selection
from ulpscope.capture.session import CaptureLevel, CaptureSession
from ulpscope.capture.tensors import Keep
from ulpscope.capture.watch_session import WatchSession

__all__ = ["CaptureLevel", "CaptureSession", "Keep", "Selection", "WatchSession", "is_one_active"]
