# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.numerics.conftest import TARGETS
from ulpscope.model import DTYPES
from ulpscope.numerics.buffers import value_at
from ulpscope.numerics.difference.difference import difference
from ulpscope.numerics.difference.kept_pairs import MOST_BYTES_OF_VIEWS, MOST_FILES, SHORTEST_BYTES, KeptPairs, Scratch
from ulpscope.numerics.difference.kept_place import Kept
from ulpscope.numerics.difference.pair_sums import Difference, distance_in, quantiles
from ulpscope.numerics.gathering import gathered

Keep = Callable[..., Kept]
_IN_FILES = [name for name in Difference.__slots__ if name not in ("ulp_counts", "ulp_buckets")]


pytestmark = pytest.mark.compiled("kernel")


@pytest.fixture
def kernel(library: ctypes.CDLL) -> ctypes.CDLL:
    if not hasattr(library, "ulpscope_compare_kept"):
        pytest.skip("the kernel reads no files here")
    return library


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, kernel: ctypes.CDLL) -> int:
    if kernel.ulpscope_level() < TARGETS[request.param]:
        pytest.skip(f"this CPU has no {request.param}")
    return TARGETS[request.param]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    """Append bytes to a file."""
    fd = os.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT)

    def into_file(data: bytes, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, first: int = 0) -> Kept:
        offset = os.lseek(fd, 5, os.SEEK_END)
        os.write(fd, data)
        return Kept(None, fd, offset, len(data), xxhash.xxh3_128_hexdigest(data), dtype, shape, strides, first)

    yield into_file
    os.close(fd)


def two_sides(dtype: str, numel: int, seed: int = 0) -> tuple[bytes, bytes]:
    """Make numbers near one, every third of which is a little off on the other side."""
    size = DTYPES[dtype].size_bytes
    values = np.random.default_rng(seed).normal(size=numel * size // 4).astype("<f4")
    data = np.frombuffer(values.tobytes().ljust(numel * size, b"\0"), np.uint8)
    other = data.copy()
    other[:: 3 * size] ^= 1
    return data.tobytes(), other.tobytes()


def assert_as_in_memory(
    pairs: KeptPairs, number: int | None, dtype: str, subject: bytes | memoryview, reference: bytes | memoryview
) -> None:
    assert number is not None
    found, expected = pairs.compared(number), difference(dtype, subject, dtype, reference)
    assert found is not None
    assert [repr(getattr(found.found, name)) for name in _IN_FILES] == [repr(getattr(expected, name)) for name in _IN_FILES]
    assert found.found.ulp_buckets is not None
    distances = [distance_in(bucket, expected.ulp_max) for bucket in found.found.ulp_buckets]
    assert distances == quantiles(expected.ulp_counts, (0.5, 0.99), expected.ulp_max)
    if (worst := expected.worst_place) is not None:
        values = [value_at(dtype, memoryview(side), worst) for side in (subject, reference)]
        assert [repr(found.subject), repr(found.reference)] == [repr(value) for value in values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gives_what_a_pass_in_memory_gives(dtype: str, keep: Keep, kernel: ctypes.CDLL, target: int) -> None:
    subject, reference = two_sides(dtype, 40_011)
    if dtype in ("float64", "complex128"):
        subject, reference = (np.frombuffer(side, "<f4").astype("<f8").tobytes()[: len(side)] for side in (subject, reference))
    pairs = KeptPairs(Scratch(), kernel, target)
    number = pairs.add(keep(subject, dtype, (40_011,)), keep(reference, dtype, (40_011,)))
    pairs.begin()
    assert_as_in_memory(pairs, number, dtype, subject, reference)


@pytest.mark.parametrize(
    "size", [241, 255, 256, 1023, 1024, 1025, 2048, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 18) + 65, (3 << 18) + 7]
)
def test_any_length_is_hashed_as_xxhash_does(size: int, keep: Keep, kernel: ctypes.CDLL, target: int) -> None:
    subject, reference = two_sides("uint8", size)
    pairs = KeptPairs(Scratch(), kernel, target)
    alone = pairs.add(keep(subject, "uint8", (size,)), keep(reference, "uint8", (size,)))
    base = keep(subject[::-1], "uint8", (size,)), keep(reference[::-1], "uint8", (size,))
    together = [pairs.add(*base), pairs.add(*(side._replace(shape=(size - 1,), strides=(1,), first=1) for side in base))]
    pairs.begin()
    assert_as_in_memory(pairs, alone, "uint8", subject, reference)
    assert_as_in_memory(pairs, together[0], "uint8", subject[::-1], reference[::-1])
    assert_as_in_memory(pairs, together[1], "uint8", subject[-2::-1], reference[-2::-1])


@pytest.mark.parametrize(
    ("shape", "strides", "first"),
    [
        ((30, 50), (1, 30), 0),
        ((10, 7), (150, 3), 4),
        ((5, 3, 10), (300, 1, 20), 100),
        ((8,), (0,), 3),
        ((1500,), (1,), 0),
        ((2, 100), (1, 7), 0),
    ],
)
def test_views_are_put_in_order(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, keep: Keep, kernel: ctypes.CDLL, target: int
) -> None:
    sides = two_sides("float32", 1500)
    pairs = KeptPairs(Scratch(), kernel, target)
    kept = [keep(side, "float32", shape, strides, first) for side in sides]
    number = pairs.add(kept[0], kept[1])
    whole = pairs.add(*(one._replace(shape=(1500,), strides=None, first=0) for one in kept))
    pairs.begin()
    assert_as_in_memory(pairs, number, "float32", *(gathered(memoryview(side), 4, shape, strides, first) for side in sides))
    assert_as_in_memory(pairs, whole, "float32", *sides)


def test_a_view_against_a_whole_tensor(keep: Keep, kernel: ctypes.CDLL) -> None:
    data, other = two_sides("float32", 600)
    pairs = KeptPairs(Scratch(), kernel)
    number = pairs.add(keep(data, "float32", (30, 20), (1, 30)), keep(other, "float32", (30, 20)))
    pairs.begin()
    assert_as_in_memory(pairs, number, "float32", gathered(memoryview(data), 4, (30, 20), (1, 30), 0), other)


def test_nan_and_infinities_in_a_late_part(keep: Keep, kernel: ctypes.CDLL, target: int) -> None:
    subject = np.ones(200_000, "<f4")
    reference = subject.copy()
    reference[70_000] = 5.0
    subject[150_000:150_004] = [np.nan, np.inf, -np.inf, np.nan]
    reference[150_001:150_004] = [-np.inf, -np.inf, np.nan]
    sides = subject.tobytes(), reference.tobytes()
    pairs = KeptPairs(Scratch(), kernel, target)
    number = pairs.add(*(keep(side, "float32", (200_000,)) for side in sides))
    pairs.begin()
    assert_as_in_memory(pairs, number, "float32", *sides)


def test_sums_that_leave_the_range_are_left_to_the_usual_way(keep: Keep, kernel: ctypes.CDLL) -> None:
    pairs = KeptPairs(Scratch(), kernel)
    number = pairs.add(*(keep(np.full(100, value, "<f8").tobytes(), "float64", (100,)) for value in (1e200, 2e200)))
    pairs.begin()
    assert number is not None
    assert pairs.compared(number) is None


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("wrong", ["hash", "end", "file"])
def test_wrong_bytes_are_never_compared(side: int, is_view: bool, wrong: str, keep: Keep, kernel: ctypes.CDLL) -> None:
    layout = ((500, 2), (1, 500)) if is_view else ((1000,), None)
    kept = [keep(data, "float32", *layout) for data in two_sides("float32", 1000)]
    changes = {"hash": {"hash": "0" * 32}, "end": {"offset": 1 << 40}, "file": {"fd": 1 << 20}}
    kept[side] = kept[side]._replace(**changes[wrong])
    pairs = KeptPairs(Scratch(), kernel)
    number = pairs.add(kept[0], kept[1])
    pairs.begin()
    assert number is not None
    assert pairs.compared(number) is None


def test_one_flipped_bit_is_noticed_wherever_it_is(keep: Keep, kernel: ctypes.CDLL, target: int) -> None:
    data, _ = two_sides("uint8", 3000)
    good = keep(data, "uint8", (3000,))
    pairs = KeptPairs(Scratch(), kernel, target)
    numbers = []
    for place in (0, 7, 63, 64, 1023, 1024, 2047, 2880, 2935, 2936, 2999):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        numbers.append(pairs.add(good, keep(bytes(flipped), "uint8", (3000,))._replace(hash=good.hash[:-1] + f"{place % 16:x}")))
    pairs.begin()
    assert [pairs.compared(number) for number in numbers if number is not None] == [None] * 11


def test_what_cannot_go_this_way(keep: Keep, kernel: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    one = keep(bytes(4096), "float32", (1024,))
    pairs = KeptPairs(Scratch(), kernel)
    assert pairs.add(None, one) is pairs.add(one, None) is None
    assert pairs.add(one, one._replace(dtype="int32")) is None
    assert pairs.add(one, one._replace(shape=(32, 32))) is None
    short = keep(bytes(SHORTEST_BYTES - 1), "uint8", (SHORTEST_BYTES - 1,))
    assert pairs.add(short, short) is None
    large = one._replace(length=MOST_BYTES_OF_VIEWS, shape=(MOST_BYTES_OF_VIEWS // 4,))
    assert pairs.add(large._replace(shape=(8,), strides=(2,)), large._replace(shape=(8,), strides=(2,))) is None
    assert pairs.add(large, large) is not None
    assert pairs.add(large._replace(shape=(8,), strides=(2,)), large._replace(shape=(8,), strides=(2,))) is None
    assert KeptPairs(Scratch(), None).add(one, one) is None


def test_only_so_many_files_are_held(keep: Keep, kernel: ctypes.CDLL) -> None:
    one = keep(bytes(4096), "float32", (1024,))
    pairs = KeptPairs(Scratch(), kernel)
    added = [pairs.add(one._replace(fd=fd), one._replace(fd=fd, hash=f"{fd:032x}")) is not None for fd in range(MOST_FILES + 5)]
    assert added == [True] * MOST_FILES + [False] * 5


def test_threads_share_the_work_and_nobody_is_forgotten(keep: Keep, kernel: ctypes.CDLL) -> None:
    pairs, expected = KeptPairs(Scratch(), kernel), []
    for seed in range(60):
        sides = two_sides("float32", 500 + 700 * seed, seed)
        expected.append((pairs.add(*(keep(side, "float32", (len(side) // 4,)) for side in sides)), sides))
    pairs.begin()
    threads = [threading.Thread(target=pairs.work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number, sides in reversed(expected):
        assert_as_in_memory(pairs, number, "float32", *sides)
    for thread in threads:
        thread.join()


def test_after_a_stop_nothing_more_is_begun(keep: Keep, kernel: ctypes.CDLL, tmp_path: Path) -> None:
    pairs = KeptPairs(Scratch(), kernel)
    number = pairs.add(*(keep(side, "float32", (1000,)) for side in two_sides("float32", 1000)))
    pairs.begin()
    pairs.stop()
    pairs.work()
    (tmp_path / "kept").write_bytes(b"")
    assert number is not None
    assert pairs.compared(number) is None


@pytest.mark.parametrize("is_built", [False, True])
def test_no_pairs(is_built: bool, kernel: ctypes.CDLL) -> None:
    pairs = KeptPairs(Scratch(), kernel if is_built else None)
    pairs.begin()
    pairs.work()
