# SPDX-License-Identifier: Apache-2.0
"""Measure how fast the passes over tensors are, as ratios to copying and reading the same memory in the same run.

    python bench/kernels.py [--mib 256] [--repeats 5]
    python bench/kernels.py --pass          the pass over two float32 tensors alone, as JSON, for trunk.py

Each number is the best of the repeats, in processor time of one thread, so that a busy machine disturbs it little. The summary
pass reads one tensor, the pair pass two; GB/s counts every byte read once.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ulpscope.format.fingerprint import fingerprint_blocks
from ulpscope.numerics.difference.difference import difference
from ulpscope.numerics.difference.difference_kernel import differencing_with
from ulpscope.numerics.kernel import open_kernel
from ulpscope.numerics.summary.summary_kernel import fingerprinting_with, summarizing_with
from ulpscope.numerics.summary.summary_numpy import summarize_blocks

Raw = npt.NDArray[np.uint8]
Row = tuple[str, str, str, int, Callable[[], object]]
CALLS = 20_000


def best_seconds(work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time) -> float:
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def tensor(dtype: str, size_bytes: int, noise: float) -> Raw:
    """Draw normal numbers; with noise, the same numbers a little off."""
    numel = size_bytes // {"float64": 8, "float32": 4, "float8_e4m3fn": 1}.get(dtype, 2)
    values = np.random.default_rng(0).standard_normal(numel, np.float32)
    values *= 1 + noise * np.random.default_rng(1).standard_normal(numel, np.float32)
    if dtype == "bfloat16":
        return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    if dtype == "float8_e4m3fn":
        return (np.abs(values) * 40).astype(np.uint8)
    return values.astype(dtype).view(np.uint8)


def rows(size_bytes: int) -> Iterator[Row]:
    library = open_kernel()
    for dtype in ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn"):
        one, other = tensor(dtype, size_bytes, 0.0), tensor(dtype, size_bytes, 1e-4)
        same, close = one.copy(), tensor(dtype, size_bytes, 1e-6)
        if library is not None:
            summarize, fingerprint, compare = summarizing_with(library), fingerprinting_with(library), differencing_with(library)
            yield "fingerprint", dtype, "C", one.size, lambda f=fingerprint, a=one: f(a.ctypes.data, a.size)
            yield "summary + fingerprint", dtype, "C", one.size, lambda f=summarize, d=dtype, a=one: f(d, a.ctypes.data, a.size)
            yield "pair, 1e-4 off", dtype, "C", 2 * one.size, lambda f=compare, d=dtype, a=one, b=other: f(d, a, b)
            yield "pair, 1e-6 off", dtype, "C", 2 * one.size, lambda f=compare, d=dtype, a=one, b=close: f(d, a, b)
            yield "pair, same bytes", dtype, "C", 2 * one.size, lambda f=compare, d=dtype, a=one, b=same: f(d, a, b)
        yield "fingerprint", dtype, "NumPy", one.size, lambda a=one: fingerprint_blocks(a)
        yield "summary + fingerprint", dtype, "NumPy", one.size, lambda d=dtype, a=one: summarize_blocks(d, a)
        yield "pair, 1e-4 off", dtype, "NumPy", 2 * one.size, lambda d=dtype, a=one, b=other: difference(d, a, d, b, None)


def overheads() -> Iterator[tuple[str, float]]:
    """Measure the microseconds of one call on a tensor of sixteen numbers."""
    small = tensor("float32", 64, 0.0)
    other = tensor("float32", 64, 1e-4)
    address = small.ctypes.data
    library = open_kernel()
    works: dict[str, Callable[[], object]] = {}
    if library is not None:
        summarize, fingerprint = summarizing_with(library), fingerprinting_with(library)
        works["summary + fingerprint, C"] = lambda: summarize("float32", address, 64)
        works["fingerprint, C"] = lambda: fingerprint(address, 64)
        works["pair, C"] = lambda: difference("float32", small, "float32", other)
    works["summary + fingerprint, NumPy"] = lambda: summarize_blocks("float32", small)
    works["pair, NumPy"] = lambda: difference("float32", small, "float32", other, None)
    for what, work in works.items():
        yield what, best_seconds(lambda work=work: [work() for _ in range(CALLS // 10)], 5) / (CALLS // 10) * 1e6


def pair_pass(size_bytes: int, repeats: int) -> dict[str, float]:
    """Measure GB/s by the clock: of reading memory, of the pass over two float32 tensors that differ by 1e-6, and of two passes at once."""
    library = open_kernel()
    if library is None:
        raise SystemExit("no kernel was built here")
    compare = differencing_with(library)
    sides = [(tensor("float32", size_bytes, 0.0), tensor("float32", size_bytes, 1e-6)) for _ in range(2)]
    memory = np.ones(size_bytes // 8, np.uint64)

    def both() -> None:
        threads = [threading.Thread(target=compare, args=("float32", *side)) for side in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    read, one, two = (best_seconds(work, repeats, time.perf_counter) for work in (memory.max, lambda: compare("float32", *sides[0]), both))
    return {"read": size_bytes / read / 1e9, "one": 2 * size_bytes / one / 1e9, "two": 4 * size_bytes / two / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="size of each tensor")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pass", dest="only_pass", action="store_true", help="only the pass over two float32 tensors, as JSON")
    options = parser.parse_args()
    size_bytes = options.mib << 20
    if options.only_pass:
        print(json.dumps(pair_pass(size_bytes, options.repeats)))
        return
    memory, target = np.ones(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)
    copy = size_bytes / best_seconds(lambda: np.copyto(target, memory), options.repeats) / 1e9
    read = size_bytes / best_seconds(lambda: memory.view("<u8").max(), options.repeats) / 1e9
    print(f"copying {options.mib} MiB {copy:.1f} GB/s, reading it {read:.1f} GB/s\n")
    print(f"{'pass':24}{'dtype':16}{'by':8}{'GB/s':>8}{'of copy':>10}{'of read':>10}")
    for what, dtype, by, size, work in rows(size_bytes):
        speed = size / best_seconds(work, options.repeats if by == "C" else 1) / 1e9
        print(f"{what:24}{dtype:16}{by:8}{speed:8.2f}{speed / copy:10.2f}{speed / read:10.2f}")
    print("\none call on 16 numbers, microseconds")
    for what, microseconds in overheads():
        print(f"  {what:32}{microseconds:8.1f}")


if __name__ == "__main__":
    main()
