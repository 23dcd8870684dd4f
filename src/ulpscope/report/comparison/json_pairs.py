# SPDX-License-Identifier: Apache-2.0
"""Write the rows of a comparison as lines of JSON, joined from pieces: a piece that several rows share is encoded once.

A tensor is measured once, in however many slots it appears, and its statistics are the same in all of them. Most of a line is known as soon
as its call is judged: passing each call to `judged` has it encoded while other threads still read tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from ulpscope.model import Comparison, JudgedCall, JudgedSlot, Measurement, TensorRecord
from ulpscope.report.comparison.rows import (
    COLUMNS,
    Row,
    call_cells,
    call_rows,
    in_order,
    measured_cells,
    slot_cells,
    source_cells,
    statistics_cells,
)
from ulpscope.report.json_text import quick_text

__all__ = ["PairLines"]

_NAMES = tuple(column.name for column in COLUMNS)
_SLOT, _CONTRIBUTION, _MEASURED, _SUBJECT, _REFERENCE, _SOURCE = map(
    _NAMES.index, ("slot", "contribution", "measured_from", "subject_numel", "reference_numel", "source")
)
_MOST_KNOWN = 1 << 12
_MOST_ROWS = 20_000


class PairLines:
    """The lines of a comparison; pieces of already judged calls are encoded before their last piece is known."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[Measurement, str, str]] = {}
        self._statistics: dict[tuple[int, Row], str] = {}
        self._rows: dict[int, tuple[JudgedSlot, str, str]] = {}
        self._num_rows = 0

    def judged(self, call: JudgedCall) -> None:
        """Encode what is known of a call; beyond a limit nothing is kept, since such rows go to a csv."""
        self._num_rows += len(call.slots)
        if self._num_rows > _MOST_ROWS:
            self._rows.clear()
            return
        self._rows.update((id(parts[0]), parts) for parts in self._parts(call))

    def lines(self, comparison: Comparison) -> Iterator[str]:
        """Yield an object for each row, without its empty cells."""
        return in_order(comparison, self._of_call, _line)

    def _of_call(self, call: JudgedCall) -> Iterator[str]:
        if not call.slots:
            yield from map(_line, call_rows(call))
            return
        contribution = f", {_piece(_CONTRIBUTION, (call.contribution,))}, "
        known = [self._rows.pop(id(slot), None) for slot in call.slots]
        for _, before, after in (row for row in known if row is not None) if None not in known else self._parts(call):
            yield f"{before}{contribution}{after}"

    def _parts(self, call: JudgedCall) -> Iterator[tuple[JudgedSlot, str, str]]:
        """Yield each slot with its line before and after the contribution of the call, which is known last."""
        head, tail = _piece(0, call_cells(call)), _piece(_SOURCE, source_cells(call))
        for slot in call.slots:
            cells = slot_cells(call, slot)
            measured, remarks = self._measurement(slot.measurement)
            subject, reference = self._summary(_SUBJECT, slot.pair.subject), self._summary(_REFERENCE, slot.pair.reference)
            verdict = _piece(_CONTRIBUTION + 1, cells[_CONTRIBUTION + 1 - _SLOT :])
            after = ", ".join([piece for piece in (verdict, measured, subject, reference, tail, remarks) if piece])
            yield slot, f"{{{head}, {_piece(_SLOT, cells[: _CONTRIBUTION - _SLOT])}", f"{after}}}"

    def _measurement(self, measurement: Measurement) -> tuple[str, str]:
        known = self._measured.get(id(measurement))
        if known is None:
            if len(self._measured) >= _MOST_KNOWN:
                self._measured.clear()
            cells, remarks = measured_cells(measurement)
            known = (measurement, _piece(_MEASURED, cells), _piece(len(_NAMES) - 1, (remarks or None,)))
            self._measured[id(measurement)] = known
        return known[1:]

    def _summary(self, first: int, tensor: TensorRecord | None) -> str:
        cells = statistics_cells(tensor)
        if 0.0 in cells[1:5]:  # -0.0 == 0.0, but they are encoded differently
            return _piece(first, cells)
        known = self._statistics.get((first, cells))
        if known is None:
            if len(self._statistics) >= _MOST_KNOWN:
                self._statistics.clear()
            known = self._statistics[first, cells] = _piece(first, cells)
        return known


def _line(row: Row) -> str:
    return f"{{{_piece(0, row)}}}"


def _piece(first: int, cells: Row) -> str:
    """Encode the members of an object, from the name of the first cell on."""
    kinds = (first, *map(type, cells))
    form = _forms.get(kinds) or _forms.setdefault(kinds, _form(first, cells))
    if form.spelt:
        values: list[Any] = list(cells)
        for at, spell in form.spelt:
            values[at] = spell(values[at])
        piece = form.text % tuple(values)
    else:
        piece = form.text % cells
    if form.is_sure or (form.is_known and '": nan' not in piece and '": inf' not in piece and '": -inf' not in piece):
        return piece
    return quick_text({name: cell for name, cell in zip(_NAMES[first:], cells, strict=False) if cell is not None})[1:-1]


class _Form(NamedTuple):
    """A text with places for cells of certain types, and the function that encodes each cell that is no number.

    `is_known`: all of the types are known. `is_sure`: none of them has values that JSON has no word for.
    """

    text: str
    spelt: list[tuple[int, Callable[[Any], str]]]
    is_known: bool
    is_sure: bool


def _form(first: int, cells: Row) -> _Form:
    members, separator = [], ""
    kinds = [type(cell) for cell in cells]
    for name, kind in zip(_NAMES[first:], kinds, strict=False):
        members.append("%.0s" if kind is type(None) else f'{separator}"{name}": {"%s" if kind in _SPELLINGS else "%r"}')
        separator = separator or (", " if kind is not type(None) else "")
    spelt = [(at, _SPELLINGS[kind]) for at, kind in enumerate(kinds) if kind in _SPELLINGS]
    is_known = all(kind in (int, float, type(None)) or kind in _SPELLINGS for kind in kinds)
    return _Form("".join(members), spelt, is_known, is_known and float not in kinds)


_SPELLINGS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring_ascii,
    bool: lambda value: "true" if value else "false",
    tuple: lambda index: repr(list(index)),
}
_forms: dict[tuple[Any, ...], _Form] = {}
