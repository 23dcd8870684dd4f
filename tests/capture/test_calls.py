# SPDX-License-Identifier: Apache-2.0
"""Check what a record of a call holds: arguments, tensors as they were before and after, modes, place."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.recording import recording, slot_of, slots_of
from ulpscope.model import CallRecord


def _encoded(record: CallRecord) -> tuple[object, object]:
    assert record.arguments is not None
    return record.arguments.args, record.arguments.kwargs


@pytest.mark.parametrize(
    ("op", "program"),
    [
        ("Tensor.add", lambda a, b: a + b),
        ("Tensor.__rsub__", lambda a, b: 1 - a),
        ("Tensor.__getitem__", lambda a, b: a[0]),
        ("Tensor.add_", lambda a, b: a.__iadd__(b)),
        ("Tensor.T", lambda a, b: a.T),
        ("Tensor.matmul", lambda a, b: a @ b),
        ("torch.matmul", lambda a, b: torch.matmul(a, b)),
        ("torch.ones", lambda a, b: torch.ones(3)),
        ("functional.gelu", lambda a, b: F.gelu(a)),
        ("torch.special.erf", lambda a, b: torch.special.erf(a)),
        ("torch.linalg.norm", lambda a, b: torch.linalg.norm(a)),
        ("Tensor.view", lambda a, b: a.view(9)),
        ("aten.mm", lambda a, b: torch.ops.aten.mm(a, b)),
    ],
)
def test_every_kind_of_call_is_recorded_under_its_name(op: str, program: object) -> None:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    with recording() as run:
        program(a, b)  # type: ignore[operator]
    assert [record.call.op for record in run.records if record.level == "api"] == [op]


@pytest.mark.parametrize(
    "program",
    [lambda a: a.shape, lambda a: a.size(), lambda a: a.grad, lambda a: a.is_contiguous(), len, repr],
)
def test_asking_a_tensor_for_facts_is_not_a_call(program: object) -> None:
    a = torch.randn(3, 3)
    with recording() as run:
        program(a)  # type: ignore[operator]
    assert not [record for record in run.records if record.level == "api"]


def test_arguments_that_are_no_tensors_are_kept_with_their_types() -> None:
    x = torch.randn(2, 3, 4)
    with recording() as run:
        F.layer_norm(x, (4,), eps=1e-3)
        x.to(torch.float16)
        x[..., 1:3:2, None]
        torch.stack([x, x], dim=1)
        torch.zeros(2, dtype=torch.float64)
    assert _encoded(run.one("functional.layer_norm")) == (
        ({"$tensor": "input.0"}, {"$tuple": [4]}),
        {"weight": None, "bias": None, "eps": 1e-3},
    )
    assert _encoded(run.one("Tensor.to")) == (({"$tensor": "input.0"}, {"$dtype": "float16"}), None)
    index = {"$tuple": [{"$ellipsis": True}, {"$slice": [1, 3, 2]}, None]}
    assert _encoded(run.one("Tensor.__getitem__")) == (({"$tensor": "input.0"}, index), None)
    assert _encoded(run.one("torch.stack")) == (([{"$tensor": "input.0.0"}, {"$tensor": "input.0.1"}],), {"dim": 1})
    assert _encoded(run.one("torch.zeros")) == ((2,), {"dtype": {"$dtype": "float64"}})


def test_tensors_in_keywords_and_containers_have_slots() -> None:
    x = torch.randn(2, 3)
    with recording() as run:
        torch.add(x, other=x, alpha=2)
        torch.cat((x, x))
        x.split([1, 2], dim=1)
    assert slots_of(run.one("torch.add")) == ["input.0", "input.other", "output.0"]
    assert slots_of(run.one("torch.cat")) == ["input.0.0", "input.0.1", "output.0"]
    assert slots_of(run.one("Tensor.split")) == ["input.0", "output.0", "output.1"]


def test_inputs_of_an_in_place_call_are_those_before_it() -> None:
    x = torch.zeros(3)
    with recording() as run:
        x.add_(1)
        x[0] = 5
        torch.add(x, 1, out=x)
    assert run.array(run.one("Tensor.add_"), "input.0").tolist() == [0, 0, 0]
    assert run.array(run.one("Tensor.add_"), "output.0").tolist() == [1, 1, 1]
    assert run.array(run.one("Tensor.__setitem__"), "mutated.0").tolist() == [5, 1, 1]
    assert run.array(run.one("torch.add"), "input.0").tolist() == [5, 1, 1]
    assert run.array(run.one("torch.add"), "output.0").tolist() == [6, 2, 2]


def test_operations_that_write_are_seen_below_autograd() -> None:
    x = torch.zeros(3)
    with recording(level="op") as run:
        x.add_(1)
        torch._foreach_mul_([x], 3)
        torch.add(x, 1, out=x)
    assert run.array(run.one("aten.add_.Tensor"), "input.0").tolist() == [0, 0, 0]
    assert run.array(run.one("aten.add_.Tensor"), "output.0").tolist() == [1, 1, 1]
    assert run.array(run.one("aten._foreach_mul_.Scalar"), "mutated.0.0").tolist() == [3, 3, 3]
    assert run.array(run.one("aten.add.out"), "output.0").tolist() == [4, 4, 4]


def test_a_write_through_an_alias_with_its_own_version_is_seen() -> None:
    x = torch.zeros(3, requires_grad=True)
    with recording() as run:
        x * 2
        x.data.add_(1)
        x * 3
    first, second = run.calls("Tensor.mul")
    assert run.array(first, "input.0").tolist() == [0, 0, 0]
    assert run.array(second, "input.0").tolist() == [1, 1, 1]


def test_memory_that_is_used_again_is_not_taken_for_the_tensor_that_had_it() -> None:
    with recording() as run:
        for value in range(20):
            torch.full((1000,), float(value)).exp()
    values = [run.array(record, "input.0")[0].item() for record in run.calls("Tensor.exp")]
    assert values == list(range(20))


def test_equal_values_in_another_layout_have_one_fingerprint() -> None:
    x = torch.randn(2, 3, 4, 4)
    with recording() as run:
        x.relu()
        x.to(memory_format=torch.channels_last).relu()
    first, second = run.calls("Tensor.relu")
    assert slot_of(first, "input.0").fingerprint == slot_of(second, "input.0").fingerprint
    assert slot_of(first, "input.0").strides != slot_of(second, "input.0").strides


def test_modes_around_a_call_are_recorded() -> None:
    x = torch.randn(4, 4)
    with recording() as run:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.mm(x, x)
        with torch.no_grad():
            torch.exp(x)
        with torch.inference_mode():
            torch.sin(x)
    assert run.one("torch.mm").modes is not None
    assert run.one("torch.mm").modes.autocast == "bfloat16"
    assert slot_of(run.one("torch.mm"), "output.0").dtype == "bfloat16"
    assert run.one("torch.exp").modes.grad is False
    assert run.one("torch.sin").modes.inference is True


def test_the_source_is_the_innermost_line_of_the_user() -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    with recording() as run:
        layer(torch.ones(1, 2))  # this very line
    source = run.one("functional.linear").source
    assert source is not None
    assert Path(__file__).samefile(source.file)
    assert source.code.endswith("# this very line")


def test_a_call_knows_its_module_by_the_path_from_the_outermost_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    with recording() as run:
        model(torch.ones(1, 2))
    assert [record.name for record in run.records if record.level == "api"] == [
        "/torch.ones.0",
        "0/functional.linear.0",
        "1.0/functional.relu.0",
        "1.1/functional.linear.1",
    ]


def test_a_custom_op_is_one_call() -> None:
    @torch.library.custom_op("ulpscope_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with recording() as run:
        torch.ops.ulpscope_test.twice(torch.ones(2))
        twice(torch.ones(2))
    assert [str(record.call) for record in run.records if record.call.op.startswith("ops")] == [
        "ops.ulpscope_test.twice.0",
        "ops.ulpscope_test.twice.1",
    ]
    assert not run.calls("Tensor.mul")


@pytest.mark.parametrize(
    ("tensor", "note"),
    [
        (torch.sparse_coo_tensor([[0], [0]], [1.0], (2**20, 2**20), check_invariants=True), "layout torch.sparse_coo: values are not read"),
        (torch.empty(2, device="meta"), "meta tensor"),
    ],
)
def test_a_tensor_without_readable_values_says_why(tensor: torch.Tensor, note: str) -> None:
    with recording() as run:
        tensor * 2
    assert note in slot_of(run.one("Tensor.mul"), "input.0").note
    assert not run.ledger


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool, torch.uint16]
)
def test_every_dtype_is_read(dtype: torch.dtype) -> None:
    x = torch.ones(4).to(dtype)
    with recording() as run:
        x.clone()
    record = slot_of(run.one("Tensor.clone"), "output.0")
    assert record.summary is not None
    assert record.summary.max == 1.0
    assert record.content is not None


@pytest.mark.parametrize("level", ["api", "both", "module"])
def test_a_module_that_fails_does_not_run_any_longer(level: str) -> None:
    """Calls after its exception would otherwise stand inside it, where modules are recorded."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("this one fails")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.works = Fails(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                self.fails(x)
            except ValueError:
                x = x.sin()
            return self.works(x)  # type: ignore[no-any-return]

    with recording(level=level) as run:  # type: ignore[arg-type]
        Outer()(torch.ones(3))
    if level != "module":
        assert run.one("Tensor.sin").module == ""
    if level != "api":
        assert run.one("module.Linear").module == "works"
        assert run.one("module.Linear").parent == str(run.one("module.Outer").call)


def test_a_module_level_record_takes_keyword_arguments() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, *, factor: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scaled": x * factor}

    with recording(level="module") as run:
        Scale()(torch.ones(2), factor=torch.full((2,), 3.0))
    assert slots_of(run.one("module.Scale")) == ["input.0", "input.factor", "output.scaled"]


def test_other_threads_are_left_alone() -> None:
    with recording() as run:
        thread = threading.Thread(target=lambda: nn.Linear(2, 2)(torch.ones(1, 2)))
        thread.start()
        thread.join()
    assert not run.records


def test_fingerprints_alone_keep_neither_statistics_nor_values() -> None:
    with recording(keep="fingerprint") as run:
        torch.ones(2).exp()
    record = slot_of(run.one("Tensor.exp"), "output.0")
    assert record.fingerprint is not None
    assert record.summary is None
    assert record.content is None


def test_memory_that_nobody_wrote_to_has_no_values() -> None:
    with recording() as run:
        x = torch.empty(1000)
        x.exp()
        x.zero_()
        x.exp()
    assert "uninitialised" in slot_of(run.one("torch.empty"), "output.0").note
    before, after = run.calls("Tensor.exp")
    assert slot_of(before, "input.0").fingerprint is None
    assert slot_of(after, "input.0").summary is not None


def test_memory_that_nobody_wrote_to_has_no_values_in_a_subclass_either() -> None:
    class Mine(torch.Tensor):
        pass

    with recording() as run:
        torch.empty_like(torch.ones(1000).as_subclass(Mine))
    assert "uninitialised" in slot_of(run.one("torch.empty_like"), "output.0").note


def test_weights_that_are_averaged_are_calls_of_the_program() -> None:
    """An optimizer's record shows what it did to its parameters; no other record shows the averaging of weights."""
    model = nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    with recording() as run:
        averaged.update_parameters(model)
        averaged.update_parameters(model)
    ops = [record.call.op for record in run.records]
    assert ops.count("Tensor.copy_") == 2
    assert ops.count("torch._foreach_lerp_") == 1


class _Asked(dict):  # type: ignore[type-arg]
    """Counts the questions; a class that loads or draws when asked would do more."""

    count = 0

    def items(self) -> Any:
        _Asked.count += 1
        return super().items()

    def __iter__(self) -> Any:
        _Asked.count += 1
        return super().__iter__()


class _AskedList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        _Asked.count += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        _Asked.count += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("level", ["module", "both"])
def test_containers_of_the_users_own_are_looked_at_past_their_class(level: str) -> None:
    class Holds(nn.Module):
        def forward(self, held: Any, *, more: Any) -> Any:
            return _Asked(y=dict.__getitem__(held, "x") + list.__getitem__(more, 0))

    _Asked.count = 0
    with recording(level=level) as run:
        Holds()(_Asked(x=torch.ones(2)), more=_AskedList([torch.ones(2)]))
    assert _Asked.count == 0
    (call,) = run.calls("module.Holds")
    assert set(slots_of(call)) == {"input.0.x", "input.more.0", "output.y"}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("level", ["api", "op"])
def test_nothing_is_read_where_an_exported_program_is_decomposed(level: str) -> None:
    """Torch's own tensors stand for values there, and their class asks for a mode that is off while ours looks."""
    exported = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with recording(level=level) as run:
        exported.run_decompositions()
    assert run.ledger == []
