# SPDX-License-Identifier: Apache-2.0
"""The part compiled beside torch is used if it fits and only its owner could have written it, and a build is whole or not there.

The real source is compiled once for all tests (tests/conftest.py). The tests here compile a stand-in with the same entry, which takes no
time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ulpscope import _native_home
from ulpscope._native_home import expected_part, objection, seal
from ulpscope.capture.native import building as native
from ulpscope.errors import InputError, MissingDependencyError, UlpscopeError

pytestmark = pytest.mark.compiled("part")

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
RELEASE = torch.__version__.partition("+")[0]
STAND_IN = r"""
#include <Python.h>
static int table[1];
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__native() {
  PyObject* made = PyModule_Create(&definition);
  if (VERSION < 0) __builtin_trap();
  PyModule_AddIntConstant(made, "VERSION", VERSION);
  PyModule_AddStringConstant(made, "TORCH", TORCH);
  PyModule_AddObject(made, NAME, PyCapsule_New(table, "ulpscope.native", nullptr));
  return made;
}
"""

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


def compile_stand_in(file: Path, *, version: int = 1, release: str = RELEASE, name: str = "TABLE") -> Path:
    source = file.with_name(f"{file.name}.cpp")
    source.write_text(f'#define VERSION {version}\n#define TORCH "{release}"\n#define NAME "{name}"\n{STAND_IN}')
    include = sysconfig.get_path("include")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", f"-I{include}", "-o", str(file), str(source)], check=True)
    return file


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stand_in(tmp_path_factory.mktemp("stand_in") / "good")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file where a part is expected that nobody has built."""
    (tmp_path / "_native.cpp").write_text("int main() {}\n")
    monkeypatch.setattr(_native_home, "SOURCE", tmp_path / "_native.cpp")
    monkeypatch.setenv("ULPSCOPE_NATIVE", str(tmp_path / "parts"))
    monkeypatch.delenv("CXX", raising=False)
    part = expected_part()
    assert part is not None
    return part.file


def put(file: Path, content: bytes) -> None:
    """Put a file in place as a build does: replace it by another one, since the old one may be in use."""
    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = file.with_name("new")
    draft.write_bytes(content)
    draft.chmod(0o755)
    seal(draft, file)
    draft.replace(file)


def write_compiler(path: Path, body: str) -> Path:
    """Write a program to be named in CXX; in its body $OUT is the file to be made."""
    path.write_text(f'#!/bin/sh\nfor OUT in "$@"; do :; done\n{body}\n')
    path.chmod(0o755)
    return path


def copying(path: Path, made: Path, *, before: str = "") -> Path:
    """Write a compiler that notes its call in `compiled` beside it, and copies a file made earlier."""
    return write_compiler(path, f'echo called >> "{path.parent / "compiled"}"\n{before}\ncp "{made}" "$OUT"; chmod 777 "$OUT"')


# ---- what is used


@pytest.mark.compiled("recorder")
def test_it_is_used_exactly_where_it_can_be_built() -> None:
    """The part is optional, so a source that stopped compiling would go unnoticed otherwise."""
    assert (native.TABLE is not None) == (COMPILER is not None)


def test_the_real_part_loads(native_part: Path) -> None:
    assert 'capsule object "ulpscope.native"' in repr(native.load(native_part))


@needs_compiler
def test_what_fits_is_used(file: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._find() is None
    put(file, stand_in.read_bytes())
    assert type(native._find()).__name__ == "PyCapsule"
    monkeypatch.setenv("ULPSCOPE_NO_KERNEL", "1")
    assert native._find() is None


@needs_compiler
@pytest.mark.parametrize("other", [{"version": 2}, {"release": "1.0.0"}, {"name": "TABEL"}], ids=str)
def test_what_was_made_for_something_else_is_not_used(other: dict[str, Any], file: Path, tmp_path: Path) -> None:
    put(file, compile_stand_in(tmp_path / "other", **other).read_bytes())
    assert native._find() is None


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x7fELF" + bytes(60), Path(__file__).read_bytes()], ids=len)
def test_garbage_is_not_used(content: bytes, file: Path) -> None:
    put(file, content)
    assert objection(file) == ""
    assert native._find() is None


@needs_compiler
def test_what_is_not_whole_or_not_in_its_place_is_not_used(file: Path, stand_in: Path) -> None:
    """The loader of the system would end the process on half a file."""
    put(file, stand_in.read_bytes())
    whole = file.read_bytes()
    middle = len(whole) // 2
    for content in (b"", whole[:middle], whole[:-1], whole + b"x", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        file.write_bytes(content)
        assert objection(file) == f"'{file}' is not as it was built"
        assert native._find() is None
    file.write_bytes(whole)
    other = file.parent.with_name(f"{file.parent.name[:-1]}!")
    file.parent.rename(other)
    assert "is not as it was built" in objection(other / file.name)


@needs_compiler
@pytest.mark.parametrize("name", ["_native.so", "native.so", "_native.py", "lock"])
def test_only_the_expected_name_counts(name: str, file: Path, stand_in: Path) -> None:
    put(file.with_name(name), stand_in.read_bytes())
    assert native._find() is None


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        stranger = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: stranger)


def replace_with_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


SPOILED: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "group": (lambda path, _: path.chmod(0o775), "is writable by others"),
    "world": (lambda path, _: path.chmod(0o757), "is writable by others"),
    "owner": (give_away, "belongs to another user"),
    "link": (replace_with_link, "is neither a file nor a folder"),
}


@needs_compiler
@pytest.mark.parametrize(
    ("how", "what"), [(how, what) for how in SPOILED for what in ("file", "folder", "home") if (how, what) != ("link", "home")]
)
def test_what_others_could_have_written_is_not_used(
    how: str, what: str, file: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(file, stand_in.read_bytes())
    assert objection(file) == ""
    spoil, problem = SPOILED[how]
    spoil({"file": file, "folder": file.parent, "home": file.parents[1]}[what], monkeypatch)
    assert problem in objection(file)
    assert native._find() is None


@needs_compiler
def test_a_link_to_the_folder_of_all_is_followed(file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches often lie on another disk."""
    put(file, stand_in.read_bytes())
    (tmp_path / "link").symlink_to("parts")
    monkeypatch.setenv("ULPSCOPE_NATIVE", str(tmp_path / "link"))
    assert native._find() is not None


@needs_compiler
@pytest.mark.parametrize("how", ["group", "world", "owner"])
@pytest.mark.parametrize("above", [1, 2, 3])
def test_every_folder_above_counts(how: str, above: int, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write to a folder can put another in the place of all that lies below it."""
    (tmp_path / "_native.cpp").write_text("int main() {}\n")
    monkeypatch.setattr(_native_home, "SOURCE", tmp_path / "_native.cpp")
    monkeypatch.setenv("ULPSCOPE_NATIVE", str(tmp_path / "a/b/c/parts"))
    part = expected_part()
    assert part is not None
    put(part.file, stand_in.read_bytes())
    assert objection(part.file) == ""
    spoil, problem = SPOILED[how]
    spoil(part.file.parents[1 + above], monkeypatch)
    assert problem in objection(part.file)
    assert native._find() is None
    with pytest.raises(InputError, match=f"{problem}, and code is not built there"):
        native.build()


@needs_compiler
def test_a_folder_for_all_in_which_nobody_moves_what_is_ours_is_fine(file: Path, stand_in: Path, tmp_path: Path) -> None:
    put(file, stand_in.read_bytes())
    tmp_path.chmod(0o1777)
    assert objection(file) == ""
    file.parents[1].chmod(0o1777)  # but that of all parts is our own
    assert "is writable by others" in objection(file)


@needs_compiler
@pytest.mark.parametrize("how", ["group", "owner", "owner of the link"])
def test_a_link_on_the_way_is_followed_and_looked_at(
    how: str, file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(file, stand_in.read_bytes())
    (tmp_path / "links").mkdir()
    (tmp_path / "links/here").symlink_to("../links/there")
    (tmp_path / "links/there").symlink_to(tmp_path)
    monkeypatch.setenv("ULPSCOPE_NATIVE", str(tmp_path / "links/here/parts"))
    assert native._find() is not None
    if how == "owner of the link":
        if os.geteuid() != 0:
            pytest.skip("only root can give a link away")
        os.chown(tmp_path / "links/there", 12345, -1, follow_symlinks=False)
    else:
        SPOILED[how][0](tmp_path / "links", monkeypatch)
    part = expected_part()
    assert part is not None
    assert part.file == file
    assert "links" in objection(file)
    assert native._find() is None


@needs_compiler
@pytest.mark.parametrize("what", ["file", "folder", "home"])
def test_what_was_looked_at_is_what_is_loaded(
    what: str, file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file takes its place between the check and the loading; loading that one would end the process."""
    put(file, stand_in.read_bytes())
    crash = compile_stand_in(tmp_path / "crash", version=-1)
    looked = _native_home.opened

    def looked_then_swapped(path: Path) -> int:
        descriptor = looked(path)
        moved = {"file": file, "folder": file.parent, "home": file.parents[1]}[what]
        moved.rename(tmp_path / "moved")
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(crash, file)
        return descriptor

    monkeypatch.setattr(_native_home, "opened", looked_then_swapped)
    assert type(native._find()).__name__ == "PyCapsule"


@needs_compiler
def test_what_is_no_file_is_not_opened(file: Path) -> None:
    """A pipe would wait for its other end."""
    file.parent.mkdir(parents=True, mode=0o755)
    os.mkfifo(file)
    assert "is neither a file nor a folder" in objection(file)
    assert native._find() is None


# ---- where it lies


def test_every_torch_and_source_has_a_folder_of_its_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {file}
    for name, value in {"__version__": "2.99.0", "cuda": "99.9", "git_version": "0" * 40}.items():
        monkeypatch.setattr(torch.version, name, value)
        part = expected_part()
        assert part is not None
        assert part.torch == torch.version.__version__
        seen.add(part.file)
    _native_home.SOURCE.write_text("int main() { return 1; }\n")
    part = expected_part()
    assert part is not None
    assert len({*seen, part.file}) == 5
    assert {path.parents[1] for path in seen} == {file.parents[1]}


def test_a_version_never_leads_elsewhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "__version__", "../../2.13/..")
    part = expected_part()
    assert part is not None
    assert part.file.parents[1] == file.parents[1]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HOME": "{tmp}"}, ".cache/ulpscope/native"),
        ({"HOME": "{tmp}", "XDG_CACHE_HOME": "{tmp}/c"}, "c/ulpscope/native"),
        ({"HOME": "{tmp}", "XDG_CACHE_HOME": "", "ULPSCOPE_NATIVE": ""}, ".cache/ulpscope/native"),
        ({"HOME": "{tmp}", "XDG_CACHE_HOME": "{tmp}/c", "ULPSCOPE_NATIVE": "~/mine"}, "mine"),
    ],
)
def test_the_place(variables: dict[str, str], place: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "ULPSCOPE_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    part = expected_part()
    assert part is not None
    assert part.file.parents[1] == tmp_path / place


def test_the_place_is_the_same_where_torch_was_not_imported() -> None:
    code = (
        "import sys; from ulpscope._native_home import expected_part; print(expected_part()); print(any('torch' in m for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected_part()}\nFalse\n"


def test_without_a_source_or_a_torch_there_is_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch.version")
        patch.setitem(sys.modules, "torch", None)
        assert expected_part() is None
    _native_home.SOURCE.unlink()
    assert expected_part() is None
    assert native._find() is None
    with pytest.raises(InputError, match="install ulpscope again"):
        native.build()


# ---- the build


@needs_compiler
def test_a_build_is_made_once_and_mended_where_it_is_broken(
    file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env WHO='the compiler' {copying(tmp_path / 'cxx', stand_in)}")
    calls = tmp_path / "compiled"
    before = os.umask(0)
    try:
        assert native.build() == file
    finally:
        os.umask(before)
    assert objection(file) == ""
    assert native._find() is not None
    assert native.build() == file
    assert calls.read_text() == "called\n"
    file.unlink()
    file.write_bytes(stand_in.read_bytes()[:5000])
    (tmp_path / "old").hardlink_to(file)
    assert native.build() == file
    assert (tmp_path / "old").stat().st_size == 5000  # someone may be using it
    assert calls.read_text() == "called\n" * 2
    assert native._find() is not None
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name, "lock"]


@needs_compiler
@pytest.mark.parametrize("umask", [0, 0o002])
def test_folders_are_made_so_that_they_can_be_trusted(
    umask: int, file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems let a user's group write to folders that the user makes."""
    monkeypatch.setenv("CXX", str(copying(tmp_path / "cxx", stand_in)))
    monkeypatch.setenv("ULPSCOPE_NATIVE", str(tmp_path / "a/b/c"))
    before = os.umask(umask)
    try:
        native.build()
    finally:
        os.umask(before)
    assert native._find() is not None


@needs_compiler
def test_a_compiler_that_does_not_know_the_newest_standard(
    file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = 'case "$*" in *-std=c++20*) echo "error: what is c++20?" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", str(copying(tmp_path / "cxx", stand_in, before=refusing)))
    assert native.build() == file


def nothing_left_of_a_build(file: Path) -> bool:
    return not file.exists() and {path.name for path in file.parent.glob("*")} <= {"lock"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("echo note >&2; echo 'a.h:1: error: no such thing' >&2; echo 'b.h:2: error: more' >&2; exit 1", ": a.h:1: error: no such thing"),
        ("echo 'license expired'; exit 3", ": license expired"),
        ("exit 3", ": it ended with exit code 3"),
        ("kill -9 $$", ": it ended with exit code -9"),
        ("printf 'error: \\377\\033[31m' >&2; exit 1", ": error: \ufffd\x1b[31m"),
    ],
)
def test_a_compiler_that_fails_is_one_sentence(
    body: str, sentence: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", body)))
    with pytest.raises(UlpscopeError) as caught:
        native.build()
    assert str(caught.value) == f"'{tmp_path / 'cxx'}' cannot compile '{_native_home.SOURCE}' for torch {torch.__version__}{sentence}"
    assert nothing_left_of_a_build(file)


@needs_compiler
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda made: made.write_bytes(b"garbage"), "invalid ELF header|file too short"),
        (lambda made: compile_stand_in(made, release="1.0.0"), "it is version 1 for torch 1.0.0, and needed is version 1 for torch"),
        (lambda made: compile_stand_in(made, version=-1), "it ended with exit code -"),
    ],
    ids=["garbage", "other torch", "crash"],
)
def test_what_does_not_load_is_not_put_in_place(
    make: Callable[[Path], Any], sentence: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "made")
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", f'cp "{tmp_path / "made"}" "$OUT"')))
    with pytest.raises(UlpscopeError, match=f"cannot be used with torch .*: .*({sentence})") as caught:
        native.build()
    assert "\n" not in str(caught.value)
    assert nothing_left_of_a_build(file)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"PATH": "/nowhere"}, "no C++ compiler was found: install g++ or clang++"),
        ({"CXX": "/nowhere/c++ -O3"}, "names the C++ compiler '/nowhere/c\\+\\+ -O3', which is not here"),
        ({"CXX": "g++ 'x"}, "which is not here: correct or unset it"),
        ({"CXX": " "}, "which is not here: correct or unset it"),
    ],
)
def test_no_compiler_is_one_sentence(variables: dict[str, str], sentence: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        MissingDependencyError, match=sentence.replace("C++", "C\\+\\+").replace("g++ or clang++", "g\\+\\+ or clang\\+\\+")
    ):
        native.build()
    assert not file.parents[1].exists()


@pytest.mark.parametrize("how", ["group", "owner"])
def test_nothing_is_built_where_others_can_write(how: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", "exit 1")))
    file.parents[1].mkdir(mode=0o755)
    spoil, problem = SPOILED[how]
    spoil(file.parents[1], monkeypatch)
    with pytest.raises(InputError, match=f"{problem}, and code is not built there: .* ULPSCOPE_NATIVE"):
        native.build()
    assert nothing_left_of_a_build(file)


def test_other_systems_are_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InputError, match="on Linux only, and this is win32"):
        native.build()
    assert not file.parents[1].exists()


def test_a_place_that_is_no_folder_is_one_sentence(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "cxx", "exit 1")))
    file.parents[1].write_text("in the way")
    with pytest.raises(InputError, match=r"cannot be written to .* ULPSCOPE_NATIVE"):
        native.build()


def start_build(source: Path, compiler: Path) -> subprocess.Popen[str]:
    code = "import sys; from pathlib import Path; from ulpscope import _native_home; from ulpscope.capture.native import building as native"
    code += "; _native_home.SOURCE = Path(sys.argv[1]); print(native.build())"
    environment = {**os.environ, "CXX": str(compiler)}
    return subprocess.Popen([sys.executable, "-c", code, str(source)], env=environment, stdout=subprocess.PIPE, text=True)


@needs_compiler
def test_two_builds_at_once_are_one(file: Path, stand_in: Path, tmp_path: Path) -> None:
    compiler = copying(tmp_path / "cxx", stand_in, before="sleep 0.5")
    running = [start_build(_native_home.SOURCE, compiler) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in running] == [f"{file}\n"] * 2
    assert (tmp_path / "compiled").read_text() == "called\n"
    assert native._find() is not None


@needs_compiler
def test_a_killed_build_leaves_nothing_half(file: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = write_compiler(tmp_path / "cxx", f'head -c 5000 "{stand_in}" > "$OUT"; echo $$ > "{tmp_path / "pid"}"; exec sleep 60')
    process = start_build(_native_home.SOURCE, compiler)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert not file.exists()
    assert native._find() is None
    monkeypatch.setenv("CXX", str(copying(tmp_path / "cxx", stand_in)))
    assert native.build() == file
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name, "lock"]
