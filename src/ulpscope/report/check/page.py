# SPDX-License-Identifier: Apache-2.0
"""Write a check as one page that opens from disk: no script, no network, every foreign string escaped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ulpscope.model import Finding
from ulpscope.model.check.checks import Check, CheckedCall
from ulpscope.report.check.console import verdict_line
from ulpscope.report.escaping import encodable, shortened
from ulpscope.report.replacing import replacing

__all__ = ["check_page", "write_check_html"]

_MOST_ROWS = 2000
_LONGEST = 400
_STYLE = """
:root{color-scheme:light dark;--back:#f6f6f3;--surface:#fff;--sunken:#f1f1ed;--text:#1d2024;--muted:#666c75;--line:#e6e6e0;--fault:#c43c00;
--fault-soft:#fdeee6;--good:#14806c;--warn:#8a6100;--mono:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media (prefers-color-scheme:dark){:root{--back:#131518;--surface:#1b1e23;--sunken:#23272d;--text:#e4e6e9;--muted:#99a0aa;--line:#2b3037;
--fault:#ff8552;--fault-soft:#33221a;--good:#4cc0a4;--warn:#e0b455}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main,header{max-width:1200px;margin:0 auto;padding:12px 24px}
h1{font-size:20px;margin:8px 0}h2{font-size:16px;margin:28px 0 8px}
.bad{color:var(--fault)}.good{color:var(--good)}.warning{color:var(--warn)}.muted{color:var(--muted)}
.card{background:var(--surface);border:1px solid var(--line);border-radius:10px;padding:14px 18px;margin:10px 0;overflow-wrap:anywhere}
.card.fault{border-left:4px solid var(--fault)}.card.note{border-left:4px solid var(--line)}
.tiles{display:flex;gap:12px;flex-wrap:wrap}
.tile{background:var(--surface);border:1px solid var(--line);border-radius:10px;padding:8px 16px}
.tile b{display:block;font-size:22px;font-variant-numeric:tabular-nums}
code,.mono{font-family:var(--mono);font-size:12.5px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:4px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--muted);font-weight:500;white-space:nowrap}td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
details summary{cursor:pointer;color:var(--muted)}
"""


def write_check_html(check: Check, path: Path) -> None:
    """Write the page; a page that was there stays until the new one is whole."""
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        stream.write(encodable(check_page(check)))


def check_page(check: Check) -> str:
    is_whole = check.num_checked == check.num_calls
    tone = "bad" if check.verdict == "wrong" else "good" if check.verdict == "sound" and is_whole else "warning"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{_text(f'check: {check.path}')}</title><style>{_STYLE}</style></head><body>",
            f'<header><strong>ulpscope</strong> <span class="muted">check of {_text(check.path)} on {_text(check.device)}, '
            f"rules {_text(check.rules)}</span></header><main>",
            f'<h1 class="{tone}">{_text(verdict_line(check))}</h1>',
            *_tiles(check),
            *(_card(finding) for finding in check.findings),
            *_calls("Failed calls, worst first", check.failures),
            *_calls("Not settled", [call for call in check.calls if call.status == "warning"]),
            *_operations(check),
            *_calls("Not checked", [call for call in check.calls if call.status == "skipped"]),
            *_calls("Passed, nearest to the limit first", _by_multiple(check)),
            "</main></body></html>\n",
        ]
    )


def _tiles(check: Check) -> Iterable[str]:
    tiles: dict[str, object] = {str(status): many for status, many in check.counts.items()}
    tiles |= {"coverage": f"{check.coverage:.1%}", "seconds": f"{check.elapsed_s:.1f}"}
    yield '<div class="tiles">'
    yield from (f'<div class="tile"><b>{_text(str(value))}</b>{_text(name)}</div>' for name, value in tiles.items())
    yield "</div>"


def _card(finding: Finding) -> str:
    lines = [*finding.evidence]
    if finding.source is not None:
        lines.append(f"{finding.source.file}:{finding.source.line} in {finding.source.function}: {finding.source.code}")
    body = "".join(f"<div>{_text(line)}</div>" for line in lines)
    more = f'<div class="muted"><code>{_text(finding.next)}</code></div>' if finding.next else ""
    return f'<section class="card {finding.level}"><strong>{_text(finding.headline)}</strong>{body}{more}</section>'


def _calls(title: str, calls: Sequence[CheckedCall]) -> Iterable[str]:
    if not calls:
        return
    is_open = " open" if calls[0].status in ("failed", "warning") else ""
    yield f'<details{is_open}><summary><h2 style="display:inline-block">{title} ({len(calls)})</h2></summary>'
    heads = ("times the limit", "phase", "module", "call", "slot", "dtype", "shape", "inputs", "reason")
    yield f'<div class="card scroll"><table><thead><tr>{"".join(f"<th>{head}</th>" for head in heads)}</tr></thead><tbody>'
    yield from (_row(call) for call in calls[:_MOST_ROWS])
    yield "</tbody></table></div>"
    if len(calls) > _MOST_ROWS:
        yield f'<p class="muted">and {len(calls) - _MOST_ROWS} more: see the csv</p>'
    yield "</details>"


def _row(call: CheckedCall) -> str:
    slot = call.worst
    texts = [call.phase, call.module, str(call.call)]
    texts += [str(slot.slot), slot.dtype, str(list(slot.shape))] if slot is not None else ["", "", ""]
    cells = "".join(f'<td class="mono">{_text(text)}</td>' for text in texts)
    inputs = {"recorded": "recorded", "generated": "made up"}.get(call.data, "")
    return f'<tr><td class="number">{_number(call.multiple)}</td>{cells}<td>{inputs}</td><td>{_text(call.reason)}</td></tr>'


def _operations(check: Check) -> Iterable[str]:
    """Yield a table with the verdicts of each operation, forward and backward."""
    groups: defaultdict[tuple[str, str], list[CheckedCall]] = defaultdict(list)
    for call in check.calls:
        groups[call.call.op, call.phase].append(call)
    yield f'<details><summary><h2 style="display:inline-block">Operations ({len(groups)})</h2></summary>'
    yield '<div class="card scroll"><table><thead><tr>'
    heads = ("operation", "phase", "passed", "failed", "warning", "skipped", "nearest to the limit")
    yield "".join(f"<th>{head}</th>" for head in heads) + "</tr></thead><tbody>"
    for (op, phase), calls in sorted(groups.items()):
        counts = [sum(call.status == status for call in calls) for status in ("passed", "failed", "warning", "skipped")]
        worst = max((call.multiple for call in calls if call.multiple is not None), default=None)
        cells = "".join(f'<td class="number">{many or ""}</td>' for many in counts)
        yield f'<tr><td class="mono">{_text(op)}</td><td>{phase}</td>{cells}<td class="number">{_number(worst)}</td></tr>'
    yield "</tbody></table></div></details>"


def _by_multiple(check: Check) -> list[CheckedCall]:
    passed = [call for call in check.calls if call.status == "passed"]
    return sorted(passed, key=lambda call: -(call.multiple or 0.0))


def _number(value: float | None) -> str:
    return "" if value is None else "∞" if value == float("inf") else f"{value:.3g}"


def _text(text: str) -> str:
    return escape(shortened(text, _LONGEST), quote=True)
