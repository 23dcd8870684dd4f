# SPDX-License-Identifier: Apache-2.0
"""The old import name; see ulpscope.compat.msprobe.mindspore."""

from ulpscope.compat.msprobe.mindspore import MsprobeStep, PrecisionDebugger, seed_all

__all__ = ["MsprobeStep", "PrecisionDebugger", "seed_all"]
