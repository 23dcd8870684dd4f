# SPDX-License-Identifier: Apache-2.0
"""Spoiled files and odd commands: each ends in an answer or a sentence, soon, and leaves what was stored as it was.

A failure says how to run its input again. `make test` runs a sample, `make test-long` a million inputs, of which a thousand through the
real command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.children import on_linux
from tests.hostile.fuzzing import Samples, fuzz, import_everything, input_of, warm_up
from tests.hostile.samples import write_samples
from tests.hostile.targets import TARGETS

pytestmark = pytest.mark.skipif(not on_linux(), reason="memory is counted where Linux tells of it")

SAMPLE = 1 / 1000
REAL = ("our commands", "msprobe's commands", "msprobe compare", "migrate")
NUM_REAL = 1000


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("fuzz") / "samples"
    folder.mkdir()
    write_samples(folder)
    import_everything()
    warm_up(folder)
    return folder


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample(name: str, samples: Path) -> None:
    target = TARGETS[name]
    assert not fuzz(target, range(max(20, int(target.share * SAMPLE))), samples), "run again what is named above"


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", TARGETS)
def test_all(name: str, part: int, samples: Path) -> None:
    size = TARGETS[name].share // 4
    assert not fuzz(TARGETS[name], range(part * size, (part + 1) * size), samples), "run again what is named above"


def test_they_are_a_million() -> None:
    assert sum(target.share for target in TARGETS.values()) == 1_000_000


@pytest.mark.parametrize("number", range(2))
def test_a_real_command(number: int, samples: Path) -> None:
    really_run(number, samples)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_real_commands(part: int, samples: Path) -> None:
    for number in range(part * NUM_REAL // 10, (part + 1) * NUM_REAL // 10):
        really_run(number, samples)


def really_run(number: int, folder: Path) -> None:
    """Run the words and files of an input of one of the targets, in a process as a user starts it."""
    target = TARGETS[REAL[number % len(REAL)]]
    kept = Samples(folder)
    found = input_of(target, 10_000_000 + number, kept.contents)
    module = "ulpscope" if target.name in ("our commands", "migrate") else "ulpscope.compat.msprobe.command.parser"
    start = ["-m", "ulpscope"] if module == "ulpscope" else ["-c", f"import sys; from {module} import main; sys.exit(main())"]
    kept.put(found)
    try:
        words = [os.fsencode(word.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")) for word in found.words]
        done = subprocess.run(
            [os.fsencode(sys.executable), *map(os.fsencode, start), *words],
            cwd=folder,
            capture_output=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
        )
        said = f"{target.name} {10_000_000 + number}: {found.words}\n{done.stdout[-1000:]!r}\n{done.stderr[-3000:]!r}"
        assert done.returncode in (0, 1, 2), f"{signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode}: {said}"
        assert b"Traceback" not in done.stdout + done.stderr, said
        assert done.returncode != 2 or (done.stdout + done.stderr).strip() or "--quiet" in found.words, said
        assert not kept.harm(is_refused=done.returncode == 2), said
    finally:
        kept.restore()
