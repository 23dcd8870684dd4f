# SPDX-License-Identifier: Apache-2.0
"""A .npy file gives the same tensor whether we read it or NumPy does; NumPy reads forms that we do not know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ulpscope.errors import DamagedRunError
from ulpscope.store.foreign import reader as foreign


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i2", "i4", "i8", "c8", "c16", "b1", "i1", "u1", "u4", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_both_read_the_same(dtype: str, shape: tuple[int, ...], order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype=dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "x.npy", array)
    found, told = foreign.open_tensor(tmp_path / "x.npy"), foreign._open_with_numpy(tmp_path / "x.npy")
    assert (found.dtype, found.shape, bytes(found.buffer)) == (told.dtype, told.shape, bytes(told.buffer))
    is_ours = dtype not in ("u4", ">f4") and array.size > 0 and array.flags.c_contiguous
    assert (foreign._open_plain_npy(tmp_path / "x.npy") is not None) == is_ours


def test_what_follows_the_values_is_no_part_of_them(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(4.0))
    with (tmp_path / "x.npy").open("ab") as stream:
        stream.write(b"more")
    assert bytes(foreign.open_tensor(tmp_path / "x.npy").buffer) == np.arange(4.0).tobytes()


@pytest.mark.parametrize(
    "change", [lambda text: text[:-1], lambda text: text[:50], lambda text: text.replace(b"(4,)", b"(9,)"), lambda text: b""]
)
def test_a_damaged_file_is_refused(change: object, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(4.0))
    (tmp_path / "x.npy").write_bytes(change((tmp_path / "x.npy").read_bytes()))  # type: ignore[operator]
    with pytest.raises(DamagedRunError, match="cannot be read as a tensor"):
        foreign.open_tensor(tmp_path / "x.npy")
