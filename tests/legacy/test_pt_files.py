# SPDX-License-Identifier: Apache-2.0
"""Our .pt files are what torch.save writes, as torch, zip tools and our own reader see them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.compat.pt_files import save_pt
from ulpscope.numerics.casting import as_array
from ulpscope.store.foreign.torch_archive import open_plain_tensor

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "uint32",
]  # fmt: skip


def made(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) - 3).to(getattr(torch, dtype)).reshape(shape)


def raw(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("shape", [(2, 3), (), (1, 0), (4,), (1, 2, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_what_was_written(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = made(dtype, shape)
    save_pt(tmp_path / "x.pt", dtype, shape, raw(tensor))
    for is_mapped in (False, True):
        found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=is_mapped)
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert bytes(raw(found)) == bytes(raw(tensor))
        assert not found.requires_grad


def test_the_archive_is_sound_and_its_data_are_aligned(tmp_path: Path) -> None:
    save_pt(tmp_path / "x.pt", "float32", (2, 3), raw(made("float32", (2, 3))))
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/data/0", "archive/version"]
    content = (tmp_path / "x.pt").read_bytes()
    assert content.index(raw(made("float32", (2, 3))).tobytes()) % 64 == 0


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
def test_our_own_reader_agrees_with_torch(tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: str) -> None:
    file = tmp_path_factory.mktemp("pt") / "x.pt"
    tensor = made(dtype, shape)
    save_pt(file, dtype, shape, raw(tensor))
    found = open_plain_tensor(file)
    assert found is not None
    assert (found.dtype, found.shape) == (dtype, shape)
    assert as_array(found).tobytes() == as_array(_as_torch_saves(tensor, file.with_name("y.pt"))).tobytes()


def _as_torch_saves(tensor: torch.Tensor, file: Path) -> Any:
    torch.save(tensor, file)
    return open_plain_tensor(file)
