# SPDX-License-Identifier: Apache-2.0
"""Read small files that claim, or unfold into, far more than they are: one sentence, soon, and with hardly any memory.

Each bomb is read in a process of its own whose memory is counted. Large files that are honest still open.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.hostile.children import GIB, answer_of, on_linux
from ulpscope.compat.checker.checker_tables import finished_apis
from ulpscope.compat.msprobe.command.flat_yaml import read_lists
from ulpscope.compat.msprobe.config import read_config
from ulpscope.compat.sheets import read_csv, read_sheet
from ulpscope.match import read_mapping
from ulpscope.model import RunInfo
from ulpscope.model.health import STATISTICS
from ulpscope.recording.selection import Selection
from ulpscope.store import DirectoryRun, create_run, open_run
from ulpscope.store.acl.file import read_acl_file
from ulpscope.store.envelope import read_envelope
from ulpscope.store.foreign.check_table import read_check_table
from ulpscope.store.foreign.reader import open_tensor
from ulpscope.store.series import open_health

pytestmark = pytest.mark.skipif(not on_linux(), reason="memory is counted where Linux tells of it")

MIB = 1 << 20
HEAD = b'{"schema":"ulpscope.baseline/1"}\n'
CALL = b'{"call":"x.0","rank":0,"step":0,"order":0,"phase":"forward"}\n'


# ---- .pt and .npy


def inflating_pickle(file: Path) -> None:
    """Write data.pkl of 3 GiB in 3 MB: one block of a MiB, again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(b"N0" * (MIB // 2)) + packer.flush(zlib.Z_FULL_FLUSH)
    inflating = 8, block * (3 << 10) + packer.flush(), 3 * GIB
    whole, listed = b"", b""
    for name, (method, content, size) in ((b"x/data.pkl", inflating), (b"x/version", (0, b"3\n", 2)), (b"x/byteorder", (0, b"little", 6))):
        sizes = zlib.crc32(content), len(content), size
        listed += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, method, 0, 0, *sizes, len(name), 0, 0, 0, 0, 0, len(whole)) + name
        whole += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, method, 0, 0, *sizes, len(name), 0) + name + content
    file.write_bytes(whole + listed + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 3, 3, len(listed), len(whole), 0))


def saved_with(file: Path, replaced: dict[str, bytes], tensor: torch.Tensor | None = None, *, deflated: str = "") -> None:
    torch.save(torch.ones(4) if tensor is None else tensor, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            short = name.partition("/")[2]
            packing = zipfile.ZIP_DEFLATED if short == deflated else zipfile.ZIP_STORED
            archive.writestr(name, replaced.get(short, content), compress_type=packing)


def called(function: str, *arguments: Any) -> bytes:
    """Write a pickle that calls a function which torch calls with weights_only too."""
    return b"\x80\x02c" + function.replace(".", "\n").encode() + b"\n" + pickle.dumps(arguments, 2)[2:-1] + b"R."


def doubling(times: int) -> bytes:
    """Codecs that torch allows double a text with each call."""
    text = b"X\x04\x00\x00\x00\\\\\\\\"
    return b"\x80\x02" + b"c_codecs\nencode\n(" * times + text + b"X\x0e\x00\x00\x00unicode_escapetR" * times + b"."


def crowded_directory(file: Path) -> None:
    """Write a directory of four hundred thousand entries that are all the same byte."""
    one = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 1, 1, 6, 0, 0, 0, 0, 0, 0) + b"x/%04d"
    listed = b"".join(one % (number % 10_000) for number in range(400_000))
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(listed), 4, 0)
    file.write_bytes(b"PK\3\4" + listed + end)


def wide_and_deep(file: Path) -> None:
    saved_with(file, {"data.pkl": b"\x80\x02" + b")" + b"\x85" * 65_000 + b"."})


def marks(file: Path) -> None:
    saved_with(file, {"data.pkl": b"\x80\x02" + b"N" * 20_000 + b"(t" * 20_000 + b"."})


def legacy(file: Path) -> None:
    """Write a storage of 2**40 numbers in a file of the old form."""
    torch.save(torch.ones(4), file, _use_new_zipfile_serialization=False)
    whole = file.read_bytes()
    file.write_bytes(whole[:-24] + struct.pack("<q", 1 << 40) + whole[-16:])


def npy(file: Path, header: bytes, version: bytes = b"\1\0", claimed: int | None = None) -> None:
    length = len(header) if claimed is None else claimed
    file.write_bytes(b"\x93NUMPY" + version + length.to_bytes(2 if version == b"\1\0" else 4, "little") + header + bytes(64))


def npy_of(shape: str, descr: str = "'<f4'") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()


def holes(file: Path) -> None:
    """Write a header of 4 GiB, which takes no room on the disk."""
    npy(file, b"{", b"\2\0", 0xFFFFFFF0)
    os.truncate(file, 5 * GIB)


def named_npy(file: Path) -> None:
    """Write an archive of arrays under the name of an array."""
    inflating_pickle(file)


TENSORS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "an inflating pickle": ("pt", inflating_pickle),
    "a deflated pickle": ("pt", lambda file: saved_with(file, {"data.pkl": bytes(50 * MIB)}, deflated="data.pkl")),
    "a deflated storage": ("pt", lambda file: saved_with(file, {"data/0": bytes(40 * MIB)}, torch.ones(1 << 20), deflated="data/0")),
    "a large pickle": ("pt", lambda file: saved_with(file, {"data.pkl": b"\x80\x02" + b"N0" * (2 * MIB) + b"."})),
    "an allocating call": ("pt", lambda file: saved_with(file, {"data.pkl": called("builtins.bytearray", 3 * GIB)})),
    "an allocating tensor": ("pt", lambda file: saved_with(file, {"data.pkl": called("torch.Tensor", GIB)})),
    "a doubling text": ("pt", lambda file: saved_with(file, {"data.pkl": doubling(60)})),
    "nested tuples": ("pt", wide_and_deep),
    "many marks": ("pt", marks),
    "a list of itself": ("pt", lambda file: saved_with(file, {"data.pkl": b"\x80\x02]q\x00" + b"h\x00a" * 20_000 + b"."})),
    "a broadcast scalar": ("pt", lambda file: torch.save(torch.zeros(1).expand(1 << 20, 1000), file)),
    "a crowded directory": ("pt", crowded_directory),
    "an old form that lies": ("pt", legacy),
    "a huge shape": ("npy", lambda file: npy(file, npy_of(f"({1 << 60},)"))),
    "a shape whose product wraps": ("npy", lambda file: npy(file, npy_of(f"({1 << 32}, {1 << 32}, 4)"))),
    "a thousand dimensions": ("npy", lambda file: npy(file, npy_of("(" + "999999999999999999, " * 1000 + ")"))),
    "a shape of many digits": ("npy", lambda file: npy(file, npy_of(f"({'9' * 60_000},)"))),
    "wide elements": ("npy", lambda file: npy(file, npy_of("(4,)", f"'|V{1 << 30}'"))),
    "nested types": ("npy", lambda file: npy(file, npy_of("(4,)", "[('a', " * 400 + "'<f4'" + ")]" * 400))),
    "a nested header": ("npy", lambda file: npy(file, b"(" * 60_000)),
    "a header of holes": ("npy", holes),
    "an archive as an array": ("npy", named_npy),
    "objects": ("npy", lambda file: npy(file, npy_of("(1000000000000,)", "'|O'"))),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_file(name: str, tmp_path: Path) -> None:
    suffix, make = TENSORS[name]
    make(tmp_path / f"x.{suffix}")
    is_refused(lambda: open_tensor(tmp_path / f"x.{suffix}"))


def is_refused(act: Callable[[], object], *, seconds: float = 4.0) -> None:
    """Expect one sentence, with less than a GiB of memory, within seconds."""
    found = answer_of(act)
    assert found.end == "sentence", found
    assert found.peak_bytes < GIB // 2, found
    assert found.seconds < seconds, found


def is_cheap(act: Callable[[], object], *, seconds: float = 4.0) -> None:
    """Expect an answer or a sentence for no more than that."""
    found = answer_of(act)
    assert found.end in ("answer", "sentence"), found
    assert found.peak_bytes < GIB, found
    assert found.seconds < seconds, found


def test_a_tensor_of_20_gb_opens(tmp_path: Path) -> None:
    """It is a file with a hole, in the form in which torch.save writes more than 4 GiB."""
    file, numel = tmp_path / "x.pt", 5 << 30
    small = tmp_path / "small.pt"
    torch.save(torch.zeros(1), small)
    with zipfile.ZipFile(small) as archive:
        described = archive.read("small/data.pkl")
    described = described.replace(b"K\x01tq\x05Q", b"\x8a\x05" + numel.to_bytes(5, "little") + b"tq\x05Q")
    described = described.replace(b"QK\x00K\x01\x85", b"QK\x00\x8a\x05" + numel.to_bytes(5, "little") + b"\x85")
    with file.open("wb") as stream:
        entries = []
        for name, size, content in (("x/data.pkl", len(described), described), ("x/data/0", 4 * numel, b"")):
            at = stream.tell()
            wide = struct.pack("<HHQQ", 1, 16, size, size)
            stream.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(name), len(wide)))
            stream.write(name.encode() + wide + content)
            stream.seek(stream.tell() + size - len(content))
            entries.append((name, at, wide + b""))
        begin = stream.tell()
        for name, at, wide in entries:
            fields = (45, 45, 0, 0, 0, 0, 0, 2**32 - 1, 2**32 - 1, len(name), len(wide), 0, 0, 0, 0, at)
            stream.write(struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields) + name.encode() + wide)
        size = stream.tell() - begin
        stream.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, size, begin))
        stream.write(struct.pack("<4sLQL", b"PK\6\7", 0, begin + size, 1))
        stream.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, 2**32 - 1, 2**32 - 1, 0))
    with zipfile.ZipFile(file) as archive:
        assert archive.getinfo("x/data/0").file_size == 20 << 30

    def look() -> object:
        data = open_tensor(file)
        return data.dtype, data.shape, bytes(data.buffer[-4:]) == bytes(4), len(data.buffer)

    found = answer_of(look)
    assert (found.end, found.said) == ("answer", str(("float32", (numel,), True, 20 << 30))), found
    assert found.peak_bytes < 64 * MIB


def test_an_array_of_20_gb_opens(tmp_path: Path) -> None:
    npy(tmp_path / "x.npy", npy_of(f"({5 << 30},)"))
    os.truncate(tmp_path / "x.npy", (20 << 30) + 10 + len(npy_of(f"({5 << 30},)")))
    found = answer_of(lambda: open_tensor(tmp_path / "x.npy").shape)
    assert found.said == f"({5 << 30},)", found
    assert found.peak_bytes < 64 * MIB


# ---- runs of our own


def frame(body: bytes) -> bytes:
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


def packed(*values: Any) -> bytes:
    return frame(msgspec.msgpack.encode(values))


CALL_BEFORE = msgspec.msgpack.encode((2, 0, "mul", 0, "forward", "api", "", "", 0, 0, [], None, False))
ARGUMENTS_AT = CALL_BEFORE.index(b"forward") + len(b"forward") + 4 + 1 + 1


def with_arguments(values: bytes) -> bytes:
    """Make a call whose arguments are these bytes."""
    return frame(CALL_BEFORE[:ARGUMENTS_AT] + b"\x92" + values + b"\xc0" + CALL_BEFORE[ARGUMENTS_AT + 1 :])


def many(value: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + value * count


FRAMES = {
    "empty lists": lambda: with_arguments(many(b"\x90", 12 << 20)),
    "empty maps": lambda: with_arguments(many(b"\x80", 12 << 20)),
    "maps": lambda: with_arguments(many(b"\x81\xa1a\xc0", 4 << 20)),
    "texts": lambda: with_arguments(many(b"\xa2ab", 6 << 20)),
    "bottomless nesting": lambda: with_arguments(b"\x91" * MIB + b"\xc0"),
    "claimed lengths": lambda: with_arguments(b"\xdd\xff\xff\xff\xff" * 1000),
    "a claimed text": lambda: with_arguments(b"\x91\xdb\xff\xff\xff\xff"),
    "a shape of a million": lambda: packed(
        2, 0, "m", 0, "forward", "api", "", "", None, None, [(("input", (0,)), "f", [1] * MIB)], None, False
    ),
}


@pytest.mark.parametrize("what", FRAMES)
def test_a_frame(what: str, tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    (path / "rank00000" / "step00000").mkdir(parents=True)
    (path / "rank00000" / "step00000" / "records.msgpack").write_bytes(packed(0, 1, 0, 0) + FRAMES[what]())
    is_cheap(lambda: len(list(open_run(path).records(0, 0))))


@pytest.mark.parametrize("text", [b'{"a":[' + b"[]," * (2 * MIB), b"[" * (16 * MIB), b'{"seed":' + b"9" * (14 * MIB) + b"}"])
def test_a_description_of_a_run(text: bytes, tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    (path / "run.json").write_bytes(text)
    is_refused(lambda: DirectoryRun(path))


def test_a_watched_run_of_which_one_step_is_wide(tmp_path: Path) -> None:
    """A few steps whose product of steps, targets and signs is 10**15."""
    path = create_run(tmp_path / "run", RunInfo())
    (path / "rank00000").mkdir()
    row = 8 * len(STATISTICS)
    small = [("weight", f"w{number}", 8, 8, "float32", "", True, 8, b"") for number in range(2000)]
    wide = [("weight", "wide", 8, 8, "float32", "", True, 64 * MIB, b"")]
    steps = [packed(2, step, 0.0, {}, bytes(2000 * row), b"", bytes(2000)) for step in range(20)]
    text = packed(0, 1, 0) + packed(1, small, []) + b"".join(steps)
    text += packed(1, wide, []) + packed(2, 30, 0.0, {}, bytes(row), b"", bytes(8 * MIB))
    (path / "rank00000" / "series-00000.msgpack").write_bytes(text)
    is_cheap(lambda: open_health(path).series(0).values.shape)


# ---- dumps of other tools


def deep(count: int) -> str:
    return "[" * count + "]" * count


@pytest.mark.parametrize(
    "text",
    [
        lambda: '{"data": ' + deep(10**6) + "}",
        lambda: '{"data": {"Torch.relu.0.forward": {"input_args": [' + "9" * 10**6 + "]}}}",
        lambda: '{"data": {"Torch.relu.0.forward": {"input_args": [' + "[]," * (10 << 20) + "0]}}}",
        lambda: '{"data": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
        lambda: '{"data": {"' + "a." * (8 << 20) + '": {}}}',
        lambda: '{"data": {"Torch.relu.0.forward": {"input_args": [{"type": "' + "x" * (20 << 20) + '"}]}}}',
        lambda: '{"data": {"Torch.relu.0.forward": {"input_args": [' + deep(63) + "]}}}",
    ],
    ids=["nested", "digits", "brackets", "maps", "a name", "a type", "as deep as may be"],
)
def test_a_dump_in_json(text: Callable[[], str], tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(text())
    is_cheap(lambda: len(list(open_run(tmp_path).records(0, 0))))
    (tmp_path / "dump.json").rename(tmp_path / "forward_info_0.json")
    is_cheap(lambda: len(list(open_run(tmp_path / "forward_info_0.json").records(0, 0))))


def lines_of(name: str, count: int) -> str:
    """Each call has one argument, at a place behind thousands of others."""
    values = json.dumps([1.0]), '"torch.float32"', "[1]"
    if name == "hooks":
        return "".join(f'["{at}_Torch_relu_forward_input.9999.9999.9999", {values[0]}, {values[1]}, {values[2]}]\n' for at in range(count))
    return "".join(f'["Torch_relu_{at}_forward_input.9999.9999.9999", 1, [], "torch.float32", [1], [1, 1, 1]]\n' for at in range(count))


@pytest.mark.parametrize("name", ["hooks", "ptdbg"])
def test_arguments_behind_thousands_that_are_not_there(name: str, tmp_path: Path) -> None:
    file = tmp_path / ("api_stack_dump.pkl" if name == "ptdbg" else "hooks.pkl")
    file.write_text(lines_of(name, 8_000))
    is_refused(lambda: len(list(open_run(file).records(0, 0))))


@pytest.mark.parametrize(
    "head", [b"\xff" * 8, struct.pack("<Q", 1 << 62), struct.pack("<Q", 64) + b"\x0a\xff\xff\xff\xff\x7f", b"\x0a\xff\xff\xff\x7f"]
)
def test_a_dump_of_the_runtime(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "Mul.mul.1.2.1234567890123456").write_bytes(head + bytes(200))
    is_refused(lambda: [tensor.array("ND") for tensor in read_acl_file(tmp_path / "Mul.mul.1.2.1234567890123456").tensors])


# ---- files beside the runs


@pytest.mark.parametrize(
    "text",
    [
        lambda: b'{"slot":"input.0","dtype":"float32","shape":[' + b"1," * 200_000 + b'1]}\n'
        + b"".join(b' {"slot":"input.%d","like":"0/input.0"}\n' % at for at in range(1, 20_000)),
        lambda: b'{"slot":"input.0","dtype":"float32","note":"' + b"x" * (20 << 20) + b'"}\n',
        lambda: b'{"slot":"input.0","dtype":"f","numel":' + b"9" * 10**6 + b"}\n",
        lambda: b"\n" * (20 << 20),
        lambda: b'{"slot":' + b"[" * 10**6 + b"\n",
    ],
    ids=["likes", "a note", "digits", "empty lines", "nested"],
)  # fmt: skip
def test_a_baseline(text: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(HEAD + CALL + b" " + text())
    is_cheap(lambda: len(read_envelope(tmp_path / "b.jsonl").calls), seconds=8)


ENDLESS: dict[str, Callable[[str], object]] = {
    "mapping": read_mapping,
    "baseline": lambda path: read_envelope(Path(path)),
    "config.json": read_config,
    "yaml": lambda path: read_lists(Path(path)),
    "selection": lambda path: Selection.parse(select=f"@{path}"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_file_without_an_end(what: str, tmp_path: Path) -> None:
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 50 * GIB)
    for path in ("/dev/zero", str(tmp_path / "holes")):
        is_refused(lambda path=path: ENDLESS[what](path))  # type: ignore[misc]


@pytest.mark.parametrize(
    "text", [b"\n" * (4 << 20), b"a\n" * (1 << 20), b"," * (130 << 10) * 8, b'"' * (2 << 20)], ids=["empty", "short", "wide", "quotes"]
)
def test_a_table(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(text)

    def read() -> object:
        try:
            return len(read_csv(tmp_path / "t.csv")), len(finished_apis(tmp_path / "t.csv"))
        except ValueError as error:
            return str(error)

    is_cheap(read, seconds=12)
    is_refused(lambda: read_check_table(tmp_path / "t.csv"), seconds=12)


SHEET = b'<?xml version="1.0"?><worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">%s<sheetData>%s</sheetData></worksheet>'
ENTITIES = (
    b'<!DOCTYPE x [<!ENTITY a "'
    + b"x" * 1000
    + b'">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + k, b"&%c;" % (97 + k) * 20) for k in range(8))
    + b"]>"
)
SHEETS: dict[str, Callable[[], dict[str, bytes]]] = {
    "inflating": lambda: {"xl/worksheets/sheet1.xml": SHEET % (b"", b"<row>" + b"<c><v>1</v></c>" * (4 << 20) + b"</row>")},
    "wide rows": lambda: {
        "xl/worksheets/sheet1.xml": SHEET % (b'<dimension ref="A1:XFD1048576"/>', b'<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>')
    },
    "many wide rows": lambda: {"xl/worksheets/sheet1.xml": SHEET % (b"", b'<row><c r="XFD1"><v>1</v></c></row>' * 20_000)},
    "entities": lambda: {"xl/worksheets/sheet1.xml": ENTITIES + (SHEET % (b"", b"<row><c><v>&i;</v></c></row>"))[21:]},
    "shared texts": lambda: {
        "xl/sharedStrings.xml": b"<sst xmlns='http://schemas.openxmlformats.org/spreadsheetml/2006/main'>"
        + b"<si><t>ab</t></si>" * (2 << 20)
        + b"</sst>"
    },
}


@pytest.mark.parametrize("what", SHEETS)
def test_a_workbook(what: str, tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["NPU Name"])
    book.save(tmp_path / "whole.xlsx")
    replaced = SHEETS[what]()
    with (
        zipfile.ZipFile(tmp_path / "whole.xlsx") as whole,
        zipfile.ZipFile(tmp_path / "x.xlsx", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made,
    ):
        for name in {*whole.namelist(), *replaced}:
            made.writestr(name, replaced.get(name) or whole.read(name))

    def read() -> object:
        try:
            return len(read_sheet(tmp_path / "x.xlsx"))
        except ValueError as error:
            return f"refused: {error}"

    assert read_sheet(tmp_path / "whole.xlsx") == [["NPU Name"]]
    is_cheap(read, seconds=12)
