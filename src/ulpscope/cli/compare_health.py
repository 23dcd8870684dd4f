# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope compare-health`: find the step at which two health runs part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope.cli.terminal import open_console

if TYPE_CHECKING:
    from ulpscope.model.health import HealthComparison

__all__ = ["compare_health"]

_FILE = click.Path(path_type=Path)
_EXIT_CODES = {"same": 0, "together": 0, "diverges": 1, "unrelated": 2}


@click.command("compare-health")
@click.argument("subject", type=_FILE)
@click.argument("reference", type=_FILE)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write findings and curves as JSON; - for stdout.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write one page with findings, curves and heat maps.")
@click.option("--png", "png_folder", type=_FILE, metavar="DIR", help="Write the pictures into this folder (needs matplotlib).")
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write the sign similarities, a row for each parameter.")
@click.option("--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
@click.pass_context
def compare_health(
    ctx: click.Context,
    subject: Path,
    reference: Path,
    json_file: Path | None,
    html_file: Path | None,
    png_folder: Path | None,
    csv_file: Path | None,
    quiet: bool,
) -> None:
    """Compare the health run SUBJECT with the health run REFERENCE: at which step do they part, and what leaves first?

    \b
    Example:
      ulpscope compare-health runs/npu-health runs/gpu-health --html health.html

    Both are folders written by ulpscope.record_health or 'ulpscope run --health'. Runs with other random numbers compare too: a gradient
    counts as departed when it leaves the noise that the two runs have anyway.

    Exit codes: 0 the runs stay together, 1 they part, 2 the question could not be answered: unrelated runs, bad input.
    """
    from ulpscope.report.replacing import check_writable
    from ulpscope.workflows.health_recording import compare_health as compared

    for path in (json_file, html_file, csv_file):
        if path is not None and str(path) != "-":
            check_writable(path)
    comparison = compared(subject, reference)
    if not quiet and str(json_file) != "-":
        from ulpscope.report.health.console import render_health

        render_health(comparison, open_console())
    _write(comparison, json_file, html_file, png_folder, csv_file)
    ctx.exit(_EXIT_CODES[comparison.verdict])


def _write(
    comparison: HealthComparison, json_file: Path | None, html_file: Path | None, png_folder: Path | None, csv_file: Path | None
) -> None:
    if json_file is not None:
        from ulpscope.report.health.health_json import dump_health, write_health_json

        if str(json_file) == "-":
            dump_health(comparison, sys.stdout)
            sys.stdout.flush()
        else:
            write_health_json(comparison, json_file)
    if html_file is not None:
        from ulpscope.report.health.page import write_health_page

        write_health_page(comparison, html_file)
    if png_folder is not None:
        from ulpscope.report.health.curves import write_pictures

        write_pictures(comparison, png_folder)
    if csv_file is not None:
        from ulpscope.report.health.figures import similarities_of
        from ulpscope.report.health.grad_probe import write_similarities

        write_similarities(csv_file, comparison.steps, similarities_of(comparison))
