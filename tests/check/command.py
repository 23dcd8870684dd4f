# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope check` in this process, or as the `main` of another."""

from __future__ import annotations

from click.testing import CliRunner, Result

from ulpscope.cli import cli

HELPER = "tests.check.loose_cannon"


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, ["check", *map(str, words)])


def main(run: str, result: str, *more: str) -> None:
    cli.main(["check", run, "--json", result, "--import", HELPER, *more], prog_name="ulpscope")
