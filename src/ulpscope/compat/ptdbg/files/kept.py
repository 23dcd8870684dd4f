# SPDX-License-Identifier: Apache-2.0
"""Keep the tensors of one dump: their .npy files, each content once, and their means as the old tool took them.

The mean is torch's own in float32: its order of summation shows in the last digits, which guides and old dumps have printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ulpscope.capture.torch_internals import Quiet
from ulpscope.compat.tensor_files import TensorFiles, save_npy
from ulpscope.format.content import content_hash
from ulpscope.model import DTYPES

__all__ = ["KeptTensors"]

_NUMBERS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


class KeptTensors:
    """Tensors by their content. Without a folder, only their means are taken."""

    def __init__(self, folder: Path | None) -> None:
        self._files = TensorFiles(folder, save_npy) if folder is not None else None
        self._means: dict[str, float | None] = {}
        self.close()  # a killed process may have left half a file

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str:
        key = self._files.keep(dtype, shape, buffer) if self._files is not None else f"{content_hash(buffer)}-{dtype}"
        if key not in self._means:
            self._means[key] = _mean(dtype, buffer)
        return key

    def name(self, key: str, name: str) -> None:
        """Give a kept tensor a file name."""
        if self._files is not None:
            self._files.link(key, name)

    def name_number(self, value: bool | int | float, name: str) -> None:
        """Write a Python number as an array without dimensions; an integer that no dtype holds gets no file."""
        if self._files is None or (isinstance(value, int) and not -(2**63) <= value < 2**63):
            return
        dtype = _NUMBERS[type(value)]
        self._files.link(self._files.keep(dtype, (), np.asarray(value, dtype).tobytes()), name)

    def mean(self, key: str | None) -> float | None:
        return self._means.get(key) if key is not None else None

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


def _mean(dtype: str, buffer: Any) -> float | None:
    """Return torch's mean of reals that it can add up; None for others."""
    kind = DTYPES[dtype].kind if dtype in DTYPES else "bool"
    if kind in ("bool", "complex") or dtype in ("uint16", "uint32", "uint64") or not len(memoryview(buffer)):
        return None
    with Quiet():
        return float(torch.frombuffer(buffer, dtype=getattr(torch, dtype)).float().mean())
