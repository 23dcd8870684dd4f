# SPDX-License-Identifier: Apache-2.0
"""`ulpscope` and `python -m ulpscope`."""

from __future__ import annotations

import gc

from ulpscope.cli import cli

__all__ = ["main"]


def main() -> None:
    try:
        cli(prog_name="ulpscope")
    finally:
        gc.freeze()  # the process ends: looking for garbage among all that it holds would take longer than many a command


if __name__ == "__main__":
    main()
