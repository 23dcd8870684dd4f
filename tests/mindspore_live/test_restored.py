# SPDX-License-Identifier: Apache-2.0
"""Whatever stood in the way of MindSpore is gone afterwards: the very objects are there again, with their own code."""

from __future__ import annotations

import subprocess
import sys
from types import CodeType, FunctionType
from typing import Any

import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import Primitive

import ulpscope.mindspore
from tests.mindspore_live.programs import array, region
from ulpscope.capture_mindspore.framework import BACKWARD_PASS, COMPILED_CALL
from ulpscope.store import MemoryRun


def everything() -> dict[str, tuple[int, CodeType | None]]:
    """Every public object of the namespaces and every attribute of the classes, by identity and code."""
    places: list[tuple[str, dict[str, Any]]] = [
        (one.__name__, vars(one)) for one in (ops, mint, mint.nn.functional, Tensor, nn.Cell, Primitive)
    ]
    places += [(f"{one.__module__}.{one.__name__}", vars(one)) for one in Primitive.__subclasses__()]
    found = {f"{place}.{name}": value for place, names in places for name, value in names.items() if callable(value)}
    found |= {"backward": BACKWARD_PASS, "compiled": COMPILED_CALL}
    return {name: (id(value), value.__code__ if isinstance(value, FunctionType) else None) for name, value in found.items()}


def test_everything_is_put_back() -> None:
    x = Tensor(array(3, 4))
    with ulpscope.mindspore.Capture.into_sink(MemoryRun().sink):
        pass
    before = everything()
    with ulpscope.mindspore.Capture.into_sink(MemoryRun().sink, level="both"):
        during = everything()
        nn.Dense(4, 4)(x)
        region(x, Tensor(array(4, 4)))
        assert everything() == during
    assert len(before) > 3000
    assert sum(before.get(name) != one for name, one in during.items()) > 500
    assert everything() == before


def test_everything_is_put_back_when_the_program_fails() -> None:
    before = everything()

    def fail() -> None:
        with ulpscope.mindspore.Capture.into_sink(MemoryRun().sink):
            ops.tanh(Tensor(array(2, 2)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert everything() == before


def test_a_second_capture_is_refused_while_one_is_under_way() -> None:
    first, second = MemoryRun(), MemoryRun()
    with ulpscope.mindspore.Capture.into_sink(first.sink), pytest.warns(Warning, match="recording this process already"):
        ulpscope.mindspore.Capture.into_sink(second.sink).start()
    assert second.ranks() == ()


def test_neither_framework_is_imported_unless_it_is_needed() -> None:
    told = "print('mindspore' in sys.modules, 'torch' in sys.modules)"
    script = f"import sys, ulpscope, ulpscope.mindspore as door; {told}; door.Capture('nowhere'); import ulpscope.capture_mindspore; {told}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False", "True", "False"]
