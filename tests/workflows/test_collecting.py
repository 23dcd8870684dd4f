# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ulpscope.workflows.compare.garbage import rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before, is_enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before)
    gc.enable() if is_enabled else gc.disable()


def test_thresholds_come_back_whatever_happens() -> None:
    gc.set_threshold(700, 10, 10)

    @rare_collections()
    def fail() -> None:
        assert gc.get_threshold()[0] > 700
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("chosen", [(0, 10, 10), (100_000, 10, 10)])
def test_what_the_user_chose_is_left_alone(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)
    with rare_collections():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_switched_off_stays_off() -> None:
    gc.disable()
    with rare_collections():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_as_a_decorator_it_keeps_the_answer() -> None:
    @rare_collections()
    def first_threshold() -> int:
        return gc.get_threshold()[0]

    gc.set_threshold(700, 10, 10)
    assert first_threshold() > 700
    assert gc.get_threshold()[0] == 700
