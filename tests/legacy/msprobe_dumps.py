# SPDX-License-Identifier: Apache-2.0
"""Write dumps of msprobe by hand from the description of the format, run the command by its installed name, and read its rows."""

from __future__ import annotations

import csv
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import torch

from msprobe.msprobe import main

F4 = np.dtype("f4")
Call = Mapping[str, Any]
"""`inputs`, `outputs`, `kwargs`, `parameters`: arrays, and plain values; a call of backward has inputs and outputs."""


class Statistics:
    """Four numbers that stand for a tensor without a file."""

    def __init__(self, high: float, low: float, mean: float = 0.0, norm: float = 1.0) -> None:
        self.numbers = (high, low, mean, norm)


def write_dump(
    folder: Path,
    calls: Mapping[str, Call],
    mode: str = "statistics",
    *,
    framework: str = "pytorch",
    stacks: Mapping[str, list[str]] | None = None,
) -> Path:
    """Write dump.json, stack.json and, where mode is tensor, the files; returns dump.json."""
    folder.mkdir(parents=True, exist_ok=True)
    if mode == "tensor":
        (folder / "dump_tensor_data").mkdir(exist_ok=True)
    data = {name: _entry(folder, name, call, mode, framework) for name, call in calls.items()}
    header = {"task": "tensor" if mode == "tensor" else "statistics", "level": "L1", "framework": framework, "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**header, "data": data}))
    (folder / "stack.json").write_text(json.dumps(stacks or {}))
    return folder / "dump.json"


def _entry(folder: Path, name: str, call: Call, mode: str, framework: str) -> dict[str, Any]:
    def leaf(value: Any, place: str) -> Any:
        return _leaf(folder, f"{name}.{place}", value, mode, framework)

    inputs = [leaf(value, f"input.{at}") for at, value in enumerate(call.get("inputs", ()))]
    outputs = [leaf(value, f"output.{at}") for at, value in enumerate(call.get("outputs", ()))]
    if "backward" in name:
        return {"input": inputs, "output": outputs}
    kwargs = {key: leaf(value, f"kwargs.{key}") for key, value in call.get("kwargs", {}).items()}
    entry = {"input_args": inputs, "input_kwargs": kwargs, "output": outputs}
    if "parameters" in call:
        entry["parameters"] = {key: leaf(value, f"parameters.{key}") for key, value in call["parameters"].items()}
    return entry


def _leaf(folder: Path, name: str, value: Any, mode: str, framework: str) -> Any:
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, (bool, int, float, str)):
        return {"type": type(value).__name__, "value": value}
    leaf: dict[str, Any] = {"type": "torch.Tensor" if framework == "pytorch" else "mindspore.Tensor"}
    if isinstance(value, Statistics):
        numbers, dtype, shape = value.numbers, "float32", [4]
    else:
        wide = value.astype(np.float64)
        numbers = tuple(float(f(wide)) for f in (np.max, np.min, np.mean, np.linalg.norm))
        dtype, shape = value.dtype.name, list(value.shape)
    leaf["dtype"] = f"torch.{dtype}" if framework == "pytorch" else dtype.capitalize()
    leaf |= {"shape": shape, "Max": numbers[0], "Min": numbers[1], "Mean": numbers[2], "Norm": numbers[3], "requires_grad": False}
    if mode == "md5":
        leaf["md5"] = f"{zlib.crc32(value.tobytes()):08x}"
    if mode == "tensor":
        leaf["data_name"] = f"{name}.{'pt' if framework == 'pytorch' else 'npy'}"
        file = folder / "dump_tensor_data" / leaf["data_name"]
        if framework == "pytorch":
            torch.save(torch.from_numpy(value.copy()), file)
        else:
            np.save(file, value)
    return leaf


def compare_json(folder: Path, npu: Path, bench: Path, **more: Any) -> Path:
    file = folder / "compare.json"
    stack = {"stack_path": str(npu.with_name("stack.json"))} if npu.is_file() else {}
    file.write_text(json.dumps({"npu_path": str(npu), "bench_path": str(bench), **stack, **more}))
    return file


def msprobe(*words: object) -> int:
    """Run `msprobe ...` and return its exit code."""
    return main([str(word) for word in words])


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def xlsx_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a sheet; `colour` is red, yellow or nothing."""
    sheet = openpyxl.load_workbook(path).active
    assert sheet is not None
    headings, *rows = sheet.iter_rows()
    names = {"FFFF0000": "red", "FFFFFF00": "yellow"}
    return [
        {str(head.value): cell.value for head, cell in zip(headings, row, strict=True)}
        | {"colour": names[str(row[0].fill.fgColor.rgb)] if row[0].fill.fill_type else ""}
        for row in rows
    ]


def number(text: Any) -> float:
    value = float(text)
    assert not math.isnan(value)
    return value
