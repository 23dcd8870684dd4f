# SPDX-License-Identifier: Apache-2.0
"""A guess at what will be compared: right where two journals are in step, harmless whatever they hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.model import RunInfo
from ulpscope.numerics.difference import guessing
from ulpscope.numerics.difference.difference import difference
from ulpscope.numerics.difference.guessing import Guess, guess_from
from ulpscope.numerics.difference.kept_pairs import GuessedPairs
from ulpscope.store import DirectoryRun, DirectorySink, create_run

STEP = Path("rank00000", "step00003")

pytestmark = pytest.mark.skipif(not hasattr(guessing.KERNEL, "ulpscope_guess"), reason="no compiled kernel that reads files here")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)


def record(folder: Path, tensors: list[np.ndarray[Any, Any]], dtypes: list[str] | None = None) -> tuple[Path, list[str]]:
    """A run with one step, and the keys of its tensors."""
    path = create_run(folder, RunInfo())
    sink = DirectorySink(path, rank=0)
    sink.begin_step(3)
    names = dtypes or [str(one.dtype) for one in tensors]
    keys = [sink.keep(name, one.shape, one) or "" for name, one in zip(names, tensors, strict=True)]
    sink.close()
    return path, keys


def two_runs(folder: Path, *sizes: int) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[tuple[str, str]]]:
    random = np.random.default_rng(1)
    ours = [random.normal(size=size).astype("<f4") for size in sizes]
    theirs = [one * np.float32(1.0001) for one in ours]
    keys = [record(folder / name, side)[1] for name, side in (("subject", ours), ("reference", theirs))]
    return ours, theirs, list(zip(*keys, strict=True))


def numbers(guess: Guess, folder: Path, keys: list[tuple[str, str]]) -> tuple[GuessedPairs, list[int | None]]:
    """What was guessed, after all of it was begun."""
    for thread in guess._threads:
        thread.join()
    runs = [DirectoryRun(folder / name) for name in ("subject", "reference")]
    pairs = GuessedPairs(guess, 0, 3)
    return pairs, [pairs.number(*(run.kept(0, 3, key) for run, key in zip(runs, both, strict=True))) for both in keys]


def guess_of(folder: Path) -> Guess:
    guess = guess_from([str(folder / "subject"), "--json", "x", str(folder / "reference")])
    assert guess is not None
    return guess


def test_journals_in_step_are_guessed_as_they_are_compared(tmp_path: Path) -> None:
    ours, theirs, keys = two_runs(tmp_path, 61, 5000, 1, 300_000, 64)
    with guess_of(tmp_path) as guess:
        pairs, found = numbers(guess, tmp_path, keys)
        assert [number is None for number in found] == [False, False, True, False, False]
        for number, one, other in zip(found, ours, theirs, strict=True):
            if number is not None:
                compared, expected = pairs.compared(number), difference("float32", one.view(np.uint8), "float32", other.view(np.uint8))
                assert compared is not None
                assert compared.found.sum_squares == expected.sum_squares
                assert compared.found.worst == expected.worst
                assert (compared.subject, compared.reference) == (one[expected.worst], other[expected.worst])


def test_every_dtype_that_it_knows_is_told_apart(tmp_path: Path) -> None:
    names = [*guessing.KINDS, "complex64", "bool", "float8_e5m2"]
    data = [np.arange(at, at + 512, dtype=np.uint8) for at in range(len(names))]
    sizes = {"complex64": 8, "bool": 1, "float8_e5m2": 1, "bfloat16": 2}
    shaped = [one.view(np.dtype((np.void, sizes.get(name) or np.dtype(name).itemsize))) for one, name in zip(data, names, strict=True)]
    _, ours = record(tmp_path / "subject", shaped, names)
    _, theirs = record(tmp_path / "reference", [one[::-1].copy() for one in shaped], names)
    with guess_of(tmp_path) as guess:
        assert guess.shared.count == len(guessing.KINDS)
        numbers(guess, tmp_path, [])
        assert {name for _, _, name, _ in guess.begun(0, 3)} == set(guessing.KINDS)
        assert guess.begun(0, 4) == guess.begun(1, 3) == {}
    assert len(ours) == len(theirs)


def test_a_wrong_guess_is_asked_by_nobody(tmp_path: Path) -> None:
    _, _, keys = two_runs(tmp_path, 100, 200, 300)
    crossed = [(keys[0][0], keys[1][1]), (keys[1][0], keys[2][1])]
    with guess_of(tmp_path) as guess:
        assert numbers(guess, tmp_path, crossed)[1] == [None, None]


def test_other_bytes_than_were_kept_are_left_to_the_usual_way(tmp_path: Path) -> None:
    _, _, keys = two_runs(tmp_path, 5000, 6000)
    shard = tmp_path / "subject" / STEP / "tensors-0000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-10] ^= 1
    shard.write_bytes(damaged)
    with guess_of(tmp_path) as guess:
        pairs, found = numbers(guess, tmp_path, keys)
        assert [number is not None and pairs.compared(number) is not None for number in found] == [True, False]


def test_files_are_closed(tmp_path: Path) -> None:
    two_runs(tmp_path, 5000)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with guess_of(tmp_path) as guess:
        pass
    guess.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_where_there_is_nothing_to_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_runs(tmp_path, 5000)
    sides = [str(tmp_path / name) for name in ("subject", "reference")]
    assert guess_from([sides[0]]) is None
    assert guess_from([sides[0], f"--{sides[1]}"]) is None
    assert guess_from([sides[0], str(tmp_path)]) is None
    (tmp_path / "reference" / "rank00000" / "step00003").rename(tmp_path / "reference" / "rank00000" / "step00004")
    assert guess_from(sides) is None
    (tmp_path / "reference" / "rank00000").rename(tmp_path / "elsewhere")
    assert guess_from(sides) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert guess_from([sides[0], sides[0]]) is None


@pytest.mark.parametrize("name", ["tensors.journal", "tensors-0000.safetensors"])
def test_a_missing_or_strange_file_ends_the_guess(name: str, tmp_path: Path) -> None:
    two_runs(tmp_path, 5000)
    path = tmp_path / "subject" / STEP / name
    path.unlink()
    with guess_of(tmp_path) as guess:
        assert guess.shared.count == 0
    os.mkfifo(path)
    with guess_of(tmp_path) as guess:
        assert guess.shared.count == 0
    path.unlink()
    path.write_bytes(b"short")
    with guess_of(tmp_path) as guess:
        assert guess.shared.count == 0


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_journal_leads_beyond_its_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes changed, cut off, added: what is guessed lies within the files, or nothing is guessed."""
    folder = tmp_path_factory.mktemp("runs")
    two_runs(folder, 100, 2000, 70)
    journal = folder / "subject" / STEP / "tensors.journal"
    text = bytearray(journal.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    journal.write_bytes(text[: data.draw(st.integers(0, len(text)))] + data.draw(st.binary(max_size=40)))
    size = (journal.parent / "tensors-0000.safetensors").stat().st_size
    with guess_of(folder) as guess:
        units = memoryview(guess.units).cast("B").cast("Q")
        for number in range(guess.shared.count):
            _, offset, length = units[number * guessing.UNIT_WORDS : number * guessing.UNIT_WORDS + 3]
            assert offset + length <= size
