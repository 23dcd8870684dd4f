# SPDX-License-Identifier: Apache-2.0
"""`ulpscope run`: record an unmodified script."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

__all__ = ["run"]

_EPILOG = """
\b
Examples:
  ulpscope run --into runs/a train.py --epochs 1
  ulpscope run --into runs/a --watch nonfinite train.py
  ulpscope run --into runs/a --keep tensors --steps 0-1 --seed 1 --deterministic -m package.train
  ulpscope run --into runs/a --keep tensors --select 'module:layers.1' --select '!*/Tensor.view*' train.py
  torchrun --nproc-per-node 2 -m ulpscope run --into runs/a train.py

\b
Patterns of --select (each may be repeated; @FILE reads them from a file, one a line):
  layers.1.*/functional.gelu*   a glob over module/call; without a slash over the call alone
  re:EXPRESSION                 a regular expression over module/call
  module:layers.1               a module and everything below it
  range:FIRST..LAST             from one call to another, both globs
  phase:backward  slot:output*  only this phase, only these slots
  !PATTERN                      not this
"""


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise click.BadParameter(f"{text!r} is not a list of numbers; write 0,1 or 0-3")
        numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    number = text.lower().removesuffix("b")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, KeyError):
        raise click.BadParameter(f"{text!r} is not a size; write 500MB or 20GB") from None


@click.command(
    epilog=_EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--into", required=True, metavar="DIR", help="Folder of the new run; one that holds a run is left alone, and DIR-2 is used.")
@click.option(
    "--keep",
    type=click.Choice(["fingerprint", "statistics", "tensors"]),
    default="statistics",
    show_default=True,
    help="What stays of each tensor.",
)
@click.option(
    "--level", type=click.Choice(["api", "module", "both", "op"]), default="api", show_default=True, help="What counts as a call."
)
@click.option("--steps", callback=_numbers, metavar="LIST", help="Record only these steps, as in 0,1 or 0-3.")
@click.option("--ranks", callback=_numbers, metavar="LIST", help="Record only these ranks.")
@click.option("--select", multiple=True, metavar="PATTERN", help="Record only these calls; see below.")
@click.option(
    "--max-bytes", callback=_size, metavar="SIZE", help="Keep at most this much of tensors per rank, as in 20GB; statistics go on."
)
@click.option(
    "--watch",
    type=click.Choice(["nonfinite", "health"]),
    help="Not record but watch: nonfinite keeps the call that makes inf or NaN, health statistics of gradients and weights.",
)
@click.option("--watch-limit", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Stop after N; 0 for never.")
@click.option("--watch-raise", is_flag=True, help="Raise an error in the script where inf or NaN was made.")
@click.option("--watch-calls", is_flag=True, help="Watch every call on an accelerator too, not every module: dearer, and names the call.")
@click.option("--seed", type=int, help="Seed Python, NumPy and torch before the script starts.")
@click.option("--deterministic", is_flag=True, help="Ask torch for deterministic kernels.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    into: str,
    keep: str,
    level: str,
    steps: list[int] | None,
    ranks: list[int] | None,
    select: tuple[str, ...],
    max_bytes: int | None,
    watch: str | None,
    watch_limit: int,
    watch_raise: bool,
    watch_calls: bool,
    seed: int | None,
    deterministic: bool,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGUMENTS, unchanged, and record it.

    A step ends with each optimizer step. The exit code is the script's own. With --watch nonfinite nothing is recorded
    until a call makes inf or NaN, which is then named at the end.
    """
    from ulpscope.workflows.running import make_comparable, run_script

    make_comparable(seed, deterministic=deterministic)
    if watch == "health":
        from ulpscope.workflows.watching import watch_script

        sys.exit(run_script(script, list(arguments), watch_script(into), is_module=is_module))
    options: dict[str, Any] = {"keep": keep, "level": level, "steps": steps, "ranks": ranks, "select": select, "max_bytes": max_bytes}
    if watch == "nonfinite":
        from ulpscope.model import NonFinite

        options["watch"] = NonFinite(limit=watch_limit or None, raise_error=watch_raise, calls=True if watch_calls else None)
    from ulpscope.workflows.capturing import Capture

    capture = Capture.of_script(into, seed=seed, **options)
    code = run_script(script, list(arguments), capture, is_module=is_module)
    if os.environ.get("RANK", "0") == "0" and capture.path is not None:
        tell = _say_what_was_made if watch == "nonfinite" else _say_what_came
        tell(capture.path)
    sys.exit(code)


def _say_what_was_made(path: Path) -> None:
    from rich.console import Console

    from ulpscope.report.nonfinite import render_nonfinite
    from ulpscope.workflows.nonfinite import find_nonfinite

    report = find_nonfinite(path)
    render_nonfinite(report, Console(stderr=True, markup=False, highlight=False, emoji=False))
    if report.first is not None:
        click.echo(f"ulpscope: recorded into '{path}'; look at it again with: ulpscope nonfinite {path}", err=True)


def _say_what_came(path: Path) -> None:
    steps = len(list(path.glob("rank*/step*")))
    if steps:
        click.echo(f"ulpscope: recorded into '{path}'; look at it with: ulpscope show {path}", err=True)
    else:
        click.echo("ulpscope: nothing was recorded: no torch call of the main thread was seen in the chosen steps and patterns", err=True)
