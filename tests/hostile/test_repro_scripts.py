# SPDX-License-Identifier: Apache-2.0
"""Run repro scripts that are made of hostile names: planted code does not run, and the script does its work."""

from __future__ import annotations

import ast
import io
import json
import os
import runpy
import subprocess
import sys
import tokenize
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ulpscope.model import Arguments, Slot
from ulpscope.report.comparison.repro import ReproCall, ReproYardstick, file_stem, script_text
from ulpscope.workflows.compare.comparing import compare_runs
from ulpscope.workflows.compare.reproducing import with_repro
from ulpscope.workflows.record.capturing import Capture

PLANT = "open('planted','w')"
"""What must not run: it leaves a file in the working directory. It has no full stop, which the name of a module cannot hold."""
UTF_7 = "coding:utf-7 +ACc-+AAo-open(+ACc-planted+ACc-,+ACc-w+ACc-)+AAo-#"
HOSTILE = {
    "utf_7": UTF_7,
    "utf_7_in_quotes": f"+ACIAIgAi- {UTF_7}",
    "utf_16": f"coding=utf-16 {PLANT}",
    "unknown_encoding": "-*- coding: no-such-codec -*-",
    "line": f"x\n{PLANT}\n",
    "carriage_return": f"x\r{PLANT}\r",
    "form_feed": f"\x0c{PLANT}\x0c",
    "separators": f"\u2028{PLANT}\u2029{PLANT}\x85{PLANT}\x0b\x1c",
    "single_quotes": f"'''\n{PLANT}\n'''",
    "double_quotes": f'"""\n{PLANT}\n"""',
    "escaped_quotes": f"\\'''+{PLANT}+'''\\",
    "json": f"\"}}'''); {PLANT}; (r'''{{\"a\": \"",
    "backslash_at_the_end": f"\\\n{PLANT}\\",
    "nul": f"\x00\n{PLANT}\x00",
    "half_characters": f"\ud800\n{PLANT}\udfff",
    "templates": f"{{}} {{0}} {{x!r}} %s %(a)s ${{A}} {PLANT}",
    "marks": "@CALL@ @FACTS@ @WHAT@ @RUN@ @TABLES@",
    "bidi": f"\u202e\u2066{PLANT}\u2069",
    "terminal": f"\x1b]0;{PLANT}\x07\x1b[2J",
    "ten_megabytes": "A" * 10_000_000 + f"\n{PLANT}",
}


class Faulty(TorchDispatchMode):
    """A machine whose gelu and batched products are wrong."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 1.5 if func._schema.name in ("aten::gelu", "aten::bmm") else made


def recorded(folder: Path, program: Callable[[], Any], *, wrong: bool) -> Path:
    torch.manual_seed(0)
    with Capture(folder, keep="tensors"), Faulty() if wrong else nullcontext():
        program()
    return folder


def script_of(folder: Path, program: Callable[[], Any]) -> Path:
    subject, reference = (recorded(folder / side, program, wrong=side == "subject") for side in ("subject", "reference"))
    fault = with_repro(compare_runs(subject, reference, replay="none"), folder / "repro").faults[0]
    assert fault.repro, fault.evidence
    return Path(fault.repro)


def run_here(script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run the file as Python reads it, but in this process, which is quicker."""
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    return int(left.value.code or 0), capsys.readouterr().out


def is_one_literal(script: Path) -> None:
    """Check that all is ASCII, the encoding is fixed, and but for one literal with JSON the text is that of a harmless call."""
    raw = script.read_bytes()
    lines = raw.decode("ascii").splitlines()
    assert lines[1] == "# -*- coding: utf-8 -*-"
    assert tokenize.detect_encoding(io.BytesIO(raw).readline)[0] == "utf-8"
    tokens = list(tokenize.tokenize(io.BytesIO(raw).readline))
    held = [token.string for token in tokens if token.type == tokenize.STRING and token.string.startswith("r'''")]
    assert len(held) == 1
    facts = json.loads(ast.literal_eval(held[0]))
    assert facts["what"].isprintable()
    rest = [token.string for token in tokens if token.string != held[0]]
    assert "planted" not in "".join(rest)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_module_of_any_name_stays_a_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential()
    model.add_module(name, torch.nn.GELU())
    script = script_of(tmp_path, lambda: model(torch.arange(12.0).reshape(3, 4) / 5 - 1))
    is_one_literal(script)
    code, said = run_here(script, capsys, monkeypatch)
    assert not (tmp_path / "planted").exists()
    assert code == 1, said
    assert "the subject's recorded output.0 errs" in said
    assert "the reference's recorded output.0 errs" in said
    assert all(line.isprintable() for line in said.split("\n"))


@pytest.mark.parametrize("name", ["utf_7", "ten_megabytes"])
def test_a_python_of_its_own_runs_the_script(name: str, tmp_path: Path) -> None:
    """As a user does, in a folder of an odd name, in a locale that cannot spell everything, with what the README says."""
    home = tmp_path / "odd $(touch planted) 'n\"ame\n"
    home.mkdir()
    model = torch.nn.Sequential()
    model.add_module(HOSTILE[name] + "é\u2028", torch.nn.GELU())
    script = script_of(home, lambda: model(torch.arange(12.0).reshape(3, 4) / 5 - 1))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "")
    assert "this machine's kernel (cpu) in output.0 errs" in done.stdout
    assert "Run it with: python gelu_0.py" in (script.parent / "README.txt").read_text(encoding="utf-8").splitlines()[1]
    assert not list(tmp_path.rglob("planted"))


def test_texts_among_the_arguments_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An equation may hold spaces, and comes from the run as it is."""
    monkeypatch.chdir(tmp_path)
    x = torch.arange(24.0).reshape(2, 3, 4) / 7 - 1
    script = script_of(tmp_path, lambda: torch.einsum("abc ,  abd -> acd", x, x))
    is_one_literal(script)
    assert "torch.einsum(TEXTS[0], " in script.read_text()
    assert run_here(script, capsys, monkeypatch)[0] == 1


def call_with(text: str) -> ReproCall:
    """Make a call with the text wherever one may stand."""
    slot, keyed = Slot("input", (0,)), Slot("input", (text,))
    return ReproCall(
        headline=text,
        op="functional.gelu",
        arguments=Arguments(
            args=({"$tensor": "input.0"}, f"~{text}~", {text + "~": [f"~{text}~"]}, {"$tensor": str(keyed)}), kwargs={"planted": text + "~"}
        ),
        phase="backward",
        files={"small": {"subject": "gelu_1.subject.safetensors"}},
        yardsticks={"small": {Slot("output", (text,)): ReproYardstick(rms=1e-8, at=(0,), error=2e-8)}},
        limits=(128.0, 64.0),
        dtype=text,
        device=text,
        strides={keyed: (1, 4)},
        leaves={Slot("output", (text,)): (slot, keyed)},
        mutated=(keyed,),
        operands={"subject": "tf32", text: "float16"},
        other_arguments=Arguments(args=({"$tensor": str(keyed)},), kwargs={"approximate": f"{text}~"}),
    )


@pytest.mark.parametrize("text", [*HOSTILE.values(), "\x7f", "a" * 500 + "…x"], ids=[*HOSTILE, "delete", "long"])
def test_no_text_stands_outside_the_literal(text: str, tmp_path: Path) -> None:
    script, harmless = tmp_path / "script.py", tmp_path / "harmless.py"
    script.write_text(script_text(call_with(text)), encoding="ascii")
    harmless.write_text(script_text(call_with("quite harmless")), encoding="ascii")
    is_one_literal(script)
    assert tokens_of(script) == tokens_of(harmless)
    compile(script.read_bytes(), "script", "exec")


def tokens_of(script: Path) -> list[str]:
    tokens = tokenize.tokenize(io.BytesIO(script.read_bytes()).readline)
    return ["(the facts)" if token.string.startswith("r'''") else token.string for token in tokens]


@pytest.mark.parametrize("call", HOSTILE.values(), ids=HOSTILE)
def test_files_beside_the_script_have_plain_names(call: str) -> None:
    stem = file_stem(call, 7)
    assert stem.isascii()
    assert stem.replace("_", "a").isalnum()
    assert len(stem) < 50
