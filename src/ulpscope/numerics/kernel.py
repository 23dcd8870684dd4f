# SPDX-License-Identifier: Apache-2.0
"""Find and open the compiled kernel. It is optional: without it, or with ULPSCOPE_NO_KERNEL=1, NumPy does the work.

Python calls the library through ctypes, which releases the interpreter lock for the length of a call.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING

from ulpscope.numerics.layouts import CODES, KINDS, VERSION, DifferenceOut, SummaryOut

if TYPE_CHECKING:
    from pathlib import Path  # importing it takes longer than opening the kernel, and a comparison begins with that

__all__ = ["BEST_TARGET", "CODES", "KERNEL", "KINDS", "VERSION", "DifferenceOut", "SummaryOut", "kernel_name", "load_kernel", "open_kernel"]

BEST_TARGET = -1


def open_kernel() -> ctypes.CDLL | None:
    """Open the kernel built beside this file; None if there is none that fits."""
    for suffix in EXTENSION_SUFFIXES:
        path = f"{os.path.dirname(__file__)}/_kernel{suffix}"  # noqa: PTH120
        if os.path.isfile(path):  # noqa: PTH113
            try:
                return load_kernel(path)
            except (OSError, AttributeError):  # built for another machine, or from another version
                continue
    return None


def load_kernel(path: Path | str) -> ctypes.CDLL:
    """Load the kernel from a shared library and declare its functions."""
    library = ctypes.CDLL(str(path))
    if library.ulpscope_version() != VERSION:
        raise OSError(f"'{path}' was built from another version of _kernel.c; build it again")
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ulpscope_level.argtypes = []
    library.ulpscope_fingerprint.argtypes = [pointer, size, pointer, integer]
    library.ulpscope_fingerprint.restype = None
    library.ulpscope_summarize.argtypes = [
        *(integer, pointer, size, size, size, pointer, pointer),
        *(pointer, ctypes.c_double, pointer, integer, pointer, ctypes.c_uint),
    ]
    library.ulpscope_difference.argtypes = [integer, pointer, pointer, size, pointer, pointer, pointer, integer]
    library.ulpscope_gather.argtypes = [pointer, size, size, pointer, pointer, pointer]
    library.ulpscope_gather.restype = None
    library.ulpscope_at_zeros.argtypes = [integer, pointer, pointer, size, pointer]
    library.ulpscope_at_zeros.restype = size
    if hasattr(library, "ulpscope_compare_kept"):  # not where files cannot be read as POSIX has it
        library.ulpscope_compare_kept.argtypes = [pointer, ctypes.c_int64, pointer, integer]
    return library


def kernel_name() -> str:
    """Name the code that does the arithmetic on tensors here, and its instructions."""
    if KERNEL is None:
        return "NumPy, switched on by ULPSCOPE_NO_KERNEL" if os.environ.get("ULPSCOPE_NO_KERNEL") == "1" else "NumPy, no compiled kernel"
    return f"compiled kernel, {_level_names()[KERNEL.ulpscope_level()]}"


def _level_names() -> tuple[str, ...]:
    import platform  # only to tell: it takes as long to import as the rest

    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return ("SSE2", "AVX2", "AVX-512")
    return ("NEON",) if machine in ("aarch64", "arm64") else ("no vector instructions chosen",)


KERNEL = None if os.environ.get("ULPSCOPE_NO_KERNEL") == "1" else open_kernel()
