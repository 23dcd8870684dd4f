# SPDX-License-Identifier: Apache-2.0
"""Check the reports: on the terminal, as JSON, as a page, by the command line, and from runs that other tools recorded."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

import ulpscope
from tests.nonfinite.programs import HARMLESS, Net, half_linear, square, train
from ulpscope.cli import cli
from ulpscope.model import NonFiniteReport
from ulpscope.report.nonfinite.page import page_text
from ulpscope.report.nonfinite.text import render_nonfinite
from ulpscope.workflows.nonfinite import find_nonfinite

GOLDEN = Path(__file__).parents[1] / "golden" / "msprobe-26" / "statistics-L0"


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overflow")
    torch.manual_seed(0)
    half_linear(lambda model, optimizer: ulpscope.Capture(folder / "run", model, watch="nonfinite"))
    return folder / "run"


@pytest.fixture(scope="module")
def report(overflowed: Path) -> NonFiniteReport:
    return find_nonfinite(overflowed)


def rendered(report: NonFiniteReport) -> str:
    console = Console(width=200, file=io.StringIO())
    render_nonfinite(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_the_answer_comes_first_and_says_what_would_have_helped(report: NonFiniteReport) -> None:
    lines = rendered(report).splitlines()
    assert lines[0] == "first non-finite value: +inf made by up  linear (call 0, forward, output 0), step 0, rank 0"
    text = "\n".join(lines)
    assert "it needs 66 2" in text
    assert "float16 ends at 65 504; bfloat16 or a scale of 1/2 would do" in text
    assert "programs.py:" in text
    assert "next: ulpscope show" in text


def test_the_exact_result_is_found_by_replaying_the_call(report: NonFiniteReport) -> None:
    first = report.first
    assert first is not None
    assert first.needed == pytest.approx(8 * 3000 * float(torch.tensor(2.76).half()), rel=1e-3)
    assert first.limit == 65504.0


def test_a_finding_stands_without_the_values_or_the_replay(
    report: NonFiniteReport, overflowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ulpscope.workflows.nonfinite.find_spec", lambda name: None)
    without = find_nonfinite(overflowed)
    assert without.first is not None
    assert without.first.needed is None
    assert any("needs torch" in note for note in without.notes)


def test_json_holds_everything_and_no_bare_infinity(report: NonFiniteReport, overflowed: Path, tmp_path: Path) -> None:
    done = command("nonfinite", str(overflowed), "--json", str(tmp_path / "a.json"), "--quiet")
    assert done.exit_code == 1, done.output
    assert done.output == ""
    told = json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["schema"] == "ulpscope.nonfinite/1"
    assert told["verdict"] == "nonfinite"
    (event,) = [event for event in told["events"] if event["level"] == "fault"]
    assert event["call"] == "functional.linear.0"
    assert event["source"]["file"].endswith("programs.py")


def test_the_page_holds_it_and_escapes_what_others_wrote(report: NonFiniteReport, overflowed: Path, tmp_path: Path) -> None:
    done = command("nonfinite", str(overflowed), "--html", str(tmp_path / "a.html"))
    assert done.exit_code == 1
    page = (tmp_path / "a.html").read_text()
    assert "+inf made by up  linear" in page
    assert "http" not in page.replace("http-equiv", "")
    assert report.first is not None
    hostile = replace(report.first, headline="<script>alert(1)</script>\x1b[31m", cause="a & b", module="</style>")
    text = page_text(replace(report, events=(hostile,), path="<img src=x>"))
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text


def test_near_misses_are_ranked_by_headroom(tmp_path: Path) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        close = (h.detach() * 0 + 6e4).half()
        far = (h.detach() * 0 + 6.0).half()
        sunk = torch.full((4, 8), 1e-4).half() * torch.full((4, 8), 1e-3).half()
        return h + (close.float() + far.float() + sunk.float()) * 0

    train(lambda model, optimizer: ulpscope.Capture(tmp_path / "run", model), Net(middle), square, steps=1)
    found = find_nonfinite(tmp_path / "run")
    assert found.first is None
    near = {miss.call: miss for miss in found.near_misses}
    assert found.near_misses[0].call == "Tensor.half.0"
    assert near["Tensor.half.0"].headroom == pytest.approx(65504 / 6e4, rel=1e-3)
    assert near["Tensor.mul.2"].subnormal_share == 1.0
    text = rendered(found)
    assert "near misses" in text
    assert "1.09x" in text
    assert "100.00% subnormal" in text


def test_a_harmless_run_leaves_with_0(tmp_path: Path) -> None:
    HARMLESS["causal_mask"](lambda model, optimizer: ulpscope.Capture(tmp_path / "run", model, watch="nonfinite"))
    done = command("nonfinite", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert done.output.startswith("nothing non-finite did harm")


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = command("nonfinite", str(tmp_path / "nowhere"))
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_a_dump_of_another_tool_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "dump")
    assert find_nonfinite(tmp_path / "dump").first is None
    (file,) = (tmp_path / "dump").rglob("dump.json")
    dump = json.loads(file.read_text())
    seen = False
    for name, call in dump["data"].items():
        seen = seen or name.startswith("Module.fc2.Linear.forward")
        for key in ("output", "input_args", "input") if seen else ():
            for tensor in call.get(key, ()) if not name.startswith("Module.fc2.Linear.forward") or key == "output" else ():
                tensor.update({"Max": float("nan"), "Min": float("nan"), "Mean": float("nan"), "Norm": float("nan")})
    file.write_text(json.dumps(dump))
    first = find_nonfinite(tmp_path / "dump").first
    assert first is not None
    assert (first.kind, first.module, first.phase) == ("made", "fc2", "forward")
    assert "ulpscope" not in first.cause


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(8, 1).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8).half() * (1.0 if step < 1 else 6e4) * 2).float().mean()
    loss.backward()
    optimizer.step()
print("done")
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("extra", "code", "said"), [((), 3, "it needs 120 000"), (("--watch-raise",), 1, "NonFiniteError: +inf was made by")]
)
def test_the_finding_is_printed_at_the_end_of_a_run(tmp_path: Path, extra: tuple[str, ...], code: int, said: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "ulpscope", "run", "--into", "run", "--watch", "nonfinite", *extra, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert "first non-finite value: +inf made by mul (call 1, forward, output 0), step 1, rank 0" in done.stderr
    assert said in done.stderr
    assert done.stdout == ("done\n" if code == 3 else "")


# ---- what a gradient would have needed


def steep(folder: Path, **options: Any) -> None:
    """Train a float16 weight whose gradient is 4 x 100 x 300."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).half()
    with ulpscope.Capture(folder / "run", model, **options) as capture:
        (model(torch.full((4, 8), 100.0, dtype=torch.float16)).float() * 300).sum().backward()
        capture.step()


def in_three_dimensions(folder: Path, **options: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 6).half()
    with ulpscope.Capture(folder / "run", model, **options) as capture:
        (model(torch.full((2, 2, 8), 100.0, dtype=torch.float16)).float() * 300).sum().backward()
        capture.step()


def cast_back(folder: Path, **options: Any) -> None:
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    with ulpscope.Capture(folder / "run", **options) as capture:
        (x.float() * 120_000).sum().backward()
        capture.step()


@pytest.mark.parametrize("program", [steep, in_three_dimensions, cast_back])
@pytest.mark.parametrize("options", [{"watch": "nonfinite"}, {"keep": "tensors"}], ids=["watched", "recorded"])
def test_what_a_gradient_needs_is_known_from_its_replay(program: Any, options: dict[str, Any], tmp_path: Path) -> None:
    program(tmp_path, **options)
    report = find_nonfinite(tmp_path / "run")
    (first, *_) = report.events
    assert (first.phase, first.needed) == ("backward", 120_000.0), (first.headline, report.notes)
    assert first.remedy == "it needs 120 000, float16 ends at 65 504; bfloat16 or a scale of 1/2 would do"


def test_what_is_gone_by_the_time_of_backward_is_said_to_be(tmp_path: Path) -> None:
    weight = torch.full((8,), 100.0, dtype=torch.float16, requires_grad=True)

    def scaled() -> torch.Tensor:
        return (weight * torch.ones(8, dtype=torch.float16)).float()

    with ulpscope.Capture(tmp_path / "run", watch="nonfinite") as capture:
        (scaled() * 1e6).sum().backward()
        capture.step()
    report = find_nonfinite(tmp_path / "run")
    assert report.events[0].call == "Tensor.float.0"
    assert report.events[0].needed is None
    assert any("Tensor.float.0" in note for note in report.notes), report.notes
