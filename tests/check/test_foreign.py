# SPDX-License-Identifier: Apache-2.0
"""Recordings of other tools, checked: their backward calls too, whose results they do not keep, or keep for something inside the call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ulpscope.errors import NotARunError
from ulpscope.model.check.checks import Check, CheckedCall
from ulpscope.workflows.check.checking import check_run


def _checker_tensor(value: torch.Tensor, needs: bool, path: Path | None) -> dict[str, Any]:
    """Describe a tensor as api_accuracy_checker writes it: statistics, or the path of the values."""
    if path is None:
        ends = {"Max": float(value.max()), "Min": float(value.min())}
        return {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape), **ends, "requires_grad": needs}
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".pt":
        torch.save(value, path)
    else:
        np.save(path, value.numpy())
    return {"type": "torch.Tensor", "datapath": f"/somewhere/else/{path.parent.name}/{path.name}", "requires_grad": needs}


def _values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 12), torch.randn(80, 12), torch.randn(6, 80)


def checker_dump(folder: Path, suffix: str, forward: str = "forward_info_7", backward: str = "backward_info_7") -> Path:
    """Write one linear and one gelu, forward and backward; `suffix` is that of the real data, or empty."""
    x, weight, gradient = _values()

    def kept(phase: str, name: str) -> Path | None:
        return folder / f"{phase}_real_data" / f"{name}{suffix}" if suffix else None

    linear = [_checker_tensor(one, True, kept("forward", f"linear.{at}")) for at, one in enumerate((x, weight))]
    forwards = {
        "Functional*linear*0": {"args": [*linear, {"type": "NoneType", "value": None}], "kwargs": {}},
        "Functional*gelu*0": {"args": [_checker_tensor(gradient, True, kept("forward", "gelu.0"))], "kwargs": {}},
    }
    backwards = {
        "Functional*gelu*0": [_checker_tensor(gradient, False, kept("backward", "gelu.0"))],
        "Functional*linear*0": [_checker_tensor(gradient, False, kept("backward", "linear.0"))],
    }
    (folder / f"{forward}.json").write_text(json.dumps(forwards))
    (folder / f"{backward}.json").write_text(json.dumps(backwards))
    return folder


def _statuses(check: Check) -> dict[str, tuple[str, str, list[str]]]:
    return {
        f"{call.call} {call.phase}": (call.status, call.reason or call.data, [str(slot.slot) for slot in call.slots])
        for call in check.calls
    }


@pytest.mark.parametrize(("suffix", "data"), [(".pt", "recorded"), (".npy", "recorded"), ("", "generated")])
@pytest.mark.parametrize("rules", ["derived", "checker"])
def test_backward_calls_whose_gradients_were_not_kept(tmp_path: Path, suffix: str, data: str, rules: str) -> None:
    check = check_run(checker_dump(tmp_path, suffix), isolated=False, rules=rules)
    assert _statuses(check) == {
        "functional.linear.0 forward": ("passed", data, ["output.0"]),
        "functional.gelu.0 forward": ("passed", data, ["output.0"]),
        "functional.gelu.0 backward": ("passed", data, ["output.0"]),
        "functional.linear.0 backward": ("passed", data, ["output.0", "output.1"]),
    }


def _msprobe_tensor(value: torch.Tensor, needs: bool = False) -> dict[str, Any]:
    facts = {"Max": float(value.max()), "Min": float(value.min()), "Mean": float(value.mean()), "Norm": float(value.norm())}
    return {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape), **facts, "requires_grad": needs}


def msprobe_dump(folder: Path) -> Path:
    """Write a linear of three dimensions, whose recorded gradient is that of a view inside the call."""
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(2, 3, 12), torch.randn(80, 12), torch.randn(2, 3, 80)
    inputs = [_msprobe_tensor(x, True), _msprobe_tensor(weight, True)]
    data = {
        "Functional.linear.0.forward": {"input_args": inputs, "input_kwargs": {}, "output": [_msprobe_tensor(F.linear(x, weight))]},
        "Functional.linear.0.backward": {"input": [_msprobe_tensor(gradient)], "output": [_msprobe_tensor(gradient.reshape(6, 80))]},
    }
    body = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (folder / "dump.json").write_text(json.dumps(body))
    return folder / "dump.json"


def test_gradients_of_something_inside_a_call_are_not_asked_for(tmp_path: Path) -> None:
    check = check_run(msprobe_dump(tmp_path), isolated=False)
    assert _statuses(check)["functional.linear.0 backward"] == ("passed", "generated", ["output.0", "output.1"])
    assert check.coverage == 1


@pytest.mark.parametrize("dump", [lambda folder: checker_dump(folder, ".pt"), msprobe_dump])
def test_a_wrong_gradient_is_found_in_them(tmp_path: Path, dump: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from ulpscope.workflows.check import one_call as check_calls

    run = check_calls.run_on_device

    def broken(program: Any, device: str) -> Any:
        made = run(program, device)
        return {slot: value * 1.001 if slot.path == (1,) else value for slot, value in made.items()}

    monkeypatch.setattr(check_calls, "run_on_device", broken)
    check = check_run(dump(tmp_path), isolated=False)
    assert [(str(call.call), call.phase, str(call.worst and call.worst.slot)) for call in check.failures] == [
        ("functional.linear.0", "backward", "output.1")
    ]


def test_two_files_of_any_name(tmp_path: Path) -> None:
    """`run_ut -forward F -backward B`: only the command line says that they belong together."""
    checker_dump(tmp_path, ".pt", "some", "other")
    check = check_run(tmp_path / "some.json", backward=tmp_path / "other.json")
    assert [(str(call.call), call.phase, call.status) for call in check.calls] == [
        ("functional.linear.0", "forward", "passed"),
        ("functional.gelu.0", "forward", "passed"),
        ("functional.gelu.0", "backward", "passed"),
        ("functional.linear.0", "backward", "passed"),
    ]
    assert {call.recorded_as for call in check.calls} == {"Functional*linear*0", "Functional*gelu*0"}
    with pytest.raises(NotARunError, match="is no file; give the forward_info"):
        check_run(tmp_path / "some.json", backward=tmp_path / "nowhere.json")


def test_a_call_is_told_as_soon_as_it_is_known(tmp_path: Path) -> None:
    told: list[CheckedCall] = []
    check = check_run(checker_dump(tmp_path, ".pt"), isolated=False, rules="checker", found=told.append)
    assert tuple(told) == check.calls


def test_an_overflow_dump_keeps_no_results_but_its_calls_are_looked_at(tmp_path: Path) -> None:
    values = torch.linspace(1.0, 12.0, 64, dtype=torch.float16)
    entries = {
        name: {"args": [_checker_tensor(values, True, None)], "kwargs": {}} for name in ("Torch_exp_0_forward", "Torch_tanh_0_forward")
    }
    (tmp_path / "forward_info_0.json").write_text(json.dumps(entries))
    check = check_run(tmp_path, isolated=False, overflow=True)
    assert [(str(call.call), call.overflow) for call in check.calls] == [("torch.exp.0", "normal"), ("torch.tanh.0", "not reproduced")]
