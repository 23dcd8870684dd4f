# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope refine`: choose calls to record again, and write a selection file and two commands."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope.cli.terminal import showing_progress

if TYPE_CHECKING:
    from ulpscope.workflows.compare.refining import Refinement

__all__ = ["refine"]

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("subject", type=_FILE)
@click.argument("reference", type=_FILE)
@click.option("--into", type=_FILE, default=Path("closer.txt"), show_default=True, metavar="FILE", help="The selection file to write.")
@click.option("--mapping", type=_FILE, metavar="FILE", help="Rules that map names of the subject to names of the reference, one a line.")
@click.option("--quiet", is_flag=True, help="Print nothing but the two commands.")
def refine(subject: Path, reference: Path, into: Path, mapping: Path | None, quiet: bool) -> None:
    """Choose the few calls of SUBJECT and REFERENCE whose values would settle what their statistics leave open.

    Writes their names to a file for `ulpscope run --select @FILE` and prints the commands that record both sides again, small this time.

    \b
    Example:
      ulpscope refine runs/npu runs/gpu --into closer.txt
      ulpscope run --into runs/npu-closer --keep tensors --seed 1 --steps 0 --select @closer.txt train.py   (and so on the other machine)
      ulpscope compare runs/npu-closer runs/gpu-closer

    Exit codes: 0 a file was written or nothing needs a closer look, 2 the question could not be answered.
    """
    from ulpscope.report.replacing import check_writable
    from ulpscope.workflows.compare.refining import refine_runs

    check_writable(into)
    with nullcontext() if quiet else showing_progress("comparing") as progress:
        refinement = refine_runs(subject, reference, mapping=mapping, progress=progress)
    if not refinement.patterns:
        _say(f"nothing to record again: {refinement.reason}")
        return
    _write(refinement, into)
    if not quiet:
        _explain(refinement, into)
    for side, command in zip(("subject", "reference"), refinement.commands(into), strict=True):
        _say(command if quiet else f"  {command}   # the {side}")
    if not quiet:
        click.echo()
        _say(f"then: {refinement.comparing_command()}")


def _write(refinement: Refinement, into: Path) -> None:
    from ulpscope.report.replacing import replacing

    with replacing(into) as temporary:
        temporary.write_text(refinement.text(), encoding="utf-8")


def _explain(refinement: Refinement, into: Path) -> None:
    _say(refinement.reason)
    many = len(refinement.chosen)
    what = f"{many} call{'s' if many != 1 else ''}" if many else f"the phases {' and '.join(refinement.phases)}"
    share = refinement.size_bytes / refinement.whole_bytes if refinement.whole_bytes else 1.0
    size = f"about {_size_text(refinement.size_bytes)} a side, {share:.1%} of all tensors of the step"
    _say(f"'{into}' selects {what} of step {refinement.step}: {size}")
    if refinement.num_left_out:
        _say(f"{refinement.num_left_out} more calls are open in the same way; the worst were chosen")
    click.echo()
    _say("record both sides again, each where and as it was recorded before:")


def _size_text(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _say(line: str) -> None:
    """Print one line, with control characters spelled out."""
    from ulpscope.report.escaping import visible

    click.echo(visible(line))
