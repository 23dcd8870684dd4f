# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope check-devices`: find the calls in which one device errs more than the other, from two tables of a check."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ulpscope.cli.terminal import open_console

__all__ = ["check_devices"]

_FILE = click.Path(path_type=Path)


@click.command("check-devices")
@click.argument("subject", type=_FILE)
@click.argument("reference", type=_FILE)
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write a row for each result.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option(
    "--edition",
    type=click.Choice(["2024", "26.2"]),
    default="2024",
    show_default=True,
    help="The publication of the standards to judge by.",
)
@click.option("--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
@click.pass_context
def check_devices(
    ctx: click.Context, subject: Path, reference: Path, csv_file: Path | None, json_file: Path | None, edition: str, quiet: bool
) -> None:
    """Compare the check of one device, SUBJECT, with that of another, REFERENCE: where does it err more?

    Both are csv files that 'ulpscope check --rules benchmark --csv FILE' wrote for the same recording, or accuracy_checking_details_*.csv
    of other tools. Each was judged against the same higher precision; here their errors are set against each other, each call by the
    standard that the published list gives it.

    \b
    Example:
      ulpscope check runs/a --device npu --rules benchmark --csv npu.csv
      ulpscope check runs/a --device cuda --rules benchmark --csv gpu.csv
      ulpscope check-devices npu.csv gpu.csv

    Exit codes: 0 no result fails, 1 some do, 2 the question could not be answered.
    """
    from ulpscope.report.replacing import check_writable
    from ulpscope.workflows.check.two_devices import compare_devices

    for path in (csv_file, json_file):
        if path is not None and str(path) != "-":
            check_writable(path)
    comparison = compare_devices(subject, reference, edition=edition)
    from ulpscope.report.check.two_devices import dump_devices, render_devices, write_devices_csv, write_devices_json

    if not quiet and str(json_file) != "-":
        render_devices(comparison, open_console())
    if csv_file is not None:
        write_devices_csv(comparison, csv_file)
    if str(json_file) == "-":
        dump_devices(comparison, sys.stdout)
    elif json_file is not None:
        write_devices_json(comparison, json_file)
    counts = comparison.counts
    ctx.exit(1 if counts["failed"] else 2 if counts["skipped"] == len(comparison.pairs) else 0)
