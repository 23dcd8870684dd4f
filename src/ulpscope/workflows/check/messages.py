# SPDX-License-Identifier: Apache-2.0
"""Pass messages between processes, and keep the journal of a check: a length, a checksum, and the message as msgpack.

The journal of a killed process ends in the middle of a message; the messages before that count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ulpscope.errors import InputError
from ulpscope.format.frames import HEAD_SIZE, checksum, framed, head_at
from ulpscope.report.escaping import visible

__all__ = ["Journal", "read_frame", "received_path", "sent_path", "write_frame"]

_MOST_BYTES = 1 << 26
T = TypeVar("T")


def write_frame(stream: BinaryIO, message: Any) -> None:
    try:
        body = msgspec.msgpack.encode(message)
    except UnicodeEncodeError as error:  # the bad text came from the command line: recorded texts are valid
        raise InputError(f"{visible(str(error.object))} is the name of nothing: it is not valid UTF-8") from None
    stream.write(framed(body))
    stream.flush()


def read_frame(stream: BinaryIO, kind: type[T]) -> T | None:
    """Read the next message; return None where the stream ends, or where no whole message follows."""
    head = stream.read(HEAD_SIZE)
    if len(head) < HEAD_SIZE:
        return None
    length, expected = head_at(head)
    body = stream.read(length) if length <= _MOST_BYTES else b""
    if len(body) < length or checksum(body) != expected:
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None


def sent_path(path: Path) -> str:
    """Encode a path as text, one character for each byte, since a path need not be valid text."""
    return os.fsencode(path).decode("latin-1")


def received_path(text: str) -> Path:
    return Path(os.fsdecode(text.encode("latin-1")))


class Journal:
    """The results so far, on disk: begun anew, or continued. Its first message says what is checked, and has to agree."""

    def __init__(self, path: Path, facts: dict[str, str], *, resume: bool) -> None:
        self.path = path
        self._facts = {name: fact.encode(errors="backslashreplace").decode() for name, fact in facts.items()}  # a path may be invalid text
        self._size = 0
        self._resume = resume and path.exists()
        if self._resume:
            self._check_facts()
        self._stream: BinaryIO | None = None

    def _check_facts(self) -> None:
        with self.path.open("rb") as stream:
            found = read_frame(stream, dict[str, str])
        if found is None:
            raise InputError(f"'{self.path}' is no journal of a check; remove it, or check without --resume")
        differing = [name for name, value in self._facts.items() if found.get(name) != value]
        if differing:
            name = differing[0]
            raise InputError(
                f"'{self.path}' is the journal of another check: its {name} is '{found.get(name, '')[:60]}' and not "
                f"'{self._facts[name][:60]}'; check without --resume to begin anew"
            )

    def found(self, kind: type[T]) -> Iterator[T]:
        """Yield the messages of an earlier check, as far as they are whole."""
        if not self._resume:
            return
        with self.path.open("rb") as stream:
            read_frame(stream, dict[str, str])
            self._size = stream.tell()
            while (message := read_frame(stream, kind)) is not None:
                self._size = stream.tell()
                yield message

    def append(self, message: Any) -> None:
        if self._stream is None:
            self._stream = self._opened()
        write_frame(self._stream, message)

    def _opened(self) -> BinaryIO:
        if self._resume:
            os.truncate(self.path, self._size)
            return self.path.open("ab")
        stream = self.path.open("wb")
        write_frame(stream, self._facts)
        return stream

    def close(self, *, is_done: bool) -> None:
        """Close the journal; delete it if the check came to its end."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if is_done:
            self.path.unlink(missing_ok=True)
