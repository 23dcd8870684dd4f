# SPDX-License-Identifier: Apache-2.0
"""`Capture`, the object that the user holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ulpscope
from ulpscope.model import NonFinite


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "layer"}, "level='layer' is not known; choose one of api, module, both, op"),
        ({"keep": "everything"}, "keep='everything' is not known; choose one of fingerprint, statistics, tensors"),
        ({"watch": "everything"}, "watch='everything' is not known; write watch='nonfinite', or watch=ulpscope.NonFinite(...)"),
        ({"watch": "nonfinite", "level": "op"}, "looks at calls or modules, not at level='op'"),
        ({"watch": NonFinite(limit=0)}, "a number of faults from 1 up"),
        ({"steps": [-1]}, "steps are whole numbers from 0 up"),
        ({"select": "re:("}, "is not a regular expression"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_training_starts(tmp_path: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ulpscope.InputError) as refused:
        ulpscope.Capture(tmp_path / "run", **options)  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_started_again_it_records_beside_the_first_run(tmp_path: Path) -> None:
    capture = ulpscope.Capture(tmp_path / "run")
    for _ in range(2):
        capture.start()
        torch.ones(2).exp()
        capture.stop()
    assert capture.path == tmp_path / "run-2"
    for path in (tmp_path / "run", tmp_path / "run-2"):
        run = ulpscope.open_run(path)
        assert [str(record.call) for record in run.records(0, 0) if record.level == "api"] == ["torch.ones.0", "Tensor.exp.0"]


def test_a_run_says_what_made_it_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with ulpscope.Capture(tmp_path / "run", keep="tensors", steps=[0], select="gelu"):
        torch.nn.functional.gelu(torch.ones(2))
    text = (tmp_path / "run" / "run.json").read_text()
    told = json.loads(text)
    assert "secret" not in text
    assert told["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert told["versions"]["torch"] == torch.__version__
    assert told["options"]["keep"] == "tensors"
    assert told["options"]["select"] == ["gelu"]


def test_the_size_limit_stops_tensors_and_not_statistics(tmp_path: Path) -> None:
    with ulpscope.Capture(tmp_path / "run", keep="tensors", max_bytes=200_000):
        for _ in range(4):
            torch.randn(20_000).exp()
    run = ulpscope.open_run(tmp_path / "run")
    slots = [slot for record in run.records(0, 0) for slot in record.slots]
    assert {slot.content is None for slot in slots} == {True, False}
    assert all(slot.summary is not None for slot in slots)
    assert any("size limit" in entry.why for entry in run.ledger(0))


def test_the_size_of_the_first_step_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ulpscope.Capture(tmp_path / "run") as capture:
        for _ in range(3):
            torch.ones(2)
            capture.step()
    assert capsys.readouterr().err.count("step 0 takes") == 1


def test_a_second_capture_records_nothing_and_says_so(tmp_path: Path) -> None:
    with ulpscope.Capture(tmp_path / "outer"):
        inner = ulpscope.Capture(tmp_path / "inner")
        with pytest.warns(ulpscope.CaptureWarning, match="recording this process already"):
            inner.start()
        torch.ones(2)
        inner.stop()
    assert not (tmp_path / "inner").exists()
    assert ulpscope.open_run(tmp_path / "outer").steps(0) == (0,)
