# SPDX-License-Identifier: Apache-2.0
"""Slots pair by place, by value passed otherwise, and by name; each stands in one pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.match.building import record
from ulpscope.match import Mapping, match_calls, pair_slots
from ulpscope.model import CallRecord, Slot, TensorRecord


def with_slots(names: Iterable[str], shapes: Iterable[tuple[int, ...]] | None = None, op: str = "functional.linear") -> CallRecord:
    names = list(names)
    shapes = list(shapes or [(4, at + 1) for at in range(len(names))])
    slots = tuple(TensorRecord(slot=Slot.parse(name), dtype="float32", shape=shape) for name, shape in zip(names, shapes, strict=True))
    return replace(record(op), slots=slots)


def paired(subject: CallRecord, reference: CallRecord, mapping: Mapping | None = None) -> list[tuple[str | None, str | None]]:
    pairs = pair_slots(subject, reference, mapping)
    return [(pair.subject and str(pair.subject.slot), pair.reference and str(pair.reference.slot)) for pair in pairs]


def test_the_same_slot_pairs() -> None:
    call = with_slots(["input.0", "input.1", "output.0"])
    assert paired(call, call) == [(name, name) for name in ("input.0", "input.1", "output.0")]


def test_position_against_keyword() -> None:
    assert paired(with_slots(["input.0", "input.1"]), with_slots(["input.0", "input.weight"])) == [
        ("input.0", "input.0"),
        ("input.1", "input.weight"),
    ]


def test_a_keyword_of_another_shape_is_another_argument() -> None:
    ours, theirs = with_slots(["input.0", "input.1"]), with_slots(["input.0", "input.mask"], [(4, 1), (9, 9)])
    assert paired(ours, theirs) == [("input.0", "input.0"), ("input.1", None), (None, "input.mask")]


def test_a_missing_slot_has_one_side() -> None:
    assert paired(with_slots(["input.0"]), with_slots(["input.0", "input.1"])) == [("input.0", "input.0"), (None, "input.1")]


def test_renamed_parameters_pair_in_order_when_all_shapes_agree() -> None:
    ours, theirs = with_slots(["parameter.layers.0.w", "parameter.layers.1.w"]), with_slots(["parameter.h.0.w", "parameter.h.1.w"])
    assert paired(ours, theirs) == [("parameter.layers.0.w", "parameter.h.0.w"), ("parameter.layers.1.w", "parameter.h.1.w")]


def test_a_mapping_renames_parameters() -> None:
    ours = with_slots(["parameter.layers.0.w", "parameter.layers.1.w"], [(1,), (2,)])
    theirs = with_slots(["parameter.h.1.w", "parameter.h.0.w"], [(2,), (1,)])
    mapping = Mapping.parse("layers.* -> h.*")
    assert paired(ours, theirs, mapping) == [("parameter.layers.0.w", "parameter.h.0.w"), ("parameter.layers.1.w", "parameter.h.1.w")]


def test_operations_of_other_names_pair_by_value_then_by_shape() -> None:
    ours = with_slots(["input.0", "input.1", "input.2"], [(4, 8), (16, 8), (16,)])
    theirs = with_slots(["input.0", "input.1", "input.2"], [(16,), (4, 8), (16, 8)], op="torch.addmm")
    assert paired(ours, theirs) == [("input.0", "input.1"), ("input.1", "input.2"), ("input.2", "input.0")]


def test_backward_pairs_as_the_arguments_of_its_forward_call_did() -> None:
    """One tool records gradients in the order of arguments, the other in that of the keywords: all have one shape."""
    forward = [
        with_slots(["input.0", "input.weight", "input.bias"], [(4, 8), (8,), (8,)]),
        with_slots(["input.0", "input.2", "input.3"], [(4, 8), (8,), (8,)]),
    ]
    shapes = [(4, 8), (4, 8), (8,), (8,)]
    backward = [
        replace(with_slots(["input.0", "output.0", "output.bias", "output.weight"], shapes), phase="backward", order=1),
        replace(with_slots(["input.0", "output.0", "output.2", "output.3"], shapes), phase="backward", order=1),
    ]
    _, pair = match_calls([forward[0], backward[0]], [forward[1], backward[1]])
    assert [(str(one.subject.slot), str(one.reference.slot)) for one in pair.slots if one.subject and one.reference] == [
        ("input.0", "input.0"),
        ("output.0", "output.0"),
        ("output.bias", "output.3"),
        ("output.weight", "output.2"),
    ]
