# SPDX-License-Identifier: Apache-2.0
"""Run the shell of `python -m ptdbg_ascend.parse`, which looks into dumps of operators, tensors and dump files.

vc, dc    two dumps of Ascend's runtime compared, one converted to .npy; without CANN, by our own reader
pt, cn    one .npy file shown, two compared element by element
pk        what a dump file says about an API
"""

from ulpscope.compat.ptdbg.shell.interactive import ParseShell, main

__all__ = ["ParseShell", "main"]
