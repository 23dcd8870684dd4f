# SPDX-License-Identifier: Apache-2.0
"""The text of a repro: arguments as code, and nothing foreign ever as code."""

from __future__ import annotations

import ast
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.errors import InputError
from ulpscope.model import Arguments, Slot
from ulpscope.report.comparison.repro import ReproCall, ReproYardstick, file_stem, readme_text, script_text

X = {"$tensor": "input.0"}


def repro(op: str = "functional.gelu", args: tuple[Any, ...] = (X,), **rest: Any) -> ReproCall:
    kwargs = rest.pop("kwargs", None)
    words: dict[str, Any] = {
        "headline": "first contributed error",
        "phase": "forward",
        "files": {"small": {"subject": "gelu_1.subject.safetensors"}},
        "yardsticks": {"small": {Slot("output", (0,)): ReproYardstick(rms=1e-8, at=(0,), error=2e-8)}},
        "limits": (128.0, 64.0),
        "dtype": "float32",
    }
    return ReproCall(op=op, arguments=Arguments(args=args, kwargs=kwargs), **{**words, **rest})


def called(text: str) -> str:
    """Return the result of a script's function `call`."""
    [function] = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "call"]
    returned = function.body[-1]
    assert isinstance(returned, ast.Return)
    assert returned.value is not None
    return ast.unparse(returned.value)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "code"),
    [
        (
            "functional.gelu",
            (X,),
            {"approximate": "tanh"},
            "torch.nn.functional.gelu(t['input.0'], approximate='tanh')",
        ),
        (
            "torch.sum",
            (X, -1),
            {"dtype": {"$dtype": "float32"}},
            "torch.sum(t['input.0'], -1, dtype=wide(torch.float32))",
        ),
        ("Tensor.T", (X,), None, "t['input.0'].T"),
        (
            "aten.mm.default",
            (X, {"$tensor": "input.1"}),
            None,
            "torch.ops.aten.mm.default(t['input.0'], t['input.1'])",
        ),
        ("ops.mylib.foo", (X,), None, "torch.ops.mylib.foo(t['input.0'])"),
        ("torch.full", ({"$tuple": [2]}, -inf), {"device": {"$device": "npu:0"}}, "torch.full((2,), float('-inf'), device=device)"),
        ("torch.full", ({"$size": [2, 3]}, nan), {"pin_memory": False}, "torch.full(torch.Size([2, 3]), float('nan'))"),
        ("Tensor.to", (X, "cuda:1"), {"copy": True}, "torch.Tensor.to(t['input.0'], str(device), copy=True)"),
        (
            "Tensor.__getitem__",
            (X, {"$tuple": [{"$ellipsis": True}, {"$slice": [None, {"$int": "9" * 20}, 2]}, None]}),
            None,
            f"torch.Tensor.__getitem__(t['input.0'], (..., slice(None, {'9' * 20}, 2), None))",
        ),
        (
            "torch.cat",
            ([{"$tensor": "input.0.0"}, {"$tensor": "input.0.1"}],),
            {"dim": 1},
            "torch.cat([t['input.0.0'], t['input.0.1']], dim=1)",
        ),
        ("torch.mul", (X, {"$complex": [0.0, 1.0]}), None, "torch.mul(t['input.0'], complex(0.0, 1.0))"),
        (
            "Tensor.contiguous",
            (X,),
            {"memory_format": {"$memory_format": "channels_last"}},
            "torch.Tensor.contiguous(t['input.0'], memory_format=torch.channels_last)",
        ),
        (
            "functional.rms_norm",
            (X, [5]),
            None,
            "torch.nn.functional.rms_norm(t['input.0'], [5], eps=1.1920928955078125e-07)",
        ),
    ],
)
def test_arguments_become_code(op: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, code: str) -> None:
    assert called(script_text(repro(op, args, kwargs=kwargs))) == code


@pytest.mark.parametrize(
    "call",
    [
        repro("os.system", ("echo",)),
        repro("functional.gelu(0);import os;os.system"),
        repro("torch.__import__('os').system"),
        repro("torch.hub.load"),
        repro("torch.nn.functional.torch.hub.load"),
        repro("functional.class"),
        repro(args=({"$object": "package.Class", "repr": "__import__('os')"},)),
        repro(args=({"$dtype": "float32); import os"},)),
        repro(args=({"$memory_format": "channels_last; import os"},)),
        repro(args=({"$int": "1); import os"},)),
        repro(args=({"$tensor": "nowhere"},)),
        repro(args=("cut in two…",)),
        repro(args=(b"bytes",)),
        repro(kwargs={"a=1); import os; f(b": 1}),
        repro(kwargs={"lambda": 1}),
        repro(autocast="bfloat16); import os; ("),
    ],
    ids=range(16),
)
def test_what_is_no_plain_call_is_refused(call: ReproCall) -> None:
    with pytest.raises((InputError, ValueError)):
        script_text(call)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60))
def test_foreign_text_never_becomes_code(text: str) -> None:
    """Wherever a text of a run may stand: the script has the same shape as with a harmless one."""
    assert shape_of(script_text(_with_text(text))) == shape_of(script_text(_with_text("x")))


def shape_of(script: str) -> str:
    """Return the program without the contents of its texts."""
    tree = ast.parse(script)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def _with_text(text: str) -> ReproCall:
    argument = text if not text.endswith("…") else "x"
    kwargs = {"a": {f"~{text}": f"~{argument}"}}
    return repro(headline=f'{text}@CALL@\n"""', args=(X, f"~{argument}"), kwargs=kwargs, device=text, dtype=text)


def test_parts_that_a_call_does_not_need_are_left_out() -> None:
    plain = script_text(repro())
    unneeded = ("STRIDES", "LEAVES", "MUTATED", "OPERANDS", "RoundedOperands", "laid_out", "autocast", "deterministic")
    assert not [part for part in unneeded if part in plain]
    slot = Slot("input", (0,))
    rich = script_text(
        repro(
            phase="backward",
            strides={slot: (1, 4)},
            leaves={Slot("output", (0,)): (slot,)},
            mutated=(slot,),
            is_writing=True,
            operands={"subject": "tf32"},
            other_arguments=Arguments(args=({"$tensor": "input.0"},), kwargs={"approximate": "tanh"}),
            deterministic=True,
        )
    )
    ast.parse(rich)
    for part in ("STRIDES", "LEAVES", "MUTATED", "OPERANDS", "RoundedOperands", "laid_out", "call_of_the_reference", "leaf.clone()"):
        assert part in rich
    assert "@" not in rich.replace('f"', "")


@pytest.mark.parametrize(
    ("call", "stem"),
    [
        ("gelu", "gelu_1"),
        ("__getitem__", "getitem_1"),
        ("../../etc/passwd", "etc_passwd_1"),
        ("é\x00/", "call_1"),
        ("a" * 99, "a" * 40 + "_1"),
    ],
)
def test_file_names_are_harmless(call: str, stem: str) -> None:
    assert file_stem(call, 1) == stem


def test_the_readme_has_three_lines() -> None:
    assert len(readme_text("a\nb", "gelu_1.py", "one row").splitlines()) == 3
