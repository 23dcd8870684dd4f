# SPDX-License-Identifier: Apache-2.0
"""`ulpscope compare`: two runs in, the first divergence out."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope.cli.terminal import open_console, showing_progress

if TYPE_CHECKING:
    from ulpscope.model import Comparison, Renderer

__all__ = ["compare"]

_FILE = click.Path(path_type=Path)
_EXIT_CODES = {"same": 0, "rounding": 0, "diverges": 1, "unknown": 2}


@click.command()
@click.argument("subject", type=_FILE)
@click.argument("reference", type=_FILE)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write findings and pairs as JSON; - for stdout.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write one page with everything; opens from disk.")
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write a row for each pair.")
@click.option("--xlsx", "xlsx_file", type=_FILE, metavar="FILE", help="The same as an Excel table.")
@click.option("--parquet", "parquet_file", type=_FILE, metavar="FILE", help="The same as Parquet.")
@click.option("--rules", type=click.Choice(["derived", "ptdbg"]), default="derived", show_default=True, help="What counts as different.")
@click.option("--mapping", type=_FILE, metavar="FILE", help="Which names of the subject mean which of the reference, one rule a line.")
@click.option("--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
@click.pass_context
def compare(
    ctx: click.Context,
    subject: Path,
    reference: Path,
    json_file: Path | None,
    html_file: Path | None,
    csv_file: Path | None,
    xlsx_file: Path | None,
    parquet_file: Path | None,
    rules: str,
    mapping: Path | None,
    quiet: bool,
) -> None:
    """Compare the run SUBJECT with the run REFERENCE and name the first divergence.

    \b
    Example:
      ulpscope compare runs/npu runs/gpu --html report.html

    SUBJECT is the run in doubt, REFERENCE the one that is trusted; both may be runs of ulpscope or dumps of msprobe or ptdbg.

    Exit codes: 0 nothing diverges, 1 something does, 2 the question could not be answered (also where bits differ and only
    fingerprints were kept, so that nobody knows by how much).
    """
    from ulpscope.workflows.comparing import compare_runs

    files = {"json": json_file, "html": html_file, "csv": csv_file, "xlsx": xlsx_file, "parquet": parquet_file}
    wanted = {kind: path for kind, path in files.items() if path is not None}
    _check_outputs(wanted)
    with nullcontext() if quiet else showing_progress("comparing") as progress:
        comparison = compare_runs(subject, reference, rules=rules, mapping=mapping, progress=progress)
    if not quiet and str(json_file) != "-":
        _print(comparison)
    for kind, path in wanted.items():
        _write(comparison, kind, path)
    ctx.exit(_EXIT_CODES[comparison.verdict])


def _check_outputs(wanted: dict[str, Path]) -> None:
    """Say before the long work, not after it, what cannot be written."""
    from ulpscope._optional import require
    from ulpscope.report.replacing import check_writable

    for kind, path in wanted.items():
        if not _is_stdout(kind, path):
            check_writable(path)
    for kind, module in (("xlsx", "xlsxwriter"), ("parquet", "pyarrow")):
        if kind in wanted and find_spec(module) is None:
            require(module, extra=kind, purpose=f"writing {wanted[kind]}")


def _print(comparison: Comparison) -> None:
    from ulpscope.report.console import render_comparison

    render_comparison(comparison, open_console())


def _write(comparison: Comparison, kind: str, path: Path) -> None:
    from ulpscope.report.html import write_html
    from ulpscope.report.json_ import dump_comparison, write_json
    from ulpscope.report.parquet import write_parquet
    from ulpscope.report.table import write_csv, write_xlsx

    renderers: dict[str, Renderer] = {
        "json": write_json,
        "html": write_html,
        "csv": write_csv,
        "xlsx": write_xlsx,
        "parquet": write_parquet,
    }
    if _is_stdout(kind, path):
        dump_comparison(comparison, sys.stdout)
        sys.stdout.flush()
    else:
        renderers[kind](comparison, path)


def _is_stdout(kind: str, path: Path) -> bool:
    return kind == "json" and str(path) == "-"
