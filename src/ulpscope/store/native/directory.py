# SPDX-License-Identifier: Apache-2.0
"""Write and read the native format: a run is a directory that anyone can read, and that a killed process leaves readable.

    run.json                      what made it
    rank00000/ledger.jsonl        what capture could not do
    rank00000/step00000/          records.msgpack, records.parquet, tensors.journal, tensors-0000.safetensors ...

docs/store-format.md is the specification. A failed write raises OSError and leaves all earlier writes readable; reading never trusts a
name, a size or a number in a file.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.format.content import content_hash, content_key
from ulpscope.format.frames import (
    UNREADABLE,
    CallFrame,
    StackFrame,
    call_record,
    encode_call,
    encode_draft,
    encode_end,
    encode_stack,
    encode_start,
)
from ulpscope.format.reading import FrameReader, end_of_step, newer_format, read_text
from ulpscope.model import FORMAT_VERSION, CallRecord, DraftCall, Frame, LedgerEntry, RunInfo, SinkAbilities, TensorData
from ulpscope.numerics.difference.kept_place import Kept
from ulpscope.store.native.appending import FILE_MODE, FOLDER_MODE, AppendFile, repeated
from ulpscope.store.native.ledger import LedgerFile, read_ledger
from ulpscope.store.native.page_cache import PageCache
from ulpscope.store.native.shards import ShardIndex, ShardWriter, tensor_bytes

__all__ = ["RECORDS", "RUN_JSON", "DirectoryRun", "DirectorySink", "create_run", "recognize"]

RUN_JSON = "run.json"
RECORDS = "records.msgpack"
PARQUET = "records.parquet"
LEDGER = "ledger.jsonl"
MAX_RUN_JSON = 16 << 20
OPEN_INDEXES = 8
MAX_STACKS = 10_000
MAX_SEEN = 4096
MAX_UNCOPIED = 64


def _rank_name(rank: int) -> str:
    return f"rank{rank:05d}"


def _step_name(step: int) -> str:
    return f"step{step:05d}"


# ---- writing


def create_run(path: str | os.PathLike[str], info: RunInfo, *, launch: str | None = None) -> Path:
    """Make the folder of a new run and return it: `path`, or `path-2`, `path-3` ... where a run is in the way.

    The processes of one launch give the same `launch` and share one folder, whichever of them comes first.
    """
    wanted = Path(path)
    if wanted.name in ("", ".."):
        wanted = wanted.resolve()
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if launch is not None:
        info = replace(info, options={**info.options, "launch": launch})
    number = 1
    while True:
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        _make_folder(folder)
        if not _is_taken(folder) and _publish(folder / RUN_JSON, _run_json(info)):
            return folder
        if launch is not None and _launch_of(folder) == launch:
            return folder
        number += 1


def _launch_of(folder: Path) -> object:
    """Return the launch that a folder's run belongs to; None if it does not say."""
    try:
        return _run_info(folder / RUN_JSON).options.get("launch")
    except (InputError, OSError):
        return None


def _make_folder(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(FOLDER_MODE)
    if not folder.is_dir():
        raise NotADirectoryError(20, "a run is a folder, and a file of that name is in the way", str(folder))


def _is_taken(folder: Path) -> bool:
    """Tell whether the folder holds a run already, ours or another tool's."""
    return any(entry.name == RUN_JSON or entry.name.startswith(("rank", "step", "dump")) for entry in folder.iterdir())


def _publish(path: Path, text: bytes) -> bool:
    """Write a file under a temporary name and rename it in one move; False if another process was first."""
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            file.write(text)
        return _take_name(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _take_name(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: two that start in the same instant can then meet
        if path.exists():
            return False
        draft.rename(path)
    return True


def _run_json(info: RunInfo) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode("utf-8", "backslashreplace").decode()
        if isinstance(value, dict):
            return {plain(str(key)): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(item) for item in value]
        return value if value is None or isinstance(value, (bool, int, float)) else plain(str(value))

    info = replace(info, format="ulpscope", format_version=FORMAT_VERSION)
    return msgspec.json.format(msgspec.json.encode(plain(asdict(info)))) + b"\n"


class DirectorySink:
    """Writes the records and tensors of one rank; implements FrameSink. Threads may keep tensors while another thread writes records of the
    same step.
    """

    abilities = SinkAbilities(is_thread_safe=True, keeps_views=True)

    def __init__(self, path: str | os.PathLike[str], rank: int, *, max_bytes: int | None = None) -> None:
        self.rank = rank
        self.max_bytes = max_bytes
        self._folder = Path(path) / _rank_name(rank)
        with suppress(FileExistsError):
            self._folder.mkdir(FOLDER_MODE)
        self._ledger = LedgerFile(self._folder / LEDGER)
        self._step: _OpenStep | None = None
        self._failure: OSError | None = None
        self._closed_bytes = 0
        self._is_full = False
        self._page_cache = PageCache()
        self._uncopied: deque[Path] = deque()  # steps without their Parquet copy: it takes as long as a training step
        self._keeping = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Count the bytes that the rank has written so far, without the Parquet copies."""
        return self._closed_bytes + (self._step.num_bytes if self._step else 0)

    def begin_step(self, step: int) -> None:
        self._leave_step()
        try:
            self._step = _OpenStep(self._folder / _step_name(step), self.rank, step, self._page_cache)
        except OSError as error:
            self._failure = OSError(error.errno, error.strerror, error.filename)
            raise

    def _leave_step(self) -> None:
        """End a step that is still open; its failure must not keep the next one from being recorded."""
        step = self._step.step if self._step else None
        try:
            self.end_step()
        except OSError as error:
            with suppress(OSError):  # kept in mind by the ledger, which tries again
                self._ledger.note(LedgerEntry(what="a step could not be completed", why=str(error), step=step))

    def write(self, record: CallRecord) -> None:
        self._open_step().write(record)

    def write_drafts(self, drafts: Iterable[DraftCall]) -> None:
        self._open_step().write_drafts(drafts)

    def number_stack(self, stack: tuple[Frame, ...]) -> int:
        """Return the number of a stack in the file of the open step, for a caller that makes frames."""
        return self._open_step().number(stack)

    def write_frames(self, frames: bytes | memoryview, count: int) -> None:
        """Append `count` records, given as frames in the format of the file."""
        self._open_step().write_frames(frames, count)

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        data = tensor_bytes(dtype, shape, buffer)
        hash = content_hash(data)
        with self._keeping:
            step = self._open_step()
            if not step.shards.holds(hash):
                if self._would_exceed(len(data)):
                    return None
                step.shards.add(hash, dtype, shape, data)
        return content_key(hash, dtype, shape)

    def note(self, entry: LedgerEntry) -> None:
        self._ledger.note(entry)

    def end_step(self) -> None:
        self._end_step(complete=True)

    def _end_step(self, *, complete: bool) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        try:
            step.finish(complete=complete)
            self._uncopied.append(step.folder)
            if len(self._uncopied) > MAX_UNCOPIED:
                self._copy_to_parquet(self._uncopied.popleft())
        finally:
            self._closed_bytes += step.num_bytes
            self._ledger.flush()

    def close(self, *, complete: bool = True) -> None:
        try:
            self._end_step(complete=complete)
        finally:
            self.copy_closed_steps()
            self._ledger.flush()

    def copy_closed_steps(self) -> None:
        """Make the Parquet copies that were put off, for a caller with time to spare; `close` makes the rest."""
        while self._uncopied:
            self._copy_to_parquet(self._uncopied.popleft())

    def _copy_to_parquet(self, folder: Path) -> None:
        from ulpscope.store.native.parquet import write_parquet  # only here: reading a run needs no NumPy

        try:
            write_parquet(folder / RECORDS, folder / PARQUET)
        except Exception as error:  # any error: a copy is not worth failing for
            with suppress(OSError):  # kept in mind by the ledger, which tries again
                self._ledger.note(LedgerEntry(what="a Parquet copy was not written", why=str(error)))

    def _open_step(self) -> _OpenStep:
        if self._step is not None:
            return self._step
        if self._failure is not None:
            raise repeated(self._failure)
        raise RuntimeError("a record or tensor was written before begin_step()")

    def _would_exceed(self, size: int) -> bool:
        if self.max_bytes is None or (not self._is_full and self.num_bytes + size <= self.max_bytes):
            return False
        if not self._is_full:
            self._is_full = True
            self._ledger.note(
                LedgerEntry(
                    what="tensors were no longer kept",
                    why=f"the run reached its size limit (max_bytes={self.max_bytes}); statistics go on",
                    step=self._step.step if self._step else None,
                )
            )
        return True


class _OpenStep:
    """The files of the step that is being written."""

    def __init__(self, folder: Path, rank: int, step: int, page_cache: PageCache) -> None:
        folder.mkdir(FOLDER_MODE)
        self.step = step
        self.folder = folder
        self.shards = ShardWriter(folder, rank, step, page_cache)
        try:
            self._records = AppendFile(folder / RECORDS, encode_start(rank, step))
        except OSError:
            self.shards.close()
            raise
        self._num_records = 0
        self._stacks: dict[tuple[tuple[str, int, str, str], ...], int] = {}
        self._seen: dict[int, tuple[tuple[Frame, ...], int]] = {}

    @property
    def num_bytes(self) -> int:
        return self._records.size + self.shards.num_bytes

    def write(self, record: CallRecord) -> None:
        stack = self.number(record.stack) if record.stack else None
        self._records.append(encode_call(record, stack))
        self._num_records += 1

    def write_drafts(self, drafts: Iterable[DraftCall]) -> None:
        frames = [encode_draft(draft, self.number(draft.stack) if draft.stack else None) for draft in drafts]
        self.write_frames(b"".join(frames) if len(frames) > 1 else frames[0], len(frames))

    def write_frames(self, frames: bytes | memoryview, count: int) -> None:
        self._records.append(frames)
        self._num_records += count

    def finish(self, *, complete: bool) -> None:
        """Close the shards, then mark the step complete: in this order, so that a complete step has all its tensors."""
        try:
            self.shards.close()
            self._records.verify_present()
            if complete:
                self._records.append(encode_end(self._num_records, self.shards.num_tensors))
        finally:
            self._records.close()

    def number(self, stack: tuple[Frame, ...]) -> int:
        """Return the number of a stack, and write the stack to the file when it is new. Equal stacks are often the same object."""
        known = self._seen.get(id(stack))
        if known is not None:
            return known[1]
        lines = tuple((frame.file, frame.line, frame.function, frame.code) for frame in stack)
        if lines not in self._stacks:
            self._records.append(encode_stack(len(self._stacks), lines))
            self._stacks[lines] = len(self._stacks)
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[id(stack)] = (stack, self._stacks[lines])
        return self._stacks[lines]


# ---- reading


def recognize(path: Path) -> bool:
    """Tell whether the folder is a run of the native format, complete or not."""
    if (path / RUN_JSON).is_file():
        return _run_format(path / RUN_JSON) == "ulpscope"
    return bool(_numbers(path, "rank"))


def _run_format(path: Path) -> str | None:
    try:
        return msgspec.convert(_read_json(path), dict[str, Any]).get("format")
    except (DamagedRunError, msgspec.ValidationError):
        return "ulpscope"  # no other tool puts a file of this name into a run folder; opening it says what is wrong


def _read_json(path: Path) -> Any:
    text = read_text(path, MAX_RUN_JSON)
    try:
        return msgspec.json.decode(text)
    except UNREADABLE as error:
        raise _damaged_json(path, error) from error


def _run_info(path: Path) -> RunInfo:
    try:
        values = _read_json(path)
    except FileNotFoundError:
        return RunInfo()
    version = values.get("format_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise newer_format(path.parent, version)
    try:
        return msgspec.convert(values, RunInfo)
    except msgspec.ValidationError as error:
        raise _damaged_json(path, error) from error


def _damaged_json(path: Path, error: Exception) -> DamagedRunError:
    return DamagedRunError(f"{path} should describe a run but does not ({error}); restore it, or remove it to open the run without")


def _numbers(folder: Path, prefix: str) -> tuple[int, ...]:
    """Return the numbers of the folders `prefix00000` ..., each under its one proper name."""
    numbers = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = re.fullmatch(rf"{prefix}([0-9]{{5,18}})", entry.name)
            if match and entry.name == f"{prefix}{int(match[1]):05d}" and entry.is_dir():
                numbers.append(int(match[1]))
    return tuple(sorted(numbers))


class DirectoryRun:
    """A run of the native format, read as far as it was written; implements Run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if not self._path.is_dir():
            raise NotARunError(f"{self._path} is not a folder, so it is no run")
        self._info = _run_info(self._path / RUN_JSON)
        self._indexes: dict[tuple[int, int], ShardIndex] = {}
        self._stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}

    @property
    def path(self) -> Path:
        return self._path

    @property
    def info(self) -> RunInfo:
        return self._info

    def ranks(self) -> tuple[int, ...]:
        return _numbers(self._path, "rank")

    def steps(self, rank: int) -> tuple[int, ...]:
        folder = self._path / _rank_name(rank)
        if not folder.is_dir():
            raise InputError(f"{self._path} has no rank {rank}; it has {_listed(self.ranks())}")
        return tuple(step for step in _numbers(folder, "step") if (folder / _step_name(step) / RECORDS).exists())

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        folder = self._step_folder(rank, step)
        return _read_records(folder / RECORDS, rank, step, self._stacks)

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        return self._index(rank, step).tensor(content)

    def kept(self, rank: int, step: int, content: str) -> Kept | None:
        """Return the place of a tensor, for a caller that reads and verifies it itself; None where something is wrong, which `tensor`
        reports.
        """
        try:
            return self._index(rank, step).kept(content)
        except (InputError, OSError):
            return None

    def listed(self, rank: int, step: int) -> Iterator[Kept]:
        """Yield the place of each tensor of a step, in the order in which they were kept."""
        return self._index(rank, step).listed()

    def _index(self, rank: int, step: int) -> ShardIndex:
        index = self._indexes.get((rank, step))
        if index is None:
            index = ShardIndex(self._step_folder(rank, step))
            if len(self._indexes) >= OPEN_INDEXES:
                self._indexes.pop(next(iter(self._indexes)))
            self._indexes[rank, step] = index
        return index

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return read_ledger(self._path / _rank_name(rank) / LEDGER)

    def is_complete(self, rank: int, step: int) -> bool:
        return end_of_step(self._step_folder(rank, step) / RECORDS) is not None

    def __repr__(self) -> str:
        return f"DirectoryRun({str(self._path)!r})"

    def _step_folder(self, rank: int, step: int) -> Path:
        folder = self._path / _rank_name(rank) / _step_name(step)
        if not (folder / RECORDS).exists():
            raise InputError(f"{self._path} has no step {step} of rank {rank}; it has {_listed(self.steps(rank))}")
        return folder


def _listed(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "none"
    return ", ".join(map(str, numbers[:10])) + (f" ... {numbers[-1]}" if len(numbers) > 10 else "")


def _read_records(path: Path, rank: int, step: int, known: dict[tuple[Frame, ...], tuple[Frame, ...]]) -> Iterator[CallRecord]:
    """Read the records of a step. An unfinished step ends at its last whole frame; a complete one that is damaged raises.

    `known` holds the stacks of other steps: equal ones become one object.
    """
    end = end_of_step(path)
    reader = FrameReader(path)
    stacks: dict[int | None, tuple[Frame, ...]] = {None: ()}
    num_records = 0
    for frame in reader:
        if isinstance(frame, CallFrame):
            if frame.stack not in stacks:
                raise reader.damaged(f"a record names stack {frame.stack}, which the file does not tell")
            num_records += 1
            yield _checked_record(reader, frame, rank, step, stacks[frame.stack])
        elif isinstance(frame, StackFrame):
            if len(known) >= MAX_STACKS:
                known.clear()
            stack = tuple(Frame(*line) for line in frame.lines)
            stacks[frame.id] = known.setdefault(stack, stack)
    if end is not None and (reader.problem or num_records != end.num_records):
        raise reader.damaged(reader.problem or f"the step should hold {end.num_records} records but holds {num_records}")


def _checked_record(reader: FrameReader, frame: CallFrame, rank: int, step: int, stack: tuple[Frame, ...]) -> CallRecord:
    try:
        return call_record(frame, rank, step, stack)
    except ValueError as error:
        raise reader.damaged(f"a record contradicts itself ({error})") from error
