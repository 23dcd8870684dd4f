# SPDX-License-Identifier: Apache-2.0
"""Switch dropout off, the one change that importing the old tool makes, so that two runs can be compared.

`functional.dropout`, `dropout2d` and `dropout3d`, and with them nn.Dropout, Dropout2d and Dropout3d, work with p=0 from the moment a
dumping function of ptdbg_ascend is imported until the process ends or `restore_dropout` is called. They are still called and dumped.
"""

from __future__ import annotations

from ulpscope.capture.intercept.patching import Patches

__all__ = ["restore_dropout", "switch_off_dropout"]

_patches: list[Patches] = []


def switch_off_dropout() -> None:
    if not _patches:
        _patches.append(Patches())
        _patches[0].no_dropout()


def restore_dropout() -> None:
    while _patches:
        _patches.pop().undo()
