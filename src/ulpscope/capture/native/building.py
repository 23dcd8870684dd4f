# SPDX-License-Identifier: Apache-2.0
"""Build and load the part of the recorder that is compiled against the installed torch (`_native.cpp`): its table of C functions.

It is optional and built on request; `_native_home` says where it lies and which file is trusted. Without it Python asks torch the same
questions. Loading never fails: a part that cannot be used is left alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from ulpscope import _native_home
from ulpscope.capture.native.versions import PART_VERSION
from ulpscope.errors import InputError, MissingDependencyError, UlpscopeError

__all__ = ["TABLE", "build", "load"]

_COMPILERS = ("c++", "g++", "clang++")
_STANDARDS = ("c++20", "c++17")  # torch 2.13 asks for the first, which older compilers do not know
_LIBRARIES = ("torch_python", "torch_cpu", "torch", "c10")
_TRIAL = "import sys; from pathlib import Path; from ulpscope.capture.native.building import load; load(Path(sys.argv[1]))"


def load(file: Path) -> Any:
    """Load the capsule from a compiled file; ImportError where it was made for another torch or version."""
    return _load(os.open(file, os.O_RDONLY | os.O_CLOEXEC), file)


def _load(descriptor: int, file: Path) -> Any:
    """Load the capsule from an open file, even if another file lies at its path by now.

    The loaded file stays open: the system knows it by this name, and must not meet another file under it.
    """
    name = f"/proc/self/fd/{descriptor}"
    if not Path(name).exists():  # a system that hides it: use the path, to which nobody else can write
        name = str(file)
    loader = ExtensionFileLoader("ulpscope.capture._native", name)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
    except BaseException:
        os.close(descriptor)
        raise
    loader.exec_module(module)
    found = (module.VERSION, module.TORCH)
    wanted = (PART_VERSION, _release(torch.__version__))
    if found != wanted:
        raise ImportError(f"it is version {found[0]} for torch {found[1]}, and needed is version {wanted[0]} for torch {wanted[1]}")
    return module.TABLE


def _release(version: str) -> str:
    """Return the numbers of a version alone, as torch's headers have it."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return numbers[0] if numbers else version


def _find() -> Any:
    part = _native_home.expected_part() if os.environ.get("ULPSCOPE_NO_KERNEL") != "1" else None
    if part is None:
        return None
    try:
        return _load(_native_home.opened(part.file), part.file)
    except Exception:  # not to be trusted, not an extension module, or one for something else
        return None


TABLE: Any = _find()


def build() -> Path:
    """Compile the part for the installed torch, unless it is there, and return its file; recordings that begin later use it.

    Takes about 20 seconds and a gigabyte of memory. A second build at the same time waits for the first and takes its result.
    """
    if not sys.platform.startswith("linux"):
        raise InputError(f"this part of the recorder is built on Linux only, and this is {sys.platform}; recording works without it")
    part = _native_home.expected_part()
    if part is None:
        raise InputError(
            f"'{_native_home.SOURCE}' or a home directory is missing: install ulpscope again, or name a folder in ULPSCOPE_NATIVE"
        )
    compiler = _compiler()
    try:
        with _locked(part.file.parent):
            if _native_home.objection(part.file) or _trouble_with(part.file):
                _replace(part.file, compiler)
    except OSError as error:
        raise InputError(f"'{part.file.parent}' cannot be written to ({error.strerror}); name another folder in ULPSCOPE_NATIVE") from error
    return part.file


def _compiler() -> list[str]:
    """Return the command of a C++ compiler."""
    given = os.environ.get("CXX")
    for command in [given] if given else _COMPILERS:
        with suppress(ValueError):  # a quotation that has no end
            words = shlex.split(command)
            if words and shutil.which(words[0]):
                return words
    if given:
        raise MissingDependencyError(
            f"the environment variable CXX names the C++ compiler '{given}', which is not here: correct or unset it"
        )
    raise MissingDependencyError("no C++ compiler was found: install g++ or clang++, or name one in the environment variable CXX")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let nobody else build in `folder` meanwhile; the lock goes with this process, however that ends."""
    import fcntl  # not on every system that can read and compare

    _native_home.make_folder(folder)
    if problem := _native_home.objection_to_folder(folder):
        raise InputError(f"{problem}, and code is not built there: take that right away, or name another folder in ULPSCOPE_NATIVE")
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _replace(file: Path, compiler: list[str]) -> None:
    """Compile a draft beside `file`, try it, and put it in its place."""
    draft = file.parent / "draft" / file.name
    shutil.rmtree(draft.parent, ignore_errors=True)  # left by a build that was killed
    draft.parent.mkdir(mode=0o700)
    try:
        _compile(compiler, draft)
        if trouble := _trouble_with(draft):
            raise UlpscopeError(
                f"what '{compiler[0]}' made of '{_native_home.SOURCE}' cannot be used with torch {torch.__version__}: {trouble}"
            )
        draft.chmod(draft.stat().st_mode & 0o755)
        _native_home.seal(draft, file)
        draft.replace(file)
    finally:
        shutil.rmtree(draft.parent, ignore_errors=True)


def _compile(compiler: list[str], file: Path) -> None:
    said = ""
    for standard in _STANDARDS:
        done = _run([*compiler, f"-std={standard}", *_flags(), "-o", str(file)])
        if done.returncode == 0:
            return
        lines = _lines(done)
        said = said or next((line for line in lines if "error" in line), lines[0])
    raise UlpscopeError(f"'{compiler[0]}' cannot compile '{_native_home.SOURCE}' for torch {torch.__version__}: {said}")


def _flags() -> list[str]:
    """Return the flags of `torch.utils.cpp_extension`, which cannot be imported without setuptools."""
    home = Path(torch.__file__).parent
    headers = (home / "include", home / "include/torch/csrc/api/include", Path(sysconfig.get_path("include")))
    return [
        *("-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(word for path in headers for word in ("-isystem", str(path))),
        str(_native_home.SOURCE),
        f"-L{home / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    ]


def _trouble_with(file: Path) -> str:
    """Load `file` in a new process and return what goes wrong; empty if it works."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "ULPSCOPE_NO_KERNEL": "1"}  # it loads nothing else of ours that was compiled
    done = _run([sys.executable, "-c", _TRIAL, str(file)], cwd=file.parent, env=environment)
    return _lines(done)[-1] if done.returncode else ""


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False, **options)
    except OSError as error:  # it cannot be run at all
        return subprocess.CompletedProcess(command, 126, "", str(error.strerror))


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the output of a program; at least how it ended."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return lines or [f"it ended with exit code {done.returncode}"]
