# SPDX-License-Identifier: Apache-2.0
"""Converting a model swaps its parameters where torch is asked to, and torch refuses to swap a parameter with a weak reference to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("options", [{}, {"keep": "tensors"}, {"level": "both"}, {"watch": "nonfinite"}], ids=str)
def test_a_model_is_converted_while_it_is_recorded(tmp_path: Path, options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ulpscope.Capture(tmp_path / "run", model=model, **options):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.to(torch.float64)
        assert model(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
