# SPDX-License-Identifier: Apache-2.0
"""The three planners (Python, Cython, C++) find the same places for hooks in the graph of any call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.backward import edges_of, plan_call
from ulpscope.capture.walk import Found, slot_and_mark

pytestmark = pytest.mark.compiled("recorder")

PLANNERS = ["cython", *(["native"] if COMPILED is not None and COMPILED.HAS_NATIVE else [])]
SIDE = 4

STEPS: dict[str, Any] = {  # of two square matrices one, of any kind of node
    "add": lambda x, y: x + y,
    "mm": lambda x, y: x @ y,
    "linear": lambda x, y: torch.nn.functional.linear(x.view(2, 2, SIDE), y).view(SIDE, SIDE),
    "sin": lambda x, y: x.sin(),
    "t": lambda x, y: x.t(),
    "view": lambda x, y: x.reshape(2, -1).reshape(SIDE, SIDE),
    "unsafe_view": lambda x, y: torch.ops.aten._unsafe_view(x, [SIDE, SIDE]),
    "half": lambda x, y: x.to(torch.bfloat16).float(),
    "low": lambda x, y: (x.to(torch.bfloat16) @ y.to(torch.bfloat16)).float(),
    "part": lambda x, y: torch.cat([x[:2], y[2:]]),
    "halves": lambda x, y: torch.cat(x.chunk(2)[::-1]),
    "expand": lambda x, y: x[0].expand(SIDE, SIDE),
    "detach": lambda x, y: x.detach() + y,
    "in_place": lambda x, y: (x * 1).mul_(y),
    "under_view": lambda x, y: _written_below(x * 1, y),
}


def _written_below(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:3].mul_(y[1:3])
    return x


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int, int]], list[int], list[bool]]:
    """Draw kinds of inputs, the steps of a call with the numbers of their operands, the numbers of its results, and views of these."""
    inputs = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    steps = []
    for made in range(draw(st.integers(1, 7))):
        there = st.integers(0, len(inputs) + made - 1)
        steps.append((draw(st.sampled_from(sorted(STEPS))), draw(there), draw(there)))
    everything = st.integers(0, len(inputs) + len(steps) - 1)
    results = [len(inputs) + len(steps) - 1, *draw(st.lists(everything, max_size=2))]
    return inputs, steps, results, draw(st.lists(st.booleans(), min_size=len(results), max_size=len(results)))


def _input(kind: int) -> torch.Tensor:
    leaf = torch.ones(SIDE, SIDE, requires_grad=kind != 5)
    made = [leaf, leaf * 2, (leaf * 2).t(), (leaf * 3).view(2, -1).view(SIDE, SIDE), leaf.to(torch.bfloat16).float(), leaf]
    return made[kind]


def _run(
    inputs: list[torch.Tensor], steps: list[tuple[str, int, int]], results: list[int], views: list[bool], into: int | None
) -> list[torch.Tensor]:
    made = list(inputs)
    for name, left, right in steps:
        made.append(STEPS[name](made[left], made[right]))
    if into is not None and made[into].grad_fn is not None:
        made[into].add_(1)  # a call that writes to what it was given
    return [made[number].view(-1, 2) if is_view else made[number] for number, is_view in zip(results, views, strict=True)]


def _plain(entering: Any, leaving: Any) -> tuple[list[tuple[int, str]], list[tuple[int, str, Any]]]:
    pairs = entering.items() if isinstance(entering, dict) else entering or ()
    return (
        [(place, str(slot)) for place, slot in pairs],
        [(place, str(slot), view if view is True or view is None else str(view)) for place, slot, view in leaving],
    )


@settings(max_examples=300)
@given(call=calls(), looks_through=st.booleans(), writes=st.booleans())
def test_the_planners_agree(call: Any, looks_through: bool, writes: bool) -> None:
    kinds, steps, results, views = call
    inputs = [_input(kind) for kind in kinds]
    into = next((number for number, tensor in enumerate(inputs) if not tensor.is_leaf), None) if writes else None
    found: list[Found] = [(slot_and_mark("input", (number,))[0], tensor) for number, tensor in enumerate(inputs)]
    edges = edges_of(found)
    others = {planner: COMPILED.edges_by(planner, found) for planner in PLANNERS}
    try:
        returned = _run(inputs, steps, results, views, into)
    except RuntimeError:  # torch refuses to write to this in place
        return
    assert all(tensor.grad_fn is None or tensor.grad_fn.name() for tensor in returned)  # a view written to gets its node when asked
    outputs: list[Found] = [(slot_and_mark("output", (number,))[0], tensor) for number, tensor in enumerate(returned)]
    plan = plan_call(edges, outputs, looks_through=looks_through)
    nodes = [_plain(entering, leaving) for _, entering, leaving in plan.nodes]
    behind = None if plan.behind is None else (str(plan.behind[1]), plan.behind[2])
    for planner, theirs in others.items():
        other, other_behind = COMPILED.plan_by(theirs, outputs, looks_through)
        assert [_plain(*node) for node in other] == nodes, planner
        assert (other_behind and (str(other_behind[0]), other_behind[1])) == behind, planner


def test_each_looks_through_the_views_of_a_linear_layer() -> None:
    x, weight = torch.ones(2, 3, SIDE, requires_grad=True), torch.ones(5, SIDE, requires_grad=True)
    found: list[Found] = [(slot_and_mark("input", (number,))[0], tensor) for number, tensor in enumerate((x, weight))]
    edges = edges_of(found)
    outputs: list[Found] = [(slot_and_mark("output", (0,))[0], torch.nn.functional.linear(x, weight))]
    through, straight = (plan_call(edges, outputs, looks_through=looks).nodes for looks in (True, False))
    assert len(through) < len(straight)
    assert {view for _, _, leaving in through for _, _, view in leaving} == {True, (2, 3, SIDE)}
