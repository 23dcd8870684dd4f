# SPDX-License-Identifier: Apache-2.0
"""Writes dumps of ptdbg for the tests, from the description of the format alone: lines of JSON, and .npy files under the same names."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Value = Any  # an array, or a Python number
Line = list[Any]


def statistics(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return max, min and mean as float32, as the old tool takes them."""
    if array.dtype == bool or not array.size:
        return [[], [], []]
    return [float(value) for value in (array.max(), array.min(), array.mean(dtype=np.float32))]


def line(name: str, value: Value, *, norm: bool = False, md5: str = "", kind: str = "") -> Line:
    """Return one line of dump.pkl; `norm` is the layout with four statistics, `md5` the one of checksums."""
    if not isinstance(value, np.ndarray):
        return [name, 0, [], str(type(value)), "[]", [value] * (4 if norm else 3)]
    four = [float(np.linalg.norm(value.astype("f8")))] if norm else []
    return [name, 0, md5 or [], kind or f"torch.{value.dtype}", list(value.shape), [] if md5 else statistics(value) + four]


def named(api: str, inputs: Sequence[Value], outputs: Value | Sequence[Value]) -> dict[str, Value]:
    """Name the tensors of one call: a single output has no number."""
    found = {f"{api}_input.{at}": value for at, value in enumerate(inputs)}
    if isinstance(outputs, (list, tuple)):
        return found | {f"{api}_output.{at}": value for at, value in enumerate(outputs)}
    return found | {f"{api}_output": outputs}


def write_lines(folder: Path, lines: Iterable[Line], stem: str = "dump") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stem}.pkl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return file


def write_dump(
    folder: Path, values: dict[str, Value], *, stem: str = "dump", stacks: bool = False, data: bool = True, **layout: Any
) -> Path:
    """Write a dump with one line for each value, and a stack after each call where asked; return the pkl file."""
    lines: list[Line] = []
    apis = [name.rpartition("_")[0] for name in values]
    for at, (name, value) in enumerate(values.items()):
        lines.append(line(name, value, **layout))
        if stacks and (at + 1 == len(apis) or apis[at + 1] != apis[at]):
            lines.append(
                [
                    f"{apis[at]}_stack_info",
                    [["/project/net.py", "12", "forward", "y = self.fc(x)"], ["/project/train.py", "3", "main", None]],
                ]
            )
    if data:
        (folder / stem).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            np.save(folder / stem / f"{name}.npy", np.asarray(value))
    return write_lines(folder, lines, stem)


def param(npu: Path, bench: Path, **more: Any) -> dict[str, Any]:
    """Return the first argument of compare for two pkl files with their folders."""
    return {
        "npu_pkl_path": str(npu),
        "bench_pkl_path": str(bench),
        "npu_dump_data_dir": str(npu.with_suffix("")),
        "bench_dump_data_dir": str(bench.with_suffix("")),
        **more,
    }


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{pattern}: {sorted(file.name for file in folder.iterdir())}"
    return found[0]
