# SPDX-License-Identifier: Apache-2.0
"""Provide every implementation of the passes: NumPy, and the kernel (built afresh where it is older than its source) for each instruction
set.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ulpscope.format.fingerprint import fingerprint_blocks
from ulpscope.model import Summary
from ulpscope.numerics import kernel
from ulpscope.numerics.difference.difference_kernel import DifferencePass, differencing_with
from ulpscope.numerics.kernel import load_kernel, open_kernel
from ulpscope.numerics.summary.summary_kernel import fingerprinting_with, summarizing_with
from ulpscope.numerics.summary.summary_numpy import summarize_blocks

Raw = npt.NDArray[np.uint8]
TARGETS = {"plain": 0, "avx2": 1, "avx512": 2}


@dataclass(frozen=True)
class Implementation:
    name: str
    summarize: Callable[[str, Raw], tuple[Summary, str]]
    fingerprint: Callable[[Raw], str]
    difference: DifferencePass | None


def _with_kernel(name: str, library: ctypes.CDLL) -> Implementation:
    summarize, fingerprint = summarizing_with(library, TARGETS[name]), fingerprinting_with(library, TARGETS[name])
    return Implementation(
        name,
        lambda dtype, raw: summarize(dtype, raw.ctypes.data, raw.size),
        lambda raw: fingerprint(raw.ctypes.data, raw.size),
        differencing_with(library, TARGETS[name]),
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Load the kernel; who asks for it is marked `compiled("kernel")`."""
    source, compiler = Path(kernel.__file__).with_name("_kernel.c"), shutil.which("cc")
    built = [path for path in map(source.with_name, [f"_kernel{suffix}" for suffix in EXTENSION_SUFFIXES]) if path.is_file()]
    if compiler is None or any(path.stat().st_mtime >= source.stat().st_mtime for path in built):
        kernel_here = open_kernel()
        assert kernel_here is not None, "the kernel beside its source cannot be used: install ulpscope again"
        return kernel_here
    path = tmp_path_factory.mktemp("kernel") / "_kernel.so"
    subprocess.run([compiler, "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return load_kernel(path)


@pytest.fixture(params=["numpy", *(pytest.param(name, marks=pytest.mark.compiled("kernel")) for name in TARGETS)])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    name = request.param
    if name == "numpy":
        return Implementation(name, summarize_blocks, fingerprint_blocks, None)
    library = request.getfixturevalue("library")
    if library.ulpscope_level() < TARGETS[name]:
        pytest.skip(f"this CPU has no {name}")
    return _with_kernel(name, library)
