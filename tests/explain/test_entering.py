# SPDX-License-Identifier: Apache-2.0
"""One bucket against many: collective calls on other shapes are no fault where the optimizers agree."""

from __future__ import annotations

import numpy as np
import pytest

from tests.explain.programs import views_of
from tests.match.building import Recorder
from ulpscope.explain.entries.entering import explain_entering
from ulpscope.explain.programs.missing import explain_missing
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.comparing import compare_runs


def reduced(*, is_flat: bool, factor: float = 1.0) -> MemoryRun:
    run = MemoryRun()
    recorder = Recorder(run, 0, "tensors", lambda where, value: value)
    recorder.begin(0)
    gradients = [np.linspace(1, 2, size, dtype="f4") for size in (6, 4)]
    for bucket in [np.concatenate(gradients)] if is_flat else gradients:
        recorder.write("forward", "", "distributed.all_reduce", {"input.0": bucket, "mutated.0": 2 * bucket})
    after = {f"gradient.{name}": np.float32(2 * factor) * one for name, one in zip("ab", gradients, strict=True)}
    recorder.write("optimizer", "", "optimizer.SGD", after)
    recorder.sink.close()
    return run


@pytest.mark.parametrize(("factor", "num_found"), [(1.0, 0), (1.5, 1)])
def test_buckets_of_another_size(factor: float, num_found: int) -> None:
    [view] = views_of(compare_runs(reduced(is_flat=True, factor=factor), reduced(is_flat=False), replay="none"))
    assert view.divergence is not None
    assert sum(explain(view) is not None for explain in (explain_missing, explain_entering)) == num_found
