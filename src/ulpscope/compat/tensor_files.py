# SPDX-License-Identifier: Apache-2.0
"""Keep one file for each tensor, as the older tools do: equal tensors are written once, and every further name is a hard link.

A file is written into a hidden folder under a name made from its content, and linked under its names from there, so a tensor that appears
in forty records is written once. Where the file system has no links, it is copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.format.content import content_hash

__all__ = ["TensorFiles", "save_npy"]

Save = Callable[[Path, str, tuple[int, ...], Any], None]


class TensorFiles:
    """The tensors of one folder. `save` writes one file from a dtype, a shape and the bytes."""

    def __init__(self, folder: Path, save: Save, mode: int = 0o640) -> None:
        self._folder = folder
        self._hidden = folder / ".content"
        self._save = save
        self._mode = mode

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str:
        """Write the bytes unless they exist already; return the key that `link` takes."""
        size = "x".join(map(str, shape))
        key = f"{content_hash(buffer)}-{dtype}-{size}"
        file = self._hidden / key
        if not file.exists():
            self._hidden.mkdir(parents=True, exist_ok=True)
            self._save(file, dtype, shape, buffer)
            file.chmod(self._mode)
        return key

    def link(self, key: str, name: str) -> Path:
        """Give a kept tensor a name in the folder, or in one below; replace an older file of that name."""
        file = self._folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        try:
            os.link(self._hidden / key, file)
        except OSError:
            shutil.copyfile(self._hidden / key, file)
        return file

    def close(self) -> None:
        """Forget the contents; files that have a name stay."""
        shutil.rmtree(self._hidden, ignore_errors=True)


def save_npy(file: Path, dtype: str, shape: tuple[int, ...], buffer: Any) -> None:
    """Write a .npy in the tensor's own type; bfloat16 and float8, which NumPy does not know, as float32."""
    from ulpscope.model import DTYPES
    from ulpscope.numerics.casting import real_dtype, reals, widen

    data = np.frombuffer(buffer, np.uint8)
    known = DTYPES[dtype].kind != "float" or dtype in ("float16", "float32", "float64")
    values = data.view(dtype) if known else widen(real_dtype(dtype), reals(dtype, data)).astype(np.float32)
    with file.open("wb") as stream:
        np.save(stream, values.reshape(shape), allow_pickle=False)
