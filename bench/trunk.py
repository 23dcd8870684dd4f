# SPDX-License-Identifier: Apache-2.0
"""Measure recording and comparing against the bare step, the peer and the machine, and print one table of ratios.

    python bench/trunk.py [--peer-python PATH] [--quick]

Everything is measured in one run, each measurement in a process of its own, recorders taking turns. The figure of a recorder is the
best of its turns, and of a turn the median of its steps after the first: noise only ever adds. A recorder that fails is a cell
that says so. Let nothing else run meanwhile. The peer is mindstudio-probe 26.2.0 in an environment of its own, and PATH the Python
of that environment.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
OURS = sys.executable
PERTURBATION = 1e-6
LARGE_RUN_BYTES = 4e9
REPLAY_SECONDS = 60.0


class Failed(Exception):
    """Raised for a process that did not do its work; the message is its last output."""


@dataclass(frozen=True)
class Finished:
    """A process that did its work."""

    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int

    @property
    def last_words(self) -> str:
        return (self.stderr.strip() or self.stdout.strip() or "it said nothing").splitlines()[-1][:160]


@dataclass(frozen=True)
class Times:
    """Seconds of each step of one training, and of ending the recording."""

    steps: list[float]
    close: float

    @property
    def step(self) -> float:
        """Return the median step, with its share of the work put off to the end."""
        return statistics.median(self.steps[1:]) + self.close / len(self.steps)


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    rounds: int
    steps: int
    tensor_steps: int
    help_runs: int
    long_steps: int
    with_large_run: bool


FULL = Effort(rounds=3, steps=12, tensor_steps=4, help_runs=5, long_steps=50, with_large_run=True)
QUICK = Effort(rounds=1, steps=5, tensor_steps=2, help_runs=2, long_steps=12, with_large_run=False)


@dataclass
class Recorder:
    """One way to train, and the figures of its turns."""

    name: str
    command: list[str]
    steps: int
    turns: list[float] = field(default_factory=list)
    bytes_a_step: float = math.nan
    files_a_step: float = math.nan
    failure: str = ""

    def take_turn(self, scratch: Path) -> None:
        if self.failure:
            return
        into = scratch / self.name.replace(" ", "-")
        try:
            seconds = train(self.command, self.steps, into)
        except Failed as error:
            self.failure = str(error)
            return
        self.turns.append(seconds.step)
        self.bytes_a_step, self.files_a_step = (amount / self.steps for amount in disk_use(into))
        shutil.rmtree(into, ignore_errors=True)

    @property
    def best(self) -> float:
        return min(self.turns, default=math.nan)


def run(command: list[str], *, expected: Iterable[int] = (0,), timeout_s: float = 3600) -> Finished:
    """Run a process to its end; its peak memory is that of the largest process in it."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=err, text=True)
        except OSError as error:
            raise Failed(f"{command[0]}: {error.strerror}") from None
        try:
            _, status, usage = wait(process, timeout_s)
        except TimeoutError:
            raise Failed(f"stopped after {timeout_s:.0f} s") from None
        elapsed = time.perf_counter() - begin
        out.seek(0)
        err.seek(0)
        finished = Finished(out.read(), err.read(), elapsed, usage.ru_maxrss * 1024)
    if status not in expected:
        raise Failed(f"exit code {status}, {finished.last_words}")
    return finished


def wait(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, int, resource.struct_rusage]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return pid, process.returncode, usage
        time.sleep(0.002)
    process.kill()
    process.wait()
    raise TimeoutError


def train(command: list[str], steps: int, into: Path, perturb: float = 0.0) -> Times:
    shutil.rmtree(into, ignore_errors=True)
    finished = run([*command, "--steps", str(steps), "--into", str(into), "--perturb", str(perturb)])
    answers = [line for line in finished.stdout.splitlines() if line.startswith('{"steps"')]
    if not answers:
        raise Failed("printed no times")
    return Times(**json.loads(answers[-1]))


def disk_use(folder: Path) -> tuple[int, int]:
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return sum(sizes), len(sizes)


def recorder_command(keep: str) -> list[str]:
    return [OURS, str(HERE / "record.py"), "--keep", keep]


def peer_command(python: str, keep: str) -> list[str]:
    return [python, str(HERE / "peer_record.py"), "--keep", keep]


# --- measurements


def measure_recording(effort: Effort, peer: str | None, scratch: Path) -> dict[str, Recorder]:
    recorders = [Recorder("bare", recorder_command("nothing"), effort.steps)]
    for keep in ("fingerprint", "statistics", "tensors"):
        recorders.append(Recorder(keep, recorder_command(keep), effort.tensor_steps if keep == "tensors" else effort.steps))
    for keep in ("statistics", "tensors") if peer else ():
        recorders.append(Recorder(f"peer {keep}", peer_command(peer, keep), effort.tensor_steps if keep == "tensors" else effort.steps))
    if peer:
        shorter = [*peer_command(peer, "tensors"), "--without-optimizer"]
        recorders.append(Recorder("peer tensors without optimizer", shorter, effort.tensor_steps))
    for turn in range(effort.rounds):
        for recorder in recorders:
            say(f"turn {turn + 1} of {effort.rounds}: {recorder.name}")
            recorder.take_turn(scratch)
    return {recorder.name: recorder for recorder in recorders}


def measure_growth(effort: Effort, scratch: Path) -> float:
    """Compare the seconds of a late step with those of an early one, medians of five around each."""
    say(f"{effort.long_steps} recorded steps")
    seconds = train(recorder_command("statistics"), effort.long_steps, scratch / "long").steps
    return statistics.median(seconds[-5:]) / statistics.median(seconds[3:8])


def record_pair(command: list[str], steps: int, folder: Path) -> tuple[Path, Path]:
    """Record two runs whose weights differ by one part in a million, so that every tensor has to be read."""
    subject, reference = folder / "subject", folder / "reference"
    train(command, steps, subject, PERTURBATION)
    train(command, steps, reference)
    return subject, reference


def compare_ours(subject: Path, reference: Path, *, replay: str = "none", cores: int = 0, attempts: int = 3) -> Finished:
    """Run our comparison. Exit code 1 means that the runs diverge, or a crash: the answer file tells which.

    The peer replays nothing, so neither do we there.
    """
    answer = subject.parent / "answer.json"
    words = ["--quiet", "--json", str(answer), "--replay", replay, "--replay-limit", str(REPLAY_SECONDS)]
    command = [*ours_command(), "compare", str(subject), str(reference), *words]
    finished = best(lambda: run(on_cores(cores, command), expected=(0, 1)), attempts)
    if not answer.is_file():
        raise Failed(finished.last_words)
    return finished


def on_cores(many: int, command: list[str]) -> list[str]:
    """Confine the command to so many cores; 0 means to none."""
    if not many:
        return command
    chosen = sorted(os.sched_getaffinity(0))[:many]
    return [OURS, "-c", f"import os, sys; os.sched_setaffinity(0, {chosen}); os.execv(sys.argv[1], sys.argv[1:])", *command]


def compare_peer(python: str, subject: Path, reference: Path, scratch: Path) -> Finished:
    steps = [next(run.glob("step0/*")) for run in (subject, reference)]
    command = [peer_script(python), "compare", "-tp", str(steps[0] / "dump.json"), "-gp", str(steps[1] / "dump.json")]
    finished = best(lambda: run([*command, "-o", str(scratch / "peer-result")]))
    if not any((scratch / "peer-result").rglob("*.csv")):
        raise Failed("wrote no result")
    return finished


def best(attempted: Callable[[], Finished], attempts: int = 3) -> Finished:
    """Return the quickest of some attempts: noise only ever adds."""
    return min((attempted() for _ in range(attempts)), key=lambda finished: finished.seconds)


def ours_command() -> list[str]:
    """Return our command as people type it, as the peer's is run; the module where the command is not installed."""
    script = Path(OURS).with_name("ulpscope")
    return [str(script)] if script.is_file() else [OURS, "-m", "ulpscope"]


def peer_script(python: str) -> str:
    return str(Path(python).parent / "msprobe")


def best_help(command: list[str], runs: int) -> float:
    return min(run(command).seconds for _ in range(runs))


def copy_bandwidth(size: int = 1 << 28) -> float:
    """Measure the bytes a second of one core copying memory."""
    source, target = bytearray(os.urandom(1 << 20)) * (size >> 20), bytearray(size)
    view = memoryview(target)
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        view[:] = source
        best = min(best, time.perf_counter() - begin)
    return size / best


def read_bandwidth(size: int = 1 << 29) -> float:
    """Measure the bytes a second of one core reading memory that no cache holds."""
    import numpy as np

    memory = np.ones(size // 8, np.uint64)
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        memory.max()
        best = min(best, time.perf_counter() - begin)
    return size / best


def write_bandwidth(folder: Path, *, sync: bool, size: int = 1 << 29) -> float:
    """Measure the bytes a second into a new file, to the page cache or to the disk."""
    block = os.urandom(1 << 24)
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        with (folder / "bandwidth").open("wb", buffering=0) as stream:
            for _ in range(size >> 24):
                stream.write(block)
            if sync:
                os.fsync(stream.fileno())
        best = min(best, time.perf_counter() - begin)
        (folder / "bandwidth").unlink()
    return size / best


# --- the table


@dataclass(frozen=True)
class Row:
    """One line of the table; `ratio` is ours over the peer or, where there is none, over the limit."""

    what: str
    ours: str
    peer: str = ""
    ratio: str = ""
    asked: str = ""
    limit: str = ""


def attempt(measure: Callable[[], Finished]) -> Finished | str:
    """Measure, or return why that failed."""
    try:
        return measure()
    except Failed as error:
        return f"failed: {error}"


def number(value: float, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:.3g}{unit}"


def recording_rows(recorders: dict[str, Recorder]) -> Iterable[Row]:
    bare = recorders["bare"].best
    for keep, asked in (("fingerprint", ""), ("statistics", "at most 1.25"), ("tensors", "")):
        ours, peer = recorders[keep], recorders.get(f"peer {keep}")
        yield Row(f"recorded step over bare step, {keep}", *cells(ours, peer, lambda one: one.best / bare, "x"), asked=asked)
    ours = recorders["tensors"]
    for remark in ("", " without optimizer"):
        peer = recorders.get(f"peer tensors{remark}")
        if peer is None and remark:
            continue
        peer_remark = f", peer{remark}" if remark else ""
        added, stored = ("", "") if remark else ("at most 0.1 of the peer's", "at most 0.55 of the peer's")
        yield Row(
            f"time that tensors add, over bare step{peer_remark}", *cells(ours, peer, lambda one: (one.best - bare) / bare), asked=added
        )
        yield Row(f"MB on disk a step, tensors{peer_remark}", *cells(ours, peer, lambda one: one.bytes_a_step / 1e6), asked=stored)
        yield Row(f"files a step, tensors{peer_remark}", *cells(ours, peer, lambda one: one.files_a_step))


def cells(ours: Recorder, peer: Recorder | None, figure: Callable[[Recorder], float], unit: str = "") -> tuple[str, str, str]:
    here = figure(ours)
    there = figure(peer) if peer else math.nan
    return (
        f"failed: {ours.failure}" if ours.failure else number(here, unit),
        "" if peer is None else f"failed: {peer.failure}" if peer.failure else number(there, unit),
        "" if math.isnan(here / there) else number(here / there),
    )


def compare_rows(effort: Effort, peer: str | None, bytes_a_step: float, scratch: Path) -> Iterable[Row]:
    say("comparing two tensor runs of one step")
    ours = attempt(lambda: compare_ours(*record_pair(recorder_command("tensors"), 1, scratch / "ours")))
    theirs: Finished | str = ""
    crossed: Finished | str = ""
    if peer:
        folder = scratch / "peer"
        theirs = attempt(lambda: compare_peer(peer, *record_pair(peer_command(peer, "tensors"), 1, folder), scratch))
        crossed = attempt(lambda: compare_ours(folder / "subject", folder / "reference"))
    yield timing_row("seconds to compare two tensor runs of one step", ours, theirs, asked="at most 0.0167 of the peer's")
    yield memory_row("MB of memory at most, there", ours, theirs, asked="under 600")
    replayed = attempt(lambda: compare_ours(scratch / "ours" / "subject", scratch / "ours" / "reference", replay="needed", attempts=1))
    yield timing_row(f"the same with replay as by default, for {REPLAY_SECONDS:g} s at most", replayed, theirs)
    if peer:
        yield timing_row("the same, both on the peer's files", crossed, theirs)
        yield memory_row("MB of memory at most, there", crossed, theirs)
    shutil.rmtree(scratch / "ours", ignore_errors=True)
    shutil.rmtree(scratch / "peer", ignore_errors=True)
    if effort.with_large_run and not math.isnan(bytes_a_step):
        steps = math.ceil(LARGE_RUN_BYTES / bytes_a_step)
        say(f"comparing two tensor runs of {steps} steps, {steps * bytes_a_step / 1e9:.1f} GB each")
        sides = record_pair(recorder_command("tensors"), steps, scratch / "large")
        os.sync()  # else the kernel would still write them, on a core that a measurement needs
        large, alone = (attempt(lambda cores=cores: compare_ours(*sides, cores=cores)) for cores in (2, 1))
        yield memory_row(f"MB of memory at most, two runs of {steps * bytes_a_step / 1e9:.1f} GB", large, "", asked="under 600")
        yield timing_row("seconds, there, on two cores", large, "")
        yield from throughput_rows(large, alone, 2 * steps * bytes_a_step)
        shutil.rmtree(scratch / "large", ignore_errors=True)


def throughput_rows(two: Finished | str, one: Finished | str, size: float) -> Iterable[Row]:
    """Compare how fast files are compared, start-up included, with reading the same memory and reading files."""
    if isinstance(two, str) or isinstance(one, str):
        return
    limit = read_bandwidth() / 1e9
    yield Row("GB/s, comparing these runs on one core", number(size / one.seconds / 1e9), limit=number(limit))
    yield Row("the same on two cores over one", number(one.seconds / two.seconds), asked="at least 1.7")


def pass_rows(effort: Effort) -> Iterable[Row]:
    """Compare the pass over two tensors with reading memory that no cache holds, on one core; and on two at once."""
    say("the pass over two tensors")
    figures = json.loads(run([OURS, str(HERE / "kernels.py"), "--pass", "--repeats", str(effort.help_runs)]).stdout)
    share = figures["one"] / figures["read"]
    yield Row(
        "GB/s, the pass over two float32 tensors",
        number(figures["one"]),
        ratio=number(share),
        asked="at least 0.25 of the limit",
        limit=number(figures["read"]),
    )
    yield Row("the same on two cores over one", number(figures["two"] / figures["one"]), asked="at least 1.7")


def timing_row(what: str, ours: Finished | str, peer: Finished | str, asked: str = "") -> Row:
    return _finished_row(what, ours, peer, lambda one: one.seconds, asked)


def memory_row(what: str, ours: Finished | str, peer: Finished | str, asked: str = "") -> Row:
    return _finished_row(what, ours, peer, lambda one: one.peak_bytes / 1e6, asked)


def _finished_row(what: str, ours: Finished | str, peer: Finished | str, figure: Callable[[Finished], float], asked: str) -> Row:
    here, there = (one if isinstance(one, str) else number(figure(one)) for one in (ours, peer))
    both = isinstance(ours, Finished) and isinstance(peer, Finished)
    return Row(what, here, there, number(figure(ours) / figure(peer)) if both else "", asked)


def import_row(effort: Effort) -> Row:
    bare, whole = (best_help([OURS, "-c", code], effort.help_runs) for code in ("pass", "import ulpscope"))
    return Row("milliseconds of import ulpscope", number((whole - bare) * 1e3), asked="under 50")


def help_row(effort: Effort, peer: str | None) -> Row:
    say("--help")
    figures: list[float | str] = []
    for command in ([*ours_command(), "--help"], [peer_script(peer), "--help"] if peer else None):
        try:
            figures.append(best_help(command, effort.help_runs) if command else "")
        except Failed as error:
            figures.append(f"failed: {error}")
    ours, theirs = (one if isinstance(one, str) else number(one) for one in figures)
    ratio = number(figures[0] / figures[1]) if all(isinstance(one, float) for one in figures) else ""
    return Row("seconds of --help", ours, theirs, ratio, "under 0.25")


def growth_row(effort: Effort, scratch: Path) -> Row:
    try:
        figure = number(measure_growth(effort, scratch))
    except Failed as error:
        figure = f"failed: {error}"
    return Row(f"step {effort.long_steps} over step 5, statistics", figure, asked="about 1")


def limit_rows(recorders: dict[str, Recorder], scratch: Path) -> Iterable[Row]:
    say("the machine's limits")
    copy, cache, disk = copy_bandwidth(), write_bandwidth(scratch, sync=False), write_bandwidth(scratch, sync=True)
    tensors, bare = recorders["tensors"], recorders["bare"].best
    yield Row("milliseconds of a bare step", number(bare * 1e3))
    yield Row("GB/s, copying memory", number(copy / 1e9))
    yield Row("GB/s, writing a file (page cache)", number(cache / 1e9))
    yield Row("GB/s, writing a file (synced)", number(disk / 1e9))
    reached = tensors.bytes_a_step / (tensors.best - bare)
    yield Row("GB/s that recording tensors reaches", number(reached / 1e9), ratio=number(reached / disk), limit=number(disk / 1e9))


def print_table(rows: Iterable[Row]) -> None:
    print("| what | ours | peer | limit | ratio | asked |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = (cell.replace("|", "\\|") for cell in (row.what, row.ours, row.peer, row.limit, row.ratio, row.asked))
        print(f"| {' | '.join(cells)} |", flush=True)


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="the Python of an environment with mindstudio-probe 26.2.0")
    parser.add_argument("--quick", action="store_true", help="few steps, one turn each: shows that it works, not how fast it is")
    parser.add_argument("--scratch", metavar="DIR", help="where to record; several GB are needed")
    options = parser.parse_args()
    effort = QUICK if options.quick else FULL
    compileall.compile_dir(HERE.parent / "src" / "ulpscope", quiet=2)  # pip compiles the packages it installs, and did so for the peer
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        recorders = measure_recording(effort, options.peer_python, scratch)
        rows = [
            *recording_rows(recorders),
            *compare_rows(effort, options.peer_python, recorders["tensors"].bytes_a_step, scratch),
            *pass_rows(effort),
            import_row(effort),
            help_row(effort, options.peer_python),
            growth_row(effort, scratch),
            *limit_rows(recorders, scratch),
        ]
    print_table(rows)


if __name__ == "__main__":
    main()
