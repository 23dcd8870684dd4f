# SPDX-License-Identifier: Apache-2.0
"""Spoil valid content: its bytes, or its meaning. The given generator chooses everything, so a seed names an input."""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

WORDS = [
    "", " ", "-", "--", ".", "..", "*", "**", "[", "[!", "?", "@", "@nothing", "#", "->", "->*", "a->b->c", ":", "::", "=", ",", "/", "//",
    "0", "-1", "1e999", "nan", "inf", "-inf", "1_0", "0x10", "१", "9" * 30, "1-3", "3-1", "1..2", "..", "0-", "{}", "{0}", "%s", "%(a)s",
    "\t", "\0", "\n", "\r\n", "\x1b[31m", "\u2028", "\u202e", "\ud800", "é", "日本", "true", "null", "None", "$tensor", "$object",
    "input.0",
    "output.0", "module:", "range:a..b", "functional.gelu.0", "Functional.gelu.0.forward", "x" * 300, "a." * 200, "'", '"', "\\", "`id`",
    "$(id)",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30]
FLOATS = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 1e308, 5e-324]


def spoiled(kind: str, content: bytes, chance: Random) -> bytes:
    """Return the content with one to three changes: three times out of four in its meaning, else in its bytes."""
    change = _CHANGES.get(kind)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = change(content, chance) if change is not None and chance.random() < 0.75 else _bytes(content, chance)
    return content


# ---- bytes


def _bytes(content: bytes, chance: Random) -> bytes:
    at, other = (chance.randrange(len(content) + 1) for _ in range(2))
    if chance.random() < 0.3:
        at = min(at, chance.randrange(64))  # headers are in front
    first, last = sorted((at, other))
    size = chance.choice((1, 2, 4, 8))
    number = chance.choice(NUMBERS) % (1 << 8 * size)
    match chance.randrange(9):
        case 0:
            return content[:at]
        case 1:
            return content[:first] + content[last:]
        case 2:
            return content[:last] + content[first : first + 4096] + content[last:]
        case 3 | 4:
            return content[:at] + number.to_bytes(size, chance.choice(("little", "big"))) + content[at + size :]
        case 5:
            return content[:at] + chance.randbytes(chance.randrange(1, 20)) + content[at:]
        case 6:
            return content[:at] + _text(chance.choice(WORDS)) + content[at + chance.randrange(8) :]
        case _:
            flipped = content[at : at + 1] or b"\0"
            return content[:at] + bytes([flipped[0] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def _text(word: str) -> bytes:
    return word.encode("utf-8", "surrogatepass")


# ---- values


def odd_value(chance: Random) -> Any:
    """Return a value of any type; few of them are sensible anywhere."""
    match chance.randrange(9):
        case 0:
            return None
        case 1:
            return chance.random() < 0.5
        case 2 | 3:
            return chance.choice(NUMBERS)
        case 4:
            return chance.choice(FLOATS)
        case 5 | 6:
            return chance.choice(WORDS)
        case 7:
            return _nested(chance.choice((0, 1, 2, 40, 900)), chance)
        case _:
            return [chance.choice(NUMBERS)] * chance.choice((0, 1, 5, 70))


def _nested(depth: int, chance: Random) -> Any:
    value: Any = [] if chance.random() < 0.5 else {}
    for _ in range(depth):
        value = [value] if chance.random() < 0.5 else {chance.choice(("a", "type", "dtype", "shape", "value")): value}
    return value


def spoil_value(value: Any, chance: Random) -> Any:
    """Change a value somewhere inside: another value, a missing or doubled one, another name."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places = [place for place, _ in inside]
    if not places or chance.random() < 0.15:
        return _changed(value, chance)
    place = chance.choice(places)
    made = dict(value) if isinstance(value, dict) else list(value)
    match chance.randrange(12):
        case 0:
            del made[place]
        case 1 if isinstance(made, list):
            made.insert(place, made[place])
        case 1 if isinstance(place, str):
            made[chance.choice((place + "x", place[:-1], chance.choice(WORDS)))] = made.pop(place)
        case 2 if isinstance(made, list):
            made[place] = made[chance.randrange(len(made))]
        case 2:
            made[place] = made[chance.choice(places)]
        case 3:
            made[place] = odd_value(chance)
        case _:
            made[place] = spoil_value(made[place], chance)
    return made


def _changed(value: Any, chance: Random) -> Any:
    if isinstance(value, str) and chance.random() < 0.6:
        at = chance.randrange(len(value) + 1)
        return value[:at] + chance.choice(WORDS) + value[at + chance.randrange(4) :]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.6:
        return value + chance.choice((-1, 1, 2**31, 2**62, -value, -2 * value))
    return odd_value(chance)


def _json(content: bytes, chance: Random) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _bytes(content, chance)
    return json.dumps(spoil_value(value, chance)).encode()


def _json_lines(content: bytes, chance: Random) -> bytes:
    lines = content.split(b"\n")
    at = chance.randrange(len(lines))
    if chance.random() < 0.7:
        indent = b" " if lines[at].startswith(b" ") else b""
        lines[at] = indent + _json(lines[at], chance)
        return b"\n".join(lines)
    return _lines(content, chance)


def _lines(content: bytes, chance: Random) -> bytes:
    """Leave out, double and exchange lines, and their words."""
    lines = content.split(b"\n")
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            separator = next((one for one in (b",", b":", b" ") if one in lines[at]), b" ")
            words = lines[at].split(separator)
            words[chance.randrange(len(words))] = _text(chance.choice(WORDS))
            lines[at] = separator.join(words)
    return b"\n".join(lines)


# ---- formats of frames, archives and fields


def _frames(content: bytes, chance: Random) -> bytes:
    """Spoil frames of MessagePack, with right checksums."""
    bodies, at = [], 0
    while at + 8 <= len(content):
        (length,) = struct.unpack_from("<I", content, at)
        bodies.append(content[at + 8 : at + 8 + length])
        at += 8 + length
    if not bodies:
        return _bytes(content, chance)
    at, other = chance.randrange(len(bodies)), chance.randrange(len(bodies))
    match chance.randrange(6):
        case 0:
            del bodies[at]
        case 1:
            bodies.insert(other, bodies[at])
        case 2:
            bodies[at] = _bytes(bodies[at], chance)
        case _:
            try:
                bodies[at] = msgspec.msgpack.encode(spoil_value(msgspec.msgpack.decode(bodies[at]), chance))
            except (msgspec.MsgspecError, UnicodeError, OverflowError, TypeError, RecursionError):
                bodies[at] = _bytes(bodies[at], chance)
    return b"".join(struct.pack("<II", len(body), zlib.crc32(body)) + body for body in bodies)


def _archive(content: bytes, chance: Random) -> bytes:
    """Change, drop or double an entry of a zip archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # spoiled before
        return _bytes(content, chance)
    if not entries:
        return _bytes(content, chance)
    at = chance.randrange(len(entries))
    name, value = entries[at]
    match chance.randrange(8):
        case 0:
            del entries[at]
        case 1:
            entries[at] = (name + chance.choice(("x", "/", "\n")), value)
        case _:
            entries[at] = (name, _bytes(value, chance))
    made = io.BytesIO()
    packing = zipfile.ZIP_DEFLATED if chance.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", packing) as archive:
        for name, value in entries:
            archive.writestr(name, value)
    return made.getvalue()


_CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "json": _json,
    "json lines": _json_lines,
    "lines": _lines,
    "frames": _frames,
    "archive": _archive,
}
