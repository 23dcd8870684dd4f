# SPDX-License-Identifier: Apache-2.0
"""Run spoiled inputs, thousands in each child process: files are restored between them, and if a child dies, its last input is blamed.

python -m tests.hostile.fuzzing "dump.json" 4711        one input again, with all that it says
python -m tests.hostile.fuzzing "dump.json" 0 5000      a range of them
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import pkgutil
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

import ulpscope
from tests.hostile.children import GIB, ended, limited, memory
from tests.hostile.samples import write_samples
from tests.hostile.targets import TARGETS, Input, Target, our_command

SEED = "ulpscope"
MOST_SECONDS = 1.0
HANGS_AFTER_S = 30.0
BATCH = 500
_REFUSALS = ("exit 2",)


class Failure(NamedTuple):
    """One input that ended otherwise than in an answer or a sentence."""

    target: str
    number: int
    end: str
    said: str

    def __str__(self) -> str:
        return f"{self.end}: python -m tests.hostile.fuzzing {self.target!r} {self.number}\n{self.said}"


class Samples:
    """A folder of samples whose files are spoiled and restored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self._entries = {path.name for path in folder.iterdir()}
        self._spoiled: Mapping[str, bytes] = {}
        self._states = {name: self._state(name) for name in self.contents}

    def _state(self, name: str) -> tuple[int, int] | None:
        try:
            status = (self.folder / name).stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    def put(self, found: Input) -> None:
        """Write the spoiled files."""
        self._spoiled = found.files
        for name, content in found.files.items():
            (self.folder / name).write_bytes(content)

    def harm(self, *, is_refused: bool) -> str:
        """Name stored files that changed, the spoiled file included where it was refused."""
        for name, state in self._states.items():
            if name in self._spoiled:
                if is_refused and (self.folder / name).read_bytes() != self._spoiled[name]:
                    return f"'{name}' was refused and then changed"
            elif "/" in name and self._state(name) != state:
                return f"'{name}' is not as it was"
        return ""

    def restore(self) -> None:
        for name in {*self._spoiled, *(name for name in self.contents if "/" not in name and self._state(name) != self._states[name])}:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(self.contents[name])
            self._states[name] = self._state(name)
        self._spoiled = {}
        for place in list(self.folder.iterdir()):
            if place.name not in self._entries:
                _remove(place)
        for place in (self.folder / "out").iterdir():
            _remove(place)


def _remove(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()


def import_everything() -> None:
    """Import before any measurement what a command imports when it runs."""
    for module in pkgutil.walk_packages(ulpscope.__path__, "ulpscope."):
        if not module.name.endswith("__main__") and ".testing" not in module.name:
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    import matplotlib.pyplot  # noqa: F401
    import openpyxl  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    import xlsxwriter  # noqa: F401


def warm_up(folder: Path) -> None:
    """Do once the work that takes longest the first time: torch and matplotlib put off much of their beginning."""
    for words in (("refine", "good", "bad"), ("compare-health", "health/run", "health2/run", "--png", "pictures"), ("check", "good")):
        at = [str(folder / word) if (folder / word).exists() or word == "pictures" else word for word in words]
        our_command(folder, tuple(at))
    shutil.rmtree(folder / "pictures", ignore_errors=True)


def input_of(target: Target, number: int, samples: dict[str, bytes]) -> Input:
    return target.spoil(samples, Random(f"{SEED}/{target.name}/{number}"))


def fuzz(target: Target, numbers: range, folder: Path, counts: Counter[str] | None = None) -> list[Failure]:
    """Run the inputs of these numbers; `folder` holds the samples. `counts` is told how they ended."""
    failures: list[Failure] = []
    counts = Counter() if counts is None else counts
    at = numbers.start
    while at < numbers.stop:
        stop = min(at + BATCH, numbers.stop)
        found, at, answers = _batch(target, range(at, stop), folder)
        failures += found
        counts.update(answers)
        if len(failures) > 20:
            break
    return failures


def _batch(target: Target, numbers: range, folder: Path) -> tuple[list[Failure], int, dict[str, int]]:
    """Return the failures of a child, and the number to go on with: the one after its last where it died."""
    shared = mmap.mmap(-1, 24)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        told = Path(scratch) / "failures"
        child = os.fork()
        if child == 0:
            _in_child(target, numbers, folder, Path(scratch) / "samples", told, shared)
        status = _waited(child, shared)
        failures = [Failure(*json.loads(line)) for line in told.read_text().splitlines()] if told.exists() else []
    last, *ended_in = struct.unpack("<3q", shared[:24])
    answers = dict(zip(("answer", "sentence"), ended_in, strict=True))
    if status == 0:
        return failures, numbers.stop, answers
    end = (
        "hangs" if status is None else f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    )
    return [*failures, Failure(target.name, last, end, "")], last + 1, answers


def _waited(child: int, shared: mmap.mmap) -> int | None:
    """Return the status of a child, None where it had to be killed since one input took far too long."""
    seen, since = b"", time.monotonic()
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if shared[:8] != seen:
            seen, since = shared[:8], time.monotonic()
        if time.monotonic() - since > HANGS_AFTER_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)


def _in_child(target: Target, numbers: range, folder: Path, copy: Path, told: Path, shared: mmap.mmap) -> NoReturn:
    code = 1
    try:
        shutil.copytree(folder, copy)
        os.chdir(copy)
        tempfile.tempdir = str(copy)
        samples = Samples(copy)
        _no_processes()
        warnings.simplefilter("ignore")
        ends: Counter[str] = Counter()
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        with limited({resource.RLIMIT_AS: memory("VmSize") + 8 * GIB}), told.open("a") as failures:
            for number in numbers:
                shared[:24] = struct.pack("<3q", number, ends["answer"], ends["sentence"])
                for failure in one(target, number, samples, ends):
                    failures.write(json.dumps(failure) + "\n")
                    failures.flush()
            shared[:24] = struct.pack("<3q", number, ends["answer"], ends["sentence"])
        code = 0
    except BaseException as error:
        with told.open("a") as failures:
            failures.write(json.dumps(Failure(target.name, struct.unpack("<q", shared[:8])[0], "the harness failed", repr(error))) + "\n")
    finally:
        os._exit(code)


def one(target: Target, number: int, samples: Samples, ends: Counter[str]) -> Iterator[Failure]:
    """Run one input and say what was wrong with how it ended."""
    found = input_of(target, number, samples.contents)
    samples.put(found)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    end, said = ended(lambda: target.run(samples.folder, found.words))
    seconds, grown = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ends["sentence" if said in _REFUSALS else end] += 1
    shown = f"{said}\nwords: {found.words!r}\nfiles: {', '.join(found.files)}"
    if end == "traceback":
        yield Failure(target.name, number, end, shown)
    if seconds > MOST_SECONDS * (3 if any("--png" in word for word in found.words) else 1):  # matplotlib draws dozens of pictures
        yield Failure(target.name, number, f"{seconds:.1f} s", shown)
    if grown << 10 > GIB:
        yield Failure(target.name, number, f"{grown >> 10} MiB", shown)
    if harm := samples.harm(is_refused=end == "sentence"):
        yield Failure(target.name, number, harm, shown)
    samples.restore()


def _no_processes() -> None:
    """Start no process: a command that needs another program has to say that it could not start it."""

    def refuse(*words: object, **options: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", "python")

    subprocess.Popen.__init__ = refuse  # type: ignore[assignment,method-assign]


def main() -> None:
    import_everything()
    target, first = TARGETS[sys.argv[1]], int(sys.argv[2])
    numbers = range(first, int(sys.argv[3]) if len(sys.argv) > 3 else first + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        path.mkdir()
        write_samples(path)
        warm_up(path)
        started = time.monotonic()
        counts: Counter[str] = Counter()
        failures = fuzz(target, numbers, path, counts)
        if len(numbers) == 1:
            samples = Samples(path)
            found = input_of(target, first, samples.contents)
            print(found.words, *(f"\n{name}: {content[:4000]!r}" for name, content in found.files.items()))
            samples.put(found)
            os.chdir(path)
            with contextlib.suppress(ModuleNotFoundError):
                print(*ended(lambda: target.run(path, found.words)))
        print(*failures, f"{len(numbers)} inputs in {time.monotonic() - started:.1f} s, {len(failures)} failures, {dict(counts)}", sep="\n")


if __name__ == "__main__":
    main()
