# SPDX-License-Identifier: Apache-2.0
"""`ulpscope` and `python -m ulpscope`.

The start and the end of a process take longer than comparing two small runs. So a comparison begins to read them before the rest is
imported, and ends without taking down the interpreter, as does every command that has loaded torch. Only `run` ends as Python does, since
a user's script ran in its process.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, NoReturn

from ulpscope.errors import sentence_of, system_error_behind

if TYPE_CHECKING:
    from ulpscope.numerics.difference.guessing import Guess

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and leave with its exit code."""
    words = sys.argv[1:]
    is_own, guess = words[:1] != ["run"], None
    if is_own:
        from ulpscope._optional import keep_triton_out

        keep_triton_out()
    gc.disable()  # until the command begins: nothing of what it imports becomes garbage
    try:
        with (_guess(words[1:]) if words[:1] == ["compare"] else None) or nullcontext() as guess:
            _run(guess)
    except KeyboardInterrupt:  # while something was imported
        from ulpscope.cli import LazyGroup

        LazyGroup.leave_interrupted()
    except (OSError, MemoryError, ImportError) as error:  # the same
        refused = system_error_behind(error)
        if refused is None:
            raise
        sys.stderr.write(f"ulpscope: {ascii(sentence_of(refused))[1:-1]}\n")
        sys.exit(2)
    finally:
        if is_own and (guess is not None or "torch" in sys.modules):
            _leave_at_once(sys.exc_info()[1])


def _guess(words: list[str]) -> Guess | None:
    from ulpscope.numerics.difference.guessing import guess_from

    return guess_from(words)


def _run(guess: Guess | None) -> NoReturn:
    from ulpscope.cli import cli

    gc.enable()
    sys.exit(cli(prog_name="ulpscope", obj=guess))


def _leave_at_once(leaving: BaseException | None) -> None:
    """End the process without freeing all that it holds, unless something is left to be done or to be said by the interpreter."""
    import threading

    if not isinstance(leaving, SystemExit) or not isinstance(leaving.code, int) or threading.active_count() > 1:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or not there: the interpreter has its own words and exit codes for that
        return
    atexit._run_exitfuncs()
    os._exit(leaving.code)


if __name__ == "__main__":
    main()
