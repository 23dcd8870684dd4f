# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope show`: print what a run recorded."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope.cli.terminal import open_console
from ulpscope.errors import InputError
from ulpscope.report.escaping import visible

if TYPE_CHECKING:
    from rich.console import Console

    from ulpscope.model import CallRecord, Run, TensorData

__all__ = ["show"]

_FILE = click.Path(path_type=Path)
_LINES_PIPED = 40
_LINES_OF_HEADER = 14


@click.command()
@click.argument("run", type=_FILE)
@click.argument("glob", required=False)
@click.option("--step", type=int, metavar="N", help="Show only this step.")
@click.option("--rank", type=int, metavar="N", help="Show only this rank.")
@click.option("--phase", type=click.Choice(["start", "forward", "backward", "optimizer", "end"]), help="Show only this phase.")
@click.option("--stacks", is_flag=True, help="Show the whole stack of each call.")
@click.option("--arguments", is_flag=True, help="Show the arguments and modes of each call.")
@click.option("--tensor", "slot", metavar="SLOT", help="Show the values in this slot, as in output.0, where they were kept.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the chosen records as JSON; - for stdout.")
@click.option("--all", "is_all", is_flag=True, help="Show everything, not just a screenful.")
def show(
    run: Path,
    glob: str | None,
    step: int | None,
    rank: int | None,
    phase: str | None,
    stacks: bool,
    arguments: bool,
    slot: str | None,
    json_file: Path | None,
    is_all: bool,
) -> None:
    """Show what RUN recorded; with GLOB, the calls whose `module/call` it matches, in detail.

    \b
    Example:
      ulpscope show runs/npu
      ulpscope show runs/npu 'layers.1.mlp*' --stacks --arguments
      ulpscope show runs/npu 'layers.1.mlp/functional.gelu.1' --tensor output.0
    """
    from ulpscope.store import open_run

    opened = open_run(run)
    records = _chosen(opened, glob, step, rank, phase)
    if json_file is not None:
        _write_json(opened, records, json_file)
        return
    console = open_console()
    if glob is None and not (stacks or arguments or slot):
        _show_overview(opened, records, console, limit=_limit(console, is_all))
    else:
        _show_details(opened, records, console, limit=_limit(console, is_all), stacks=stacks, arguments=arguments, slot=slot)


def _chosen(run: Run, glob: str | None, step: int | None, rank: int | None, phase: str | None) -> Iterator[CallRecord]:
    """Yield the records asked for; refuse a choice that matches none."""
    ranks = [number for number in run.ranks() if rank in (None, number)]
    places = [(number, found) for number in ranks for found in run.steps(number) if step in (None, found)]
    records = chain.from_iterable(run.records(number, found) for number, found in places)
    chosen = (record for record in records if phase in (None, record.phase) and (glob is None or _matches(record, glob)))
    first = next(chosen, None)
    if first is not None:
        return chain([first], chosen)
    if (glob, step, rank, phase) == (None, None, None, None):
        return iter(())
    raise InputError(_nothing_chosen(run, glob=glob, step=step, rank=rank, phase=phase))


def _matches(record: CallRecord, glob: str) -> bool:
    call = record.call
    return any(name == glob or fnmatchcase(name, glob) for name in (record.name, str(call), call.op, call.short))


def _nothing_chosen(run: Run, **asked: object) -> str:
    question = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    ranks = run.ranks()
    steps = sorted({step for rank in ranks for step in run.steps(rank)})
    example = next((record.name for rank in ranks for step in run.steps(rank) for record in run.records(rank, step) if record.module), "")
    looks = f", names such as '{example}'" if example else ""
    return f"nothing in '{run.path}' is recorded for {question}; it holds ranks {_few(ranks)}, steps {_few(steps)}{looks}: try a wider glob"


def _few(numbers: Iterable[int]) -> str:
    words = [str(number) for number in numbers]
    return ", ".join(words[:8]) + (" ..." if len(words) > 8 else "") or "none"


def _limit(console: Console, is_all: bool) -> int | None:
    if is_all:
        return None
    return max(console.size.height - _LINES_OF_HEADER, 10) if console.is_terminal else _LINES_PIPED


def _show_overview(run: Run, records: Iterator[CallRecord], console: Console, *, limit: int | None) -> None:
    from ulpscope.report.comparison.console import render_records, render_run

    render_run(run, console, size_bytes=_size_on_disk(run.path))
    console.print()
    render_records(records, console, limit=limit)


def _show_details(
    run: Run, records: Iterator[CallRecord], console: Console, *, limit: int | None, stacks: bool, arguments: bool, slot: str | None
) -> None:
    from ulpscope.report.comparison.console import render_details

    num_lines = num_hidden = 0
    for record in records:
        if limit is not None and num_lines >= limit:
            num_hidden += 1
            continue
        num_lines += 2 + len(record.slots) + (len(record.stack) if stacks else 0)
        render_details(record, console, stacks=stacks, arguments=arguments, most_slots=limit)
        if slot is not None:
            _show_values(run, record, slot, console)
    if num_hidden:
        console.print(f"and {num_hidden} more: --all, or a narrower glob")


def _show_values(run: Run, record: CallRecord, slot: str, console: Console) -> None:
    """Print the values in one slot, shortened in the middle as NumPy does."""
    from ulpscope.report.comparison.console import slot_label

    found = next((tensor for tensor in record.slots if slot in (str(tensor.slot), slot_label(tensor.slot))), None)
    if found is None:
        known = ", ".join(slot_label(tensor.slot) for tensor in record.slots[:20])
        console.print(f"  there is no slot {visible(slot)}; this call has {visible(known) or 'none'}")
    elif found.content is None:
        console.print(f"  the values of {visible(slot)} were not kept; record with --keep tensors")
    else:
        console.print(f"  {_values(run.tensor(record.rank, record.step, found.content))}", soft_wrap=True)


def _values(data: TensorData) -> str:
    import numpy as np

    from ulpscope.numerics.casting import as_array, widen

    values = as_array(data)
    if data.dtype == "bool":
        values = values.astype(bool)
    elif data.dtype.startswith(("bfloat16", "float8")):
        values = widen(data.dtype, values)
    return np.array2string(values, prefix="  ", threshold=200, edgeitems=3, max_line_width=120)


def _write_json(run: Run, records: Iterator[CallRecord], path: Path) -> None:
    from ulpscope.report.comparison.json_ import dump_run
    from ulpscope.report.replacing import replacing

    if str(path) == "-":
        dump_run(run, records, sys.stdout)
        sys.stdout.flush()
        return
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        dump_run(run, records, stream)


def _size_on_disk(path: Path) -> int:
    """Sum the bytes of all files below; files that vanish meanwhile count as nothing."""
    size_bytes = 0
    for file in chain([path], path.rglob("*")):
        with suppress(OSError):
            status = file.lstat()
            size_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size_bytes
