# SPDX-License-Identifier: Apache-2.0
"""Records one call for each row of the table of names, forward and backward, and writes down which rows could not be run.

`python -m tests.mindspore_live.record_names FOLDER`, with MindSpore. The folder `tests/mindspore_runs/recorded/names` is its result: there
torch replays the calls, so that both frameworks' results meet as files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

import ulpscope.mindspore
from tests.mindspore_live.examples import ROWS, evaluate, example_of, inputs

__all__ = ["record_names"]

_DIFFERENTIABLE = ("float", "bfloat")


def record_names(folder: Path) -> dict[str, str]:
    """Record every row that runs here; the rows that do not, each with MindSpore's reason."""
    ms.runtime.launch_blocking()  # or a kernel that is missing would be missed by a later call
    missing: dict[str, str] = {}
    capture = ulpscope.mindspore.Capture(folder / "run", keep="tensors")
    capture.start()
    for name, row in ROWS.items():
        capture.pause()
        given = inputs()
        text = example_of(row)
        try:
            results = _results(evaluate(name, text, dict(given)))
        except Exception as error:
            missing[name] = str(error).strip().splitlines()[0][:120]
            continue
        floats = {key: value for key, value in given.items() if key in _names_in(text) and _is_float(value)}
        has_gradient = bool(floats) and all(_is_float(one) for one in results)
        try:
            _once(capture, name, text, given, floats if has_gradient else {}, results)
        except Exception as error:
            missing[f"{name} (backward)"] = str(error).strip().splitlines()[0][:120]
            _once(capture, name, text, given, {}, results)
    capture.stop()
    (folder / "missing.json").write_text(json.dumps(missing, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return missing


def _once(capture: Any, name: str, text: str, given: dict[str, Any], floats: dict[str, Any], results: list[Any]) -> None:
    """Run one example while recording, with a gradient that is no constant where it has any."""
    if not floats:
        capture.resume()
        try:
            evaluate(name, text, dict(given))
        finally:
            capture.pause()
        return

    def call(*values: Any) -> Any:
        return evaluate(name, text, {**given, **dict(zip(floats, values, strict=True))})

    sens = tuple(Tensor(_gradient(one.shape).astype(one.asnumpy().dtype)) for one in results)
    differentiate = ops.GradOperation(get_all=True, sens_param=True)(call)
    capture.resume()
    try:
        differentiate(*floats.values(), sens if len(sens) > 1 else sens[0])
    finally:
        capture.pause()


def _gradient(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return ((np.arange(int(np.prod(shape))) * 3 % 11 + 1) / 8).astype(np.float32).reshape(shape)


def _names_in(text: str) -> set[str]:
    return {node for node in "".join(letter if letter.isidentifier() else " " for letter in text).split() if len(node) == 1}


def _results(value: Any) -> list[Any]:
    found = list(value) if isinstance(value, (tuple, list)) else [value]
    for one in found:
        one.asnumpy()
    return found


def _is_float(value: Any) -> bool:
    return str(value.dtype).lower().startswith(_DIFFERENTIABLE)


if __name__ == "__main__":
    folder, sys.argv = Path(sys.argv[1]), ["record_names.py"]  # the run says how it was made, and nothing of this machine
    folder.mkdir(parents=True)
    lacking = record_names(folder)
    backward = sum("(" in name for name in lacking)
    print(f"{len(ROWS)} rows, {len(lacking) - backward} without a kernel here, {backward} more without a backward kernel")
