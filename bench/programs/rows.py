# SPDX-License-Identifier: Apache-2.0
"""Show the answers as tables, and hold them against the counts at the start, which no later run may fall below.

The baseline holds, for every program, the calls that were recorded at each level and those that `check` judged and skipped. Fewer calls
or a lower share is a failure: a false alarm that went away because fewer calls are looked at has not been repaired.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.programs.asking import LEVELS, Pair, Row
from bench.programs.catalogue import KINDS

__all__ = ["BASELINE", "Baseline", "fallen", "full_table", "read_rows", "replace_table", "summary_table"]

BASELINE = Path(__file__).with_name("baseline.json")
BEGIN, END = "<!-- made by: python -m bench.programs --docs -->", "<!-- end of what was made -->"
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Baseline:
    """Counts by program, with the versions of torch and transformers that they belong to."""

    versions: dict[str, str]
    counts: dict[str, list[int]]

    @classmethod
    def read(cls, path: Path = BASELINE) -> Baseline:
        return cls(**json.loads(path.read_text())) if path.exists() else cls({}, {})

    def with_rows(self, rows: Iterable[Row]) -> Baseline:
        return Baseline(_versions(), self.counts | {row.key: _counts(row) for row in rows if not row.problem})

    def write(self, path: Path = BASELINE) -> None:
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(counts)}" for key, counts in sorted(self.counts.items()))
        path.write_text(f'{{\n"versions": {json.dumps(self.versions)},\n"counts": {{\n{lines}\n}}\n}}\n')

    @property
    def is_of_this_torch(self) -> bool:
        """Tell whether the counts can be compared: another torch has other samples, and other calls in a model."""
        return self.versions == _versions()


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Read the rows that earlier runs wrote with --out; of a program that was asked again, the last."""
    found: dict[tuple[str, str], Row] = {}
    for line in [line for path in paths for line in path.read_text().splitlines()]:
        words = json.loads(line)
        pairs = {name: Pair(**pair) for name, pair in words.pop("pairs").items()}
        row = Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}, pairs=pairs)
        found[row.key, row.device] = row
    return list(found.values())


def _versions() -> dict[str, str]:
    return {name: version(name).split("+")[0] for name in ("torch", "transformers")}


def _counts(row: Row) -> list[int]:
    return [*(row.num_calls.get(level, 0) for level in LEVELS), row.num_checked, row.num_skipped]


def fallen(row: Row, baseline: Baseline) -> list[str]:
    """Say which counts are less than at the start."""
    before = baseline.counts.get(row.key)
    if before is None or row.problem or row.device != "cpu":
        return []
    *calls, checked, skipped = before
    found = [
        f"records {row.num_calls[level]} calls at level {level}, {many} at the start"
        for level, many in zip(LEVELS, calls, strict=True)
        if row.num_calls.get(level, 0) < many
    ]
    share = checked / (checked + skipped) if checked else 0.0
    return found + ([f"check judges {row.share:.1%} of the calls, {share:.1%} at the start"] if row.share < share - _ROUNDING else [])


def summary_table(rows: Sequence[Row], baseline: Baseline) -> str:
    """Make a table with one line for each kind of program, dtype and device."""
    lines = [
        "| programs | | harmless | torch's doing | same seed: 0 | calls recorded (api, both, op) | checked | skipped | failed | less |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group in dict.fromkeys(_group(row) for row in sorted(rows, key=_place)):
        some = [row for row in rows if _group(row) == group]
        judged = [row for row in some if row.is_repeatable and not row.problem]
        cells = [
            "{}s, {}, {}".format(*group),
            len(some),
            f"{sum(not row.changed and not row.changed_by_torch for row in judged)} of {len(judged)}",
            sum(bool(row.changed_by_torch) and not row.changed for row in judged),
            _quiet(some, "same seed"),
            ", ".join(_number(sum(row.num_calls.get(level, 0) for row in some)) for level in LEVELS),
            _number(sum(row.num_checked for row in some)),
            _number(sum(row.num_skipped for row in some)),
            sum(len(row.failures) for row in some),
            sum(bool(fallen(row, baseline)) for row in some),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    names = dict.fromkeys(name for row in rows for name in row.pairs if name != "same seed")
    if not names:
        return "\n".join(lines) + "\n"
    lines += ["", "| two ways of one architecture | pairs | exit 0 | exit 2 | exit 1 |", "|---|---|---|---|---|"]
    for name in names:
        codes = Counter(row.pairs[name].exit_code for row in rows if name in row.pairs)
        lines.append(f"| {name} | {sum(codes.values())} | {codes[0]} | {codes[2]} | {codes[1]} |")
    return "\n".join(lines) + "\n"


def full_table(rows: Sequence[Row]) -> str:
    """Make a table with one line for each architecture and layout; operators are too many."""
    lines = ["| program | calls recorded (api, both, op) | checked | share | same seed | other ways |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=_place):
        if row.key.startswith("operator/"):
            continue
        others = ", ".join(f"{name}: {pair.exit_code}" for name, pair in row.pairs.items() if name != "same seed")
        calls = ", ".join(_number(row.num_calls.get(level, 0)) for level in LEVELS)
        same = row.pairs["same seed"].exit_code if "same seed" in row.pairs else ""
        _, name, dtype, *_ = row.key.split("/")
        lines.append(f"| {name}, {dtype}, {row.device} | {calls} | {_number(row.num_checked)} | {row.share:.1%} | {same} | {others} |")
    return "\n".join(lines) + "\n"


def replace_table(page: Path, tables: str) -> None:
    """Put the tables where a page holds the last ones."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}")


def _group(row: Row) -> tuple[str, str, str]:
    kind, _, dtype, *_ = row.key.split("/")
    return kind, dtype, row.device


def _place(row: Row) -> tuple[int, str, str]:
    kind, name, dtype, *_ = row.key.split("/")
    return [*KINDS].index(kind), dtype, name  # type: ignore[arg-type]


def _quiet(rows: Sequence[Row], pair: str) -> str:
    asked = [row.pairs[pair] for row in rows if pair in row.pairs]
    return f"{sum(each.exit_code == 0 for each in asked)} of {len(asked)}"


def _number(count: int) -> str:
    return f"{count:,}".replace(",", " ")
