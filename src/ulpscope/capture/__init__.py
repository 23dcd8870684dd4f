# SPDX-License-Identifier: Apache-2.0
"""Turn a live program into records: needs torch."""

from ulpscope.capture.active import is_one_active
from ulpscope.capture.nonfinite.hunt_session import HuntSession
from ulpscope.capture.record.tensor_reader import Keep
from ulpscope.capture.selection import Selection
from ulpscope.capture.session import CaptureLevel, CaptureSession

__all__ = ["CaptureLevel", "CaptureSession", "HuntSession", "Keep", "Selection", "is_one_active"]
