# SPDX-License-Identifier: Apache-2.0
"""Find the compiled part of the recorder, and tell whether it may be loaded, without torch.

The part fits one torch, one Python and one version of its source, so each combination has a folder of its own, under the user's cache or
under ULPSCOPE_NATIVE. It is code: a file that another user owns, can write to, or could replace is not loaded. So every folder and every
link on the way to it is checked, from the root on. The file that is loaded is the very file that was checked: it stays open from before the
first check on.
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
    """Raised for a file that is not to be loaded; the message says why."""


class Part(NamedTuple):
    """The compiled part that would fit here, whether or not it was built."""

    file: Path
    torch: str


def expected_part() -> Part | None:
    """Return the part for the torch, the Python and the source at hand; None where one of them is missing, or a place for it."""
    try:
        torch, source = _torch_version(), SOURCE.read_bytes()
        build = "\0".join([torch.__version__, str(torch.cuda), torch.git_version, EXTENSION_SUFFIXES[0]])
        home = _home()
    except Exception:  # torch may be broken; importing it will say more
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
    """Say why `file` is not to be loaded; empty where nothing is wrong with it."""
    try:
        os.close(opened(file))
    except Untrusted as reason:
        return str(reason)
    return ""


def opened(file: Path) -> int:
    """Open the file after a check of it and of the way to it; raise Untrusted with the reason."""
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
    """Say why nothing in the folder of a part is trusted: it, or a folder or link on the way to it, is open to others."""
    if os.name != "posix":
        return f"'{folder}' cannot be trusted here: who may write to it is not known"
    return next(filter(None, map(_objection_to, (*_way(_given_home()), *_way(folder)))), "") or _objection_to_end(folder)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, so that no other user can write to them, whatever the user's umask is."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o755, exist_ok=True)


def _way(path: Path) -> Iterator[Path]:
    """Yield every step on the way to a path, itself included: folders from the root on, and links, which are followed."""
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
    """Say what is wrong with one step of the way.

    A folder like /tmp is fine: all may write there, but no user may move another's files.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""  # a missing step leads nowhere; `make_folder` checks again after making it
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
    """Say why the folder of the part, or of all parts, is not ours alone: a link, or write access for others."""
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
    """Append a seal to a draft of `file` that tells that it is whole and in its place: loading half a file would end the process."""
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
    """Return the folder of all parts, without links in its path."""
    return _given_home().resolve()


def _given_home() -> Path:
    given, cache = os.environ.get("ULPSCOPE_NATIVE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given or Path(cache or "~/.cache", "ulpscope", "native")).expanduser()


def _torch_version() -> Any:
    """Load the module `torch.version` alone where torch was not imported; it needs nothing of torch."""
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
