# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope health`: draw the curves of a health run, and redraw them while it trains."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope.cli.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console, Group

    from ulpscope.store.series import HealthRun

__all__ = ["health"]

_HEIGHT_PIPED = 40
_WIDTH_PIPED = 100


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rank", type=int, metavar="N", help="Draw only this rank; without it, the first recorded one.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS", help="Seconds between two drawings."
)
@click.option("--once", is_flag=True, help="Draw once and leave, as it does where the output is not a terminal.")
def health(run: Path, rank: int | None, interval: float, once: bool) -> None:
    """Draw the curves of the health run RUN, and redraw them while it trains; leave with Ctrl-C.

    \b
    Example:
      ulpscope run --into runs/health --health --seed 1 train.py
      ulpscope health runs/health
      ssh node17 ulpscope health --once /data/runs/health
    """
    from ulpscope.errors import InputError
    from ulpscope.store.series import open_health

    opened = open_health(run)
    chosen = opened.ranks()[0] if rank is None else rank
    if chosen not in opened.ranks():
        raise InputError(f"'{run}' has no rank {chosen}; it has {', '.join(map(str, opened.ranks()))}")
    console = open_console()
    if once or not console.is_terminal:
        console.print(_screen(opened, chosen, console), soft_wrap=True)
        return
    with suppress(KeyboardInterrupt):  # the way to leave
        _follow(opened, chosen, console, interval)


def _follow(run: HealthRun, rank: int, console: Console, interval: float) -> None:
    from rich.live import Live

    with Live(_screen(run, rank, console), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_screen(run, rank, console), refresh=True)


def _screen(run: HealthRun, rank: int, console: Console) -> Group:
    from ulpscope.report.health.console import draw_series

    width, height = (console.width, console.height) if console.is_terminal else (_WIDTH_PIPED, _HEIGHT_PIPED)
    alerts = sorted((alert for each in run.ranks() for alert in run.alerts(each)), key=lambda alert: alert.step)
    can_draw = (sys.stdout.encoding or "").lower().startswith("utf")
    title = f"{run.path}, rank {rank} of {run.info.world_size}"
    return draw_series(run.latest(rank), alerts, title=title, width=width, height=height, can_draw=can_draw)
