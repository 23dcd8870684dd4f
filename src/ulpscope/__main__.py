# SPDX-License-Identifier: Apache-2.0
"""`ulpscope` and `python -m ulpscope`."""

from __future__ import annotations

from ulpscope.cli import cli

__all__ = ["main"]


def main() -> None:
    cli(prog_name="ulpscope")


if __name__ == "__main__":
    main()
