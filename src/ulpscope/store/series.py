# SPDX-License-Identifier: Apache-2.0
"""Write and read health runs: one append-only series for each rank, in segments that are thinned when they get too many.

    run.json                          what made it, as for every run
    rank00000/series-00000.msgpack    frames as in docs/store-format.md: start, layout, step, step ...
    rank00000/alerts.jsonl            what the run was warned about
    rank00000/ledger.jsonl            what could not be watched

A step is on disk when `write` returns, and a killed process loses at most the frame that it was writing. Each segment holds its own
layouts. When all segments together exceed `max_bytes`, two neighbours become one that is twice as coarse: a run of any length keeps its
whole history, coarser the older it is. Reading never trusts a size, a name or a number in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.format.frames import UNREADABLE, framed
from ulpscope.format.reading import FrameReader, newer_format, read_text
from ulpscope.model import FORMAT_VERSION, LedgerEntry, RunInfo
from ulpscope.model.health import STATISTICS, Alert, HealthLayout, HealthSeries, HealthStep, HealthTarget
from ulpscope.store.native.appending import FILE_MODE, FOLDER_MODE, AppendFile, write_all
from ulpscope.store.native.directory import DirectoryRun
from ulpscope.store.native.ledger import LedgerFile

__all__ = ["HealthRun", "SeriesSink", "open_health"]

SEGMENT_BYTES = 16 << 20
MAX_BYTES = 4 << 30
MOST_STEPS = 20_000
MOST_TARGETS = 1_000_000
MOST_COLUMN_BYTES = 256 << 20
MOST_DENSE_BYTES = 768 << 20  # columns with room for every target in every step, and for the signs of the widest target
MAX_ALERTS_BYTES = 16 << 20
LEDGER = "ledger.jsonl"
ALERTS = "alerts.jsonl"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_ROW_BYTES = 8 * len(STATISTICS)


class _StartFrame(msgspec.Struct, array_like=True, tag=0):
    version: int
    rank: _Count


class _TargetRow(msgspec.Struct, array_like=True):
    kind: str
    name: str
    numel: _Count
    global_numel: _Count
    dtype: str
    layer: str
    is_counted: bool
    num_samples: _Count
    owned: bytes


class _LayoutFrame(msgspec.Struct, array_like=True, tag=1):
    """The rows of the steps that follow."""

    targets: list[_TargetRow]
    bounds: list[float]


class _StepFrame(msgspec.Struct, array_like=True, tag=2):
    """One step: `statistics` is float64 and `histograms` int64, little-endian, row by row."""

    step: _Count
    time: float
    scalars: dict[str, float]
    statistics: bytes
    histograms: bytes
    signs: bytes


_AnyFrame = _StartFrame | _LayoutFrame | _StepFrame
_decoder: msgspec.msgpack.Decoder[_AnyFrame] = msgspec.msgpack.Decoder(_AnyFrame)
_alerts = msgspec.json.Decoder(Alert)


# ---- writing


def _frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return framed(body)


def _start_bytes(rank: int) -> bytes:
    return _frame((0, FORMAT_VERSION, rank))


def _layout_bytes(layout: HealthLayout) -> bytes:
    return _frame((1, [_plain(astuple(target)) for target in layout.targets], layout.bounds))


def _plain(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value for value in values)


def _step_bytes(step: HealthStep) -> bytes:
    statistics = np.ascontiguousarray(step.statistics, dtype="<f8").tobytes()
    histograms = b"" if step.histograms is None else np.ascontiguousarray(step.histograms, dtype="<i8").tobytes()
    return _frame((2, step.step, step.time, step.scalars, statistics, histograms, step.signs))


class _Segment:
    """A closed segment: its file, its size and the distance of its steps, as a power of two."""

    def __init__(self, path: Path, size: int, stride: int = 1) -> None:
        self.path, self.size, self.stride = path, size, stride


class SeriesSink:
    """Writes the series of one rank. It keeps only the names of its segments in memory."""

    def __init__(self, path: str | os.PathLike[str], rank: int, *, max_bytes: int = MAX_BYTES, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.rank = rank
        self._folder = Path(path) / f"rank{rank:05d}"
        with suppress(FileExistsError):
            self._folder.mkdir(FOLDER_MODE)
        self._ledger = LedgerFile(self._folder / LEDGER)
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max(max_bytes // 8, 1))
        self._closed: list[_Segment] = []
        self._number = 0
        self._file: AppendFile | None = None
        self._layout: HealthLayout | None = None

    def write(self, step: HealthStep) -> None:
        """Append one step; it survives a kill of the process from here on."""
        data = _step_bytes(step)
        if self._file is None or self._file.size + len(data) > self._segment_bytes:
            self._begin_segment()
        assert self._file is not None
        if step.layout is not self._layout:
            self._file.append(_layout_bytes(step.layout))
            self._layout = step.layout
        self._file.append(data)

    def alert(self, alert: Alert) -> None:
        """Write an alert down."""
        fd = os.open(self._folder / ALERTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), FILE_MODE)
        try:
            write_all(fd, msgspec.json.encode(alert) + b"\n")
        finally:
            os.close(fd)

    def note(self, entry: LedgerEntry) -> None:
        self._ledger.note(entry)

    def close(self) -> None:
        """Close the files; calling it twice is harmless."""
        self._end_segment()
        self._ledger.flush()

    def _begin_segment(self) -> None:
        self._end_segment()
        self._thin()
        self._file = AppendFile(_segment_path(self._folder, self._number), _start_bytes(self.rank))
        self._number += 1

    def _end_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._closed.append(_Segment(self._file.path, self._file.size))
        self._file = self._layout = None

    def _thin(self) -> None:
        """Make room for one more segment; the newest stays whole, so that a kill never costs the step before it."""
        while len(self._closed) > 2 and sum(segment.size for segment in self._closed) + self._segment_bytes > self._max_bytes:
            place = _pair_to_join([segment.stride for segment in self._closed[:-1]])
            older, newer = self._closed[place : place + 2]
            older.size, older.stride = _join(older, newer, self.rank, self._segment_bytes)
            newer.path.unlink()
            del self._closed[place + 1]


def _pair_to_join(strides: list[int]) -> int:
    """Choose the two neighbours to join, and return the older: the two that are most alike; of equal pairs those as coarse as most are; of
    these the oldest.

    Joining makes one segment that is about twice as coarse, so segments get coarser with age and about as many are of each coarseness.
    """

    def harm(place: int) -> tuple[float, int, int]:
        one, other = strides[place : place + 2]
        return max(one, other) / min(one, other), -strides.count(one), place

    return min(range(len(strides) - 1), key=harm)


def _join(older: _Segment, newer: _Segment, rank: int, most_bytes: int) -> tuple[int, int]:
    """Join two segments into one, as coarse as the coarser, or coarser still until it fits; return its size and its stride."""
    stride = max(older.stride, newer.stride)
    sources = [(segment.path, stride // segment.stride) for segment in (older, newer)]
    every = 1
    while True:
        size, num_steps = _rewrite(sources, every, older.path, rank, most_bytes)
        if size <= most_bytes or num_steps <= 1:
            return size, stride * every
        every *= 2


def _segment_path(folder: Path, number: int) -> Path:
    return folder / f"series-{number:05d}.msgpack"


def _rewrite(sources: list[tuple[Path, int]], every: int, to: Path, rank: int, most_bytes: int) -> tuple[int, int]:
    """Write the kept steps of segments into one file; return its size and number of steps.

    The file replaces `to` if it is no larger than asked, or has a single step."""
    draft = to.with_name(f".{to.name}.{os.urandom(4).hex()}")
    file = AppendFile(draft, _start_bytes(rank))
    num_steps = 0
    try:
        for frame in _kept_frames(sources, every):
            file.append(_frame(frame))
            num_steps += isinstance(frame, _StepFrame)
        file.close()
        if file.size <= most_bytes or num_steps <= 1:
            draft.replace(to)
    finally:
        file.close()
        draft.unlink(missing_ok=True)
    return file.size, num_steps


def _kept_frames(sources: list[tuple[Path, int]], every: int) -> Iterator[Any]:
    """Pick steps of each segment at its interval, of these again one in `every` over all, and the layouts that they need."""
    written: _LayoutFrame | None = None
    num_picked = 0
    for source, of_source in sources:
        layout: _LayoutFrame | None = None
        number = 0
        for frame in _SeriesReader(source):
            if isinstance(frame, _LayoutFrame):
                layout = frame
            elif isinstance(frame, _StepFrame):
                if number % of_source == 0:
                    if num_picked % every == 0:
                        if layout is not None and layout != written:
                            written = layout
                            yield layout
                        yield frame
                    num_picked += 1
                number += 1


# ---- reading


class _SeriesReader(FrameReader):
    """Reads the frames of one segment."""

    def _decode(self, body: bytes) -> Any:
        try:
            frame = _decoder.decode(body)
        except UNREADABLE as error:
            raise self.damaged(f"a frame holds something unexpected ({error})") from error
        if isinstance(frame, _StartFrame) and frame.version > FORMAT_VERSION:
            raise newer_format(self.path, frame.version)
        return frame


class HealthRun:
    """A readable health run, also while it is being written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._run = DirectoryRun(path)
        self._cursors: dict[int, _Cursor] = {}

    @property
    def path(self) -> Path:
        return self._run.path

    @property
    def info(self) -> RunInfo:
        return self._run.info

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a series, ascending."""
        return tuple(rank for rank in self._run.ranks() if _segments(self._folder(rank)))

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return self._run.ledger(rank)

    def alerts(self, rank: int) -> tuple[Alert, ...]:
        """Return the alerts of the rank; skip lines that are torn or foreign."""
        try:
            lines = read_text(self._folder(rank) / ALERTS, MAX_ALERTS_BYTES).splitlines()
        except FileNotFoundError:
            return ()
        found = []
        for line in lines:
            with suppress(*UNREADABLE):
                found.append(_alerts.decode(line))
        return tuple(found)

    def steps(self, rank: int) -> Iterator[HealthStep]:
        """Read every step of a rank, ascending."""
        seen = -1
        for path in _segments(self._folder(rank)):
            try:
                for step in _read_steps(_SeriesReader(path)):
                    if step.step > seen:  # a join that was cut short can leave some twice
                        seen = step.step
                        yield step
            except FileNotFoundError:  # joined with its neighbour meanwhile
                continue

    def series(
        self, rank: int, *, wants: Callable[[HealthTarget], bool] = lambda target: True, signs: bool = True, most_steps: int = MOST_STEPS
    ) -> HealthSeries:
        """Read the steps of a rank as columns, at most `most_steps` of them, of the targets that `wants` accepts."""
        if rank not in self.ranks():
            raise InputError(f"{self.path} has no watched rank {rank}; it has {', '.join(map(str, self.ranks())) or 'none'}")
        columns = _Columns(wants, signs, most_steps)
        for step in self.steps(rank):
            columns.add(step)
        return columns.series(rank)

    def latest(self, rank: int) -> HealthSeries:
        """Return the series as far as it has come, reading only steps that are new since the last time."""
        cursor = self._cursors.setdefault(rank, _Cursor(self._folder(rank)))
        for step in cursor.news():
            cursor.columns.add(step)
        return cursor.columns.series(rank)

    def __repr__(self) -> str:
        return f"HealthRun({str(self.path)!r})"

    def _folder(self, rank: int) -> Path:
        return self.path / f"rank{rank:05d}"


def open_health(path: str | os.PathLike[str]) -> HealthRun:
    """Open a health run.

    >>> open_health("runs/health").ranks()  # doctest: +SKIP
    (0, 1)
    """
    path = Path(path)
    if not path.exists():
        raise NotARunError(f"{path} does not exist; a watched run is a folder, made by ulpscope.watch or 'ulpscope run --watch health'")
    if not path.is_dir():
        raise NotARunError(f"{path} is a file; a watched run is a folder, made by ulpscope.watch or 'ulpscope run --watch health'")
    run = HealthRun(path)
    if not run.ranks():
        hint = "it is a recorded run: use 'ulpscope show' or 'ulpscope compare'" if run._run.ranks() else "it holds no run"
        raise NotARunError(f"{path} holds no series of a watched run; {hint}, or give the folder that ulpscope.watch wrote to")
    return run


def _segments(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if re.fullmatch(r"series-[0-9]{5,18}\.msgpack", entry.name)]
    except OSError:
        return []
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


def _read_steps(reader: _SeriesReader) -> Iterator[HealthStep]:
    """Read the steps of a segment up to its last whole frame."""
    layout: HealthLayout | None = None
    for frame in reader:
        if isinstance(frame, _LayoutFrame):
            layout = _layout_of(frame)
        elif isinstance(frame, _StepFrame):
            if layout is None:
                raise reader.damaged("a step stands before any layout")
            yield _step_of(reader, frame, layout)


def _layout_of(frame: _LayoutFrame) -> HealthLayout:
    targets = tuple(HealthTarget(**msgspec.structs.asdict(row)) for row in frame.targets)
    return HealthLayout(targets, tuple(frame.bounds))


def _step_of(reader: FrameReader, frame: _StepFrame, layout: HealthLayout) -> HealthStep:
    num_targets = len(layout.targets)
    num_bins = len(layout.bounds) + 1 if layout.bounds else 0
    num_signs = sum(-(-target.num_samples // 8) for target in layout.targets)
    expected = (num_targets * _ROW_BYTES, num_targets * num_bins * 8, num_signs)
    found = (len(frame.statistics), len(frame.histograms), len(frame.signs))
    if found != expected:
        raise reader.damaged(f"step {frame.step} holds {found} bytes where its layout has {expected}")
    return HealthStep(
        step=frame.step,
        time=frame.time,
        layout=layout,
        statistics=np.frombuffer(frame.statistics, dtype="<f8").reshape(num_targets, -1),
        scalars=frame.scalars,
        histograms=np.frombuffer(frame.histograms, dtype="<i8").reshape(num_targets, num_bins) if num_bins else None,
        signs=frame.signs,
    )


class _Cursor:
    """The position of a reader in a growing series."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = -1
        self._last: tuple[Path, int, _SeriesReader, HealthLayout | None] | None = None
        self.columns = _Columns(lambda target: True, signs=False, most_steps=MOST_STEPS)

    def news(self) -> Iterator[HealthStep]:
        paths = _segments(self._folder)
        if self._last is not None and self._last[0] in paths:
            paths = paths[paths.index(self._last[0]) :]
        for path in paths:
            try:
                yield from self._news_of(path, path.stat().st_ino)
            except FileNotFoundError:  # joined with its neighbour meanwhile
                continue

    def _news_of(self, path: Path, identity: int) -> Iterator[HealthStep]:
        reader, layout = _SeriesReader(path), None
        if self._last is not None and self._last[:2] == (path, identity):
            _, _, reader, layout = self._last
        for frame in reader:
            if isinstance(frame, _LayoutFrame):
                layout = _layout_of(frame)
            elif isinstance(frame, _StepFrame) and layout is not None and frame.step > self._seen:
                self._seen = frame.step
                yield _step_of(reader, frame, layout)
        self._last = (path, identity, reader, layout)


class _Columns:
    """Collects steps into columns; when there are too many, it drops every other one."""

    def __init__(self, wants: Callable[[HealthTarget], bool], signs: bool, most_steps: int) -> None:
        self._wants = wants
        self._with_signs = signs
        self._most = max(2, most_steps)
        self._every = 1
        self._num_seen = 0
        self._num_bytes = 0
        self._targets: dict[tuple[str, str], HealthTarget] = {}
        self._places: dict[tuple[str, str], int] = {}
        self._picked: dict[int, tuple[HealthLayout, Any, Any, Any]] = {}
        self._rows: list[tuple[int, float, Any, Any, dict[str, float], Any, Any]] = []
        self._bounds: tuple[float, ...] = ()

    def add(self, step: HealthStep) -> None:
        self._num_seen += 1
        if (self._num_seen - 1) % self._every:
            return
        rows, places, spans = self._pick(step.layout)
        values = step.statistics[rows]
        histograms = None if step.histograms is None else step.histograms[rows]
        signs = _bits(step.signs, spans) if self._with_signs else None
        self._rows.append((step.step, step.time, places, values, step.scalars, signs, histograms))
        self._num_bytes += values.nbytes + (len(step.signs) if self._with_signs else 0)
        if len(self._rows) > 2 and (len(self._rows) > self._most or self._num_bytes > MOST_COLUMN_BYTES):
            self._rows = self._rows[::2]
            self._every *= 2
            self._num_bytes //= 2

    def _pick(self, layout: HealthLayout) -> tuple[Any, Any, Any]:
        """Return the rows of a layout that are wanted, their places among all wanted targets, and where their signs lie."""
        known = self._picked.get(id(layout))
        if known is not None and known[0] is layout:
            return known[1:]
        rows, places, spans, at = [], [], [], 0
        for row, target in enumerate(layout.targets):
            size = -(-target.num_samples // 8)
            if self._wants(target):
                key = (target.kind, target.name)
                if key not in self._places:
                    if len(self._places) >= MOST_TARGETS:
                        raise DamagedRunError(f"the series names more than {MOST_TARGETS} targets; it is damaged, or not a watched run")
                    self._places[key] = len(self._places)
                self._targets[key] = target
                rows.append(row)
                places.append(self._places[key])
                spans.append((at, at + size))
            at += size
        self._bounds = layout.bounds or self._bounds
        found = (np.array(rows, dtype=np.int64), np.array(places, dtype=np.int64), spans)
        if len(self._picked) > 64:
            self._picked.clear()
        self._picked[id(layout)] = (layout, *found)
        return found

    def _thin_out(self, step_bytes: int) -> None:
        """Drop every other step until all of them fit into the memory that columns may take."""
        while len(self._rows) > 2 and len(self._rows) * step_bytes > MOST_DENSE_BYTES:
            self._rows = self._rows[::2]
            self._every *= 2
            self._num_bytes //= 2
        if len(self._rows) * step_bytes > MOST_DENSE_BYTES:
            raise DamagedRunError(f"a step of the series takes {step_bytes} bytes as columns; it is damaged, or not a watched run")

    def series(self, rank: int) -> HealthSeries:
        targets = tuple(self._targets[key] for key in self._places)
        width = max((-(-target.num_samples // 8) for target in targets), default=0) if self._with_signs else 0
        self._thin_out(len(targets) * (1 + 8 * len(STATISTICS) + width + (8 * len(self._bounds) + 8 if self._bounds else 0)))
        shape = (len(self._rows), len(targets))
        values = np.full((*shape, len(STATISTICS)), np.nan)
        present = np.zeros(shape, dtype=bool)
        signs = np.zeros((*shape, width), dtype=np.uint8) if width else None
        histograms = np.zeros((*shape, len(self._bounds) + 1), dtype=np.int64) if self._bounds else None
        for number, (_, _, places, row, _, bits, counts) in enumerate(self._rows):
            values[number, places] = row
            present[number, places] = True
            if signs is not None and bits is not None:
                for place, each in zip(places, bits, strict=True):
                    signs[number, place, : len(each)] = each
            if histograms is not None and counts is not None and counts.shape[1] == histograms.shape[2]:
                histograms[number, places] = counts
        return HealthSeries(
            rank=rank,
            steps=np.array([row[0] for row in self._rows], dtype=np.int64),
            times=np.array([row[1] for row in self._rows]),
            targets=targets,
            values=values,
            present=present,
            scalars=_scalar_columns([row[4] for row in self._rows]),
            signs=signs,
            bounds=self._bounds,
            histograms=histograms,
            num_left_out=self._num_seen - len(self._rows),
        )


def _bits(signs: bytes, spans: Iterable[tuple[int, int]]) -> list[Any]:
    whole = np.frombuffer(signs, dtype=np.uint8)
    return [whole[first:last] for first, last in spans]


def _scalar_columns(rows: list[dict[str, float]]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
