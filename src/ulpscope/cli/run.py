# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope run`: record an unmodified script."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ulpscope._shell import as_path, command_line
from ulpscope.cli.seeds import checked_seed
from ulpscope.report.escaping import visible

__all__ = ["run"]

_EPILOG = """
\b
Examples:
  ulpscope run --into runs/a --seed 1 train.py --epochs 1
  ulpscope run --into runs/a --nonfinite train.py
  ulpscope run --into runs/a --health --seed 1 train.py
  ulpscope run --into runs/a --keep tensors --steps 0-1 --seed 1 --deterministic -m package.train
  ulpscope run --into runs/a --keep tensors --seed 1 --select 'module:layers.1' --select '!*/Tensor.view*' train.py
  torchrun --nproc-per-node 2 -m ulpscope run --into runs/a --seed 1 train.py

\b
Patterns of --select (each may be repeated; @FILE reads them from a file, one a line):
  layers.1.*/functional.gelu*   a glob over module/call; without a slash over the call alone
  re:EXPRESSION                 a regular expression over module/call
  module:layers.1               a module and everything below it
  range:FIRST..LAST             from one call to another, both globs
  phase:backward  slot:output*  only this phase, only these slots
  !PATTERN                      not this
"""

_MOST_NUMBERS = 1_000_000


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise click.BadParameter(f"{text[:80]!r} is not a list of numbers; write 0,1 or 0-3")
        if last - first >= _MOST_NUMBERS:
            raise click.BadParameter(f"{text[:80]!r} is more than {_MOST_NUMBERS} numbers; leave the option out to record all of them")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    units = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
    number = text.lower().removesuffix("b")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        size = int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise click.BadParameter(f"{text[:80]!r} is not a size; write 500MB or 20GB")
    return size


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
    help="How much to keep of each tensor.",
)
@click.option(
    "--level",
    type=click.Choice(["api", "module", "both", "op"]),
    default="api",
    show_default=True,
    help="Which operations count as a call.",
)
@click.option("--steps", callback=_numbers, metavar="LIST", help="Record only these steps, as in 0,1 or 0-3.")
@click.option("--ranks", callback=_numbers, metavar="LIST", help="Record only these ranks.")
@click.option("--select", multiple=True, metavar="PATTERN", help="Record only these calls; see below.")
@click.option(
    "--max-bytes", callback=_size, metavar="SIZE", help="Keep at most this much of tensors per rank, as in 20GB; statistics go on."
)
@click.option("--nonfinite", is_flag=True, help="Hunt for the first inf or NaN: keep only the call that makes it.")
@click.option("--health", is_flag=True, help="Record only statistics of gradients, updates and weights, at every step.")
@click.option("--watch", type=click.Choice(["nonfinite", "health"]), help="The older names of --nonfinite and --health.")
@click.option(
    "--nonfinite-limit",
    "--watch-limit",
    "nonfinite_limit",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="End the hunt after N faults; 0 for never.",
)
@click.option("--nonfinite-raise", "--watch-raise", "nonfinite_raise", is_flag=True, help="Raise an error in the script at inf or NaN.")
@click.option(
    "--nonfinite-calls",
    "--watch-calls",
    "nonfinite_calls",
    is_flag=True,
    help="On an accelerator, look at every call instead of every module: this costs more, and names the call.",
)
@click.option("--seed", type=int, callback=checked_seed, help="Seed Python, NumPy and torch before the script starts.")
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
    nonfinite: bool,
    health: bool,
    watch: str | None,
    nonfinite_limit: int,
    nonfinite_raise: bool,
    nonfinite_calls: bool,
    seed: int | None,
    deterministic: bool,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGUMENTS, unchanged, and record it.

    A step ends with each optimizer step. The exit code is the script's own. With --nonfinite nothing is recorded
    until a call makes inf or NaN, which is then named at the end.
    """
    from ulpscope.workflows.record.running import check_destination, make_comparable, run_script

    nonfinite, health = nonfinite or watch == "nonfinite", health or watch == "health"
    if nonfinite and health:
        raise click.UsageError("--nonfinite and --health record different things: run the script once with each")
    check_destination(into)
    make_comparable(seed, deterministic=deterministic)
    is_first = os.environ.get("RANK", "0") == "0"
    if health:
        folders: list[Path | None] = []
        code = run_script(script, list(arguments), _recording_health(into, folders), is_module=is_module)
        for path in folders:
            if is_first and path is not None:
                _say_how_to_draw(path)
        sys.exit(code)
    options: dict[str, Any] = {"keep": keep, "level": level, "steps": steps, "ranks": ranks, "select": select, "max_bytes": max_bytes}
    if nonfinite:
        from ulpscope.model import NonFinite

        hunt = NonFinite(limit=nonfinite_limit or None, raise_error=nonfinite_raise, calls=True if nonfinite_calls else None)
        options["nonfinite"] = hunt
    from ulpscope.workflows.record.capturing import Capture

    capture = Capture.of_script(into, seed=seed, **options)
    code = run_script(script, list(arguments), capture, is_module=is_module)
    if is_first and capture.path is not None:
        tell = _say_what_was_made if nonfinite else _say_what_came
        tell(capture.path)
    sys.exit(code)


def _say_what_was_made(path: Path) -> None:
    from rich.console import Console

    from ulpscope.report.nonfinite.text import render_nonfinite
    from ulpscope.workflows.nonfinite import find_nonfinite

    report = find_nonfinite(path)
    render_nonfinite(report, Console(stderr=True, markup=False, highlight=False, emoji=False))
    if report.first is not None:
        _say(f"recorded into '{path}'; look at it again with: {command_line('ulpscope', 'nonfinite', as_path(path))}")


@contextmanager
def _recording_health(into: str, folders: list[Path | None]) -> Iterator[None]:
    """Record the health of the script that runs inside, and add the folder of the run to `folders`."""
    from ulpscope.workflows.health_recording import record_script_health

    with record_script_health(into) as health:
        folders.append(health.path)
        yield


def _say_how_to_draw(path: Path) -> None:
    draw, compare = (
        command_line("ulpscope", "health", "--once", as_path(path)),
        command_line("ulpscope", "compare-health", as_path(path), "OTHER"),
    )
    click.echo(f"ulpscope: recorded health into '{visible(str(path))}'; draw it with: {draw}", err=True)
    click.echo(f"ulpscope: find the step at which it parts from another health run: {compare}", err=True)


def _say_what_came(path: Path) -> None:
    from ulpscope.store import open_run

    run = open_run(path)
    show = command_line("ulpscope", "show", as_path(path))
    for entry in (entry for rank in run.ranks()[:1] for entry in run.ledger(rank) if entry.what.startswith("find what ")):
        _say(f"could not {entry.what}: {entry.why}; names look like those of: {show}")
    if any(run.steps(rank) for rank in run.ranks()):
        _say(f"recorded into '{path}'; look at it with: {show}")
    else:
        _say("nothing was recorded: no torch call of the main thread was seen in the chosen steps and patterns")


def _say(sentence: str) -> None:
    """Print one line on stderr, so that the script's own output stays as it is."""
    click.echo(f"ulpscope: {visible(sentence)}", err=True)
