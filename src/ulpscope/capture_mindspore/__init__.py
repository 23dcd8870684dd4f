# SPDX-License-Identifier: Apache-2.0
"""A live program of MindSpore to records: needs mindspore, and no torch."""

from ulpscope.capture_mindspore.reading import Keep
from ulpscope.capture_mindspore.session import CaptureLevel, MindSporeSession
from ulpscope.recording.active import is_one_active
from ulpscope.recording.selection import Selection

__all__ = ["CaptureLevel", "Keep", "MindSporeSession", "Selection", "is_one_active"]
