# SPDX-License-Identifier: Apache-2.0
"""The series on disk: whole after a kill, flat in memory, bounded in size, and never trusted when read."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ulpscope.errors import DamagedRunError, InputError, NewerFormatError
from ulpscope.model import RunInfo
from ulpscope.model.health import Alert, HealthLayout, HealthStep, HealthTarget
from ulpscope.store import create_run
from ulpscope.store.series import HealthRun, SeriesSink, open_health

TARGETS = tuple(
    HealthTarget(kind=kind, name=name, numel=40, global_numel=40, dtype="float32", layer="fc", num_samples=12 if kind == "gradient" else 0)
    for kind in ("gradient", "parameter")
    for name in ("fc.weight", "fc.bias")
)
LAYOUT = HealthLayout(TARGETS, (-1.0, 1.0))


def step_numbered(number: int, layout: HealthLayout = LAYOUT) -> HealthStep:
    rows = len(layout.targets)
    return HealthStep(
        step=number,
        time=1000.0 + number,
        layout=layout,
        statistics=np.arange(rows * 6, dtype=np.float64).reshape(rows, 6) + number,
        scalars={"loss": 1.0 / (number + 1)} if number % 2 == 0 else {},
        histograms=np.full((rows, 3), number, dtype=np.int64),
        signs=bytes([number % 256]) * sum(-(-target.num_samples // 8) for target in layout.targets),
    )


def write(folder: Path, numbers: range, **options: int) -> HealthRun:
    path = create_run(folder / "run", RunInfo())
    sink = SeriesSink(path, 0, **options)
    for number in numbers:
        sink.write(step_numbered(number))
    sink.close()
    return open_health(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    series = write(tmp_path, range(5)).series(0)
    assert series.steps.tolist() == [0, 1, 2, 3, 4]
    assert series.targets == TARGETS
    assert series.values[3].tolist() == step_numbered(3).statistics.tolist()
    assert series.scalars["loss"][:3].tolist() == pytest.approx([1.0, np.nan, 1 / 3], nan_ok=True)
    assert series.signs[2, :2].tolist() == [[2, 2], [2, 2]]
    assert series.histograms[4].tolist() == [[4, 4, 4]] * 4
    assert series.num_left_out == 0


def test_nan_and_infinities_survive(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    sink = SeriesSink(path, 0)
    values = np.array([[np.nan, np.inf, -np.inf, -0.0, 5e-324, 1.0]] * 4)
    sink.write(replace(step_numbered(0), statistics=values, scalars={"loss": float("nan"), "scale": float("inf")}))
    sink.close()
    series = open_health(path).series(0)
    assert series.values[0].tobytes() == values.tobytes()
    assert np.isnan(series.scalars["loss"][0])
    assert series.scalars["scale"][0] == np.inf


def test_targets_may_come_and_go(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    sink = SeriesSink(path, 0)
    other = HealthLayout((TARGETS[0], replace(TARGETS[1], name="new")), (-1.0, 1.0))
    for step in (step_numbered(0), step_numbered(1, other), step_numbered(2)):
        sink.write(step)
    sink.close()
    series = open_health(path).series(0)
    assert [target.name for target in series.targets] == ["fc.weight", "fc.bias", "fc.weight", "fc.bias", "new"]
    assert series.present[:, 4].tolist() == [False, True, False]
    assert series.present[:, 0].all()


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    series = write(tmp_path, range(9)).series(0, wants=lambda target: target.kind == "parameter", signs=False, most_steps=4)
    assert {target.kind for target in series.targets} == {"parameter"}
    assert series.steps.tolist() == [0, 4, 8]
    assert series.num_left_out == 6


def test_a_growing_series_is_read_as_it_grows(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    sink = SeriesSink(path, 0, segment_bytes=2000)
    for number in range(3):
        sink.write(step_numbered(number))
    run = open_health(path)
    assert run.latest(0).steps.tolist() == [0, 1, 2]
    for number in range(3, 40):
        sink.write(step_numbered(number))
    assert run.latest(0).steps.tolist() == list(range(40))
    sink.close()


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.health.test_store import step_numbered
from ulpscope.store.series import SeriesSink
sink = SeriesSink(Path(sys.argv[2]), 0, segment_bytes=20000, max_bytes=200000)
number = 0
while True:
    sink.write(step_numbered(number))
    print(number, flush=True)
    number += 1
"""


def test_a_killed_writer_leaves_a_whole_series(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parents[2]), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = -1
        for line in process.stdout:
            said = int(line)
            if said >= 1500:
                break
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
    said = int(rest[-1]) if rest else said
    steps = [step.step for step in open_health(path).steps(0)]
    assert steps[-1] >= said
    assert steps == sorted(set(steps))
    assert steps[0] == 0


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 60])
def test_a_torn_end_costs_one_step(cut: int, tmp_path: Path) -> None:
    run = write(tmp_path, range(4))
    file = next((run.path / "rank00000").glob("series-*"))
    os.truncate(file, file.stat().st_size - cut)
    assert run.series(0).steps.tolist() == [0, 1, 2]


def test_a_hundred_thousand_rows_in_little_memory_and_little_disk(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    sink = SeriesSink(path, 0, max_bytes=1_000_000, segment_bytes=50_000)
    for number in range(2000):
        sink.write(step_numbered(number))
    peaks = []
    for numbers in (range(2000, 13_000), range(13_000, 25_000)):
        tracemalloc.start()
        for number in numbers:
            sink.write(step_numbered(number))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    peak = min(peaks)  # pathlib has names interned, and the interpreter may enlarge its table of them, by 8 MB, once
    sink.close()
    files = list((path / "rank00000").glob("series-*"))
    assert peak < 1_500_000
    assert sum(file.stat().st_size for file in files) <= 1_000_000
    assert len(files) < 60
    steps = [step.step for step in open_health(path).steps(0)]
    gaps = np.diff(steps)
    assert steps[0] == 0
    assert steps[-1] == 24_999
    assert (gaps > 0).all()
    assert gaps[:10].max() > gaps[-10:].max(), "the past is coarser than the present"
    assert gaps.max() <= 128


def test_alerts(tmp_path: Path) -> None:
    run = write(tmp_path, range(1))
    alert = Alert(kind="exploding", step=3, rank=0, headline="large", names=("fc.weight",), value=10.0, usual=1.0)
    SeriesSink(run.path, 0).alert(alert)
    with (run.path / "rank00000" / "alerts.jsonl").open("a") as file:
        file.write('{"torn')
    assert run.alerts(0) == (alert,)


def raw_frame(body: bytes) -> bytes:
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def hostile(folder: Path, *frames: object) -> HealthRun:
    run = write(folder, range(1))
    file = next((run.path / "rank00000").glob("series-*"))
    file.write_bytes(b"".join(raw_frame(msgspec.msgpack.encode(frame)) for frame in frames))
    return run


ROW = ["gradient", "w", 4, 4, "float32", "", True, 8, b""]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([[0, 1, 0], [2, 0, 0.0, {}, b"", b"", b""]], "a step stands before any layout"),
        ([[0, 1, 0], [1, [ROW], []], [2, 0, 0.0, {}, b"\0" * 47, b"", b"\0"]], "holds"),
        ([[0, 1, 0], [1, [ROW], []], [2, 0, 0.0, {}, b"\0" * 48, b"", b""]], "holds"),
        ([[0, 1, 0], [1, [[*ROW[:7], 2**60, b""]], []], [2, 0, 0.0, {}, b"\0" * 48, b"", b"\0"]], "holds"),
        ([[0, 1, 0], [1, [["gradient"]], []]], "unexpected"),
        ([[0, 1, 0], [2, -1, 0.0, {}, b"", b"", b""]], "unexpected"),
        ([[0, 1, 0], "text"], "unexpected"),
    ],
)
def test_lies_are_damage(frames: list[object], words: str, tmp_path: Path) -> None:
    run = hostile(tmp_path, *frames)
    with pytest.raises(DamagedRunError, match=words):
        run.series(0)


def test_a_newer_series_says_so(tmp_path: Path) -> None:
    with pytest.raises(NewerFormatError, match="pip install -U ulpscope"):
        hostile(tmp_path, [0, 99, 0]).series(0)


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no watched rank 3; it has 0"):
        write(tmp_path, range(1)).series(3)
