# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope compare`: find the first divergence between two runs, or between a run and a baseline."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope.cli.terminal import open_console, showing_progress
from ulpscope.model import REPLAY_MODES, RULE_NAMES
from ulpscope.workflows.compare.driver import REPORTS, Question, answer

if TYPE_CHECKING:
    from ulpscope.model import Comparison

__all__ = ["compare"]

_FILE = click.Path(path_type=Path)
_EPILOG = """
\b
Examples:
  ulpscope compare runs/npu runs/gpu --html report.html
  ulpscope compare runs/npu runs/gpu --repeat runs/gpu-again --json report.json
  ulpscope compare runs/npu runs/gpu --replay none --quiet
  ulpscope compare runs/today --baseline tests/numerics.jsonl --update
  ulpscope compare runs/today --baseline tests/numerics.jsonl --junit numerics.xml

SUBJECT is the run in doubt, REFERENCE the one that is trusted; both may be runs of ulpscope or dumps of msprobe or ptdbg.

Exit codes: 0 everything was compared and nothing diverges, 1 something diverges, 2 the question could not be answered: bad input, or
something that was recorded could neither be compared nor shown harmless (--partial passes over that), or bits differ and only
fingerprints were kept, so that nobody knows by how much.
"""


@click.command(epilog=_EPILOG)
@click.argument("subject", type=_FILE)
@click.argument("reference", type=_FILE, required=False)
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write findings and pairs as JSON; - for stdout.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write one page with everything; a repro goes beside it.")
@click.option("--csv", "csv_file", type=_FILE, metavar="FILE", help="Write a row for each pair.")
@click.option("--xlsx", "xlsx_file", type=_FILE, metavar="FILE", help="Write the same as an Excel table.")
@click.option("--parquet", "parquet_file", type=_FILE, metavar="FILE", help="Write the same as Parquet.")
@click.option("--junit", "junit_file", type=_FILE, metavar="FILE", help="Write JUnit XML, a test case for each module.")
@click.option("--github-summary", type=_FILE, metavar="FILE", help='Append Markdown to a file, as in "$GITHUB_STEP_SUMMARY".')
@click.option("--repro", "repro_dir", type=_FILE, metavar="DIR", help="Write a script with its inputs that shows the first fault alone.")
@click.option(
    "--rules", type=click.Choice(RULE_NAMES), default="derived", show_default=True, help="The rules that decide which calls differ."
)
@click.option("--mapping", type=_FILE, metavar="FILE", help="Rules that map names of the subject to names of the reference, one a line.")
@click.option(
    "--replay",
    type=click.Choice(REPLAY_MODES),
    default="needed",
    show_default=True,
    help="Run calls that differ again in a higher precision: until the cause is found (needed), all of them, or none.",
)
@click.option(
    "--replay-limit",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="The most time for these runs.",
)
@click.option("--repeat", type=_FILE, metavar="RUN", help="The reference recorded once more: shows which calls are not deterministic.")
@click.option("--baseline", type=_FILE, metavar="FILE", help="Compare with this file in the place of REFERENCE.")
@click.option("--update", is_flag=True, help="Write the baseline, or widen it so that SUBJECT fits; nothing is judged.")
@click.option(
    "--partial", "is_partial", is_flag=True, help="Answer for the parts that could be compared: exit code 0 where none of them diverges."
)
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
    is_partial: bool,
    quiet: bool,
) -> None:
    """Compare the run SUBJECT with the run REFERENCE, or with a baseline, and name the first divergence."""
    files = (json_file, html_file, csv_file, xlsx_file, parquet_file, junit_file)
    wanted = {kind: path for kind, path in zip(REPORTS, files, strict=True) if path is not None}
    _check_sides(reference, baseline, repeat)
    if update:
        _check_update(baseline, [*wanted, *(["github-summary"] if github_summary else []), *(["repro"] if repro_dir else [])])
        assert baseline is not None
        _update(subject, baseline, quiet=quiet)
        return
    question = Question(
        subject=subject,
        reference=reference,
        reports=wanted,
        github_summary=github_summary,
        repro_dir=repro_dir,
        rules=rules,
        mapping=mapping,
        replay=replay,
        replay_limit=replay_limit,
        repeat=repeat,
        baseline=baseline,
        partial=is_partial,
    )
    show = None if quiet or str(json_file) == "-" else _print
    ctx.exit(answer(question, show=show, progress=nullcontext if quiet else partial(showing_progress, "comparing")))


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
    from ulpscope.workflows.compare.baselines import update_baseline

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


def _print(comparison: Comparison) -> None:
    from ulpscope.report.comparison.console import render_comparison

    render_comparison(comparison, open_console())
