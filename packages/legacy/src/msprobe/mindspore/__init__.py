# SPDX-License-Identifier: Apache-2.0
"""Re-export ulpscope.compat.msprobe.mindspore under the old import name."""

from ulpscope.compat.msprobe.mindspore import MsprobeStep, PrecisionDebugger, seed_all

__all__ = ["MsprobeStep", "PrecisionDebugger", "seed_all"]
