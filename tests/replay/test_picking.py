# SPDX-License-Identifier: Apache-2.0
"""Indices that differ and are right all the same; factors that differ by signs."""

from __future__ import annotations

import torch

from ulpscope.model import CallName, Slot
from ulpscope.replay.yardstick.gauges import has_free_signs, with_signs_of
from ulpscope.replay.yardstick.picking import picks_the_same


def test_equal_elements_in_another_order() -> None:
    values = torch.tensor([[3, 1, 3, 1]])
    assert picks_the_same([values], torch.tensor([[1, 3, 0, 2]]), torch.tensor([[3, 1, 2, 0]]))


def test_other_elements_are_not_the_same() -> None:
    values = torch.tensor([[3, 1, 3, 2]])
    assert not picks_the_same([values], torch.tensor([[1, 3, 0, 2]]), torch.tensor([[3, 1, 2, 0]]))


def test_one_element_twice_is_no_choice() -> None:
    values = torch.tensor([[3, 1, 3, 1]])
    assert not picks_the_same([values], torch.tensor([[1, 1, 0, 2]]), torch.tensor([[3, 1, 2, 0]]))


def test_what_is_no_index_of_anything() -> None:
    assert not picks_the_same([torch.zeros(1, 2)], torch.tensor([[5, 6]]), torch.tensor([[6, 5]]))


def test_signs_of_eigenvectors_are_free_and_their_directions_are_not() -> None:
    call, slot = CallName("linalg.eigh", 0), Slot.parse("output.1")
    _, exact = torch.linalg.eigh(torch.diag(torch.arange(1.0, 5.0)) + 0.1)
    flipped = exact * torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert has_free_signs(call)
    assert torch.equal(with_signs_of(call, {slot: flipped}, {slot: exact})[slot], exact)
    assert not torch.allclose(with_signs_of(call, {slot: exact.flip(1)}, {slot: exact})[slot], exact)
