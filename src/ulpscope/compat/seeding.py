# SPDX-License-Identifier: Apache-2.0
"""Seed as `seed_all` of the older tools does: every generator from one seed, and cuDNN switched off as their guides say."""

from __future__ import annotations

import os
import random

import numpy as np

from ulpscope.errors import InputError

__all__ = ["seed_all"]


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """Seed Python, NumPy, torch and its devices; with `mode` ask torch for deterministic algorithms.

    >>> seed_all(seed=1234, mode=True)  # doctest: +SKIP

    As the guides promise, cuDNN is switched off, not only its benchmarks: convolutions on CUDA are slower from here on.
    """
    import torch

    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InputError(f"seed_all wants a whole number from 0 to 2**32 - 1 as seed, not {seed!r}")
    if not isinstance(mode, bool):
        raise InputError(f"seed_all wants mode=True or mode=False, not {mode!r}")
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    npu = getattr(torch, "npu", None)
    if npu is not None:
        npu.manual_seed(seed)
        npu.manual_seed_all(seed)
    torch.backends.cudnn.enabled = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["HCCL_DETERMINISTIC"] = "TRUE"
        torch.use_deterministic_algorithms(True)
