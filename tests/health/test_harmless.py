# SPDX-License-Identifier: Apache-2.0
"""Record health without changing anything: the programs of tests/harmless, bitwise, with and without a recording, all put back after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harmless import programs
from ulpscope.store.series import open_health
from ulpscope.workflows.health_recording import record_script_health as watch_script
from ulpscope.workflows.health_recording import watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
NAMES = sorted(programs.PROGRAMS)
SOME = [
    *("mlp", "gpt_dropout", "conv_batch_norm", "in_place", "tied_weights", "checkpoint_reentrant", "checkpoint_not_reentrant"),
    *("gradient_accumulation", "autocast_grad_scaler", "skipped_steps", "several_optimizers", "lbfgs_closure", "multihead_attention"),
    *("users_function_mode", "users_dispatch_mode_outside", "jit_tracing", "functional_transforms", "exception_in_mid_step"),
]


class InScript:
    """Records health as `ulpscope run --health` does, with nothing told."""

    def __init__(self, folder: Path) -> None:
        self._watch = watch_script(folder / "run", quiet=True, activations="*", bounds=(-1.0, 0.0, 1.0), exact_updates=True)

    def __enter__(self) -> InScript:
        self._watch.__enter__()
        return self

    def __exit__(self, *leaving: Any) -> None:
        self._watch.__exit__(*leaving)

    def step(self) -> None: ...


def watching(folder: Path, *, is_script: bool) -> Callable[..., Any]:
    def record(model: Any = None, optimizer: Any = None) -> Any:
        if is_script:
            return InScript(folder)
        return watch(model, optimizer, into=folder / "run", quiet=True, activations=("*",), bounds=(0.0,))

    return record


def complaints(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("run*")):
        for ledger in path.glob("rank*/ledger.jsonl"):
            found += ledger.read_text().splitlines()
    return found


def check(name: str, folder: Path, *, is_script: bool) -> None:
    without = programs.run(name, programs.Nothing)
    watched = programs.run(name, watching(folder, is_script=is_script))
    assert not (found := programs.differences(without, watched)), "\n".join(found)
    assert complaints(folder) == []


@pytest.mark.parametrize("name", SOME)
def test_watching_changes_nothing(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, is_script=len(name) % 2 == 0)


@pytest.mark.long
@pytest.mark.parametrize("is_script", [False, True], ids=["handle", "script"])
@pytest.mark.parametrize("name", NAMES)
def test_watching_changes_nothing_in_any_program(name: str, is_script: bool, tmp_path: Path) -> None:
    check(name, tmp_path, is_script=is_script)


def test_an_ordinary_program_is_seen(tmp_path: Path) -> None:
    """A recording that did nothing would pass everything above."""
    programs.run("mlp", watching(tmp_path, is_script=False))
    series = open_health(tmp_path / "run").series(0)
    assert {target.kind.partition(".")[0] for target in series.targets} == {"activation", "gradient", "parameter", "update", "moment"}
    assert len(series.steps) >= 2


def attributes() -> dict[tuple[str, str], Any]:
    homes = [torch.nn.utils, torch.nn.utils.clip_grad, torch.autograd, torch.amp.GradScaler, torch.nn.Module, torch.optim.Optimizer]
    return {(str(home), name): value for home in homes for name, value in vars(home).items()}


def hooks() -> list[int]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    return [len(vars(module)["_global_forward_pre_hooks"]), len(vars(optimizer)["_global_optimizer_pre_hooks"])]


@pytest.mark.parametrize("is_script", [False, True], ids=["handle", "script"])
def test_everything_is_put_back(is_script: bool, tmp_path: Path) -> None:
    before, hooks_before = attributes(), hooks()
    programs.run("mlp", watching(tmp_path, is_script=is_script))
    after = attributes()
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert hooks() == hooks_before


def test_an_exception_of_the_program_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), watch_script(tmp_path / "run", quiet=True):
        raise ZeroDivisionError
    assert [key for key, value in attributes().items() if before[key] is not value] == []
