# SPDX-License-Identifier: Apache-2.0
"""`ulpscope compare`: two runs, or a run and a baseline, in; the first divergence out."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ulpscope.cli.terminal import open_console, showing_progress

if TYPE_CHECKING:
    from ulpscope.model import Comparison, Renderer
    from ulpscope.report.json_pairs import PairLines

__all__ = ["compare"]

_FILE = click.Path(path_type=Path)
_EXIT_CODES = {"same": 0, "rounding": 0, "diverges": 1, "unknown": 2}
_RENDERERS = {
    "html": ("html", "write_html"),
    "csv": ("table", "write_csv"),
    "xlsx": ("table", "write_xlsx"),
    "parquet": ("parquet", "write_parquet"),
    "junit": ("junit", "write_junit"),
}
_EPILOG = """
\b
Examples:
  ulpscope compare runs/npu runs/gpu --html report.html
  ulpscope compare runs/npu runs/gpu --repeat runs/gpu-again --json report.json
  ulpscope compare runs/npu runs/gpu --replay none --quiet
  ulpscope compare runs/today --baseline tests/numerics.jsonl --update
  ulpscope compare runs/today --baseline tests/numerics.jsonl --junit numerics.xml

SUBJECT is the run in doubt, REFERENCE the one that is trusted; both may be runs of ulpscope or dumps of msprobe or ptdbg.

Exit codes: 0 nothing diverges, 1 something does, 2 the question could not be answered (also where bits differ and only
fingerprints were kept, so that nobody knows by how much).
"""


@click.command(epilog=_EPILOG)
@click.argument("subject", type=_FILE)
@click.argument("reference", type=_FILE, required=False)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write findings and pairs as JSON; - for stdout.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write one page with everything; a repro goes beside it.")
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write a row for each pair.")
@click.option("--xlsx", "xlsx_file", type=_FILE, metavar="FILE", help="The same as an Excel table.")
@click.option("--parquet", "parquet_file", type=_FILE, metavar="FILE", help="The same as Parquet.")
@click.option("--junit", "junit_file", type=_FILE, metavar="FILE", help="Write JUnit XML, a test case for each module.")
@click.option("--github-summary", type=_FILE, metavar="FILE", help='Append Markdown to a file, as in "$GITHUB_STEP_SUMMARY".')
@click.option("--repro", "repro_dir", type=_FILE, metavar="DIR", help="Write a script with its inputs that shows the first fault alone.")
@click.option("--rules", type=click.Choice(["derived", "ptdbg"]), default="derived", show_default=True, help="What counts as different.")
@click.option("--mapping", type=_FILE, metavar="FILE", help="Which names of the subject mean which of the reference, one rule a line.")
@click.option(
    "--replay",
    type=click.Choice(["needed", "all", "none"]),
    default="needed",
    show_default=True,
    help="Which calls to run again in a higher precision: what differs until the cause is found, all that differs, or none.",
)
@click.option(
    "--replay-limit", type=click.FloatRange(min=0), default=600.0, show_default=True, metavar="SECONDS", help="The most time for that."
)
@click.option("--repeat", type=_FILE, metavar="RUN", help="The reference recorded once more: shows which calls are not deterministic.")
@click.option("--baseline", type=_FILE, metavar="FILE", help="Compare with this file in the place of REFERENCE.")
@click.option("--update", is_flag=True, help="Write the baseline, or widen it so that SUBJECT fits; nothing is judged.")
@click.option("--quiet", is_flag=True, help="Print nothing: the exit code is the answer.")
@click.pass_context
def compare(
    ctx: click.Context,
    subject: Path,
    reference: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    csv_file: Path | None,
    xlsx_file: Path | None,
    parquet_file: Path | None,
    junit_file: Path | None,
    github_summary: Path | None,
    repro_dir: Path | None,
    rules: str,
    mapping: Path | None,
    replay: str,
    replay_limit: float,
    repeat: Path | None,
    baseline: Path | None,
    update: bool,
    quiet: bool,
) -> None:
    """Compare the run SUBJECT with the run REFERENCE, or with a baseline, and name the first divergence."""
    files = {"json": json_file, "html": html_file, "csv": csv_file, "xlsx": xlsx_file, "parquet": parquet_file, "junit": junit_file}
    wanted = {kind: path for kind, path in files.items() if path is not None}
    _check_sides(reference, baseline, repeat)
    if update:
        _check_update(baseline, [*wanted, *(["github-summary"] if github_summary else []), *(["repro"] if repro_dir else [])])
        assert baseline is not None
        _update(subject, baseline, quiet=quiet)
        return
    _check_outputs(wanted | ({"torch": repro_dir} if repro_dir else {}))
    words: dict[str, Any] = {"rules": rules, "mapping": mapping, "replay": replay, "replay_seconds": replay_limit}
    words |= {"repeat": repeat} if repeat is not None else {}
    lines = _lines() if json_file is not None else None
    words |= {"judged": lines.judged} if lines is not None else {}
    with nullcontext() if quiet else showing_progress("comparing") as progress:
        comparison = _compare(subject, reference, baseline, {**words, "progress": progress})
    comparison = _with_repro(comparison, repro_dir, html_file if replay != "none" else None)
    if not quiet and str(json_file) != "-":
        _print(comparison)
    for kind, path in wanted.items():
        _write(comparison, kind, path, lines)
    if github_summary is not None:
        _append_summary(comparison, github_summary)
    ctx.exit(_EXIT_CODES[comparison.verdict])


def _check_sides(reference: Path | None, baseline: Path | None, repeat: Path | None) -> None:
    if reference is None and baseline is None:
        raise click.UsageError("give the run to compare with: REFERENCE, or --baseline FILE")
    if reference is not None and baseline is not None:
        raise click.UsageError("give either REFERENCE or --baseline, not both")
    if repeat is not None and reference is None:
        raise click.UsageError("--repeat is REFERENCE recorded once more, so it needs REFERENCE; a baseline is widened with --update")


def _check_update(baseline: Path | None, reports: list[str]) -> None:
    if baseline is None:
        raise click.UsageError("--update writes a baseline, so it needs --baseline FILE")
    if reports:
        raise click.UsageError(f"--update judges nothing, so there is nothing to write for --{reports[0]}; run it without --update")


def _update(subject: Path, baseline: Path, *, quiet: bool) -> None:
    from ulpscope.report.escaping import visible
    from ulpscope.report.replacing import check_writable
    from ulpscope.workflows.baselines import update_baseline

    check_writable(baseline)
    change = update_baseline(subject, baseline)
    if quiet:
        return
    if change.is_new:
        click.echo(visible(f"baseline '{baseline}' written: {change.num_calls} calls of '{subject}'"))
        return
    if change.is_none:
        click.echo(visible(f"baseline '{baseline}' is left as it is: '{subject}' fits into it"))
        return
    changes = {"slots widened": change.num_widened, "calls added": change.num_added, "calls removed": change.num_removed}
    told = ", ".join(f"{many} {what}" for what, many in changes.items())
    click.echo(visible(f"baseline '{baseline}' now holds {change.num_runs} runs: {told}; look at the diff before you commit it"))


def _compare(subject: Path, reference: Path | None, baseline: Path | None, words: dict[str, Any]) -> Comparison:
    from ulpscope.workflows.comparing import compare_runs

    if baseline is None:
        assert reference is not None
        return compare_runs(subject, reference, **words)
    from ulpscope.store import open_run
    from ulpscope.workflows.baselines import BaselineRun

    run = open_run(subject)
    return compare_runs(run, BaselineRun(baseline, run), **words)


def _with_repro(comparison: Comparison, folder: Path | None, html_file: Path | None) -> Comparison:
    """The comparison with the path of a repro: in the folder asked for, else beside the page."""
    beside = html_file.with_name(f"{html_file.stem}_repro") if html_file is not None else None
    into = folder or beside
    if into is None or not comparison.faults or find_spec("torch") is None:
        return comparison
    from ulpscope.workflows.reproducing import with_repro

    return with_repro(comparison, into, is_asked_for=folder is not None)


def _check_outputs(wanted: dict[str, Path]) -> None:
    """Say before the long work, not after it, what cannot be written; `torch` stands for the repro, which needs that."""
    from ulpscope._optional import require
    from ulpscope.report.replacing import check_writable

    for kind, path in wanted.items():
        if not _is_stdout(kind, path) and kind != "torch":
            check_writable(path)
    for kind, module in (("xlsx", "xlsxwriter"), ("parquet", "pyarrow"), ("torch", "torch")):
        if kind in wanted and find_spec(module) is None:
            require(module, extra=kind, purpose=f"writing {wanted[kind]}")


def _print(comparison: Comparison) -> None:
    from ulpscope.report.console import render_comparison

    render_comparison(comparison, open_console())


def _lines() -> PairLines:
    from ulpscope.report.json_pairs import PairLines

    return PairLines()


def _write(comparison: Comparison, kind: str, path: Path, lines: PairLines | None) -> None:
    if kind == "json":
        _write_json(comparison, path, lines)
        return
    module, function = _RENDERERS[kind]
    renderer: Renderer = getattr(import_module(f"ulpscope.report.{module}"), function)
    renderer(comparison, path)


def _write_json(comparison: Comparison, path: Path, lines: PairLines | None) -> None:
    from ulpscope.report.json_ import dump_comparison, write_json

    if not _is_stdout("json", path):
        write_json(comparison, path, lines=lines)
        return
    dump_comparison(comparison, sys.stdout, lines=lines)
    sys.stdout.flush()


def _append_summary(comparison: Comparison, path: Path) -> None:
    from ulpscope.report.github_summary import append_github_summary

    append_github_summary(comparison, path)


def _is_stdout(kind: str, path: Path) -> bool:
    return kind == "json" and str(path) == "-"
