# SPDX-License-Identifier: Apache-2.0
"""The same elements in the same order in another shape are read once: every view gets the values of a separate read."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.capture import tensor_cases
from tests.capture.test_devices import LateSummaries
from ulpscope.capture.device.queue import Devices
from ulpscope.capture.record.tensor_reader import TensorReader, record_of
from ulpscope.model import Slot, TensorRecord

SLOT = Slot.parse("input.0")
DTYPES = ("float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64")


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw a tensor of up to four dimensions, and views of views of it; many have the same elements as another one."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=4))
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    count = 2
    for size in sizes:
        count *= size
    memory = torch.arange(-3, count - 3, dtype=torch.float32).to(dtype)
    found = [memory[draw(st.integers(0, 1)) :][: count // 2].reshape(sizes)]
    for _ in range(draw(st.integers(1, 12))):
        found.append(_view(draw, draw(st.sampled_from(found))))
    return found


def _view(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    kind = draw(
        st.sampled_from(("merge", "split", "swap", "select", "step", "chunk", "expand", "unsqueeze", "squeeze", "strided", "mirror"))
    )
    dims = tensor.dim()
    dim = draw(st.integers(0, dims - 1)) if dims else 0
    if kind == "unsqueeze":
        return tensor.unsqueeze(draw(st.integers(0, dims)))
    if kind == "expand":
        return tensor.expand(draw(st.integers(1, 3)), *tensor.shape) if dims < 6 else tensor
    if kind == "mirror":
        return tensor.conj() if tensor.is_complex() else torch._neg_view(tensor) if tensor.is_floating_point() else tensor
    if kind == "strided":
        sizes = draw(st.lists(st.integers(1, 3), max_size=3))
        strides = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
        reach = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return tensor.as_strided(sizes, strides) if (reach + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes() else tensor
    if not dims:
        return tensor.view(1)
    if kind == "merge":
        try:
            return tensor.view(-1)
        except RuntimeError:
            return tensor
    if kind == "split":
        size = tensor.shape[dim]
        factor = next((factor for factor in (2, 3) if size % factor == 0), 1)
        return tensor.unflatten(dim, (factor, size // factor)) if dims < 6 and size else tensor
    if kind == "swap":
        return tensor.transpose(dim, draw(st.integers(0, dims - 1)))
    if kind == "select":
        return tensor.select(dim, draw(st.integers(0, tensor.shape[dim] - 1))) if tensor.shape[dim] else tensor
    if kind == "step":
        first, step = draw(st.integers(0, 1)), draw(st.integers(1, 3))
        return tensor[(slice(None),) * dim + (slice(first, None, step),)]
    if kind == "chunk":
        return draw(st.sampled_from(tensor.chunk(2, dim)))
    return tensor.squeeze()


class _Late(TensorReader):
    """The host as a device that reads late."""

    def _new_form(self, tensor: torch.Tensor, strides: Any) -> Any:
        form = super()._new_form(tensor, strides)
        form.is_on_host = False
        return form


def _records(tensors: list[torch.Tensor], keep: Any, *, is_late: bool) -> list[TensorRecord]:
    if not is_late:
        reader = TensorReader(keep, lambda dtype, shape, data: f"{dtype} {shape} {bytes(data).hex()}")
        return [reader.record(SLOT, tensor) for tensor in tensors]
    devices = Devices(statistics=True, complain=lambda what, why: pytest.fail(f"{what}: {why}"), make=lambda *_, **__: LateSummaries())
    reader = _Late(keep, lambda *_: None, devices)
    taken = [reader.take(SLOT, tensor) for tensor in tensors]
    devices.send()
    devices.collect(wait=True)
    return [record_of(one) for one in taken]


CASES = [("statistics", False), ("fingerprint", False), ("tensors", False), ("statistics", True)]


@pytest.mark.parametrize(("keep", "is_late"), CASES)
@hypothesis.settings(max_examples=120, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(tensors=views())
def test_every_view_gets_what_it_gets_alone(keep: str, is_late: bool, tensors: list[torch.Tensor]) -> None:
    together = _records([*tensors, *tensors[:2]], keep, is_late=is_late)
    alone = [_records([tensor], keep, is_late=is_late)[0] for tensor in [*tensors, *tensors[:2]]]
    assert together == alone
    for tensor, record in zip(tensors, together, strict=False):
        assert (record.shape, record.strides) == (tuple(tensor.shape), tensor.stride())
        if keep == "statistics" and tensor.numel() and not tensor.is_complex():
            plain = tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
            assert not tensor_cases.wrong(plain, record.summary, record.fingerprint)


def _how_many_reads(tensors: list[torch.Tensor], keep: str) -> int:
    reader = TensorReader(keep, lambda *_: None)  # type: ignore[arg-type]
    return len({id(reader.take(SLOT, tensor).values) for tensor in tensors})


def test_only_what_has_another_order_is_read_again() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    same = [x, x.view(-1), x.view(6, 4), x.unsqueeze(1), x.reshape(2, 1, 12), x.detach()]
    assert _how_many_reads(same, "statistics") == _how_many_reads(same, "fingerprint") == 1
    assert (
        _how_many_reads([x, x.transpose(0, 1), x.mT, x.mT.contiguous().mT, x[:1], x[1:], x.view(torch.int32), x.neg()], "statistics") == 8
    )
    part = x[:, 1:]
    assert _how_many_reads([part, part.reshape(2, 2, 2, 2), part.flatten(1), part.clone()], "statistics") == 2
    assert _how_many_reads([x, x.view(-1)], "tensors") == 2  # what is kept has a shape


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.view(-1)[0].fill_(9.0)], ids=["itself", "through a view"])
def test_a_view_of_what_was_written_to_is_read_again(change: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    reader = TensorReader("statistics", lambda *_: None)
    before = reader.record(SLOT, x)
    change(x)
    after = reader.record(SLOT, x.view(-1))
    assert before.fingerprint != after.fingerprint
    assert not tensor_cases.wrong(x.view(-1), after.summary, after.fingerprint)
