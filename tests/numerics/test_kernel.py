# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from ulpscope.numerics import kernel
from ulpscope.numerics.kernel import DifferenceOut, SummaryOut, load_kernel, open_kernel
from ulpscope.numerics.ulp import BUCKETS


def test_a_library_of_another_version_is_not_used(library: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if library is None:
        pytest.skip("no compiled kernel here")
    monkeypatch.setattr(kernel, "VERSION", kernel.VERSION + 1)
    with pytest.raises(OSError, match="another version"):
        load_kernel(Path(library._name))
    assert open_kernel() is None


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_broken_library_is_not_used(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_kernel.so").write_bytes(content)
    monkeypatch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
    assert open_kernel() is None


def test_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
    assert open_kernel() is None


def test_structures_have_the_size_of_those_in_c() -> None:
    assert ctypes.sizeof(SummaryOut) == 11 * 8
    assert ctypes.sizeof(DifferenceOut) == (18 + BUCKETS) * 8
