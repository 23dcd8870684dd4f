# SPDX-License-Identifier: Apache-2.0
"""Private names of torch: one file reads them, and for each of them something is done where a torch does not have it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from ulpscope import _torch_private, _torch_versions
from ulpscope.errors import UlpscopeError

ROOT = Path(__file__).parents[1]
HOME = ROOT / "src/ulpscope/_torch_private.py"
SOURCES = [
    path
    for folder in ("src", "packages/legacy/src")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != HOME and path.parent.name != "capture_mindspore"
]
NAMES = sorted(set(re.findall(r'"(torch(?:\.\w+)+)"', HOME.read_text(encoding="utf-8"))))

EVERYWHERE = {path.rpartition(".")[2] for path in _torch_private.ATTRIBUTES} | {"_modules", "_parameters"}
"""What any file may read from an object. The last two are the dictionaries of every module, as they were in the first releases of torch."""

KINDS: tuple[Any, ...] = (
    *(torch.Tensor, torch.UntypedStorage, torch.nn.Module(), torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.autograd.Function),
    *(torch.amp.GradScaler("cpu"), torch.optim.SGD([torch.ones(1)], lr=0.1), torch.ones(1, requires_grad=True).exp().grad_fn),
)
ON_OBJECTS = {name for kind in KINDS for name in dir(kind) if re.match("_[a-z]", name)}


def private_names(source: str) -> Iterator[str]:
    """Private names of torch that a program reads: by import, by a dotted name that begins with torch, or from an object."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{one.name}" for one in node.names if re.search(r"\._", f"{node.module}.{one.name}"))
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names if re.match(r"torch\..*?\b_", one.name))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.match(r"torch\.(?!ops\.)(.*\.)?_(?!_)\w+$", name):
                yield name
            elif node.attr in ON_OBJECTS - EVERYWHERE and not re.match(r"(self|cls)\.\w+$", name):
                yield f"an object's {node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from (f"an object's {name}" for name in ON_OBJECTS - EVERYWHERE if ast.unparse(node.args[1]) == repr(name))


def test_one_file_reads_private_names_of_torch() -> None:
    assert len(SOURCES) > 300
    read = {(str(path.relative_to(ROOT)), name) for path in SOURCES for name in private_names(path.read_text(encoding="utf-8"))}
    assert read == set()


def test_the_compiled_recorder_takes_private_names_from_that_file() -> None:
    text = (ROOT / "src/ulpscope/capture/native/_compiled.pyx").read_text(encoding="utf-8")
    assert re.findall(r"\btorch\.(?:\w+\.)*_\w+", text) == []
    assert "_torch_private." in text


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch._C._len_torch_dispatch_stack()", "torch._C._len_torch_dispatch_stack"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.overrides import _pop_mode", "torch.overrides._pop_mode"),
        ("import torch._decomp", "torch._decomp"),
        ("optimizer._optimizer_step_pre_hooks", "an object's _optimizer_step_pre_hooks"),
        ("getattr(scaler, '_scale', None)", "an object's _scale"),
    ],
)
def test_what_is_looked_for_would_be_found(line: str, name: str) -> None:
    assert name in set(private_names(line))


@pytest.mark.parametrize("line", ["torch.ops.aten._to_copy.default", "self._scale", "tensor._version", "torch.__version__", "'torch._ops'"])
def test_what_may_stand_anywhere(line: str) -> None:
    assert set(private_names(line)) == set()


PROGRAM = '''
import gc, json, os, sys, tempfile, traceback
from types import ModuleType

import torch


class Hiding(ModuleType):
    """Something of torch's without what lies at a path below it."""

    def __init__(self, real, path):
        super().__init__(getattr(real, "__name__", "torch"))
        self.__dict__["real"], self.__dict__["path"] = real, path
        for name in ("__path__", "__spec__", "__version__"):
            if hasattr(real, name):
                self.__dict__[name] = getattr(real, name)

    def __getattr__(self, name):
        first, _, rest = self.path.partition(".")
        if name != first:
            return getattr(self.real, name)
        if not rest:
            raise AttributeError(name)
        return Hiding(getattr(self.real, name), rest)


def hide(path):
    sys.modules["torch"] = Hiding(torch, path.partition(".")[2])
    try:
        import ulpscope._torch_private
    finally:
        sys.modules["torch"] = torch


def record(folder):
    import ulpscope

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ulpscope.Capture(folder, model=model) as capture:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            capture.step()
    from ulpscope.store import open_run

    run = open_run(folder)
    names = [record.name for step in run.steps(0) for record in run.records(0, step)]
    return {"calls": len(names), "ledger": [f"{entry.what}: {entry.why}" for entry in run.ledger(0)]}


def replay(folder):
    from ulpscope.replay.calls.rebuild import function_of

    x = torch.ones(3)
    return {"gelu": bool(function_of("aten.gelu.default")(x).equal(torch.nn.functional.gelu(x)))}


def emulate(folder):
    from ulpscope.testing import npu

    npu.install()
    return {"sum": float(torch.ones(3, device="npu").sum())}


def attempt(action, folder):
    from ulpscope.errors import UlpscopeError

    try:
        return action(folder)
    except UlpscopeError as error:
        return {"refused": str(error)}
    except BaseException:
        return {"failed": traceback.format_exc()}


def look(path):
    told = {"path": path}
    try:
        if path:
            hide(path)
    except BaseException as error:
        return told | {"refused": f"{type(error).__name__}: {error}"}
    with tempfile.TemporaryDirectory() as home:
        return told | {action.__name__: attempt(action, os.path.join(home, "run")) for action in (record, replay, emulate)}


import ulpscope.report.escaping, ulpscope.store  # what needs no torch is loaded once, and each path has a process of its own

gc.freeze()
for path in ["", *sys.argv[1:]]:
    if child := os.fork():
        if status := os.waitpid(child, 0)[1]:
            print(json.dumps({"path": path, "died": status}), flush=True)
    else:
        print(json.dumps(look(path)), flush=True)
        os._exit(0)
'''


FEW = [*NAMES[::9], "torch._C._dispatch_has_kernel", "torch._C._current_autograd_node", "torch._C._DisableAutocast"]
LONG = pytest.mark.long


@pytest.fixture(
    scope="module",
    params=[(FEW, "compiled"), pytest.param((NAMES, "compiled"), marks=LONG), pytest.param((NAMES, "Python"), marks=LONG)],
    ids=["few", "all", "all in Python"],
)
def without_each(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What happens without each of the names, with the compiled recorder and with that in Python; the whole torch has no name."""
    names, recorder = request.param
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "ULPSCOPE_NO_KERNEL": "1" if recorder == "Python" else ""}
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"path"')]
    assert {each["path"] for each in found} == {"", *names}
    return {each["path"]: each for each in found}


def test_without_any_of_the_names_it_works_or_says_in_one_line_what_is_off(without_each: dict[str, dict[str, Any]]) -> None:
    whole = without_each[""]
    assert whole["record"]["calls"] > 20
    assert whole["record"]["ledger"] == [] or not torch.__version__.startswith("2.13")
    for path, told in without_each.items():
        if path == "":
            continue
        acts = [told] if "refused" in told else [told["record"], told["replay"], told["emulate"]]
        for act in acts:
            assert "failed" not in act, (path, act["failed"])
            assert "died" not in act, path
            if "refused" in act:
                assert path in act["refused"]
                assert "\n" not in act["refused"]
        if "record" in told and "calls" in told["record"]:
            lines = [line for line in told["record"]["ledger"] if path in line]
            assert told["record"]["calls"] == whole["record"]["calls"] or len(lines) == 1, path


def test_a_name_that_is_needed_for_one_thing_stops_only_that(without_each: dict[str, dict[str, Any]]) -> None:
    told = without_each["torch._C._dispatch_has_kernel"]
    assert told["record"]["calls"] == without_each[""]["record"]["calls"]
    version, tried = torch.__version__, _torch_versions.range_tried()
    sentence = f"torch {version} has no 'torch._C._dispatch_has_kernel', and replaying calls is not possible without it; "
    assert told["replay"] == {"refused": f"{sentence}ulpscope is tried with {tried}"}


def test_what_is_lost_stands_in_the_ledger(without_each: dict[str, dict[str, Any]]) -> None:
    told = without_each["torch._C._current_autograd_node"]
    why = f"torch {torch.__version__} has no 'torch._C._current_autograd_node'"
    assert told["record"]["ledger"] == [*without_each[""]["record"]["ledger"], f"tell which backward call is running: {why}"]


def test_a_torch_in_which_something_is_not_what_it_was_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vars(torch.nn.Module)["__call__"]
    monkeypatch.setattr(torch.amp.GradScaler, "step", property(lambda _: None))
    with pytest.raises(UlpscopeError) as error, ulpscope.Capture(tmp_path / "run"):
        pass
    assert str(error.value).startswith(f"recording cannot begin with torch {torch.__version__}: ")
    assert str(error.value).endswith(f"; ulpscope is tried with {_torch_versions.range_tried()}")
    assert "\n" not in str(error.value)
    assert vars(torch.nn.Module)["__call__"] is before
