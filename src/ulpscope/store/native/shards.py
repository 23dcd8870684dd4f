# SPDX-License-Identifier: Apache-2.0
"""Keep the tensors of one step: streamed into safetensors shards, found through a journal.

The bytes go to the shard first, their place to the journal second, the record that names them third: a tensor that a killed process left
named can be read. A shard becomes a valid safetensors file when it is closed; our reader uses the journal.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ulpscope.errors import DamagedRunError
from ulpscope.format.content import Content, content_hash, parse_content
from ulpscope.format.frames import TensorFrame, encode_start, encode_tensor
from ulpscope.format.reading import FrameReader, not_allowed, verify_regular
from ulpscope.model import DTYPES, TensorData, dtype
from ulpscope.numerics.buffer_pool import LARGEST_KEPT, room_for
from ulpscope.numerics.difference.kept_place import Kept
from ulpscope.store.native.appending import AppendFile
from ulpscope.store.native.page_cache import PageCache

__all__ = ["JOURNAL", "ShardIndex", "ShardWriter", "tensor_bytes", "tensor_of"]

JOURNAL = "tensors.journal"
HEADER_SIZE = (64 << 10) - 8
SHARD_SIZE = 1 << 30
ALIGNMENT = 8
OPEN_SHARDS = 8
COPY_BELOW = 128 << 10  # making a mapping costs as much as copying this
READ_AHEAD_FROM = 8 << 20
READ_UP_TO = LARGEST_KEPT if hasattr(os, "preadv") else 0

# The dtypes of safetensors 0.4; every other dtype is stored as plain bytes, with its true name in the journal.
_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def shard_name(number: int) -> str:
    return f"tensors-{number:04d}.safetensors"


class _Shard:
    """One safetensors file under construction, its header reserved in front."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.file = AppendFile(folder / shard_name(number), HEADER_SIZE.to_bytes(8, "little") + b"{}".ljust(HEADER_SIZE))
        self._entries = ['"__metadata__":{"format":"ulpscope"}']
        self._header_size = len(self._entries[0]) + 2
        self._num_pads = 0

    def has_room(self, entry_size: int) -> bool:
        return self._header_size + entry_size + 1 <= HEADER_SIZE and self.file.size < SHARD_SIZE

    def add(self, hash: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> int:
        """Append the bytes and a filler that aligns the next ones; return where they begin."""
        offset = self.file.size
        self.file.append(data)
        self._list(hash, _SAFETENSORS_NAMES.get(dtype), shape, offset, len(data))
        if padding := -len(data) % ALIGNMENT:
            self.file.append(bytes(padding))
            self._list(f"padding.{self._num_pads}", "U8", (padding,), offset + len(data), padding)
            self._num_pads += 1
        return offset

    def close(self) -> None:
        try:
            header = f"{{{','.join(self._entries)}}}".encode().ljust(HEADER_SIZE)
            self.file.overwrite(header, offset=8)
        finally:
            self.file.close()

    def _list(self, name: str, dtype: str | None, shape: tuple[int, ...], offset: int, length: int) -> None:
        begin = offset - HEADER_SIZE - 8
        entry = _entry(name, dtype or "U8", shape if dtype else (length,), begin, begin + length)
        self._entries.append(entry)
        self._header_size += len(entry) + 1


def _entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{begin},{end}]}}'


def _entry_bound(shape: tuple[int, ...]) -> int:
    """Return a length that no entry with its filler exceeds."""
    return 260 + sum(len(str(size)) + 1 for size in shape)


class ShardWriter:
    """Keeps the tensors of one step, each content once."""

    def __init__(self, folder: Path, rank: int, step: int, page_cache: PageCache) -> None:
        self._folder = folder
        self._page_cache = page_cache
        self._kept: set[str] = set()
        self._shard: _Shard | None = None
        self._num_shards = 0
        self._full_bytes = 0
        self._journal = AppendFile(folder / JOURNAL, encode_start(rank, step))

    @property
    def num_tensors(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._full_bytes + self._journal.size + (self._shard.file.size if self._shard else 0)

    def holds(self, hash: str) -> bool:
        return hash in self._kept

    def add(self, hash: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        shard = self._shard_with_room(_entry_bound(shape))
        offset = shard.add(hash, dtype, shape, data)
        self._journal.append(encode_tensor(hash, dtype, shape, shard.number, offset, len(data)))
        self._kept.add(hash)
        self._page_cache.wrote(shard.file.path, shard.file.size)

    def close(self) -> None:
        try:
            self._close_shard()
        finally:
            self._journal.close()

    def _close_shard(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._full_bytes += shard.file.size
            shard.close()

    def _shard_with_room(self, entry_size: int) -> _Shard:
        self._journal.verify_whole()
        if self._shard is not None and not self._shard.has_room(entry_size):
            self._close_shard()
        if self._shard is None:
            self._num_shards += 1
            self._shard = _Shard(self._folder, self._num_shards - 1)
        return self._shard


class ShardIndex:
    """The place of each tensor of one step, as far as the journal lists it; it follows a journal that still grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, TensorFrame] = {}
        self._paths: dict[int, Path] = {}
        self._shards: dict[int, _OpenShard] = {}
        self._verified: set[str] = set()
        self._journal = FrameReader(folder / JOURNAL)
        self._lock = threading.Lock()  # several threads may ask for tensors

    def tensor(self, content: str) -> TensorData:
        """Map the bytes of a tensor; the first time, verify their hash."""
        asked, place, shard = self._found(content)
        data = shard.bytes_at(place.offset, place.length)
        if asked.hash not in self._verified:
            if content_hash(data) != asked.hash:
                raise DamagedRunError(
                    f"{shard.path}: the {place.length} bytes from {place.offset} are not those that were written; restore the file"
                )
            self._verified.add(asked.hash)
        return tensor_of(asked, data)

    def kept(self, content: str) -> Kept:
        """Return the place of a tensor, for a caller that reads and verifies it itself."""
        return self._kept(*self._found(content))

    def listed(self) -> Iterator[Kept]:
        """Yield the place of each tensor, in the order in which they were kept."""
        for frame in FrameReader(self._folder / JOURNAL):
            if isinstance(frame, TensorFrame):
                content = Content(frame.hash, frame.dtype, frame.shape, None, 0)
                yield self._kept(content, frame, self._shard_of(content, frame))

    @staticmethod
    def _kept(asked: Content, place: TensorFrame, shard: _OpenShard) -> Kept:
        shard.verify_holds(place.offset, place.length)
        return Kept(shard, shard.fd, place.offset, place.length, *asked)

    def _found(self, content: str) -> tuple[Content, TensorFrame, _OpenShard]:
        asked = parse_content(content)
        place = self._place(asked.hash)
        return asked, place, self._shard_of(asked, place)

    def _shard_of(self, asked: Content, place: TensorFrame) -> _OpenShard:
        path = self._paths.get(place.shard) or self._paths.setdefault(place.shard, self._folder / shard_name(place.shard))
        asked.verify(place.length, path)
        return self._shard(place.shard, path)

    def _shard(self, number: int, path: Path) -> _OpenShard:
        if (known := self._shards.get(number)) is not None:
            return known
        with self._lock:
            if number not in self._shards:
                if len(self._shards) >= OPEN_SHARDS:
                    self._shards.pop(next(iter(self._shards)))
                self._shards[number] = _OpenShard(path)
            return self._shards[number]

    def _place(self, hash: str) -> TensorFrame:
        if hash not in self._places:
            with self._lock:
                if hash not in self._places:
                    self._read_on()
        try:
            return self._places[hash]
        except KeyError:
            problem = f" and stops at byte {self._journal.position} ({self._journal.problem})" if self._journal.problem else ""
            raise DamagedRunError(f"{self._journal.path} lists {len(self._places)} tensors but not {hash}{problem}") from None

    def _read_on(self) -> None:
        try:
            self._places.update((frame.hash, frame) for frame in self._journal if isinstance(frame, TensorFrame))
        except FileNotFoundError:
            raise DamagedRunError(f"{self._journal.path} is missing, so the tensors of this step cannot be found") from None


class _OpenShard:
    """A shard held open for reading; views of it stay good after it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self._size = 0
        try:
            self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            raise DamagedRunError(f"{path} is missing, so its tensors cannot be read") from None
        except PermissionError as error:
            raise not_allowed(path) from error

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def bytes_at(self, offset: int, length: int) -> memoryview:
        """Return a read-only view of part of the file; its mapping lives as long as the view, so memory stays flat over many tensors."""
        self.verify_holds(offset, length)
        if length < COPY_BELOW:
            return self._copied(offset, length)
        return self._read(offset, length) if length <= READ_UP_TO else self._mapped(offset, length)

    def verify_holds(self, offset: int, length: int) -> None:
        """Verify that this is a regular file and that it is long enough."""
        if offset + length > self._size:
            self._size = verify_regular(self.path, os.fstat(self.fd))
        if offset + length > self._size:
            found = f"{self.path} holds {self._size} bytes"
            raise DamagedRunError(f"{found}, but a tensor should lie at {offset} to {offset + length}: it is cut off")

    def _read(self, offset: int, length: int) -> memoryview:
        """Read a copy into memory that was used before: several threads map and unmap files only one after the other."""
        room = room_for(length)
        done = 0
        while done < length and (more := os.preadv(self.fd, [room[done:]], offset + done)):
            done += more
        return room[:done].toreadonly()

    def _mapped(self, offset: int, length: int) -> memoryview:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(self.fd, offset + length - start, access=mmap.ACCESS_READ, offset=start)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENODEV):
                raise
            return self._copied(offset, length)  # a mapping holds a descriptor, and a caller may hold very many
        if length >= READ_AHEAD_FROM and hasattr(mapping, "madvise"):
            mapping.madvise(mmap.MADV_WILLNEED)  # the disk reads on while the caller reads the beginning
        return memoryview(mapping)[offset - start :]

    def _copied(self, offset: int, length: int) -> memoryview:
        data = os.pread(self.fd, length, offset)
        while len(data) < length and (more := os.pread(self.fd, length - len(data), offset + len(data))):
            data += more
        return memoryview(data)


def tensor_bytes(dtype_name: str, shape: tuple[int, ...], buffer: Any) -> memoryview:
    """Return the bytes of a C-contiguous buffer, without a copy; refuse a number that does not fit the tensor."""
    data = _flat(memoryview(buffer))
    if len(data) != prod(shape) * dtype(dtype_name).size_bytes:
        raise ValueError(f"{len(data)} bytes were given for a {dtype_name} tensor of shape {list(shape)}")
    return data


def _flat(view: memoryview) -> memoryview:
    if view.nbytes == 0:
        return memoryview(b"")
    if view.format == "B" and view.ndim == 1:
        return view
    try:
        return view.cast("B")
    except TypeError:  # complex numbers have no format that memoryview can cast
        import numpy as np

        return np.asarray(view).reshape(-1).view(np.uint8).data


def tensor_of(content: Content, data: memoryview) -> TensorData:
    """Return the tensor that a key names, with its elements in order, from the kept bytes."""
    if content.strides is not None:
        from ulpscope.numerics.gathering import gathered  # only here: most tensors lie in one piece

        data = gathered(data, DTYPES[content.dtype].size_bytes, content.shape, content.strides, content.offset)
    return TensorData(content.dtype, content.shape, data)
