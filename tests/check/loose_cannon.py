# SPDX-License-Identifier: Apache-2.0
"""Register operations that fail without an exception, for processes that are told to import this module.

ULPSCOPE_TEST_CANNON decides how they fail, so that the recording is sound and the check is not.
"""

from __future__ import annotations

import os
import time

import torch


@torch.library.custom_op("loose_cannon::crash", mutates_args=())
def crash(x: torch.Tensor) -> torch.Tensor:
    if os.environ.get("ULPSCOPE_TEST_CANNON"):
        os.abort()
    return x + 1


@torch.library.custom_op("loose_cannon::hang", mutates_args=())
def hang(x: torch.Tensor) -> torch.Tensor:
    if os.environ.get("ULPSCOPE_TEST_CANNON"):
        time.sleep(600)
    return x + 2


@torch.library.custom_op("loose_cannon::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    os.write(1, b"this is no answer\n")
    return x + 3


@torch.library.custom_op("loose_cannon::lose", mutates_args=())
def lose(x: torch.Tensor) -> torch.Tensor:
    if os.environ.get("ULPSCOPE_TEST_CANNON"):
        raise RuntimeError("CUDA error: device-side assert triggered")
    return x + 4


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x**3

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 3 * x**2 * gradient
