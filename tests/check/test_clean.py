# SPDX-License-Identifier: Apache-2.0
"""Sound kernels are not blamed: recordings of small real networks, on the CPU that made them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.check.networks import NETWORKS, VARIANTS, record
from ulpscope.model.check.checks import Check
from ulpscope.workflows.check.checking import check_run

QUICK = [("gpt", "float32", "tensors"), ("unet", "half", "statistics"), ("experts", "amp", "tensors")]
ALL = [(name, variant, keep) for name in NETWORKS for variant in VARIANTS for keep in ("tensors", "statistics")]


def _assert_sound(check: Check) -> None:
    assert [(call.name, call.phase, call.reason) for call in check.calls if call.status in ("failed", "warning")] == []
    assert check.coverage >= 0.97, check.reasons
    assert not check.precision


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("name", "variant", "keep"), QUICK)
def test_nothing_fails_on_a_clean_cpu(tmp_path: Path, name: str, variant: str, keep: str) -> None:
    check = check_run(record(name, tmp_path / "run", variant=variant, keep=keep), isolated=False)
    _assert_sound(check)
    phases = {call.phase for call in check.calls}
    assert phases == {"forward", "backward", "optimizer"}
    assert {call.data for call in check.calls if call.phase == "backward"} == {"recorded" if keep == "tensors" else "generated"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("name", "variant", "keep"), [one for one in ALL if one not in QUICK])
def test_nothing_fails_on_a_clean_cpu_anywhere(tmp_path: Path, name: str, variant: str, keep: str) -> None:
    _assert_sound(check_run(record(name, tmp_path / "run", variant=variant, keep=keep, steps=2), isolated=False))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_no_seed_makes_inputs_that_blame_a_sound_kernel(tmp_path: Path, seed: int) -> None:
    for name in NETWORKS:
        _assert_sound(check_run(record(name, tmp_path / f"{name}{seed}", keep="statistics"), isolated=False, seed=seed))


def test_the_answer_is_the_same_each_time(tmp_path: Path) -> None:
    path = record("experts", tmp_path / "run", keep="statistics")
    first, again = (check_run(path, isolated=False, seed=3, select="*linear*") for _ in range(2))
    assert [call.slots for call in first.calls] == [call.slots for call in again.calls]
    other = check_run(path, isolated=False, seed=4, select="*linear*")
    assert [call.slots for call in first.calls] != [call.slots for call in other.calls]


def test_dropout_is_judged_by_its_share_and_what_it_keeps(tmp_path: Path) -> None:
    from ulpscope import Capture

    with Capture(tmp_path / "run", keep="statistics") as capture:
        values = torch.randn(64, 64).requires_grad_()
        torch.nn.functional.dropout(values, 0.3).sum().backward()
        torch.bernoulli(torch.rand(50, 50))
        capture.step()
    check = check_run(tmp_path / "run", isolated=False, select=["*dropout*", "*bernoulli*"])
    assert [(call.call.short, call.is_random, call.status) for call in check.calls] == [
        ("dropout", True, "passed"),
        ("dropout", True, "passed"),
        ("bernoulli", True, "passed"),
    ]
    assert all(slot.drawn is not None and slot.drawn.distance < 8 for call in check.calls for slot in call.slots)
