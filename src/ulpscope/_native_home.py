# SPDX-License-Identifier: Apache-2.0
"""Where the part of the recorder lies that is compiled beside the installed torch, and whether it may be loaded; told without torch.

It fits one torch, one Python and one version of its source, so each combination has a folder of its own, under the user's cache or under
ULPSCOPE_NATIVE. It is code: a file or a folder that someone else owns, or can write to, is left alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["SOURCE", "Part", "expected_part", "objection", "objection_to_folder", "seal"]

SOURCE = Path(__file__).parent / "capture" / "_native.cpp"
_SEAL_BYTES = 16


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


def objection(file: Path) -> str:
    """Why `file` is not to be loaded; empty where nothing is wrong with it."""
    return objection_to_folder(file.parent) or _objection_to(file) or ("" if _is_sealed(file) else f"'{file}' is not as it was built")


def objection_to_folder(folder: Path) -> str:
    """Why nothing in the folder of a part is trusted: it, or the folder of all parts, is open to others."""
    return _objection_to(folder.parent) or _objection_to(folder)


def _objection_to(path: Path) -> str:
    try:
        status = path.lstat()
    except OSError as error:
        return f"'{path}' cannot be looked at ({error.strerror})"
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return f"'{path}' is neither a file nor a folder"
    if os.name != "posix" or status.st_uid not in (os.geteuid(), 0):
        return f"'{path}' belongs to another user"
    return f"'{path}' is writable by others" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def seal(draft: Path, file: Path) -> None:
    """Append to a draft of `file` what tells that it is whole and in its place: loading half a file ends the process."""
    with draft.open("ab+") as written:
        written.seek(0)
        written.write(_seal(written.read(), file))
        written.flush()
        os.fsync(written.fileno())


def _is_sealed(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES], file)


def _seal(content: bytes, file: Path) -> bytes:
    return hashlib.blake2b(content, key=file.parent.name[-16:].encode(), digest_size=_SEAL_BYTES).digest()


def _home() -> Path:
    """The folder of all parts, without links in its path: whatever is below it is looked at as it is."""
    given, cache = os.environ.get("ULPSCOPE_NATIVE"), os.environ.get("XDG_CACHE_HOME")
    return Path(given or Path(cache or "~/.cache", "ulpscope", "native")).expanduser().resolve()


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
