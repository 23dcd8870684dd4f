# SPDX-License-Identifier: Apache-2.0
"""Start early: right where two runs kept their tensors in the same order, harmless whatever the runs hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.model import RunInfo
from ulpscope.numerics.difference.difference import difference
from ulpscope.numerics.difference.kept_pairs import KeptPairs
from ulpscope.numerics.kernel import KERNEL, KINDS
from ulpscope.store import DirectoryRun, DirectorySink, create_run
from ulpscope.workflows.compare import early
from ulpscope.workflows.compare.early import begun_early, early_start

STEP = Path("rank00000", "step00003")

pytestmark = [
    pytest.mark.compiled("kernel"),
    pytest.mark.skipif(KERNEL is not None and not hasattr(KERNEL, "ulpscope_compare_kept"), reason="the kernel reads no files here"),
]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)


def record(folder: Path, tensors: list[np.ndarray[Any, Any]], dtypes: list[str] | None = None) -> list[str]:
    """Make a run with one step, and return the keys of its tensors."""
    sink = DirectorySink(create_run(folder, RunInfo()), rank=0)
    sink.begin_step(3)
    names = dtypes or [str(one.dtype) for one in tensors]
    keys = [sink.keep(name, one.shape, one) or "" for name, one in zip(names, tensors, strict=True)]
    sink.close()
    return keys


def two_runs(folder: Path, *sizes: int) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[tuple[str, str]]]:
    random = np.random.default_rng(1)
    ours = [random.normal(size=size).astype("<f4") for size in sizes]
    theirs = [one * np.float32(1.0001) for one in ours]
    keys = [record(folder / name, side) for name, side in (("subject", ours), ("reference", theirs))]
    return ours, theirs, list(zip(*keys, strict=True))


def begun(folder: Path, keys: list[tuple[str, str]]) -> tuple[KeptPairs, list[int | None]]:
    """Return the pairs that an early start has begun, after all of them were compared."""
    runs = DirectoryRun(folder / "subject"), DirectoryRun(folder / "reference")
    next(iter(early._begun.values())).work()
    pairs = begun_early(*runs, 0, 3)
    assert pairs is not None
    return pairs, [pairs.begun(*(run.kept(0, 3, key) for run, key in zip(runs, both, strict=True))) for both in keys]


def words(folder: Path) -> list[str]:
    return [str(folder / "subject"), "--json", "x", str(folder / "reference")]


def test_tensors_in_the_same_order_are_compared_as_they_are_later(tmp_path: Path) -> None:
    ours, theirs, keys = two_runs(tmp_path, 61, 5000, 1, 300_000, 64)
    with early_start(words(tmp_path)):
        pairs, found = begun(tmp_path, keys)
        assert [number is None for number in found] == [False, False, True, False, False]
        for number, one, other in zip(found, ours, theirs, strict=True):
            if number is not None:
                compared, expected = pairs.compared(number), difference("float32", one.view(np.uint8), "float32", other.view(np.uint8))
                assert compared is not None
                assert compared.found.sum_squares == expected.sum_squares
                assert compared.found.worst == expected.worst
                assert (compared.subject, compared.reference) == (one[expected.worst], other[expected.worst])
    assert early._begun == {}


def test_dtypes_that_need_numpy_wait(tmp_path: Path) -> None:
    names = [*KINDS, "complex64", "bool", "float8_e5m2"]
    data = [np.arange(at, at + 512, dtype=np.uint8) for at in range(len(names))]
    sizes = {"complex64": 8, "bool": 1, "float8_e5m2": 1, "bfloat16": 2}
    shaped = [one.view(np.dtype((np.void, sizes.get(name) or np.dtype(name).itemsize))) for one, name in zip(data, names, strict=True)]
    ours, theirs = record(tmp_path / "subject", shaped, names), record(tmp_path / "reference", [one[::-1].copy() for one in shaped], names)
    with early_start(words(tmp_path)):
        _, found = begun(tmp_path, list(zip(ours, theirs, strict=True)))
        assert [name for name, number in zip(names, found, strict=True) if number is not None] == list(KINDS)
        runs = DirectoryRun(tmp_path / "subject"), DirectoryRun(tmp_path / "reference")
        assert begun_early(*runs, 0, 4) is begun_early(*runs, 1, 3) is None


def test_a_pair_that_does_not_belong_together_is_asked_by_nobody(tmp_path: Path) -> None:
    _, _, keys = two_runs(tmp_path, 100, 200, 300)
    with early_start(words(tmp_path)):
        assert begun(tmp_path, [(keys[0][0], keys[1][1]), (keys[1][0], keys[2][1])])[1] == [None, None]


def test_other_bytes_than_were_kept_are_left_to_the_usual_way(tmp_path: Path) -> None:
    _, _, keys = two_runs(tmp_path, 5000, 6000)
    shard = tmp_path / "subject" / STEP / "tensors-0000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-10] ^= 1
    shard.write_bytes(damaged)
    with early_start(words(tmp_path)):
        pairs, found = begun(tmp_path, keys)
        assert [number is not None and pairs.compared(number) is not None for number in found] == [True, False]


def test_where_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starts(*words: str) -> bool:
        with early_start([*words]):
            return bool(early._begun)

    two_runs(tmp_path, 5000)
    sides = [str(tmp_path / name) for name in ("subject", "reference")]
    assert starts(*sides)
    assert not starts(sides[0])
    assert not starts(sides[0], f"--{sides[1]}")
    assert not starts(sides[0], str(tmp_path))
    (tmp_path / "reference" / "rank00000" / "step00003").rename(tmp_path / "reference" / "rank00000" / "step00004")
    assert not starts(*sides)
    (tmp_path / "reference" / "rank00000").rename(tmp_path / "elsewhere")
    assert not starts(*sides)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert not starts(sides[0], sides[0])


@pytest.mark.parametrize("name", ["tensors.journal", "tensors-0000.safetensors"])
def test_a_missing_or_strange_file_is_left_to_the_usual_way(name: str, tmp_path: Path) -> None:
    two_runs(tmp_path, 5000)
    path = tmp_path / "subject" / STEP / name

    def number_of_pairs() -> int:
        with early_start(words(tmp_path)):
            return sum(pairs._shared.count for pairs in early._begun.values())

    assert number_of_pairs() == 1
    path.unlink()
    assert number_of_pairs() == 0
    os.mkfifo(path)
    assert number_of_pairs() == 0
    path.unlink()
    path.write_bytes(b"short")
    assert number_of_pairs() == 0


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_journal_leads_beyond_its_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Change, cut off and add bytes: what is listed lies within the files, or reading ends with an error of ours."""
    folder = tmp_path_factory.mktemp("runs")
    two_runs(folder, 100, 2000, 70)
    journal = folder / "subject" / STEP / "tensors.journal"
    text = bytearray(journal.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    journal.write_bytes(text[: data.draw(st.integers(0, len(text)))] + data.draw(st.binary(max_size=40)))
    size = (journal.parent / "tensors-0000.safetensors").stat().st_size
    with early_start(words(folder)):
        for pairs in early._begun.values():
            for unit in pairs._units.values():
                assert unit.subject.offset + unit.subject.length <= size
