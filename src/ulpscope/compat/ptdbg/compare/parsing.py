# SPDX-License-Identifier: Apache-2.0
"""Run `parse`: print one API's statistics and stack from a dump file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ulpscope.compat.ptdbg.compare.compare_ptdbg import leaving_with_code
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.report.escaping import visible
from ulpscope.store.foreign.ptdbg_lines import named_lines

__all__ = ["parse", "parsed_lines"]


def parse(pkl_file: str | os.PathLike[str], moudule_name_prefix: str) -> None:
    """Print all lines of the dump file whose name begins with the prefix.

    >>> parse("rank0/api_stack_dump.pkl", "Torch_batch_norm_1_forward")  # doctest: +SKIP
    """
    with leaving_with_code():
        for line in parsed_lines(pkl_file, moudule_name_prefix):
            print(visible(line))


def parsed_lines(pkl_file: str | os.PathLike[str], prefix: str) -> Iterator[str]:
    """Yield the lines that `parse` prints; the file is read as the lines are asked for."""
    if not isinstance(pkl_file, (str, os.PathLike)) or not isinstance(prefix, str):
        raise CompareException(CompareException.INVALID_PARAM_ERROR, "parse wants the path of a dump file and the beginning of a name")
    is_first = True
    found = False
    for name, values in named_lines(Path(pkl_file)):
        if not name.startswith(prefix):
            continue
        found = True
        if name.endswith("_stack_info"):
            yield from _stack(name, values[1] if len(values) > 1 else [])
        elif len(values) >= 6:
            if is_first:
                yield ""
                yield "Statistic Info:"
                is_first = False
            yield _statistics(name, values)
    if not found:
        yield f"No name in {pkl_file} begins with {prefix}."


def _statistics(name: str, values: list[Any]) -> str:
    _, _, checksum, dtype, shape, statistics = values[:6]
    start = f"  [{name}][dtype: {dtype}][shape: {shape}]"
    if isinstance(checksum, str) and not statistics:
        return f"{start}[md5: {checksum}]"
    high, low, mean = (*statistics, None, None, None)[:3] if isinstance(statistics, list) else (None, None, None)
    return f"{start}[max: {high}][min: {low}][mean: {mean}]"


def _stack(name: str, frames: object) -> Iterator[str]:
    """Yield the frames as Python prints a traceback, outermost first."""
    yield ""
    yield f"Trace back({name}):"
    for frame in reversed(frames if isinstance(frames, list) else []):
        if isinstance(frame, list) and len(frame) >= 3:
            yield f'  File "{frame[0]}", line {frame[1]}, in {frame[2]}'
            if len(frame) > 3 and frame[3]:
                yield f"    {str(frame[3]).strip()}"
