# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope nonfinite`: find where inf and NaN began in a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ulpscope.cli.terminal import open_console, showing_progress

__all__ = ["nonfinite"]

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("run", type=_FILE)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the whole answer as JSON; - for stdout.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write the answer as a page that opens from disk.")
@click.option("--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
def nonfinite(run: Path, json_file: Path | None, html_file: Path | None, quiet: bool) -> None:
    """Name the call that made the first inf or NaN in RUN, say why, and rank the near misses.

    RUN is anything that `ulpscope run` recorded, with --nonfinite or without, or a dump of another tool.
    Exit codes: 0 nothing non-finite did harm, 1 something did, 2 the question could not be answered.

    \b
    Example:
      ulpscope run --into runs/a --nonfinite train.py
      ulpscope nonfinite runs/a --html nonfinite.html
    """
    from ulpscope.workflows.nonfinite import find_nonfinite

    with showing_progress("looking for inf and NaN") as progress:
        report = find_nonfinite(run, progress=progress)
    if json_file is not None:
        from ulpscope.report.nonfinite.text import dump_nonfinite, write_nonfinite_json

        if str(json_file) == "-":
            dump_nonfinite(report, sys.stdout)
        else:
            write_nonfinite_json(report, json_file)
    if html_file is not None:
        from ulpscope.report.nonfinite.page import write_nonfinite_html

        write_nonfinite_html(report, html_file)
    if not quiet and str(json_file) != "-":
        from ulpscope.report.nonfinite.text import render_nonfinite

        render_nonfinite(report, open_console())
    sys.exit(1 if report.first else 0)
