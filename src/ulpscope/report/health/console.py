# SPDX-License-Identifier: Apache-2.0
"""Print a health run, or two of them compared, on a terminal: the answer first, alerts, and curves of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.text import Text

from ulpscope.model import Finding
from ulpscope.model.health import Alert, HealthComparison, HealthSeries
from ulpscope.numerics.summary.composing import norms
from ulpscope.report.escaping import shortened
from ulpscope.report.health.figures import similarities_of

__all__ = ["draw_series", "render_health", "sparkline"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = " .:-=+*#@"
_LONGEST_LINE = 400
_STYLES = {"same": "bold green", "together": "bold green", "unrelated": "bold yellow", "diverges": "bold red"}
_WORDS = {
    "same": ("same", ", no difference"),
    "together": ("nothing diverges", ", no difference beyond the noise of the runs"),
    "unrelated": ("unrelated", ", not comparable: their gradients agree as by chance"),
    "diverges": ("diverges", ""),
}
_MOST_ALERTS = 6


def render_health(comparison: HealthComparison, console: Console) -> None:
    """Print the verdict, the findings, and the curves of the whole run and of the targets that left first."""
    sides = f"{comparison.subject_path} against {comparison.reference_path}"
    counts = f"{len(comparison.steps)} steps, {len(comparison.names)} gradients"
    words, rest = _WORDS[comparison.verdict]
    _print(console, f"{words}: {sides}, {counts}{rest}", _STYLES[comparison.verdict])
    for finding in comparison.findings:
        if finding.level == "fault":
            _print(console, "")
        _render_finding(finding, console)
    if comparison.verdict != "same" and comparison.similarity.size:
        _print(console, "")
        width = _width(console) - 44
        for name, values in _compared_curves(comparison).items():
            _print(console, f"{shortened(name, 34):<34} {sparkline(values, width, _can_draw(console))} {_range(values)}")


def _render_finding(finding: Finding, console: Console) -> None:
    is_fault = finding.level == "fault"
    _print(console, finding.headline if is_fault else f"note: {finding.headline}", "bold red" if is_fault else "yellow")
    for line in finding.evidence[:6]:
        _print(console, f"  {line}")
    if finding.next:
        _print(console, f"  next: {finding.next}", "dim")


def _compared_curves(comparison: HealthComparison) -> dict[str, Any]:
    curves = {"sign similarity, all": similarities_of(comparison)["summary"]}
    places = {name: place for place, name in enumerate(comparison.names)}
    for name in dict.fromkeys(each.name for each in comparison.departures if each.name in places):
        curves[f"sign similarity, {name}"] = comparison.similarity[:, places[name]]
        curves[f"norm ratio, {name}"] = np.exp(comparison.log_ratio[:, places[name]])
        break
    return {name: values for name, values in curves.items() if not np.isnan(values).all()}


def draw_series(series: HealthSeries, alerts: Sequence[Alert], *, title: str, width: int, height: int, can_draw: bool = True) -> Group:
    """Draw one screen of a health run: scalars, the global gradient norm, the layers with the largest gradients, alerts."""
    room = max(width - 50, 10)
    lines = [Text(shortened(title, width), style="bold", no_wrap=True)]
    last = f"step {int(series.steps[-1])}, {len(series.steps)} steps" if len(series.steps) else "no step yet"
    lines.append(Text(f"{last}{f', {series.num_left_out} passed over' if series.num_left_out else ''}", style="dim"))
    curves = _curves(series)
    most = max(height - len(lines) - min(len(alerts), _MOST_ALERTS) - 3, 3)
    for name, values in list(curves.items())[:most]:
        known = values[np.isfinite(values)]
        now = f"{known[-1]:.4g}" if known.size else "nan"
        lines.append(Text(f"{shortened(name, 36):<36} {now:>10} {sparkline(values, room, can_draw)}", no_wrap=True))
    if len(curves) > most:
        lines.append(Text(f"and {len(curves) - most} more", style="dim"))
    for alert in alerts[-_MOST_ALERTS:]:
        rank = f", rank {alert.rank}" if alert.rank else ""
        lines.append(Text(shortened(f"! step {alert.step}{rank}: {alert.kind}: {alert.headline}", width), style="red", no_wrap=True))
    return Group(*lines)


def _curves(series: HealthSeries) -> dict[str, Any]:
    """Return scalars first, then the norm of all gradients, then each gradient's, largest first."""
    order = ("loss", "learning_rate", "scale")
    names = [*(name for name in order if name in series.scalars), *(name for name in series.scalars if name not in order)]
    curves: dict[str, Any] = {name: series.scalars[name] for name in names}
    rows = [row for row, target in enumerate(series.targets) if target.kind == "gradient"]
    if rows:
        numel = np.array([series.targets[row].numel for row in rows], dtype=np.int64)
        sizes = norms(series.values[:, rows], numel)
        curves["gradient norm"] = np.sqrt(np.nansum(sizes**2, axis=1))
        latest = np.nan_to_num(sizes[-1]) if len(sizes) else np.zeros(len(rows))
        for place in np.argsort(-latest, kind="stable"):
            curves[f"|g| {series.targets[rows[place]].name}"] = sizes[:, place]
    return curves


def sparkline(values: Any, width: int, can_draw: bool = True) -> str:
    """Draw values as one line of blocks, the largest of each stretch; `!` where no value of a stretch is finite.

    >>> sparkline(np.array([0.0, 1.0, 2.0]), 3)
    '▁▅█'
    """
    blocks = _BLOCKS if can_draw else _PLAIN_BLOCKS
    size = max(1, -(-len(values) // max(width, 1)))
    chunks = [np.asarray(values[first : first + size], dtype=float) for first in range(0, len(values), size)]
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if not known.size:
        return "!" * len(chunks)
    low, high = float(known.min()), float(known.max())
    is_wide = low > 0 and high > 30 * low
    cells = []
    for chunk in chunks:
        finite = chunk[np.isfinite(chunk)]
        if np.isinf(chunk).any() or not finite.size:
            cells.append("!" if np.isinf(chunk).any() else " ")
            continue
        value = float(finite[np.argmax(np.abs(finite))])
        share = (math.log(value / low) / math.log(high / low)) if is_wide else (value - low) / (high - low) if high > low else 0.5
        cells.append(blocks[1 + round(share * (len(blocks) - 2))])
    return "".join(cells)


def _range(values: Any) -> str:
    known = values[np.isfinite(values)]
    return f"{known.min():.3g} to {known.max():.3g}" if known.size else ""


def _width(console: Console) -> int:
    return console.width if console.is_terminal else 100


def _can_draw(console: Console) -> bool:
    return (console.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(shortened(line, _LONGEST_LINE), style=style), soft_wrap=True, highlight=False)
