# SPDX-License-Identifier: Apache-2.0
"""Calls pair by name where they can, by likeness where they must, and never crosswise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.match.building import numbered, record
from ulpscope.match import Mapping, match_calls
from ulpscope.model import CallRecord, Pair

OPS = ("functional.linear", "functional.gelu", "torch.add", "torch.matmul")
calls = st.lists(
    st.builds(
        lambda op, module, width: record(op, module=module, shapes=((4, width),)),
        st.sampled_from(OPS),
        st.sampled_from(("", "layers.0", "layers.1")),
        st.sampled_from((8, 16)),
    ),
    max_size=40,
).map(numbered)


def network(prefix: str = "layers", layers: int = 4) -> list[CallRecord]:
    ops = ("functional.layer_norm", "functional.linear", "functional.gelu", "functional.linear", "torch.add")
    return numbered([record(op, module=f"{prefix}.{at}") for at in range(layers) for op in ops])


def positions(pairs: list[Pair]) -> list[tuple[int | None, int | None]]:
    return [(pair.subject and pair.subject.order, pair.reference and pair.reference.order) for pair in pairs]


def lone(pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.subject is None or pair.reference is None]


def check_order(pairs: list[Pair]) -> None:
    for side in ("subject", "reference"):
        orders = [getattr(pair, side).order for pair in pairs if getattr(pair, side)]
        assert orders == sorted(orders)


@given(calls)
def test_a_run_matches_itself_one_to_one(records: list[CallRecord]) -> None:
    pairs = match_calls(records, records)
    assert positions(pairs) == [(one.order, one.order) for one in records]
    assert all(pair.matched_by == "name" for pair in pairs)


@given(calls, st.data())
def test_removed_calls_are_exactly_the_unmatched(records: list[CallRecord], data: st.DataObject) -> None:
    removed = data.draw(st.sets(st.integers(0, max(len(records) - 1, 0)), max_size=10)) if records else set()
    shorter = numbered([one for at, one in enumerate(records) if at not in removed])
    pairs = match_calls(shorter, records)
    assert len(lone(pairs)) == len(removed)
    assert all(pair.subject is None for pair in lone(pairs))
    check_order(pairs)


@given(calls, calls)
def test_every_record_stands_in_one_pair_and_the_order_is_kept(left: list[CallRecord], right: list[CallRecord]) -> None:
    pairs = match_calls(left, right)
    check_order(pairs)
    assert sorted(pair.subject.order for pair in pairs if pair.subject) == list(range(len(left)))
    assert sorted(pair.reference.order for pair in pairs if pair.reference) == list(range(len(right)))
    assert len(lone(match_calls(right, left))) == len(lone(pairs))


def test_renamed_modules_pair_by_alignment() -> None:
    pairs = match_calls(network("layers"), network("h"))
    assert not lone(pairs)
    assert {pair.matched_by for pair in pairs} == {"alignment"}
    check_order(pairs)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("Tensor.matmul", "torch.matmul"),
        ("functional.softmax", "Tensor.softmax"),
        ("Tensor.__iadd__", "torch.add"),
        ("Tensor.add_", "aten.add.Tensor"),
        ("torch.bmm", "torch.matmul"),
        ("npu.npu_gelu", "functional.gelu"),
        ("Tensor.truediv", "Tensor.div"),
    ],
)
def test_the_same_operation_under_another_name_pairs(here: str, there: str) -> None:
    around = ("functional.linear", "functional.layer_norm")
    left, right = (numbered([record(around[0]), record(op), record(around[1])]) for op in (here, there))
    assert positions(match_calls(left, right)) == [(0, 0), (1, 1), (2, 2)]


def test_unlike_operations_stay_unmatched() -> None:
    left, right = (numbered([record("functional.linear"), record(op), record("functional.linear")]) for op in ("torch.sin", "torch.cat"))
    assert positions(match_calls(left, right)) == [(0, 0), (None, 1), (1, None), (2, 2)]


def test_of_two_like_calls_the_one_with_the_same_values_pairs() -> None:
    left = numbered([record(values=("u1:a", "u1:b")), record(values=("u1:b", "u1:c"))])
    right = numbered([record(values=("u1:b", "u1:c"))])
    assert positions(match_calls(left, right)) == [(0, None), (1, 0)]


def test_of_two_like_calls_the_one_on_the_same_line_pairs_even_when_lines_moved() -> None:
    left = numbered([record(code="x = x + noise"), record(code="x = x + y")])
    right = numbered([record(code="x = x + y")])
    assert positions(match_calls(left, right)) == [(0, None), (1, 0)]


def test_fused_calls_leave_their_neighbours_paired() -> None:
    unfused = ("torch.matmul", "Tensor.div", "Tensor.softmax", "torch.matmul")
    wrap = lambda inner: numbered([record("functional.linear"), *map(record, inner), record("functional.layer_norm")])  # noqa: E731
    pairs = match_calls(wrap(unfused), wrap(["functional.scaled_dot_product_attention"]))
    assert positions(pairs)[0] == (0, 0)
    assert positions(pairs)[-1] == (5, 2)
    assert len(lone(pairs)) == 5


def test_calls_of_other_levels_never_pair() -> None:
    assert len(lone(match_calls([record("torch.add")], [record("torch.add", level="module")]))) == 2


def test_recomputed_calls_pair_with_recomputed_ones_only() -> None:
    forward = network(layers=1)
    again = [replace(one, recompute=True, order=10 + one.order) for one in forward]
    pairs = match_calls([*forward, *again], forward)
    assert {pair.subject.recompute for pair in lone(pairs) if pair.subject} == {True}
    assert len(lone(pairs)) == len(again)
    assert not lone(match_calls([*forward, *again], [*forward, *again]))


def test_backward_follows_the_pairing_of_its_forward_call() -> None:
    left = numbered([record("torch.sin"), record("functional.linear"), record("functional.linear")])
    right = numbered([record("functional.linear"), record("functional.linear")])
    backward = [replace(one, phase="backward", order=10 - one.order) for one in (*left[1:],)]
    theirs = [replace(one, phase="backward", order=10 - one.order) for one in right]
    pairs = match_calls([*left, *backward], [*right, *theirs])
    found = {(str(p.subject.call), str(p.reference.call)) for p in pairs if p.subject and p.reference and p.record.phase == "backward"}
    assert found == {("functional.linear.0", "functional.linear.0"), ("functional.linear.1", "functional.linear.1")}


def test_backward_calls_without_a_forward_call_are_aligned() -> None:
    ops = [record(op, level="op", phase="backward") for op in ("aten.mm.default", "aten.t.default", "aten.mm.default")]
    assert not lone(match_calls(numbered(ops), numbered(ops)))
    assert len(lone(match_calls(numbered(ops[1:]), numbered(ops)))) == 1


def test_state_pairs_by_name_and_optimizers_of_another_class_in_order() -> None:
    def state(*names: tuple[str, str]) -> list[CallRecord]:
        return [record(op, order=at, phase=phase, level="state") for at, (op, phase) in enumerate(names)]

    left = state(("state.rng", "start"), ("state.batch", "start"), ("optimizer.SGD", "optimizer"))
    right = state(("state.batch", "start"), ("optimizer.AdamW", "optimizer"))
    assert positions(match_calls(left, right)) == [(0, None), (1, 0), (2, 1)]


def test_a_mapping_renames_modules_and_operations() -> None:
    left = numbered([record("npu.fast_norm", module="layers.0"), record("functional.linear", module="layers.0")])
    right = numbered([record("functional.layer_norm", module="h.0"), record("functional.linear", module="h.0")])
    mapping = Mapping.parse("layers.0/npu.fast_norm.* -> h.0/functional.layer_norm.*\nlayers.* -> h.*")
    pairs = match_calls(left, right, mapping)
    assert positions(pairs) == [(0, 0), (1, 1)]
    assert [pair.matched_by for pair in pairs] == ["mapping", "mapping"]


@pytest.mark.parametrize("num_removed", [0, 50])
def test_twenty_thousand_calls(num_removed: int) -> None:
    records = network(layers=4000)
    step = len(records) // num_removed if num_removed else len(records) + 1
    shorter = numbered([one for at, one in enumerate(records) if at % step != 3 % step or not num_removed])
    assert len(lone(match_calls(shorter, records))) == len(records) - len(shorter)


def test_large_blocks_without_anchors_stay_cheap_and_ordered() -> None:
    left = numbered([record("torch.add") for _ in range(4000)])
    right = numbered([record("torch.add") for _ in range(5000)])
    pairs = match_calls(left, right)
    assert len(lone(pairs)) == 1000
    check_order(pairs)
    assert len(lone(match_calls(left, numbered([record("torch.sin") for _ in range(4000)])))) == 8000


def test_large_blocks_that_only_look_alike_are_aligned_within_a_band() -> None:
    left = numbered([record("Tensor.mm", module=f"a{at}", shapes=((4, at % 97 + 1),)) for at in range(600)])
    right = numbered([record("torch.matmul", module=f"b{at}", shapes=((4, at % 89 + 1),)) for at in range(500)])
    check_order(match_calls(left, right))
