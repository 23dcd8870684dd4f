# SPDX-License-Identifier: Apache-2.0
"""The door for MindSpore: `ulpscope.mindspore.Capture` records a training run as `ulpscope.Capture` does for PyTorch.

Importing this module imports no framework.
"""

from ulpscope.workflows.record.capturing_mindspore import Capture

__all__ = ["Capture"]
