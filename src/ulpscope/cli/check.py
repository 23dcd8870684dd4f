# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope check`: find the operations of a run that are wrong on a device."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ulpscope.cli.seeds import checked_seed
from ulpscope.cli.terminal import open_console, showing_progress
from ulpscope.report.escaping import visible

if TYPE_CHECKING:
    from ulpscope.model.check.checks import Check

__all__ = ["check"]

_FILE = click.Path(path_type=Path)
_EXIT_CODES = {"sound": 0, "wrong": 1, "unknown": 2}
_EPILOG = """
\b
Examples:
  ulpscope run --into runs/npu --keep tensors --steps 0 train.py
  ulpscope check runs/npu --device npu --html check.html
  ulpscope check runs/npu --jobs 4 --select module:layers.1 --save-failures failures
  ulpscope check runs/npu --overflow

RUN may have kept its tensors (the calls get their real inputs) or statistics alone (inputs are made from them, the same for the same
--seed). It may be a run of ulpscope, or a dump of msprobe, ptdbg or api_accuracy_checker.

Exit codes: 0 no checked call is wrong, 1 some are, 2 the question could not be answered (also where no call could be checked,
or every module is opaque). If only a share of the calls could be checked, the answer begins with that share.
"""


@click.command(epilog=_EPILOG)
@click.argument("run", type=_FILE)
@click.option(
    "--device",
    default=None,
    metavar="NAME",
    help="The device under test: cpu, cuda:1, npu ... Default: that of the recording, if it is here.",
)
@click.option(
    "--reference-precision",
    type=click.Choice(["auto", "float64"]),
    default="auto",
    show_default=True,
    help="Precision of the reference: auto is the next wider dtype for rule sets that say so, else float64.",
)
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N", help="Processes that share the work.")
@click.option("--select", multiple=True, metavar="GLOB", help="Check only these calls: a glob over module/call, or @file; may be repeated.")
@click.option(
    "--rules",
    type=click.Choice(["derived", "checker", "benchmark", "ulp", "binary", "absolute"]),
    default="derived",
    show_default=True,
    help="The rules that decide which calls fail: an error beyond an honest kernel's, or a published standard.",
)
@click.option("--edition", type=click.Choice(["2024", "26.2"]), default="2024", show_default=True, help="The publication of the standards.")
@click.option("--save-failures", type=_FILE, metavar="DIR", help="Keep inputs and results of each failed call there, as safetensors.")
@click.option("--resume", is_flag=True, help="Go on with a check that was ended: calls that it checked are not checked again.")
@click.option("--overflow", is_flag=True, help="Check only calls that made inf or NaN from clean inputs: was that normal in their dtype?")
@click.option(
    "--seed", type=int, callback=checked_seed, default=0, show_default=True, metavar="N", help="Seed for inputs made from statistics."
)
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True, metavar="SECONDS", help="The most time for one call."
)
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Import this module first: it registers operations or a device.")
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write a row for each result.")
@click.option("--xlsx", "xlsx_file", type=_FILE, metavar="FILE", help="Write the same as an Excel table.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write the answer as a page that opens from disk.")
@click.option("--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
@click.pass_context
def check(
    ctx: click.Context,
    run: Path,
    device: str | None,
    reference_precision: str,
    jobs: int,
    select: tuple[str, ...],
    rules: str,
    edition: str,
    save_failures: Path | None,
    resume: bool,
    overflow: bool,
    seed: int,
    timeout: float,
    imports: tuple[str, ...],
    csv_file: Path | None,
    xlsx_file: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    quiet: bool,
) -> None:
    """Run every call of RUN again on a device and name the operations that err more than an honest kernel."""
    files = {"csv": csv_file, "xlsx": xlsx_file, "json": json_file, "html": html_file}
    wanted = {kind: path for kind, path in files.items() if path is not None}
    _check_outputs(wanted)
    words: dict[str, Any] = {
        "device": device,
        "rules": rules,
        "edition": edition,
        "reference_precision": reference_precision,
        "jobs": jobs,
        "select": list(select) or None,
        "seed": seed,
        "overflow": overflow,
        "save_failures": save_failures,
        "timeout_s": timeout,
        "imports": imports,
        "journal": _journal_path(run, device, wanted, resume),
        "resume": resume,
    }
    if resume and not quiet and not Path(words["journal"]).exists():
        click.echo(visible(f"there is no journal '{words['journal']}': the check begins anew"), err=True)
    with nullcontext() if quiet else showing_progress(f"checking on {device}" if device else "checking") as progress:
        from ulpscope.workflows.check.checking import check_run

        found = check_run(run, **words, progress=progress)
    if not quiet and str(json_file) != "-":
        _print(found)
    for kind, path in wanted.items():
        _write(found, kind, path)
    ctx.exit(_EXIT_CODES[found.verdict])


def _journal_path(run: Path, device: str | None, wanted: dict[str, Path], resume: bool) -> Path | None:
    """Choose the journal's path: beside the first result file, else beside the run; None where that folder cannot be written to."""
    first = next((path for path in wanted.values() if str(path) != "-"), None)
    own = f"{run.resolve().name}.check-{(device or 'here').replace(':', '')}.journal"
    path = first.with_name(f"{first.name}.journal") if first is not None else run.resolve().parent / own
    return path if resume or os.access(path.parent, os.W_OK) else None


def _check_outputs(wanted: dict[str, Path]) -> None:
    from ulpscope._optional import require
    from ulpscope.report.replacing import check_writable

    for kind, path in wanted.items():
        if not (kind == "json" and str(path) == "-"):
            check_writable(path)
    if "xlsx" in wanted and find_spec("xlsxwriter") is None:
        require("xlsxwriter", extra="xlsx", purpose=f"writing {wanted['xlsx']}")


def _print(found: Check) -> None:
    from ulpscope.report.check.console import render_check

    render_check(found, open_console())


def _write(found: Check, kind: str, path: Path) -> None:
    from ulpscope.report.check.check_rows import dump_check, write_check_csv, write_check_json, write_check_xlsx
    from ulpscope.report.check.page import write_check_html

    if kind == "json" and str(path) == "-":
        dump_check(found, sys.stdout)
        sys.stdout.flush()
        return
    {"csv": write_check_csv, "xlsx": write_check_xlsx, "json": write_check_json, "html": write_check_html}[kind](found, path)
