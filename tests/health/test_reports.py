# SPDX-License-Identifier: Apache-2.0
"""Test the reports of two health runs compared, and the files of the older gradient probe."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from tests.health.training import train
from ulpscope.cli import cli
from ulpscope.errors import InputError, MissingDependencyError
from ulpscope.model import Finding, RunInfo
from ulpscope.model.health import Departure, HealthComparison
from ulpscope.numerics.summary.composing import counts_of_intervals
from ulpscope.report.health import grad_probe
from ulpscope.report.health.console import render_health, sparkline
from ulpscope.report.health.figures import MOST_COLUMNS, MOST_ROWS, heat_maps
from ulpscope.report.health.page import write_health_page
from ulpscope.report.health.tensorboard import tagged_scalars
from ulpscope.store.series import open_health

EVIL = "<script>alert(1)</script>\x1b[31m$x$"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    train(path / "good")
    train(path / "again")
    train(path / "other", seed=2)
    train(path / "bad", seed=2, fault="corrupted")
    return path


def compare(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(cli, ["compare-health", *(str(folder / each) if not each.startswith("-") else each for each in arguments)])


def comparison(names: tuple[str, ...] = ("fc.weight", "fc.bias"), num_steps: int = 5) -> HealthComparison:
    shape = (num_steps, len(names))
    return HealthComparison(
        subject=RunInfo(),
        reference=RunInfo(),
        subject_path="a",
        reference_path="b",
        findings=(Finding(level="fault", kind="parted", headline=f"the runs part at step 3: {names[0]}", step=3),),
        departures=(
            Departure(
                step=3, signal="norm", kind="gradient", name=names[0], layer="fc", multiple=2.0, subject=2.0, reference=1.0, rule="jump"
            ),
        ),
        steps=np.arange(num_steps),
        names=names,
        numels=(10,) * len(names),
        similarity=np.linspace(1, 0.5, num_steps)[:, None] * np.ones(shape),
        log_ratio=np.linspace(0, 1, num_steps)[:, None] * np.ones(shape),
        subject_scalars={"loss": np.linspace(2, 1, num_steps)},
        reference_scalars={"loss": np.linspace(2, 1.1, num_steps)},
    )


@pytest.mark.parametrize(
    ("subject", "code", "words"),
    [
        ("bad", 1, "the runs part at step 20: gradient of layers.1.up.weight leaves the reference"),
        ("other", 0, "nothing diverges"),
        ("again", 0, "same: "),
    ],
)
def test_the_exit_code_is_the_answer(subject: str, code: int, words: str, folder: Path) -> None:
    result = compare(folder, subject, "good")
    assert (result.exit_code, result.stderr) == (code, "")
    assert words in result.stdout
    quiet = compare(folder, subject, "good", "--quiet")
    assert (quiet.exit_code, quiet.stdout) == (code, "")


@pytest.mark.parametrize("arguments", [["missing", "good"], ["good", "good", "--html=/nowhere/at/all.html"]])
def test_what_cannot_be_answered_is_exit_code_2_and_one_sentence(arguments: list[str], folder: Path) -> None:
    result = compare(folder, *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_all_reports(folder: Path, tmp_path: Path) -> None:
    files = {"--json": tmp_path / "a.json", "--html": tmp_path / "a.html", "--csv": tmp_path / "a.csv"}
    result = compare(folder, "bad", "good", *(f"{option}={path}" for option, path in files.items()))
    assert result.exit_code == 1
    data = json.loads(files["--json"].read_text())
    assert (data["schema"], data["verdict"], data["parted_at"]) == ("ulpscope.health/1", "diverges", 20)
    assert data["findings"][0]["module"] == "layers.1.up"
    assert len(data["similarity"]["layers.1.up.weight"]) == 30
    rows = list(csv.reader(io.StringIO(files["--csv"].read_text())))
    assert rows[0] == ["step", *map(str, range(30))]
    assert rows[-1][0] == "summary"
    assert {row[0] for row in rows[1:-1]} == set(data["similarity"])
    page = files["--html"].read_text()
    assert "the runs part at step 20" in page
    assert page.count("<svg") == 5


def test_json_to_stdout_is_nothing_else(folder: Path) -> None:
    assert json.loads(compare(folder, "bad", "good", "--json", "-").stdout)["verdict"] == "diverges"


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed here")
def test_pictures(tmp_path: Path) -> None:
    from ulpscope.report.health.curves import write_pictures

    written = write_pictures(comparison((EVIL, "fc.bias")), tmp_path / "png")
    assert [path.name for path in written] == ["similarity.png", "norms.png", "loss.png", "similarity_by_layer.png", "norms_by_layer.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)


def test_pictures_without_matplotlib_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ulpscope.report.health.curves import write_pictures

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ulpscope\[plots\]'"):
        write_pictures(comparison(), tmp_path / "png")


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    write_health_page(comparison((EVIL, "fc.bias")), tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page


def test_the_console_shows_and_does_not_obey() -> None:
    out = io.StringIO()
    render_health(comparison((EVIL, "fc.bias")), Console(file=out, width=120))
    assert "\x1b" not in out.getvalue()
    assert "\\x1b[31m" in out.getvalue()


@pytest.mark.parametrize(("num_names", "num_steps"), [(1, 1), (1, 2), (700, 3), (3, 5000)])
def test_heat_maps_stay_small(num_names: int, num_steps: int, tmp_path: Path) -> None:
    found = comparison(tuple(f"layer{number}.weight" for number in range(num_names)), num_steps)
    for heat in heat_maps(found):
        assert heat.values.shape == (len(heat.layers), len(heat.first_steps))
        assert heat.values.shape[0] <= MOST_ROWS
        assert heat.values.shape[1] <= MOST_COLUMNS
    write_health_page(found, tmp_path / "a.html")
    assert (tmp_path / "a.html").stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([0, 1, 2], "▁▅█"), ([1, 1], "▅▅"), ([np.nan, np.nan], "!!"), ([1, np.inf, 2], "▁!█"), ([1e-6, 1e-3, 1.0], "▁▅█"), ([], "")],
)
def test_sparklines(values: list[float], drawn: str) -> None:
    assert sparkline(np.array(values, dtype=float), 10) == drawn


def test_a_long_curve_fits_the_line() -> None:
    assert len(sparkline(np.arange(1000.0), 30)) <= 30
    assert sparkline(np.arange(4.0), 30, can_draw=False).isascii()


def test_watch_draws_once_where_nobody_looks_on(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["watch", str(folder / "bad")])
    assert result.exit_code == 0
    assert "step 29, 30 steps" in result.stdout
    assert "gradient norm" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_watch_of_a_rank_that_is_not_there(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["watch", str(folder / "bad"), "--rank", "7"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "has no rank 7; it has 0" in result.stderr


def test_tensorboard_tags(folder: Path) -> None:
    step = next(iter(open_health(folder / "good").steps(0)))
    tags = tagged_scalars(step)
    assert {"scalar/loss", "scalar/gradient_norm", "gradient/layers.1.up", "update_ratio/layers.1.up.weight"} <= set(tags)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed here")
def test_tensorboard_files(folder: Path, tmp_path: Path) -> None:
    from ulpscope.report.health.tensorboard import EventWriter

    writer = EventWriter(tmp_path / "events")
    for step in open_health(folder / "good").steps(0):
        writer.write(step)
    writer.close()
    data = b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())
    assert b"gradient/layers.1.up" in data


# ---- the older gradient probe: facts that its documents and tests give

GRADIENT = np.array([[-2.0, 2.0], [0.2, 0.3]])


def test_the_worked_example_of_its_document() -> None:
    assert counts_of_intervals(np.array([9.3, 5.4, -1.0, -12.3]), (-10, 0, 10)).tolist() == [1, 1, 2, 0]


def test_its_rows() -> None:
    statistics = [2.0, -2.0, 2.851315498352051, [2, 2]]
    assert grad_probe.gradient_row("w", GRADIENT, "L0") == ["w", "678a6c7d9d9716682b56fda097d0936c", *statistics]
    assert grad_probe.gradient_row("w", GRADIENT, "L1") == ["w", *statistics]
    assert grad_probe.gradient_row("w", GRADIENT, "L2") == ["w", 0.25, 0.0, 0.5, 0.25, 0.0, *statistics]


def test_its_headings() -> None:
    assert grad_probe.header("L0") == ["param_name", "MD5", "max", "min", "norm", "shape"]
    assert grad_probe.header("L1") == ["param_name", "max", "min", "norm", "shape"]
    assert grad_probe.header("L2") == ["param_name", "(-inf, -1]", "(-1, 0]", "(0, 1]", "(1, inf)", "=0", "max", "min", "norm", "shape"]


def test_its_files(tmp_path: Path) -> None:
    summary = grad_probe.write_summary(tmp_path, 0, 3, [grad_probe.gradient_row("fc.weight", GRADIENT, "L2")], "L2")
    mask = grad_probe.write_mask(tmp_path, 0, 3, "fc.weight", GRADIENT)
    assert (summary, mask) == (tmp_path / "rank0/grad_summary_3.csv", tmp_path / "rank0/step3/fc.weight.npy")
    assert np.load(mask, allow_pickle=False).tolist() == [[False, True], [True, True]]
    rows = list(csv.reader(io.StringIO(summary.read_text())))
    assert rows[1] == ["fc.weight", "0.25", "0.0", "0.5", "0.25", "0.0", "2.0", "-2.0", "2.851315498352051", "[2, 2]"]


@pytest.mark.parametrize("name", ["../../evil", "/evil", ".hidden", "", "a\\b"])
def test_no_mask_climbs_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be the name of a file"):
        grad_probe.write_mask(tmp_path, 0, 0, name, GRADIENT)


def test_reading_and_reporting_need_no_torch(folder: Path) -> None:
    code = """
import sys
sys.modules['torch'] = None
from ulpscope.workflows.health_recording import compare_health
print(compare_health(*sys.argv[1:]).parted_at)
"""
    command = [sys.executable, "-c", code, str(folder / "bad"), str(folder / "good")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert (done.stdout, done.stderr) == ("20\n", "")
