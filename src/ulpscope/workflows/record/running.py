# SPDX-License-Identifier: Apache-2.0
"""Run a user's script or module unchanged, with a capture or a hunt around it."""

from __future__ import annotations

import builtins
import os
import random
import sys
import traceback
import types
from contextlib import AbstractContextManager
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from runpy import _run_module_as_main as run_as_main  # type: ignore[attr-defined]  # what `python -m` itself calls
from typing import Any

from ulpscope._optional import require
from ulpscope.errors import InputError

__all__ = ["check_destination", "make_comparable", "run_script"]


def check_destination(into: str) -> None:
    """Refuse a folder that no run can be written to, before a training that would go unrecorded begins."""
    folder = Path(into).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    advice = "give another folder with --into DIR"
    if not there.is_dir():
        raise InputError(f"nothing can be recorded into '{into}': '{there}' is a file and not a folder; {advice}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"nothing can be recorded into '{into}': '{there}' cannot be written to; {advice}")


def make_comparable(seed: int | None, *, deterministic: bool) -> None:
    """Seed every random generator in reach and ask torch for deterministic kernels, so that two runs can be compared."""
    torch = require("torch", extra="torch", purpose="recording a run")
    if seed is not None:
        random.seed(seed)
        require("numpy", extra="torch", purpose="seeding").random.seed(seed % 2**32)
        torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")
        # torch.use_deterministic_algorithms would tell the compiler too, by importing it, and triton with it.
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
        if "torch._inductor.config" in sys.modules:
            sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def run_script(target: str, arguments: list[str], capture: AbstractContextManager[Any], *, is_module: bool = False) -> int:
    """Run a script as Python would, inside a capture or a hunt; return the script's own exit code.

    Its module stays `__main__`: functions that it registered with `atexit`, and threads that outlive it, may still pickle its classes.
    """
    code = None if is_module else _compiled(target)
    sys.argv = [target, *arguments]
    # A module is looked up in the working folder, a script's imports beside the script, as Python does it.
    sys.path[0] = str(Path.cwd()) if is_module else str(Path(target).resolve().parent)
    if is_module:
        _check_module(target)
    try:
        with capture:
            if code is None:
                _new_main()
                run_as_main(target)
            else:
                _execute(code, target)
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as error:
        _tell_of(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _check_module(name: str) -> None:
    """Refuse a name that no module can have; nothing is imported for the check, since a package is imported under capture."""
    try:
        is_there = not name.endswith(".py") and find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        raise InputError(f"there is no module '{name}' here; give a name as 'python -m' takes it, or the path of a script without -m")


def _compiled(script: str) -> types.CodeType:
    path = Path(script)
    try:
        source = path.read_bytes()
    except OSError as error:
        hint = "; for a module write 'ulpscope run -m NAME'" if not path.suffix else ""
        raise InputError(f"the script '{script}' cannot be read ({error.strerror or error}){hint}") from None
    try:
        return compile(source, str(path.absolute()), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"the script '{script}' is not valid Python: {error}") from None


def _execute(code: types.CodeType, script: str) -> None:
    main, path = _new_main(), str(Path(script).absolute())  # the path as called, also through a link
    main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main)


def _new_main() -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main.__dict__


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1


def _tell_of(error: BaseException) -> None:
    """Report an error that ended the script as Python would: call the excepthook, which prints it unless the script has its own."""
    frames = _frames_of(error)
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, frames)
        return
    try:
        sys.excepthook(type(error), error, frames)
    except Exception:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, frames)


def _frames_of(error: BaseException) -> types.TracebackType | None:
    """Return the traceback that the script would have on its own, without ulpscope's frames and the import machinery's above it."""
    frames: Any = error.__traceback__
    while frames is not None and (frames.tb_frame.f_code.co_filename == __file__ or "runpy" in frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames or error.__traceback__
