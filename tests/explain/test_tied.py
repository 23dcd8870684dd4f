# SPDX-License-Identifier: Apache-2.0
"""Weights that are tied in one program only."""

from __future__ import annotations

import pytest

from tests.explain.programs import compared, views_of
from ulpscope.explain.entries.tied import explain_tied


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_copy_instead_of_the_weight_itself(keep: str) -> None:
    found = explain_tied(views_of(compared("copied", "tied", keep=keep))[0])
    assert found is not None
    assert (found.level, found.kind, found.slot) == ("fault", "parameters", "parameter.head.weight")
    assert found.headline == "weights are tied in the reference only: parameter head.weight, step 0, rank 0"


def test_the_other_way_round() -> None:
    found = explain_tied(views_of(compared("tied", "copied"))[0])
    assert found is not None
    assert "tied in the subject only" in found.headline


def test_two_weights_of_their_own_are_not_tied() -> None:
    assert explain_tied(views_of(compared("", "tied"))[0]) is None
    assert [explain_tied(view) for view in views_of(compared("", ""))] == [None] * 3
