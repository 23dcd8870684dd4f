# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ulpscope.model import DTYPES
from ulpscope.numerics import kernel
from ulpscope.numerics.difference.difference_kernel import differencing_with
from ulpscope.numerics.difference.pair_sums import BUCKETS
from ulpscope.numerics.kernel import DifferenceOut, SummaryOut, load_kernel, open_kernel
from ulpscope.numerics.summary.summary_kernel import summarizing_with


@pytest.mark.compiled("kernel")
def test_a_library_of_another_version_is_not_used(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.compiled("kernel")
def test_what_other_machines_build_gives_the_same_bits(library: ctypes.CDLL, tmp_path: Path) -> None:
    """The part without instructions of x86-64, as an arm64 machine compiles it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source = Path(kernel.__file__).with_name("_kernel.c")
    built = tmp_path / "portable.so"
    flags = ["-O1", "-DULPSCOPE_PORTABLE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True)
    portable = load_kernel(built)
    assert portable.ulpscope_level() == 0
    for name, entry in DTYPES.items():
        left = np.frombuffer(np.random.default_rng(1).bytes(7001 * entry.size_bytes), np.uint8)
        right = left.copy()
        right[:: 5 * entry.size_bytes] ^= 1
        found, expected = (differencing_with(one)(name, left, right) for one in (portable, library))
        assert repr(dataclasses.astuple(found)) == repr(dataclasses.astuple(expected))
        summaries = {repr(summarizing_with(one)(name, left.ctypes.data, left.size)) for one in (portable, library)}
        assert len(summaries) == 1
