# SPDX-License-Identifier: Apache-2.0
"""Show where inf and NaN began, as one page that opens from disk: no script, no network, every foreign string escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path

from ulpscope.model import Frame, NearMiss, NonFiniteEvent, NonFiniteReport
from ulpscope.report.escaping import encodable, shortened
from ulpscope.report.nonfinite.text import headroom_text, verdict_line
from ulpscope.report.replacing import replacing

__all__ = ["page_text", "write_nonfinite_html"]

_MOST_EVENTS = 200
_LONGEST = 400
_STYLE = """
:root{color-scheme:light dark;--back:#f6f6f3;--surface:#fff;--sunken:#f1f1ed;--text:#1d2024;--muted:#666c75;--line:#e6e6e0;--fault:#c43c00;
--fault-soft:#fdeee6;--good:#14806c;--bar:#4a7fb0;--mono:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media (prefers-color-scheme:dark){:root{--back:#131518;--surface:#1b1e23;--sunken:#23272d;--text:#e4e6e9;--muted:#99a0aa;--line:#2b3037;
--fault:#ff8552;--fault-soft:#33221a;--good:#4cc0a4;--bar:#7db2e0}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main,header,footer{max-width:1100px;margin:0 auto;padding:12px 24px}
h1{font-size:20px;margin:8px 0}h2{font-size:16px;margin:28px 0 8px}
.card{background:var(--surface);border:1px solid var(--line);border-radius:10px;padding:14px 18px;margin:10px 0;overflow-wrap:anywhere}
.fault{border-left:4px solid var(--fault)}.note{border-left:4px solid var(--line)}
.kind{display:inline-block;border-radius:6px;padding:0 8px;background:var(--sunken);color:var(--muted);font-size:12px;margin-right:8px}
.fault .kind{background:var(--fault-soft);color:var(--fault)}
.verdict.bad{color:var(--fault)}.verdict.good{color:var(--good)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:10px 0 0}dt{color:var(--muted)}dd{margin:0}
code,.mono{font-family:var(--mono);font-size:12.5px}.muted{color:var(--muted)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:4px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--muted);font-weight:500}td.number{text-align:right;font-variant-numeric:tabular-nums}
.bar{display:inline-block;height:8px;border-radius:4px;background:var(--bar);vertical-align:middle}
"""


def write_nonfinite_html(report: NonFiniteReport, path: Path) -> None:
    """Write the page; a page that was there stays until the new one is whole."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        stream.write(encodable(page_text(report)))


def page_text(report: NonFiniteReport) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{_text(f'non-finite values: {report.path}')}</title><style>{_STYLE}</style></head><body>",
        f'<header><strong>ulpscope</strong> <span class="muted">non-finite values in {_text(report.path)}</span></header><main>',
        f'<h1 class="verdict {"bad" if report.first else "good"}">{_text(verdict_line(report))}</h1>',
        *_section("Faults", report.faults, "Nothing non-finite reached a loss, a gradient or a parameter."),
        *_section("Harmless", [event for event in report.events if event.level == "note"], ""),
        *_misses(report.near_misses),
        *(f'<p class="muted">{_text(note)}</p>' for note in report.notes),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _section(title: str, events: Iterable[NonFiniteEvent], otherwise: str) -> Iterable[str]:
    chosen = list(events)
    if not chosen and not otherwise:
        return
    yield f"<h2>{title}</h2>"
    if not chosen:
        yield f'<p class="muted">{otherwise}</p>'
    yield from (_card(event) for event in chosen[:_MOST_EVENTS])
    if len(chosen) > _MOST_EVENTS:
        yield f'<p class="muted">and {len(chosen) - _MOST_EVENTS} more</p>'


def _card(event: NonFiniteEvent) -> str:
    facts = [
        ("why", _text(event.cause)),
        ("what would help", _text(event.remedy)),
        *(("", _text(line)) for line in event.evidence),
        ("where", _frames(event.stack or ((event.source,) if event.source else ()))),
        ("next", f"<code>{_text(event.next)}</code>" if event.next else ""),
    ]
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts if value)
    return (
        f'<section class="card {event.level}"><span class="kind">{event.kind}</span><strong>{_text(event.headline)}</strong>'
        f"<dl>{rows}</dl></section>"
    )


def _frames(stack: tuple[Frame, ...]) -> str:
    return "<br>".join(
        f'<span class="mono">{_text(f"{frame.file}:{frame.line}")}</span> in {_text(frame.function)} <code>{_text(frame.code)}</code>'
        for frame in stack[:6]
    )


def _misses(misses: tuple[NearMiss, ...]) -> Iterable[str]:
    if not misses:
        return
    yield "<h2>Near misses</h2>"
    yield (
        '<p class="muted">How far the largest value of each call was from the end of its dtype, over all steps and ranks, '
        "and what sank into subnormals or to zero.</p>"
    )
    yield '<div class="card scroll"><table><thead><tr>'
    yield "".join(
        f"<th>{name}</th>" for name in ("call", "phase", "slot", "dtype", "largest", "headroom", "", "subnormal", "to zero", "step")
    )
    yield "</tr></thead><tbody>"
    yield from (_row(miss) for miss in misses)
    yield "</tbody></table></div>"


def _row(miss: NearMiss) -> str:
    used = max(0.0, 1.0 - math.log2(max(miss.headroom, 1.0)) / 16)
    cells = [
        f'<td class="mono">{_text(f"{miss.module}  {miss.call}".strip())}</td><td>{miss.phase}</td>',
        f'<td class="mono">{_text(miss.slot)}</td><td>{_text(miss.dtype)}</td>',
        f'<td class="number">{miss.largest:.4g}</td><td class="number">{headroom_text(miss)}</td>',
        f'<td><span class="bar" style="width:{used * 90:.0f}px"></span></td>',
        f'<td class="number">{_share(miss.subnormal_share)}</td><td class="number">{_share(miss.zero_share)}</td>',
        f'<td class="number">{miss.step}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _share(share: float) -> str:
    return f"{share:.2%}" if share else ""


def _text(text: str) -> str:
    return escape(shortened(text, _LONGEST), quote=True)
