# SPDX-License-Identifier: Apache-2.0
"""A live program to records: needs torch."""

from ulpscope.capture.selection import Selection
from ulpscope.capture.session import CaptureLevel, CaptureSession
from ulpscope.capture.tensors import Keep

__all__ = ["CaptureLevel", "CaptureSession", "Keep", "Selection"]
