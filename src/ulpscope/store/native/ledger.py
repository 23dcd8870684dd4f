# SPDX-License-Identifier: Apache-2.0
"""Write and read the ledger: what capture could not do, one JSON object a line.

The first of equal entries is on disk when `note` returns; repeats are only counted and written when the step ends. Memory and file stay
small: past a thousand different entries, further ones are counted under one entry that says so. An entry that a failing disk refuses is
tried again next time.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec

from ulpscope.format.frames import UNREADABLE
from ulpscope.format.reading import read_text
from ulpscope.model import LedgerEntry
from ulpscope.store.native.appending import FILE_MODE, write_all

__all__ = ["LedgerFile", "merge_entries", "read_ledger"]

MAX_ENTRIES = 1000
MAX_TEXT = 2000
MAX_READ = 16 << 20

_decoder = msgspec.json.Decoder(LedgerEntry)


def _key(entry: LedgerEntry) -> tuple[str, str, str]:
    return entry.what, entry.why, entry.call


def merge_entries(entries: list[LedgerEntry]) -> tuple[LedgerEntry, ...]:
    """Merge equal entries, with the step of the first and the sum of their counts."""
    merged: dict[tuple[str, str, str], LedgerEntry] = {}
    for entry in entries:
        first = merged.get(_key(entry))
        merged[_key(entry)] = entry if first is None else replace(first, count=first.count + entry.count)
    return tuple(merged.values())


class LedgerFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: dict[tuple[str, str, str], LedgerEntry] = {}
        self._written: set[tuple[str, str, str]] = set()

    def note(self, entry: LedgerEntry) -> None:
        entry = replace(entry, what=_printable(entry.what), why=_printable(entry.why), call=_printable(entry.call))
        if _key(entry) not in self._written and len(self._written | self._pending.keys()) >= MAX_ENTRIES:
            why = f"only the first {MAX_ENTRIES} are told one by one"
            entry = replace(entry, what="more things than the ledger lists", why=why, call="")
        waiting = self._pending.get(_key(entry))
        self._pending[_key(entry)] = entry if waiting is None else replace(waiting, count=waiting.count + entry.count)
        if _key(entry) not in self._written:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, as one append."""
        if not self._pending:
            return
        text = b"".join(msgspec.json.encode(entry) + b"\n" for entry in self._pending.values())
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), FILE_MODE)
        try:
            size = os.fstat(fd).st_size
            try:
                write_all(fd, text)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        self._written.update(self._pending)
        self._pending.clear()


def _printable(text: str) -> str:
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()


def read_ledger(path: Path) -> tuple[LedgerEntry, ...]:
    """Read the entries of a ledger; skip lines that are torn or foreign."""
    try:
        lines = read_text(path, MAX_READ).splitlines()
    except FileNotFoundError:
        return ()
    entries = []
    for line in lines:
        try:
            entries.append(_decoder.decode(line))
        except UNREADABLE:
            continue
    return merge_entries(entries)
