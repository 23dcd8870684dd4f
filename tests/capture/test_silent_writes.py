# SPDX-License-Identifier: Apache-2.0
"""Operations that write to tensors without raising their version: the values recorded afterwards are the new ones."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from ulpscope import Capture, open_run
from ulpscope.capture.intercept.naming import op_name, silently_written, writes_silently
from ulpscope.model import CallRecord


def test_gradients_are_read_again_after_unscaling(tmp_path: Path) -> None:
    """torch's unscaling does not raise the version of the gradients that it divides."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Capture(tmp_path / "run", optimizer=optimizer, keep="statistics"):
        scaler.scale((weight * weight).sum()).backward()
        torch.linalg.vector_norm(weight.grad)
        scaler.unscale_(optimizer)
        torch.linalg.vector_norm(weight.grad)
        scaler.step(optimizer)
    run = open_run(tmp_path / "run")
    norms = [record for record in run.records(0, 0) if "vector_norm" in record.call.op and record.phase == "forward"]
    largest = [record.slots[0].summary.max for record in norms if record.slots[0].summary]
    assert largest == [256 * 6.0, 6.0]
    [step] = [record for record in run.records(0, 0) if record.phase == "optimizer"]
    [gradient] = [slot for slot in step.slots if slot.slot.role == "gradient"]
    assert gradient.summary is not None
    assert gradient.summary.max == 6.0


@pytest.mark.parametrize(
    ("op", "is_silent"),
    [
        ("torch._amp_foreach_non_finite_check_and_unscale_", True),
        ("torch._foreach_mul_", True),
        ("torch._foreach_mul", False),
        ("Tensor.mul_", False),
        ("Tensor.__iadd__", False),
    ],
)
def test_which_operations_those_are(op: str, is_silent: bool) -> None:
    assert writes_silently(op) is is_silent


@pytest.mark.parametrize(
    ("op", "places"),
    [
        ("torch.native_batch_norm", {3, 4}),
        ("torch._native_batch_norm_legit", {3, 4}),
        ("aten._native_batch_norm_legit.default", {3, 4}),
        ("ops.aten._batch_norm_with_update", {3, 4}),
        ("torch.batch_norm_update_stats", {1, 2}),
        ("torch.batch_norm_gather_stats_with_counts", {3, 4}),
        ("torch.fused_moving_avg_obs_fake_quant", {3, 4, 5, 6}),
        ("torch._native_batch_norm_legit_no_training", set()),
        ("torch.native_batch_norm_backward", set()),
        ("torch.matmul", set()),
    ],
)
def test_what_they_write_is_read_from_their_schemas(op: str, places: set[int]) -> None:
    found = silently_written(op, (None,) * 5 + (True,), {})
    assert {place for place in found if isinstance(place, int)} == places


@pytest.mark.parametrize("level", ["api", "op"])
def test_what_an_observer_writes_is_a_result(tmp_path: Path, level: Any) -> None:
    """Quantisation-aware training keeps the range of its activations in buffers whose version torch does not raise."""
    one, ranges, scale = torch.ones(1, dtype=torch.long), (torch.zeros(1), torch.zeros(1)), torch.ones(1)
    written = []
    with Capture(tmp_path / "run", keep="tensors", level=level):
        for _ in range(2):
            torch.fused_moving_avg_obs_fake_quant(
                torch.arange(4.0), one, one, *ranges, scale, torch.zeros(1, dtype=torch.int), 0.5, 0, 255, 0
            )
            written.append(float(ranges[1]))
    calls = [record for record in open_run(tmp_path / "run").records(0, 0) if "moving_avg_obs" in record.call.op]
    largest = [_largest(calls[0], "mutated"), _largest(calls[1], "input"), _largest(calls[1], "mutated")]
    assert largest == [written[0], written[0], written[1]]
    assert 0 < written[0] < written[1]


def _largest(call: CallRecord, role: str) -> float | None:
    """Return the value of the observer's running maximum, the fifth argument."""
    found = next(one for one in call.slots if one.slot.role == role and one.slot.path in ((4,), ("running_max",)))
    return found.summary.max if found.summary is not None else None


class _Normalised(torch.autograd.Function):
    """A Function that updates the buffers it is given, through an operation that raises no version."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return torch.native_batch_norm(values, None, None, mean, variance, True, 0.5, 1e-5)[0]


def test_buffers_of_a_function_are_read_again(tmp_path: Path) -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    before = []
    with Capture(tmp_path / "run", keep="statistics"):
        for _ in range(3):
            before.append(float(mean.mean()))
            _Normalised.apply(torch.arange(12.0).reshape(4, 3), mean, variance)
    calls = [record for record in open_run(tmp_path / "run").records(0, 0) if record.call.op.startswith("Function.")]
    seen = [next(slot.summary.mean for slot in call.slots if slot.slot.path == (1,) and slot.summary) for call in calls]
    assert seen == pytest.approx(before)
    assert len(set(seen)) == 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of what torch has deprecated, too
def test_every_operator_that_writes_without_telling_is_known() -> None:
    """Call each of torch's operators on its samples: an argument that changes has a higher version, or is known to be written."""
    from torch.testing._internal.common_methods_invocations import op_db

    unknown = set()
    for operator in op_db:
        if torch.float32 not in operator.supported_dtypes("cpu"):
            continue
        for sample in islice(operator.sample_inputs("cpu", torch.float32), 40):
            with suppress(AssertionError, NotImplementedError):  # jiterator's operators need a GPU
                unknown |= _written_unseen(operator.op, (sample.input, *sample.args), sample.kwargs)
    assert not unknown


def _written_unseen(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    given = [(place, one) for place, one in [*enumerate(args), *kwargs.items()] if isinstance(one, torch.Tensor)]
    kept = [(place, one, one.clone(), one._version) for place, one in given if one.layout is torch.strided]
    function(*args, **kwargs)
    changed = [(place, one) for place, one, before, version in kept if one._version == version and one.shape == before.shape]
    name = op_name(function) or repr(function)
    known = silently_written(name, args, kwargs)
    before_of = {place: before for place, _, before, _ in kept}
    return {f"{name}: {place}" for place, one in changed if place not in known and not _has_equal_bits(one, before_of[place])}


def _has_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one != one, other != other)
