# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ulpscope.format.fingerprint import EMPTY, Sums, block_sums

from .conftest import Implementation

EVERY_IMPLEMENTATION = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
MASK = (1 << 64) - 1


def by_the_letter(data: bytes) -> str:
    """Compute the specification in the slowest possible form."""
    data += bytes(-len(data) % 8)
    s0 = s1 = 0
    for j in range(len(data) // 8):
        w = int.from_bytes(data[8 * j : 8 * j + 8], "little")
        w = w * 0x9E3779B97F4A7C15 & MASK
        w ^= w >> 32
        w = w * 0xD6E8FEB86659FD93 & MASK
        w ^= w >> 32
        s0, s1 = (s0 + w) & MASK, (s1 * 0xD1342543DE82EF95 + w) & MASK
    return f"u1:{s1:016x}{s0:016x}"


def raw(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_known_answers(implementation: Implementation) -> None:
    assert implementation.fingerprint(raw(b"")) == "u1:" + 32 * "0"
    assert implementation.fingerprint(raw(bytes(range(20)))) == "u1:f1754d635cfed0c7bf181745870d3873"
    assert implementation.fingerprint(np.ones(3, "<f4").view(np.uint8)) == "u1:4f4ea67fc6fa2d90b76006ea6e1ff6e8"


@EVERY_IMPLEMENTATION
@given(st.binary(max_size=700))
def test_every_implementation_follows_the_specification(implementation: Implementation, data: bytes) -> None:
    assert implementation.fingerprint(raw(data)) == by_the_letter(data)


@pytest.mark.parametrize("size", [32767, 32768, 32769, 65536, 100_003])
def test_across_blocks(implementation: Implementation, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert implementation.fingerprint(raw(data)) == by_the_letter(data)


def test_summarizing_gives_the_same_fingerprint(implementation: Implementation) -> None:
    data = raw(np.random.default_rng(0).bytes(80_000))
    for dtype in ("float32", "bfloat16", "bool", "int64", "complex64"):
        assert implementation.summarize(dtype, data)[1] == implementation.fingerprint(data)


@given(st.lists(st.binary(max_size=64).map(lambda data: data[: len(data) // 8 * 8]), max_size=5), st.binary(max_size=20))
def test_stretches_compose(stretches: list[bytes], last: bytes) -> None:
    sums = EMPTY
    for stretch in [*stretches, last]:
        sums += block_sums(raw(stretch))
    assert str(sums) == by_the_letter(b"".join(stretches) + last)


@given(*[st.builds(Sums, st.integers(0, 1 << 40), st.integers(0, MASK), st.integers(0, MASK)) for _ in range(3)])
def test_composition_is_associative_and_has_a_neutral_element(a: Sums, b: Sums, c: Sums) -> None:
    assert (a + b) + c == a + (b + c)
    assert EMPTY + a == a == a + EMPTY


def _swapped(values: np.ndarray) -> np.ndarray:
    values[[3, 4]] = values[[4, 3]]
    return values


def _some_signs_flipped(values: np.ndarray) -> np.ndarray:
    values[::7] *= -1
    return values


def _one_ulp(values: np.ndarray) -> np.ndarray:
    values[17] = np.nextafter(values[17], np.float32(9), dtype=values.dtype)
    return values


CHANGES = {
    "two neighbours swapped": _swapped,
    "reversed": lambda values: values[::-1].copy(),
    "rotated": lambda values: np.roll(values, 2),
    "rows and columns exchanged": lambda values: values.reshape(25, 40).T.ravel(),
    "some signs flipped": _some_signs_flipped,
    "all signs flipped": lambda values: -values,
    "one unit in the last place": _one_ulp,
    "doubled": lambda values: 2 * values,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8"])
def test_sees(implementation: Implementation, change: str, dtype: str) -> None:
    values = np.random.default_rng(3).standard_normal(1000).astype(dtype)
    changed = np.ascontiguousarray(CHANGES[change](values.copy()))
    assert implementation.fingerprint(changed.view(np.uint8)) != implementation.fingerprint(values.view(np.uint8))


def one_hot(labels: list[int], dtype: str = "<i8") -> np.ndarray:
    return np.eye(max(labels) + 1, dtype=dtype)[labels]


PAIRS = {
    "one-hot rows of swapped labels": (one_hot([3, 1, 4, 2, 5]), one_hot([1, 3, 4, 5, 2])),
    "identity and its mirror image": (np.eye(64), np.fliplr(np.eye(64)).copy()),
    "checkerboard and its inverse": (np.indices((64, 64)).sum(0) % 2, 1 - np.indices((64, 64)).sum(0) % 2),
    "checkerboard in four dimensions": (np.indices((8, 8, 8, 8)).sum(0) % 2, 1 - np.indices((8, 8, 8, 8)).sum(0) % 2),
    "a palindrome inside out": (np.array([1, 2, 2, 1]), np.array([2, 1, 1, 2])),
    "two rows swapped in a batch of tokens": (np.array([[7, 7, 9], [9, 7, 7]]), np.array([[9, 7, 7], [7, 7, 9]])),
    "a mask and its transpose": (np.tril(np.ones((32, 32), "<f4")), np.triu(np.ones((32, 32), "<f4"))),
}


@pytest.mark.parametrize("case", PAIRS)
def test_sees_where_few_distinct_values_stand(implementation: Implementation, case: str) -> None:
    """Tensors with the same values in other places, whose places have the same sum."""
    one, other = PAIRS[case]
    assert np.array_equal(np.sort(one, None), np.sort(other, None)), "the same values"
    assert implementation.fingerprint(one.reshape(-1).view(np.uint8)) != implementation.fingerprint(other.reshape(-1).view(np.uint8))


def test_no_collision_among_many_patterns_of_signs(implementation: Implementation) -> None:
    rng = np.random.default_rng(5)
    patterns = {tuple(rng.integers(0, 2, 16).tolist()) for _ in range(4000)}
    signs = [np.where(np.array(pattern) == 1, -1.0, 1.0).astype("<f4") for pattern in patterns]
    assert len({implementation.fingerprint(values.view(np.uint8)) for values in signs}) == len(patterns)


def test_no_collision_among_permutation_matrices(implementation: Implementation) -> None:
    labels = list(itertools.permutations(range(6)))
    assert len({implementation.fingerprint(one_hot(list(label)).reshape(-1).view(np.uint8)) for label in labels}) == len(labels)
