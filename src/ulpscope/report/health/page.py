# SPDX-License-Identifier: Apache-2.0
"""Write a health comparison as one HTML file that opens from disk: findings, curves and heat maps, without scripts.

Every foreign string is escaped; drawings are SVG, made of numbers that are formatted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.model import Finding
from ulpscope.model.health import HealthComparison
from ulpscope.report.escaping import encodable, shortened
from ulpscope.report.health.figures import Curves, HeatMap, heat_maps, loss_curves, norm_curves, similarity_curves
from ulpscope.report.replacing import replacing

__all__ = ["write_health_page"]

_COLOURS = ("#1f5fa8", "#c4411e", "#3b8a4e", "#8a5fb0", "#b8860b", "#4a8f9c", "#8c564b")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 70, 24
_MOST_POINTS = 1500
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6670; --paper: #ffffff; --line: #d8dde2; --fault: #b3361a; --good: #2c7a43 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa4ad; --paper: #15191d; --line: #343b42; --fault: #f08a6c; --good: #7cc48f }
}
body { margin: 0 auto; padding: 24px; max-width: 1080px; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
h1 { font-size: 22px; margin: 0 }
h2 { font-size: 16px; margin: 32px 0 8px }
.soft { color: var(--soft) }
.fault, .note { border-left: 4px solid var(--line); padding: 2px 12px; margin: 12px 0 }
.fault { border-color: var(--fault) }
.fault b, .diverges { color: var(--fault) }
.together, .same { color: var(--good) }
.unrelated { color: var(--soft) }
ul { margin: 4px 0; padding-left: 20px }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif }
.grid { stroke: var(--line); stroke-width: 1 }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 6px; vertical-align: middle }
"""


_WORDS = {
    "same": "the runs are equal",
    "together": "the runs stay together",
    "unrelated": "the runs are unrelated",
    "diverges": "the runs part",
}


def write_health_page(comparison: HealthComparison, path: Path) -> None:
    """Write the page; what stood at `path` before is replaced only once the new one is whole."""
    with replacing(path) as temporary:
        temporary.write_text("".join(_page(comparison)), encoding="utf-8", newline="\n")


def _page(comparison: HealthComparison) -> Iterable[str]:
    verdict = comparison.verdict
    words = _WORDS[verdict]
    yield f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{_text(words)}</title>\n<style>{_STYLE}</style>\n'
    yield f'<h1 class="{verdict}">{_text(words)}</h1>\n'
    sides = f"{comparison.subject_path} against {comparison.reference_path}"
    yield f'<p class="soft">{_text(sides)}, {len(comparison.steps)} steps, {len(comparison.names)} parameters</p>\n'
    yield from (_finding(finding) for finding in comparison.findings)
    for curves in (similarity_curves(comparison), norm_curves(comparison), loss_curves(comparison)):
        if curves is not None:
            yield f"<h2>{_text(curves.title)}</h2>\n{_legend(curves.lines)}{_curves(curves)}\n"
    for heat in heat_maps(comparison):
        if heat.values.size:
            yield f"<h2>{_text(heat.title)}</h2>\n{_heat(heat)}\n"
    yield from _departures(comparison)
    yield "</html>\n"


def _text(value: str) -> str:
    return escape(encodable(shortened(value, 400)))


def _finding(finding: Finding) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in finding.evidence)
    following = f'<div class="soft">next: {_text(finding.next)}</div>' if finding.next else ""
    return f'<div class="{finding.level}"><b>{_text(finding.headline)}</b><ul>{lines}</ul>{following}</div>\n'


def _legend(lines: dict[str, Any]) -> str:
    cells = [
        f'<span><i style="background:{_COLOURS[number % len(_COLOURS)]}"></i>{_text(name)}</span>' for number, name in enumerate(lines)
    ]
    return f'<div class="legend">{"".join(cells)}</div>\n'


class _Scale:
    """Maps steps and values to places on the drawing."""

    def __init__(self, curves: Curves) -> None:
        self.is_log = curves.unit == "ratio"
        known = np.concatenate([np.asarray(values, dtype=float) for values in curves.lines.values()] or [np.zeros(1)])
        known = known[np.isfinite(known) & ((known > 0) | (not self.is_log))]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        low, high = (min(low, 0.9), max(high, 1.1)) if self.is_log else (low, high)
        low, high = self._of(low), self._of(high)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
        self.low, self.high = low - margin, high + margin
        first, last = float(curves.steps[0]), float(curves.steps[-1])
        self.first, self.last = first, last if last > first else first + 1

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - 10)

    def y(self, value: float) -> float:
        share = (self._of(value) - self.low) / (self.high - self.low)
        return (1 - min(max(share, -0.05), 1.05)) * (_HEIGHT - _BOTTOM)

    def ticks(self) -> Sequence[float]:
        values = np.linspace(self.low, self.high, 5)[1:-1]
        return [10**value if self.is_log else value for value in values.tolist()]


def _curves(curves: Curves) -> str:
    scale = _Scale(curves)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(curves.title)}">']
    for value in scale.ticks():
        place = scale.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for step in (curves.steps[0], curves.steps[len(curves.steps) // 2], curves.steps[-1]):
        parts.append(f'<text x="{scale.x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{int(step)}</text>')
    for number, values in enumerate(curves.lines.values()):
        colour = _COLOURS[number % len(_COLOURS)]
        parts += [
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{points}"/>'
            for points in _points(scale, curves.steps, values)
        ]
    if curves.parted_at is not None:
        place = scale.x(curves.parted_at)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{_HEIGHT - _BOTTOM}" stroke="#c4411e" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{place + 4:.1f}" y="11">parted at {curves.parted_at}</text>')
    return "".join(parts) + "</svg>"


def _points(scale: _Scale, steps: Any, values: Any) -> list[str]:
    """Return stretches of known values as points; a long run is drawn by its lows and highs."""
    size = max(1, -(-len(steps) // (_MOST_POINTS // 2)))
    stretches: list[list[str]] = [[]]
    for first in range(0, len(steps), size):
        chunk = np.asarray(values[first : first + size], dtype=float)
        known = chunk[np.isfinite(chunk)]
        if not known.size:
            stretches.append([])
            continue
        for value in dict.fromkeys((float(known.min()), float(known.max()))):
            stretches[-1].append(f"{scale.x(float(steps[first])):.1f},{scale.y(value):.1f}")
    return [" ".join(stretch if len(stretch) > 1 else stretch * 2) for stretch in stretches if stretch]


def _heat(heat: HeatMap) -> str:
    left, row_height = 240, 14
    num_columns = heat.values.shape[1]
    width = (_WIDTH - left - 10) / num_columns
    height = row_height * len(heat.layers) + _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_text(heat.title)}">']
    for row, layer in enumerate(heat.layers):
        parts.append(f'<text x="{left - 6}" y="{row * row_height + 11}" text-anchor="end">{_text(layer[-38:])}</text>')
        for column in range(num_columns):
            place, colour = left + column * width, _colour(float(heat.values[row, column]), heat)
            size = f'width="{width + 0.2:.2f}" height="{row_height - 1}"'
            parts.append(f'<rect x="{place:.1f}" y="{row * row_height}" {size} fill="{colour}"/>')
    for column in sorted({0, num_columns // 2, num_columns - 1}):
        parts.append(f'<text x="{left + column * width:.1f}" y="{height - 8}">{int(heat.first_steps[column])}</text>')
    if heat.parted_at is not None:
        place = left + (np.searchsorted(heat.first_steps, heat.parted_at, side="right") - 1) * width
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{height - _BOTTOM}" stroke="#c4411e" stroke-dasharray="4 3"/>')
    return "".join(parts) + "</svg>"


def _colour(value: float, heat: HeatMap) -> str:
    """Choose a colour: white where the sides agree, red or blue where they do not, grey where the value is unknown."""
    if math.isnan(value):
        return "#8883"
    share = (value - heat.middle) / max(heat.high - heat.middle, heat.middle - heat.low)
    strength = min(abs(share), 1.0) ** 0.6
    ink = (196, 65, 30) if share > 0 or heat.middle == 1.0 else (31, 95, 168)
    red, green, blue = (round(238 + (each - 238) * strength) for each in ink)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _departures(comparison: HealthComparison) -> Iterable[str]:
    if not comparison.departures:
        return
    shown = min(len(comparison.departures), 40)
    yield f'<h2>departures</h2>\n<p class="soft">The first {shown} of {len(comparison.departures)}, in order.</p>\n<ul>\n'
    for each in comparison.departures[:40]:
        words = f"step {each.step}: {each.signal} of {each.kind} {each.name}, {each.subject:.4g} and {each.reference:.4g} ({each.rule})"
        yield f"<li><code>{_text(words)}</code></li>\n"
    yield "</ul>\n"
