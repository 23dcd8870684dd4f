# SPDX-License-Identifier: Apache-2.0
"""Where the part of the recorder lies that is compiled beside the installed torch, and whether it may be loaded; told without torch.

It fits one torch, one Python and one version of its source, so each combination has a folder of its own, under the user's cache or under
ULPSCOPE_NATIVE. It is code: a file that someone else owns, can write to, or could put another in the place of is left alone. So every
folder on the way to it is looked at, from the root on, and every link; and what is loaded is the very file that was looked at, which
stays open from before the first look on.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "SOURCE",
    "Part",
    "Untrusted",
    "expected_part",
    "installed_torch",
    "make_folder",
    "objection",
    "objection_to_folder",
    "opened",
    "seal",
]

SOURCE = Path(__file__).parent / "capture" / "native" / "_native.cpp"
_SEAL_BYTES = 16
_MOST_LINKS = 40


class Untrusted(Exception):
    """Why a file is not to be loaded."""


class Part(NamedTuple):
    """What would fit here, whether or not it was built."""

    file: Path
    torch: str


def expected_part() -> Part | None:
    """The part for the torch, the Python and the source at hand; None where one of them is missing, or a place for it."""
    try:
        torch, source = _torch_version(), SOURCE.read_bytes()
        build = "\0".join([torch.__version__, str(torch.cuda), torch.git_version, EXTENSION_SUFFIXES[0]])
        home = _home()
    except Exception:  # a torch that is broken as well, of which whoever imports it hears more
        return None
    key = hashlib.blake2b(source + build.encode(), digest_size=8).hexdigest()
    folder = re.sub(r"[^\w.+-]", "_", f"{sys.implementation.cache_tag}-torch-{torch.__version__}-{key}")
    return Part(home / folder / f"_native{EXTENSION_SUFFIXES[0]}", str(torch.__version__))


def installed_torch() -> str:
    """The version of torch that is installed; empty where there is none, or one that is broken."""
    try:
        return str(_torch_version().__version__)
    except Exception:
        return ""


def objection(file: Path) -> str:
    """Why `file` is not to be loaded; empty where nothing is wrong with it."""
    try:
        os.close(opened(file))
    except Untrusted as reason:
        return str(reason)
    return ""


def opened(file: Path) -> int:
    """The file, open, after a look at it and at the way to it; raises Untrusted with what is wrong."""
    if problem := objection_to_folder(file.parent):
        raise Untrusted(problem)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        problem = f"'{file}' is neither a file nor a folder" if file.is_symlink() else _objection_to(file)
        raise Untrusted(problem or f"'{file}' cannot be opened ({error.strerror})") from None
    try:
        status = os.fstat(descriptor)
        problem = _objection_to_status(file, status) or ("" if stat.S_ISREG(status.st_mode) else f"'{file}' is not a file")
        if problem or not _is_sealed(descriptor, file):
            raise Untrusted(problem or f"'{file}' is not as it was built")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def objection_to_folder(folder: Path) -> str:
    """Why nothing in the folder of a part is trusted: it, or a folder or link on the way to it, is open to others."""
    if os.name != "posix":
        return f"'{folder}' cannot be trusted here: who may write to it is not known"
    return next(filter(None, map(_objection_to, (*_way(_given_home()), *_way(folder)))), "") or _objection_to_end(folder)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, so that nobody else can write to them, whatever the user's habit is."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o755, exist_ok=True)


def _way(path: Path) -> Iterator[Path]:
    """Everything that is passed on the way to a path, itself included: folders from the root on, and links, which are followed."""
    at, parts, num_links = Path("/"), list(reversed(Path.cwd().joinpath(path).parts)), 0
    yield at
    while parts:
        part = parts.pop()
        if part in ("/", "//"):
            at = Path("/")
            continue
        if part == "..":
            at = at.parent
            continue
        step = at / part
        yield step
        if not step.is_symlink():
            at = step
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            return
        parts += reversed(step.readlink().parts)


def _objection_to(path: Path) -> str:
    """What is wrong with one step of a way. A folder in which all may write, but nobody move what is another's, is fine: see /tmp."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""  # what is not there leads nowhere; who makes it looks again
    except OSError as error:
        return f"'{path}' cannot be looked at ({error.strerror})"
    return _objection_to_status(path, status)


def _objection_to_status(path: Path, status: os.stat_result) -> str:
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        return f"'{path}' is neither a file nor a folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"'{path}' belongs to another user"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    is_open = not stat.S_ISLNK(status.st_mode) and not is_sticky and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"'{path}' is writable by others" if is_open else ""


def _objection_to_end(folder: Path) -> str:
    """The folder of a part and that of all parts are our own: there, links and places where others may put files are not needed."""
    for path in (folder.parent, folder):
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            return f"'{path}' cannot be looked at ({error.strerror})"
        if not stat.S_ISDIR(mode):
            return f"'{path}' is neither a file nor a folder"
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"'{path}' is writable by others"
    return ""


def seal(draft: Path, file: Path) -> None:
    """Append to a draft of `file` what tells that it is whole and in its place: loading half a file ends the process."""
    with draft.open("ab+") as written:
        written.seek(0)
        written.write(_seal(written.read(), file))
        written.flush()
        os.fsync(written.fileno())


def _is_sealed(descriptor: int, file: Path) -> bool:
    try:
        with open(descriptor, "rb", closefd=False) as stream:
            content = stream.read()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES], file)


def _seal(content: bytes, file: Path) -> bytes:
    return hashlib.blake2b(content, key=file.parent.name[-16:].encode(), digest_size=_SEAL_BYTES).digest()


def _home() -> Path:
    """The folder of all parts, without links in its path."""
    return _given_home().resolve()


def _given_home() -> Path:
    given, cache = os.environ.get("ULPSCOPE_NATIVE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given or Path(cache or "~/.cache", "ulpscope", "native")).expanduser()


def _torch_version() -> Any:
    """The module `torch.version`, which needs nothing of torch: alone where torch was not imported."""
    if "torch.version" in sys.modules:
        return sys.modules["torch.version"]
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    spec = spec_from_file_location("torch.version", Path(torch.origin).with_name("version.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
