# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from ulpscope.errors import DamagedRunError
from ulpscope.model import DTYPES, TensorData
from ulpscope.numerics.casting import as_array, as_bytes, byte_values, bytes_at, real_dtype, reals, widen

FLOAT8 = [name for name in DTYPES if name.startswith("float8")]


@pytest.mark.parametrize("name", [*FLOAT8, "bfloat16", "float16"])
def test_every_pattern_as_torch_has_it(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    size = DTYPES[name].size_bytes
    raw = np.arange(256**size, dtype=f"<u{size}").view(np.uint8)
    expected = torch.from_numpy(raw.copy()).view(getattr(torch, name)).to(torch.float64).numpy()
    np.testing.assert_array_equal(widen(name, reals(name, raw)), expected)
    ordered = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(widen(name, reals(name, raw)))[ordered], np.signbit(expected)[ordered])


@pytest.mark.parametrize("name", ["bool", "uint8", "int8"])
def test_one_byte_integers(name: str) -> None:
    values = byte_values(name)
    assert values[0] == 0
    assert values[255] == {"bool": 1, "uint8": 255, "int8": -1}[name]


def test_limits_are_those_of_the_dtype_table() -> None:
    for name in FLOAT8:
        values = byte_values(name)
        assert np.max(values[np.isfinite(values)]) == DTYPES[name].max, name


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_share_the_memory(name: str) -> None:
    buffer = bytes(6 * DTYPES[name].size_bytes)
    data = TensorData(name, (2, 3), memoryview(buffer))
    array = as_array(data)
    assert array.shape[:2] == (2, 3)
    assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
    assert widen(real_dtype(name), array).size == 6 * (2 if name.startswith("complex") else 1)


def test_complex_becomes_pairs_of_reals() -> None:
    values = np.array([1 + 2j, -3j], "<c8")
    np.testing.assert_array_equal(widen("complex64", values), [1.0, 2.0, 0.0, -3.0])
    np.testing.assert_array_equal(widen("float32", reals("complex64", values.view(np.uint8))), [1.0, 2.0, -0.0, -3.0])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    array = as_array(TensorData("float32", shape, bytes(4 if 0 not in shape else 0)))
    assert array.shape == shape


def test_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(np.arange(100, dtype="<f4").tobytes())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        array = as_array(TensorData("float32", (100,), mapped))
        assert array[99] == 99.0
        del array


@pytest.mark.parametrize(("shape", "size"), [((2, 3), 20), ((2, 3), 28), ((), 0), ((1 << 40,), 8)])
def test_a_buffer_of_another_size_is_damage(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(DamagedRunError, match=f"{size} were stored"):
        as_bytes(TensorData("float32", shape, bytes(size)))


def test_bytes_at_an_address() -> None:
    values = np.arange(5, dtype=np.uint8)
    view = bytes_at(values.ctypes.data + 1, 3)
    np.testing.assert_array_equal(view, [1, 2, 3])
    assert not view.flags.writeable
    assert bytes_at(0, 0).size == 0
