# SPDX-License-Identifier: Apache-2.0
"""Write the repro of a culprit: a script that runs alone, fails where the fault lies in the call, and holds as few rows as possible."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ulpscope.model import Comparison, SystemicPrecision
from ulpscope.workflows.compare import reproducing
from ulpscope.workflows.compare.comparing import compare_runs
from ulpscope.workflows.compare.reproducing import with_repro
from ulpscope.workflows.record.capturing import Capture


class Faulty(TorchDispatchMode):
    """One aten operation, the first of its kind, gives something else."""

    def __init__(self, op: str, change: Callable[[torch.Tensor], torch.Tensor], output: int | None = None) -> None:
        super().__init__()
        self.op, self.change, self.output, self.has_hit = op, change, output, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.has_hit or func._schema.name.removeprefix("aten::") != self.op:
            return result
        self.has_hit = True
        if self.output is None:
            return self.change(result)
        return tuple(self.change(one) if at == self.output else one for at, one in enumerate(result))


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * 1.5


def one_row(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[3] = value[3] * 1.5
    return value


def recorded(path: Path, program: Callable[[], Any], fault: TorchDispatchMode | None = None) -> Path:
    torch.manual_seed(0)
    with Capture(path, keep="tensors"), fault or nullcontext():
        program()
    assert fault is None or fault.has_hit  # type: ignore[attr-defined]
    return path


def compared(folder: Path, program: Callable[[], Any], fault: TorchDispatchMode) -> Comparison:
    subject, reference = recorded(folder / "subject", program, fault), recorded(folder / "reference", program)
    return compare_runs(subject, reference, replay="none")


def run(script: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the script in this process, as if alone: starting another for each would take most of the time."""
    before = sys.argv
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        return int(left.code or 0), capsys.readouterr().out
    finally:
        sys.argv = before
        torch.use_deterministic_algorithms(False)
    raise AssertionError("the script ends with an exit code")


def leaf(*shape: int, seed: int = 1, **kind: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kind).requires_grad_()


def forward_gelu() -> None:
    F.gelu(leaf(6, 5))


def forward_linear() -> None:
    F.linear(leaf(6, 3, 5), leaf(7, 5, seed=2), leaf(7, seed=3))


def backward_linear() -> None:
    F.linear(leaf(6, 5), leaf(7, 5, seed=2)).square().sum().backward()


def forward_softmax() -> None:
    F.softmax(leaf(6, 5).detach().bfloat16(), dim=-1, dtype=torch.float32)


def forward_convolution() -> None:
    F.conv2d(leaf(6, 3, 8, 8).detach().to(memory_format=torch.channels_last), leaf(4, 3, 3, 3, seed=2), stride=2, padding=(1, 1))


def backward_norm() -> None:
    F.layer_norm(leaf(6, 5), [5], leaf(5, seed=2), leaf(5, seed=3)).square().sum().backward()


def forward_maximum() -> None:
    torch.max(leaf(6, 5).detach(), dim=1)


def in_place() -> None:
    leaf(6, 5).detach().add_(leaf(6, 5, seed=2).detach(), alpha=2)


def forward_attention() -> None:
    query, key, value = (leaf(6, 2, 4, 8, seed=seed).detach() for seed in (1, 2, 3))
    F.scaled_dot_product_attention(query, key, value, is_causal=True)


def backward_square() -> None:
    x = leaf(6, 5)
    (x * x).sum().backward()


def under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(leaf(6, 5), leaf(7, 5, seed=2))


def forward_sliced() -> None:
    torch.mm(leaf(6, 10).detach()[:, ::2], leaf(5, 7, seed=2).detach())


CASES = [
    (forward_gelu, Faulty("gelu", one_row), "gelu_0", [1, 1]),
    (forward_linear, Faulty("addmm", scaled), "linear_0", [1, 1, 5]),
    (backward_linear, Faulty("mm", scaled), "linear_0", None),
    (forward_softmax, Faulty("_softmax", one_row), "softmax_0", [1, 5]),
    (forward_convolution, Faulty("convolution", one_row), "conv2d_0", [1, 3, 8, 8]),
    (backward_norm, Faulty("native_layer_norm_backward", one_row, 0), "layer_norm_0", [1, 5]),
    (forward_maximum, Faulty("max", one_row, 0), "max_0", [1, 5]),
    (in_place, Faulty("add_", lambda value: value.mul_(1.5)), "add_0", [1, 1]),
    (backward_square, Faulty("mul", scaled), None, None),
    (forward_sliced, Faulty("mm", one_row), "mm_0", [1, 5]),
    (forward_attention, Faulty("_scaled_dot_product_flash_attention_for_cpu", one_row, 0), "scaled_dot_product_attention_0", [1, 1, 4, 8]),
]


@pytest.mark.parametrize(("program", "fault", "stem", "shape"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_script_fails_alone_on_few_rows(
    program: Callable[[], None],
    fault: Faulty,
    stem: str | None,
    shape: list[int] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault.has_hit = False
    comparison = with_repro(compared(tmp_path, program, fault), tmp_path / "repro")
    script = comparison.faults[0].repro
    assert script, comparison.faults[0].evidence
    code, said = run(script, capsys)
    assert code == 1, said
    assert said.count("<-- too much") >= 1
    code, said = run(script, capsys, "--device", "cpu")
    assert code == 0, said
    assert "this machine's kernel (cpu)" in said
    if stem is not None:
        assert Path(script).name == f"{stem}.py"
    if shape is not None:
        assert list(load_file(Path(script).with_name(f"{stem}.subject.safetensors"))["input.0"].shape) == shape


def test_a_fault_of_this_machine_is_shrunk_by_running_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pytorch#188375: the weight gradient of a layer norm over one element is zero, and torch 2.13 on a CPU gives noise."""

    def program() -> None:
        F.layer_norm(leaf(64, 1), [1], leaf(1, seed=2), leaf(1, seed=3)).backward(leaf(64, 1, seed=4).detach())

    right = Faulty("native_layer_norm_backward", torch.zeros_like, 1)
    subject, reference = recorded(tmp_path / "subject", program), recorded(tmp_path / "reference", program, right)
    [fault] = with_repro(compare_runs(subject, reference), tmp_path / "repro").faults
    assert fault.slot == "output.weight"
    code, said = run(fault.repro, capsys, "--device", "cpu")
    assert (code, "this machine's kernel (cpu) in output.weight errs" in said) == (1, True), said
    stored = load_file(Path(fault.repro).with_name("layer_norm_0.subject.safetensors"))
    assert stored["input.0"].shape[0] < 64
    assert "recorded.output.weight" not in stored
    assert "this machine's kernel still errs" in (tmp_path / "repro/README.txt").read_text()


def test_other_arguments_stand_beside_the_own_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program(approximate: str) -> Callable[[], None]:
        return lambda: F.gelu(leaf(6, 5), approximate=approximate)  # type: ignore[return-value]

    subject, reference = recorded(tmp_path / "subject", program("tanh")), recorded(tmp_path / "reference", program("none"))
    [fault] = with_repro(compare_runs(subject, reference), tmp_path / "repro").faults
    assert fault.kind == "arguments"
    text = Path(fault.repro).read_text()
    assert "torch.nn.functional.gelu(t['input.0'], approximate='tanh')" in text
    assert "torch.nn.functional.gelu(t['input.0'], approximate='none')" in text
    code, said = run(fault.repro, capsys)
    assert code == 1
    assert "the exact result with the reference's arguments, in output.0 differs by" in said
    assert said.count("too much") == 1
    assert "so the arguments of this call are at fault" in said


def test_autocast_is_part_of_the_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = with_repro(compared(tmp_path, under_autocast, Faulty("mm", scaled)), tmp_path / "repro")
    script = comparison.faults[0].repro
    assert "torch.autocast(device.type, dtype=torch.bfloat16)" in Path(script).read_text()
    assert run(script, capsys)[0] == 1
    assert run(script, capsys, "--device", "cpu")[0] == 0


class Rounding(TorchDispatchMode):
    """A machine whose matrix unit takes float16 operands."""

    has_hit = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            args = (args[0], *(one.half().float() for one in args[1:]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_machine_that_rounds_its_operands_is_judged_by_that(is_known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = recorded(tmp_path / "subject", forward_linear, Rounding())
    reference = recorded(tmp_path / "reference", forward_linear, Faulty("addmm", scaled))
    precision = (SystemicPrecision(family="linear", operands="float16", side="subject"),) if is_known else ()
    comparison = replace(compare_runs(subject, reference, replay="none"), precision=precision)
    code, said = run(with_repro(comparison, tmp_path / "repro").faults[0].repro, capsys)
    [line] = [line for line in said.splitlines() if "the subject's recorded" in line]
    assert (code, "too much" in line) == (1, not is_known), said


def test_the_script_needs_nothing_of_ours(tmp_path: Path) -> None:
    script = with_repro(compared(tmp_path, forward_gelu, Faulty("gelu", one_row)), tmp_path / "repro").faults[0].repro
    code = f"import runpy, sys; sys.modules['ulpscope'] = None; sys.argv = [{script!r}]; runpy.run_path({script!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(
        "first contributed error: gelu (call 0, forward, output 0), step 0, rank 0\n  the subject's recorded output.0 errs "
    )


def test_the_whole_inputs_stay_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compared(tmp_path, forward_gelu, Faulty("gelu", one_row))
    assert run(with_repro(comparison, tmp_path / "both").faults[0].repro, capsys, "--whole")[0] == 1
    monkeypatch.setattr(reproducing, "_MOST_WHOLE_BYTES", 10)
    script = with_repro(comparison, tmp_path / "small").faults[0].repro
    assert sorted(path.name for path in Path(script).parent.iterdir()) == [
        "README.txt",
        "gelu_0.py",
        "gelu_0.reference.safetensors",
        "gelu_0.subject.safetensors",
    ]
    assert run(script, capsys, "--whole")[0] == 2


def test_what_cannot_be_shown_alone_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compared(tmp_path, forward_gelu, Faulty("gelu", one_row))
    monkeypatch.setattr(reproducing, "is_random", lambda program: True)
    asked, quiet = (with_repro(comparison, tmp_path / "repro", is_asked_for=asked) for asked in (True, False))
    assert quiet == comparison
    assert asked.faults[0].repro == ""
    assert asked.faults[0].evidence[-1] == "no repro: gelu draws random numbers"
    assert not (tmp_path / "repro").exists()
