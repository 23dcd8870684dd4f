# SPDX-License-Identifier: Apache-2.0
"""Test which tensors a health recording measures, and to which step they belong."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ulpscope.capture.health.monitor import HealthSession
from ulpscope.errors import CaptureWarning, InputError
from ulpscope.model.health import Alert, HealthSeries
from ulpscope.store.series import open_health
from ulpscope.workflows.health_recording import record_script_health as watch_script
from ulpscope.workflows.health_recording import watch


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 6)).square().mean()


def series(path: Path) -> HealthSeries:
    return open_health(path).series(0)


def column(found: HealthSeries, kind: str, name: str, statistic: str = "rms") -> Any:
    place = next(place for place, target in enumerate(found.targets) if (target.kind, target.name) == (kind, name))
    return found.values[:, place, ("min", "max", "mean", "rms", "zero", "nonfinite").index(statistic)]


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def test_rows_are_what_the_tensors_hold(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    expected: dict[tuple[str, str], list[float]] = {}
    with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            optimizer.step()
            for name, parameter in model.named_parameters():
                expected.setdefault(("gradient", name), []).append(rms(parameter.grad))
                expected.setdefault(("parameter", name), []).append(rms(parameter))
                expected.setdefault(("update", name), []).append(rms(parameter.detach() - before[name]))
                expected.setdefault(("moment.momentum_buffer", name), []).append(rms(optimizer.state[parameter]["momentum_buffer"]))
    found = series(health.path)
    assert {(target.kind, target.name) for target in found.targets} == set(expected)
    for (kind, name), values in expected.items():
        assert column(found, kind, name).tolist() == pytest.approx(values, rel=1e-6)
    assert found.scalars["learning_rate"].tolist() == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("order", ["before", "after", "twice before", "explicit"])
def test_a_loss_belongs_to_its_step_wherever_it_is_logged(order: str, tmp_path: Path) -> None:
    model = network()
    optimizer, losses = sgd(model), []
    with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
        for _ in range(4):
            optimizer.zero_grad()
            parts = [loss_of(model) for _ in range(2 if order == "twice before" else 1)]
            if order != "after":
                for part in parts:
                    health.log(loss=part)
            sum(parts).backward()
            optimizer.step()
            if order == "after":
                health.log(loss=parts[0])
            if order == "explicit":
                health.step()
            losses.append(float(np.mean([part.item() for part in parts])))
    found = series(health.path)
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.scalars["loss"].tolist() == pytest.approx(losses)


def test_gradients_before_and_after_clipping(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
        for _ in range(2):
            optimizer.zero_grad()
            (loss_of(model) * 1000).backward()
            health.before_clip()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    found = series(health.path)
    assert found.steps.tolist() == [0, 1]
    assert (column(found, "unclipped", "0.weight") > 10 * column(found, "gradient", "0.weight")).all()


def test_accumulation_is_one_step(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True, activations="0") as health:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                loss_of(model).backward()
            optimizer.step()
    found = series(health.path)
    assert found.steps.tolist() == [0, 1]
    assert not np.isnan(column(found, "activation", "0")).any()


def test_several_optimizers_of_one_step(tmp_path: Path) -> None:
    model = network()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.2)]
    with watch(model, optimizers, into=tmp_path / "run", quiet=True) as health:
        for _ in range(3):
            loss_of(model).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = series(health.path)
    assert found.steps.tolist() == [0, 1, 2]
    assert found.present.all()


@pytest.mark.parametrize(
    ("granularity", "names"), [("parameter", {"0.weight", "0.bias", "2.weight", "2.bias"}), ("layer", {"0", "2"}), ("group", {"group0"})]
)
def test_granularity(granularity: Any, names: set[str], tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True, granularity=granularity, bounds=(0.0,)) as health:
        loss_of(model).backward()
        optimizer.step()
    found = series(health.path)
    assert {target.name for target in found.targets} == names
    rows = [place for place, target in enumerate(found.targets) if target.kind == "gradient"]
    squares = sum(found.values[0, row, 3] ** 2 * found.targets[row].numel for row in rows)
    assert squares == pytest.approx(sum(float(p.grad.square().sum()) for p in model.parameters()), rel=1e-5)
    assert found.histograms[0, rows].sum() == sum(p.numel() for p in model.parameters())


def test_signs_of_a_layer_are_those_of_its_parameters(tmp_path: Path) -> None:
    signs = {}
    for granularity in ("parameter", "layer"):
        model = network()
        optimizer = sgd(model)
        torch.manual_seed(1)
        with watch(model, optimizer, into=tmp_path / granularity, quiet=True, granularity=granularity, num_samples=16) as health:
            loss_of(model).backward()
            optimizer.step()
        found = series(health.path)
        for place, target in enumerate(found.targets):
            if target.kind == "gradient":
                signs[target.name] = np.unpackbits(found.signs[0, place])
        if granularity == "parameter":
            gradients = {name: (p.grad.flatten() > 0).numpy() for name, p in model.named_parameters()}
    np.testing.assert_array_equal(signs["2.weight"][:16], gradients["2.weight"])
    np.testing.assert_array_equal(signs["2"].reshape(-1, 8)[-1, :2], gradients["2.bias"])


def test_steps_with_the_same_rows_have_the_same_layout() -> None:
    """A layout that is new each time would be written each time, and alerts would have no past."""
    model, steps = network(), []
    optimizer = sgd(model)
    session = HealthSession(steps.append, models=[model], optimizers=[optimizer], activations="*", granularity="layer")
    session.start()
    for _ in range(4):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    session.stop()
    assert len(steps) == 4
    assert steps[1].layout is steps[2].layout is steps[3].layout
    assert {target.kind for target in steps[3].layout.targets} >= {"activation", "gradient", "moment.momentum_buffer"}


def test_every_nth_step(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True, every=3) as health:
        for _ in range(8):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            health.log(loss=1.0)
    assert series(health.path).steps.tolist() == [0, 3, 6]


def test_main_grad_is_taken_for_the_gradient(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
        loss_of(model).backward()
        model[0].weight.main_grad = torch.full((8, 6), 3.0)
        optimizer.step()
    assert column(series(health.path), "gradient", "0.weight").tolist() == [3.0]


def test_a_parameter_without_gradient_is_absent_for_that_step(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            if step == 1:
                model[0].bias.grad = None
            optimizer.step()
    assert np.isnan(column(series(health.path), "gradient", "0.bias")).tolist() == [False, True, False]


def test_sparse_gradients(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert column(series(health.path), "gradient", "weight", "zero").tolist() == [0.8]


def test_a_fused_optimizer_with_a_scaler_shows_gradients_without_their_scale(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, into=tmp_path / "run", quiet=True, scaler=scaler) as health:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            expected = rms(model[0].weight.grad) / 1024
            scaler.step(optimizer)
            scaler.update()
    found = series(health.path)
    assert column(found, "gradient", "0.weight")[-1] == pytest.approx(expected, rel=1e-5)
    assert found.scalars["scale"].tolist() == [1024.0, 1024.0]


def train_alone(steps: int = 4, overflow_at: int = -1) -> list[float]:
    """Train as a script that knows nothing of being recorded."""
    model = network()
    optimizer, losses = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=overflow_at >= 0)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        if step == overflow_at:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def test_a_script_is_watched_without_being_told(tmp_path: Path) -> None:
    with watch_script(tmp_path / "run", quiet=True, activations="*") as health:
        losses = train_alone()
    found = series(health.path)
    assert found.scalars["loss"].tolist() == pytest.approx(losses)
    assert {"0.weight", "2.bias"} <= {target.name for target in found.targets if target.kind == "gradient"}
    later = slice(1, None)  # that the model exists is seen in its first forward, what it clips from the second step on
    assert (column(found, "unclipped", "2.weight")[later] > column(found, "gradient", "2.weight")[later]).all()


def test_a_step_that_a_scaler_leaves_out_counts_as_a_step(tmp_path: Path) -> None:
    with watch_script(tmp_path / "run", quiet=True) as health:
        losses = train_alone(overflow_at=2)
    found = series(health.path)
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.scalars["loss"].tolist() == pytest.approx(losses)
    assert found.scalars["skipped"].tolist()[2] == 1.0
    assert found.scalars["scale"].tolist()[3] == 32.0


def test_a_failure_to_watch_never_reaches_training(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with watch(model, optimizer, into=tmp_path / "run", quiet=True) as health:
            for _ in range(3):
                loss_of(model).backward()
                health.log(loss="not a number")
                optimizer.step()
    assert [warning.category for warning in said] == [CaptureWarning]
    assert "could not take down a scalar" in str(said[0].message)
    assert "could not convert" in (health.path / "rank00000" / "ledger.jsonl").read_text()
    assert series(health.path).steps.tolist() == [0, 1, 2]


def test_a_folder_that_cannot_be_made_leaves_training_unwatched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = network()
    with pytest.warns(CaptureWarning, match="Training goes on without it"):
        health = watch(model, sgd(model), into=tmp_path / "file" / "run")
    health.log(loss=1.0)
    health.step()
    health.before_clip()
    health.close()
    assert health.path is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every=0 makes no sense"),
        ({"granularity": "model"}, "granularity='model' is not known"),
        ({"kinds": ["loss"]}, "kinds='loss' is not known; choose from gradient, parameter, update, moment"),
        ({"bounds": [1.0, 0.0]}, "not in ascending order"),
    ],
)
def test_wrong_wishes_are_said_in_words(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        watch(network(), into=tmp_path / "run", **options)


def train_to_a_nan(model: nn.Module, into: Path, on_alert: Any) -> Any:
    optimizer = sgd(model)
    with watch(model, optimizer, into=into, on_alert=on_alert) as health:
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model).backward()
            if step == 25:
                model[2].weight.grad[0, 0] = float("nan")
            optimizer.step()
    return health


def test_alerts_are_printed_stored_and_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[Alert] = []

    def on_alert(alert: Alert) -> None:
        called.append(alert)
        raise RuntimeError("the user's own mistake")

    with pytest.warns(CaptureWarning, match="call on_alert"):
        health = train_to_a_nan(network(), tmp_path / "run", on_alert)
    assert called[0].kind == "nonfinite"
    assert (called[0].step, called[0].names[0]) == (25, "2.weight")
    assert open_health(health.path).alerts(0) == health.alerts == tuple(called)
    assert "ulpscope: step 25: values that are not finite in 2.weight" in capsys.readouterr().err


ON_NPU = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ulpscope.testing import npu
npu.install()
from tests.health.training import train
from ulpscope.workflows.health_recording import compare_health
folder = Path(sys.argv[2])
comparison = compare_health(train(folder / "npu", steps=12, device="npu"), train(folder / "cpu", steps=12))
assert comparison.verdict == "together", comparison.findings
assert comparison.similarity[0].min() == 1.0
broken = train(folder / "broken", steps=12, device="npu", fault="corrupted", at=6)
found = compare_health(broken, folder / "cpu").findings[0]
assert (found.step, found.module) == (6, "layers.1.up"), found
assert not list(folder.glob("*/rank*/ledger.jsonl"))
"""


def test_on_the_emulated_npu(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ON_NPU, root, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
