# SPDX-License-Identifier: Apache-2.0
"""The command line, for processes that are started with a call of `main`."""

from __future__ import annotations

from ulpscope.cli import cli


def main(run: str, result: str, *more: str) -> None:
    cli.main(["check", run, "--json", result, "--import", "tests.check.loose_cannon", *more], prog_name="ulpscope")
