# SPDX-License-Identifier: Apache-2.0
"""Test the output of a check: the answer first, every number as a number, nothing foreign taken for markup or a formula."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import openpyxl
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import safe_open

from tests.check.command import invoke
from ulpscope import Capture, open_run
from ulpscope.explain.checks import explain_check
from ulpscope.judge.checks import check_multiple, conclude, errs_text, judge_checked, settle, with_own_leeway
from ulpscope.model import CallName, Frame, Phase, RunInfo, Slot, SlotReplay
from ulpscope.model.check.checks import Check, CheckedCall, CheckedSlot, FamilyPrecision
from ulpscope.report.check.check_rows import CHECK_SCHEMA, check_columns, check_rows, write_check_csv, write_check_json, write_check_xlsx
from ulpscope.report.check.console import render_check, verdict_line
from ulpscope.report.check.page import check_page, write_check_html
from ulpscope.workflows.check.checking import check_run

HONEST = SlotReplay(slot=Slot("output", (0,)), dtype="float32", numel=100, max_ratio=2.0, rms_ratio=0.9, native_ratio=0.8)
WRONG = replace(HONEST, max_ratio=700.0, rms_ratio=212.0, worst_index=(3, 4), worst_recorded=1.25, worst_exact=1.0)


def _call(
    name: str, device: SlotReplay | None = HONEST, recorded: SlotReplay | None = None, phase: str = "forward", **more: object
) -> CheckedCall:
    call = CheckedCall(
        rank=0,
        step=0,
        order=int(more.pop("order", 0)),  # type: ignore[call-overload]
        call=CallName.parse(name),
        phase=phase,  # type: ignore[arg-type]
        module="layers.1",
        device="npu:0",
        data="recorded",
        source=Frame("train.py", 48, "forward", "return gelu(x)"),
    )
    if device is None:
        return replace(call, status="skipped", reason=str(more["reason"]))
    slot = judge_checked(CheckedSlot(slot=Slot("output", (0,)), dtype="float32", shape=(10, 10), device=device, recorded=recorded), "npu:0")
    return conclude(replace(call, slots=(slot,)))


def _check(*calls: CheckedCall, precision: tuple[FamilyPrecision, ...] = ()) -> Check:
    settled = settle(calls)
    findings = explain_check(settled, precision, device="npu:0", path="runs/npu")
    return Check(
        info=RunInfo(), path="runs/npu", device="npu:0", calls=settled, precision=precision, findings=findings, elapsed_s=2.0, num_resumed=1
    )


def _check_of_everything() -> Check:
    return _check(
        _call("functional.gelu.0"),
        _call("functional.gelu.1", WRONG, order=1),
        _call("functional.silu.0", replace(HONEST, num_nonfinite=2), order=2),
        _call("torch.mm.0", HONEST, WRONG, order=3),
        _call("=cmd|' /C calc'!A0.0", order=4),
        _call("distributed.all_reduce.0", None, reason="a collective needs its other ranks", order=5),
        precision=(FamilyPrecision(family="convolution", operands="tf32"),),
    )


def _printed(check: Check) -> str:
    stream = StringIO()
    render_check(check, Console(file=stream, width=300, color_system=None))
    return stream.getvalue()


def test_the_answer_comes_first_and_the_worst_before_the_rest() -> None:
    text = _printed(_check_of_everything())
    lines = text.splitlines()
    assert lines[0] == "wrong: runs/npu on npu:0, 3 of 5 checked calls fail"
    assert text.index("silu forward is wrong") < text.index("gelu forward is wrong on npu:0 in 1 of 2 calls")
    assert "npu:0 errs 212x what an honest float32 kernel errs on these inputs; worst at [3, 4]: 1.25, exact 1" in text
    assert "mm forward is wrong on the device that recorded it" in text
    assert "is not reproduced here" in text
    assert "train.py:48 in forward: return gelu(x)" in text
    assert "note: convolutions on npu:0 compute with about 11 significant bits (TF32 operands)" in text
    assert "1 call of distributed.all_reduce: a collective needs its other ranks" in text
    assert "2 passed, 3 failed, 1 skipped; coverage 83.3%; 2.0 s, 3 calls/s, 1 of them found before" in lines[-1]


def test_a_sound_device_is_said_to_be_one() -> None:
    assert _printed(_check(_call("functional.gelu.0"))).startswith("sound: runs/npu on npu:0, 1 calls checked")
    nothing = _check(_call("distributed.all_reduce.0", None, reason="x"))
    assert _printed(nothing).startswith("unknown: runs/npu on npu:0, none of 1 calls could be checked")


@pytest.mark.parametrize(
    ("found", "phase", "beyond"),
    [
        (HONEST, "forward", False),
        (replace(HONEST, rms_ratio=8.1), "forward", True),
        (replace(HONEST, rms_ratio=8.1), "optimizer", False),
        (replace(HONEST, rms_ratio=8.1, numel=63), "forward", False),
        (replace(HONEST, rms_ratio=8.1, leeway=8.0), "forward", False),
        (replace(HONEST, bias=11.0), "backward", True),
        (replace(HONEST, bias=9.0), "backward", False),
        (replace(HONEST, num_flipped=1), "forward", True),
    ],
)
def test_the_limits(found: SlotReplay, phase: Phase, beyond: bool) -> None:
    assert (check_multiple(found, phase) > 1) is beyond


def test_published_rules_are_named_and_what_they_say_is_not_said_to_be_wrong(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with Capture(tmp_path / "run", keep="tensors") as capture:
        for _ in range(2):
            x = torch.randn(16, 40).requires_grad_()
            torch.nn.functional.layer_norm(x, (40,)).square().sum().backward()
            capture.step()
    sound = check_run(tmp_path / "run", isolated=False, rules="checker")
    assert verdict_line(sound).endswith("none fails by the rules checker")
    check = check_run(tmp_path / "run", isolated=False, rules="binary", select="*layer_norm*")
    assert [call.status for call in check.calls] == ["failed"] * 4
    assert verdict_line(check).endswith("4 of 4 checked calls fail by the rules binary")
    (forward, _) = check.findings
    assert forward.headline.startswith("layer_norm forward fails by the rules binary on cpu in 2 of 2 calls")
    assert any(line == "also functional.layer_norm.0" for line in forward.evidence)
    assert "--rules binary" in forward.next


def test_warnings_of_published_rules_are_no_doubts() -> None:
    warned = [replace(_call(f"functional.gelu.{at}"), step=at, status="warning", reason="output.0: a few differ") for at in range(2)]
    (note,) = explain_check(warned, (), device="npu", path="runs/npu", rules="checker")
    assert note.headline == (
        "2 calls are warnings by the rules checker: functional.gelu.0 (step 0, rank 0), functional.gelu.1 (step 1, rank 0)"
    )
    (doubt,) = explain_check(warned[:1], (), device="npu", path="runs/npu")
    assert doubt.headline == "1 call could not be settled: functional.gelu.0"


def test_overflows_are_not_said_to_err() -> None:
    check = _check(replace(_call("torch.exp.0"), overflow="normal"), replace(_call("torch.tanh.0"), overflow="not reproduced"))
    assert verdict_line(check).endswith("none of 2 overflows is abnormal")


@pytest.mark.parametrize(("scale", "is_said"), [(1e-3, True), (5e-4, False), (None, False)])
def test_a_change_of_scale_is_said_where_it_is_most_of_the_error(scale: float | None, is_said: bool) -> None:
    assert ("1.001 times the exact" in errs_text(replace(WRONG, scale=scale, error=1.05e-3, bias=900.0))) is is_said


@pytest.mark.parametrize(
    ("name", "dtype", "leeway"),
    [
        ("torch.lstm.0", "float32", 8.0),
        ("VF.gru.1", "float64", 8.0),
        ("torch.lstm.0", "bfloat16", 1.0),
        ("functional.gelu.0", "float32", 1.0),
    ],
)
def test_recurrent_layers_have_functions_of_their_own(name: str, dtype: str, leeway: float) -> None:
    assert with_own_leeway(replace(HONEST, dtype=dtype), CallName.parse(name)).leeway == leeway
    assert with_own_leeway(replace(HONEST, dtype=dtype, leeway=16.0), CallName.parse(name)).leeway == 16.0


def test_a_backward_is_not_blamed_for_its_own_forward() -> None:
    check = _check(_call("functional.gelu.0", WRONG), _call("functional.gelu.0", WRONG, phase="backward", order=7))
    assert [call.status for call in check.calls] == ["failed", "warning"]
    alone = _check(_call("functional.gelu.0"), _call("functional.gelu.0", WRONG, phase="backward", order=7))
    assert [call.status for call in alone.calls] == ["passed", "failed"]


def test_csv_and_xlsx_hold_numbers_and_no_formulas(tmp_path: Path) -> None:
    check = _check_of_everything()
    write_check_csv(check, tmp_path / "check.csv")
    with (tmp_path / "check.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in rows] == ["passed", "failed", "failed", "failed", "passed", "skipped"]
    assert float(rows[1]["device_rms_ratio"]) == 212.0
    assert rows[2]["multiple"] == "inf"
    assert rows[4]["call"].startswith("'=cmd")
    write_check_xlsx(check, tmp_path / "check.xlsx")
    sheet = openpyxl.load_workbook(tmp_path / "check.xlsx").active
    cells = list(sheet.iter_rows(values_only=True))  # type: ignore[union-attr]
    assert list(cells[0]) == check_columns(check)
    assert cells[2][cells[0].index("device_rms_ratio")] == 212.0
    assert str(cells[5][cells[0].index("call")]).startswith("'=cmd")


def test_json_keeps_infinities(tmp_path: Path) -> None:
    write_check_json(_check_of_everything(), tmp_path / "check.json")
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["schema"] == CHECK_SCHEMA
    assert found["verdict"] == "wrong"
    assert found["counts"] == {"passed": 2, "failed": 3, "warning": 0, "skipped": 1}
    assert found["coverage"] == pytest.approx(5 / 6)
    assert [row.get("multiple") for row in found["results"]][2] == "Infinity"
    assert found["findings"][0]["kind"] == "kernel"
    assert len(found["results"]) == len(list(check_rows(_check_of_everything())))


def test_the_page_escapes_what_is_foreign(tmp_path: Path) -> None:
    call = replace(_call("functional.gelu.1", WRONG), module="<script>alert(1)</script>", reason='"><img src=x onerror=1>')
    page = check_page(_check(call, _call("functional.gelu.0")))
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    write_check_html(_check_of_everything(), tmp_path / "check.html")
    assert (tmp_path / "check.html").stat().st_size > 1000


def test_failures_are_kept_for_a_closer_look(tmp_path: Path) -> None:
    """A run whose recorded result was tampered with: wrong, not reproduced, and kept with everything that shows it."""
    torch.manual_seed(0)
    with Capture(tmp_path / "run", keep="tensors") as capture:
        F.gelu(torch.randn(10, 10))
        F.gelu(torch.randn(10, 10)) * 2
        capture.step()
    records = list(open_run(tmp_path / "run").records(0, 0))
    _swap_results(tmp_path / "run", tmp_path / "swapped", records)
    result = invoke(tmp_path / "swapped", "--save-failures", tmp_path / "kept", "--select", "*gelu*", "--csv", tmp_path / "check.csv")
    assert result.exit_code == 1, result.output
    assert "not reproduced here" in result.output
    kept = sorted((tmp_path / "kept").iterdir())
    assert len(kept) == 2
    with safe_open(kept[0], framework="pt") as file:
        assert {"input.0", "device.output.0", "exact.output.0", "recorded.output.0"} == set(file.keys())
        assert "errs" in file.metadata()["reason"]
        exact = F.gelu(file.get_tensor("input.0").double())
        assert torch.allclose(file.get_tensor("exact.output.0"), exact)


def _swap_results(source: Path, target: Path, records: list[object]) -> None:
    """Exchange the results of the two gelus."""
    from ulpscope.numerics.casting import as_bytes
    from ulpscope.store import DirectorySink, create_run

    run = open_run(source)
    sink = DirectorySink(create_run(target, run.info), 0)
    sink.begin_step(0)
    for record in run.records(0, 0):
        for slot in record.slots:
            if slot.content:
                data = run.tensor(0, 0, slot.content)
                assert sink.keep(data.dtype, data.shape, as_bytes(data)) == slot.content
    gelus = [one for one in run.records(0, 0) if one.call.short == "gelu"]
    other = {str(gelus[0].call): gelus[1], str(gelus[1].call): gelus[0]}
    for record in run.records(0, 0):
        if str(record.call) in other:
            given = [slot for slot in record.slots if slot.slot.is_input]
            record = replace(record, slots=(*given, *(slot for slot in other[str(record.call)].slots if slot.slot.is_output)))
        sink.write(record)
    sink.end_step()
    sink.close()


def test_the_command_answers_with_its_exit_code(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", keep="statistics") as capture:
        F.silu(torch.randn(4, 30))
        capture.step()
    result = invoke(tmp_path / "run", "--json", "-", "--select", "*silu*")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"] == "sound"
    assert not list(tmp_path.glob("*.journal"))
    assert math.isfinite(json.loads(result.stdout)["elapsed_s"])


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--reference-precision", "half"], ["--timeout", "0"], ["--csv", "."]])
def test_words_that_make_no_sense_are_refused(tmp_path: Path, words: list[str]) -> None:
    assert invoke(tmp_path, *words).exit_code != 0
