# SPDX-License-Identifier: Apache-2.0
"""Pairing by keys alone: in rounds from strict to loose, and of lists that are read side by side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ulpscope.match.queues import QueueKeys, pair_in_queues
from ulpscope.match.rounds import in_order, pair_in_rounds

NAMES = st.lists(st.sampled_from(["a.1", "a.2", "b.1", "b.2", "c.1"]), max_size=8)


def loose(names: list[str]) -> list[str | None]:
    return [None if name.startswith("c") else name[0] for name in names]


def test_the_first_of_a_name_is_the_partner_of_the_first() -> None:
    assert pair_in_rounds([(["a", "b", "a"], ["a", "a", "b"])]) == {0: 0, 1: 2, 2: 1}


def test_a_later_round_sees_only_what_is_left_and_has_a_key() -> None:
    left, right = ["a.1", "a.3", "c.1"], ["a.1", "a.7", "c.2"]
    assert pair_in_rounds([(left, right), (loose(left), loose(right))]) == {0: 0, 1: 1}


@given(NAMES, NAMES)
def test_rounds_pair_each_place_once_and_by_an_equal_key(left: list[str], right: list[str]) -> None:
    partners = pair_in_rounds([(left, right), (loose(left), loose(right))])
    assert len(set(partners.values())) == len(partners)
    assert all(left[i] == right[j] or loose(left)[i] == loose(right)[j] for i, j in partners.items())
    for name in set(left):
        strict = [j for i, j in sorted(partners.items()) if left[i] == right[j] == name]
        assert strict == sorted(strict)
        assert len(strict) == min(left.count(name), right.count(name))


@given(NAMES, NAMES)
def test_every_place_stands_in_the_order_once(left: list[str], right: list[str]) -> None:
    partners = pair_in_rounds([(left, right)])
    found = list(in_order(partners, len(left), len(right)))
    assert [i for i, _ in found if i is not None] == list(range(len(left)))
    assert sorted(j for _, j in found if j is not None) == list(range(len(right)))
    assert {i: j for i, j in found if i is not None and j is not None} == partners


def test_what_waited_before_a_partner_is_given_up() -> None:
    keys = [[QueueKeys([name], [name]) for name in names] for names in ("xab", "bay")]
    assert list(pair_in_queues(*keys)) == [(1, 1)]


def test_an_item_may_look_for_other_keys_than_its_own() -> None:
    function, operator = QueueKeys(["conv2d", "f:conv2d"], ["conv2d", "a:conv2d"]), QueueKeys(["aten", "a:conv2d"], ["aten", "f:conv2d"])
    assert list(pair_in_queues([function], [operator])) == [(0, 0)]
    assert list(pair_in_queues([operator], [operator])) == [(0, 0)]
