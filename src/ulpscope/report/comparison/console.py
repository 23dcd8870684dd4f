# SPDX-License-Identifier: Apache-2.0
"""Print a comparison, or the contents of a run, on a terminal: the answer first.

Lines are printed as styled text, never as markup, and control characters in foreign texts are made visible first. A line that goes into a
pipe is never wrapped or cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ulpscope._shell import command_line
from ulpscope.model import CallRecord, Comparison, Finding, Frame, LedgerEntry, Run, Slot, Summary, TensorRecord
from ulpscope.report.comparison.counts import Counts, count_calls
from ulpscope.report.comparison.coverage import answer_text, gaps_text
from ulpscope.report.escaping import shortened

__all__ = ["render_comparison", "render_details", "render_records", "render_run", "slot_label"]

_MOST_FAULTS = 5
_MOST_NOTES = 3
_MOST_EVIDENCE = 6
_MOST_SLOTS = 12
_LONGEST_LINE = 400
_LONGEST_NAME = 80

_VERDICT_WORDS = {"same": "same", "rounding": "nothing diverges", "unknown": "unknown", "diverges": "diverges"}
_VERDICT_STYLES = {"same": "bold green", "rounding": "bold green", "unknown": "bold yellow", "diverges": "bold red"}


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict, the findings in order of cause, notes, and how many calls got which verdict."""
    counts = count_calls(comparison)
    _print(console, _verdict_line(comparison, counts), _VERDICT_STYLES[comparison.verdict])
    faults = comparison.faults
    doubts = [finding for finding in comparison.findings if finding.kind == "bitwise"]
    notes = [finding for finding in comparison.findings if finding.level == "note" and finding not in doubts]
    for finding in [*faults[:_MOST_FAULTS], *doubts]:
        _print(console, "")
        _render_finding(finding, console)
    _render_more(len(faults) - _MOST_FAULTS, "fault", console)
    if notes:
        _print(console, "")
    for finding in notes[:_MOST_NOTES]:
        _render_note(finding, console)
    _render_more(len(notes) - _MOST_NOTES, "note", console)
    _print(console, "")
    _render_counts(counts, console)


def _verdict_line(comparison: Comparison, counts: Counts) -> str:
    """Return the answer in one line; what was not compared comes before everything else."""
    sides = f"{comparison.subject_path} against {comparison.reference_path}"
    word = _VERDICT_WORDS[comparison.verdict]
    gaps = gaps_text(comparison.coverage)
    if gaps and comparison.verdict != "diverges":
        word += f": {gaps}"
    return f"{word}: {sides}, {answer_text(comparison, counts)}"


def _render_finding(finding: Finding, console: Console) -> None:
    _print(console, finding.headline, "bold red" if finding.level == "fault" else "bold")
    for line in finding.evidence[:_MOST_EVIDENCE]:
        _print(console, f"  {line}")
    if finding.source is not None:
        _print(console, f"  {_place(finding.source)}", "cyan")
    if finding.repro:
        _print(console, f"  repro: {finding.repro}")
    if finding.next:
        _print(console, f"  next: {finding.next}", "dim")


def _render_note(finding: Finding, console: Console) -> None:
    _print(console, f"note: {finding.headline}", "yellow")
    for line in finding.evidence[:2]:
        _print(console, f"  {line}", "dim")


def _render_more(number: int, what: str, console: Console) -> None:
    if number > 0:
        _print(console, f"and {number} more {what}{'s' if number > 1 else ''}: --json", "dim")


def _render_counts(counts: Counts, console: Console) -> None:
    cells = {
        "calls compared": counts.compared,
        "same": counts.same,
        "rounding": counts.rounding,
        "differ": counts.differs,
        "inherited": counts.inherited,
        "only subject": counts.only_subject,
        "only reference": counts.only_reference,
    }
    cells |= {name: number for name, number in (("partial", counts.partial), ("unmeasured", counts.unmeasured)) if number}
    _print(console, "  ".join(cells), "dim")
    _print(console, "  ".join(str(number).rjust(len(name)) for name, number in cells.items()))


def render_run(run: Run, console: Console, *, size_bytes: int) -> None:
    """Print how a run was made, what it holds, and what capture could not do."""
    info = run.info
    _print(console, f"{run.path}: {info.format} run, format {info.format_version}", "bold")
    facts = {
        "made by": ", ".join(filter(None, (info.tool, info.created))),
        "command": command_line(*info.command),
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
        "devices": ", ".join(info.devices),
        "options": ", ".join(f"{name}={_argument(value)}" for name, value in info.options.items() if value is not None),
        "environment": " ".join(f"{name}={value}" for name, value in info.environment.items()),
        "seed": "" if info.seed is None else str(info.seed),
        "ranks": f"{_ranges(run.ranks())} of world size {info.world_size}",
        "steps": _ranges(sorted({step for rank in run.ranks() for step in run.steps(rank)})),
        "complete": _completeness(run),
        "size": _size(size_bytes),
        "ledger": _ledger([entry for rank in run.ranks() for entry in run.ledger(rank)]),
    }
    for name, value in facts.items():
        if value:
            _print(console, f"  {name:<12}{value}")


def _completeness(run: Run) -> str:
    steps = [(rank, step) for rank in run.ranks() for step in run.steps(rank)]
    broken = [f"step {step} of rank {rank}" for rank, step in steps if not run.is_complete(rank, step)]
    if not broken:
        return "yes" if steps else "no step was recorded"
    return f"no: {', '.join(broken[:3])}{f' and {len(broken) - 3} more' if len(broken) > 3 else ''} was cut short"


def _ledger(entries: Sequence[LedgerEntry]) -> str:
    if not entries:
        return "empty: everything asked for was recorded"
    first = "; ".join(f"{entry.what}: {entry.why}{f' ({entry.count}x)' if entry.count > 1 else ''}" for entry in entries[:3])
    return f"{_plural(len(entries), 'entry', 'entries')}: {first}{'; ...' if len(entries) > 3 else ''}"


_TABLE_HEADINGS = ("call", "phase", "slot", "dtype", "shape", "min", "max", "mean", "rms", "nonfinite")


def render_records(records: Iterable[CallRecord], console: Console, *, limit: int | None) -> None:
    """Print a line for each slot of each call, up to about `limit` lines, and count the calls left out."""
    lines: list[tuple[str, ...]] = []
    num_hidden = 0
    place = (-1, -1)
    for record in records:
        if limit is not None and len(lines) >= limit:
            num_hidden += 1
            continue
        if place != (place := (record.rank, record.step)):
            lines.append((f"rank {record.rank}, step {record.step}", *("",) * (len(_TABLE_HEADINGS) - 1)))
        lines.extend(_record_lines(record))
    _render_table(_TABLE_HEADINGS, lines, console)
    if num_hidden:
        _print(console, f"and {_plural(num_hidden, 'more call')}: --all, or a glob such as 'layers.1.mlp*'", "dim")


def _record_lines(record: CallRecord) -> list[tuple[str, ...]]:
    empty = ("",) * (len(_TABLE_HEADINGS) - 2)
    cells = [_slot_cells(tensor) for tensor in record.slots[:_MOST_SLOTS]] or [empty]
    if len(record.slots) > _MOST_SLOTS:
        cells.append((f"and {len(record.slots) - _MOST_SLOTS} more", *empty[1:]))
    names = [(shortened(_name(record), _LONGEST_NAME), record.phase)] + [("", "")] * (len(cells) - 1)
    return [(*name, *rest) for name, rest in zip(names, cells, strict=True)]


def _slot_cells(tensor: TensorRecord) -> tuple[str, ...]:
    summary = tensor.summary or Summary(0)
    numbers = (summary.min, summary.max, summary.mean, summary.rms, summary.num_nonfinite)
    return (shortened(slot_label(tensor.slot), _LONGEST_NAME), shortened(tensor.dtype, 20), _shape(tensor.shape), *map(_number, numbers))


def _render_table(headings: Sequence[str], lines: Sequence[Sequence[str]], console: Console) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    for number, line in enumerate([headings, *lines]):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        _print(console, text, "" if number else "dim", is_row=True)


def render_details(record: CallRecord, console: Console, *, stacks: bool, arguments: bool, most_slots: int | None = None) -> None:
    """Print one call with everything that was recorded about it, except slots beyond `most_slots`."""
    again = ", recomputed" if record.recompute else ""
    place = f"{record.phase}{again}, step {record.step}, rank {record.rank}, order {record.order}"
    _print(console, f"{_name(record)}  {place}", "bold")
    if record.source is not None and not stacks:
        _print(console, f"  {_place(record.source)}", "cyan")
    shown = record.slots[:most_slots]
    width = max((len(slot_label(tensor.slot)) for tensor in shown), default=0)
    for tensor in shown:
        _print(console, f"  {slot_label(tensor.slot):<{width}}  {_tensor(tensor)}")
    if len(shown) < len(record.slots):
        _print(console, f"  and {_plural(len(record.slots) - len(shown), 'more slot')}: --all", "dim")
    if arguments:
        _render_arguments(record, console)
    if stacks:
        _render_stack(record, console)


def _render_arguments(record: CallRecord, console: Console) -> None:
    given, modes = record.arguments, record.modes
    if given is not None and (given.args or given.kwargs or record.phase == "forward"):
        words = [_argument(value) for value in given.args] + [f"{name}={_argument(value)}" for name, value in (given.kwargs or {}).items()]
        _print(console, f"  arguments: {record.call.short}({', '.join(words)})")
    if modes is not None:
        words = [f"{field.name}={value}" for field in fields(modes) if (value := getattr(modes, field.name)) is not None]
        _print(console, f"  modes: {', '.join(words)}")


def _render_stack(record: CallRecord, console: Console) -> None:
    _print(console, "  stack, innermost first:" if record.stack else "  no stack was recorded")
    for frame in record.stack:
        _print(console, f"    {_place(frame)}", "cyan")


def _name(record: CallRecord) -> str:
    return record.name.removeprefix("/")


def slot_label(slot: Slot) -> str:
    """Write a slot for a reader: `parameter.head.weight`, dots and all."""
    return ".".join([slot.role, *map(str, slot.path)])


def _tensor(tensor: TensorRecord) -> str:
    words = [tensor.dtype, _shape(tensor.shape)]
    if tensor.summary is not None:
        names = ("min", "max", "mean", "rms")
        words += [f"{name} {_number(value)}" for name in names if (value := getattr(tensor.summary, name)) is not None]
        counts = {"nan": "num_nan", "+inf": "num_posinf", "-inf": "num_neginf", "zero": "num_zero", "subnormal": "num_subnormal"}
        words += [f"{name} {value}" for name, field in counts.items() if (value := getattr(tensor.summary, field))]
    if tensor.strides is not None and not _is_contiguous(tensor.shape, tensor.strides):
        words.append(f"strides {_shape(tensor.strides)}")
    words += [tensor.device, tensor.fingerprint or "", "kept" if tensor.content else "", tensor.note]
    return "  ".join(filter(None, words))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether the strides are those of a plain row-major tensor, which need no mention."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _argument(value: Any) -> str:
    """Write a recorded argument as in code: `input.0`, `float32`, `(1, 2)`."""
    match value:
        case {"$tensor": word} | {"$dtype": word} | {"$int": word} | {"$memory_format": word} | {"$layout": word}:
            return str(word)
        case {"$device": word}:
            return repr(word)
        case {"$ellipsis": _}:
            return "..."
        case {"$slice": [start, stop, step]}:
            return f"slice({_argument(start)}, {_argument(stop)}, {_argument(step)})"
        case {"$complex": [real, imaginary]}:
            return f"complex({real}, {imaginary})"
        case {"$tuple": [*items]} | {"$size": [*items]}:
            return f"({', '.join(map(_argument, items))}{',' if len(items) == 1 else ''})"
        case {"$object": name}:
            return str(value.get("repr") or name)
        case list():
            return f"[{', '.join(map(_argument, value))}]"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_argument(item)}' for key, item in value.items())}}}"
        case _:
            return repr(value)


def _place(frame: Frame) -> str:
    """Write a frame as `file:line in function: code`; a file below the working directory is shown relative to it."""
    try:
        file = str(Path(frame.file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        file = frame.file
    code = f": {frame.code.strip()}" if frame.code.strip() else ""
    return f"{file}:{frame.line} in {frame.function}{code}"


def _print(console: Console, line: str, style: str = "", *, is_row: bool = False) -> None:
    text = Text(shortened(line, 10 * _LONGEST_LINE if is_row else _LONGEST_LINE), style=style)
    if is_row and console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis", highlight=False)
    else:
        console.print(text, soft_wrap=True, highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _plural(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if units[0] != "bytes" else f"{size_bytes} bytes"


def _ranges(numbers: Sequence[int]) -> str:
    """Shorten a list of numbers: `0-3, 7` for 0, 1, 2, 3, 7."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1][1:] = [number]
        else:
            groups.append([number])
    return ", ".join("-".join(map(str, group)) for group in groups) or "none"
