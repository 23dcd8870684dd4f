# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope` and `python -m ulpscope`.

The garbage collector is off while a command is imported and when the process ends, since it would find nothing: this saves a twentieth of a
short comparison, and a quarter of a second where torch is loaded. `run` ends as Python does, since a user's script ran in its process.
"""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from ulpscope.errors import sentence_of, system_error_behind

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and leave with its exit code."""
    is_own = sys.argv[1:2] != ["run"]
    if is_own:
        from ulpscope._optional import keep_triton_out

        keep_triton_out()
    gc.disable()
    try:
        with _early_start(sys.argv[2:]) if sys.argv[1:2] == ["compare"] else nullcontext():
            _run(is_own=is_own)
    except KeyboardInterrupt:  # interrupted during an import
        from ulpscope.cli import LazyGroup

        LazyGroup.leave_interrupted()
    except (OSError, MemoryError, ImportError) as error:  # raised during an import
        refused = system_error_behind(error)
        if refused is None:
            raise
        sys.stderr.write(f"ulpscope: {ascii(sentence_of(refused))[1:-1]}\n")
        sys.exit(2)
    finally:
        if is_own:
            gc.freeze()


def _early_start(words: list[str]) -> AbstractContextManager[None]:
    from ulpscope.workflows.compare.early import early_start

    return early_start(words)


def _run(*, is_own: bool) -> NoReturn:
    from ulpscope.cli import cli

    if is_own:
        gc.freeze()
    gc.enable()
    sys.exit(cli(prog_name="ulpscope"))


if __name__ == "__main__":
    main()
