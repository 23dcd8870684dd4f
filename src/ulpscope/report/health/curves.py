# SPDX-License-Identifier: Apache-2.0
"""Draw a health comparison as PNG files: similarity, norms, loss, and two heat maps of layers over steps. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ulpscope._optional import require
from ulpscope.model.health import HealthComparison
from ulpscope.report.escaping import shortened
from ulpscope.report.health.figures import Curves, HeatMap, heat_maps, loss_curves, norm_curves, similarity_curves
from ulpscope.report.replacing import replacing

__all__ = ["write_curves", "write_pictures"]

COLOURS = ("#1f5fa8", "#c4411e", "#3b8a4e", "#8a5fb0", "#b8860b", "#4a8f9c", "#8c564b")
_LONGEST_NAME = 60


def write_pictures(comparison: HealthComparison, folder: Path) -> tuple[Path, ...]:
    """Write the pictures below `folder` and return their paths."""
    require("matplotlib", extra="plots", purpose="drawing curves")
    folder.mkdir(parents=True, exist_ok=True)
    curves = {"similarity": similarity_curves(comparison), "norms": norm_curves(comparison), "loss": loss_curves(comparison)}
    written = [_drawn(_curves_figure(each), folder / f"{name}.png") for name, each in curves.items() if each is not None]
    for name, heat in zip(("similarity_by_layer", "norms_by_layer"), heat_maps(comparison), strict=True):
        if heat.values.size:
            written.append(_drawn(_heat_figure(heat), folder / f"{name}.png"))
    return tuple(written)


def write_curves(curves: Curves, path: Path) -> Path:
    """Write one picture."""
    require("matplotlib", extra="plots", purpose="drawing curves")
    return _drawn(_curves_figure(curves), path)


def _drawn(figure: Any, path: Path) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return path


def _figure(width: float, height: float) -> Any:
    """Make a figure outside of pyplot, so that the user's pyplot state stays as it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _curves_figure(curves: Curves) -> Any:
    figure = _figure(10, 4.5)
    axes = figure.add_subplot()
    if curves.band is not None:
        axes.fill_between(curves.steps, *curves.band, color="#000000", alpha=0.07, linewidth=0, label="range of all parameters")
    for number, (name, values) in enumerate(curves.lines.items()):
        marker = "o" if len(curves.steps) < 3 else None
        axes.plot(curves.steps, values, color=COLOURS[number % len(COLOURS)], linewidth=1.4, marker=marker, label=_label(name))
    _mark_parting(axes, curves.parted_at)
    axes.set_title(curves.title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(curves.unit)
    if curves.unit == "ratio":
        axes.set_yscale("log")
        axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.grid(alpha=0.2)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _heat_figure(heat: HeatMap) -> Any:
    figure = _figure(10, min(12.0, 1.8 + 0.22 * len(heat.layers)))
    axes = figure.add_subplot()
    colours = "RdYlGn" if heat.middle == 1.0 else "RdBu_r"
    image = axes.imshow(heat.values, aspect="auto", cmap=colours, vmin=heat.low, vmax=heat.high, interpolation="nearest")
    axes.set_facecolor("#dddddd")
    axes.set_yticks(range(len(heat.layers)), [_label(layer) for layer in heat.layers], fontsize=7)
    places = np.unique(np.linspace(0, len(heat.first_steps) - 1, min(10, len(heat.first_steps))).astype(int))
    axes.set_xticks(places, [str(heat.first_steps[place]) for place in places])
    if heat.parted_at is not None:
        _mark_parting(axes, float(np.searchsorted(heat.first_steps, heat.parted_at, side="right")) - 1.5, heat.parted_at)
    axes.set_xlabel("step")
    axes.set_title(heat.title, loc="left", fontsize=11)
    figure.colorbar(image, ax=axes, pad=0.01)
    return figure


def _mark_parting(axes: Any, at: float | None, step: int | None = None) -> None:
    if at is not None:
        axes.axvline(at, color="#c4411e", linewidth=1.0, linestyle="--")
        text = f" parted at {int(at) if step is None else step}"
        axes.annotate(text, (at, 1.0), xycoords=("data", "axes fraction"), fontsize=8, color="#c4411e", va="bottom")


def _label(name: str) -> str:
    """Escape a foreign name, so that matplotlib takes none of it for mathematics."""
    return shortened(name, _LONGEST_NAME).replace("$", r"\$").lstrip("_") or "?"
