# SPDX-License-Identifier: Apache-2.0
"""Old configurations in, commands of ours out; the commands are parsed by our own command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ulpscope.cli import cli
from ulpscope.compat.msprobe.config import read_config
from ulpscope.errors import InputError
from ulpscope.recording.selection import Selection


def migrated(folder: Path, config: Any) -> list[str]:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    done = CliRunner().invoke(cli.get_command(click.Context(cli), "migrate"), [str(folder / "config.json")], catch_exceptions=False)  # type: ignore[arg-type]
    assert done.exit_code == 0
    return done.output.splitlines()


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ({"task": "statistics", "dump_path": "d", "rank": [], "step": [], "level": "L1"}, "ulpscope run --into d train.py"),
        (
            {"task": "tensor", "dump_path": "d", "rank": [0], "step": [0, "4-6"], "level": "mix", "seed": 1234, "is_deterministic": True},
            "ulpscope run --into d --keep tensors --level both --steps 0,4,5,6 --ranks 0 --seed 1234 --deterministic train.py",
        ),
        (
            {
                "task": "statistics",
                "dump_path": "d",
                "level": "L0",
                "statistics": {"summary_mode": "md5", "data_mode": ["backward", "input"]},
            },
            "ulpscope run --into d --keep fingerprint --level module --select phase:backward --select 'slot:input*' train.py",
        ),
        (
            {
                "task": "tensor",
                "dump_path": "d",
                "tensor": {"scope": ["Torch.mm.0.forward", "Functional.relu.2.backward"], "list": ["conv"]},
            },
            "ulpscope run --into d --keep tensors --select range:torch.mm.0..functional.relu.2 --select '*conv*' train.py",
        ),
        (
            {"task": "overflow_check", "dump_path": "d", "overflow_check": {"overflow_nums": -1}},
            "ulpscope run --into d --nonfinite --nonfinite-limit 0 train.py",
        ),
        ({"task": "grad_probe", "dump_path": "d", "grad_probe": {"grad_level": "L2"}}, "ulpscope run --into d --health train.py"),
        (
            {"task": "acc_check", "dump_path": "d", "acc_check": {"black_list": ["conv2d"]}},
            "ulpscope run --into d train.py",
        ),
    ],
)
def test_the_command_of_a_config(tmp_path: Path, config: dict[str, Any], command: str) -> None:
    lines = migrated(tmp_path, config)
    assert lines[0] == command
    for line in lines:
        if not line.startswith("#"):
            _, name, *words = shlex.split(line)
            subcommand = cli.get_command(click.Context(cli), name)
            assert subcommand is not None
            context = subcommand.make_context(name, words)
            Selection.parse(select=context.params.get("select"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "is no JSON"),
        ("[1]", "holds a list"),
        ({"task": "dance"}, "task is 'dance'"),
        ({"tsak": "tensor"}, "the key 'tsak'"),
        ({"task": "tensor", "step": "many"}, "step holds 'many'"),
        ({"task": "tensor", "step": [True]}, "step holds True"),
        ({"task": "tensor", "rank": ["7-3"]}, "rank holds '7-3'"),
        ({"task": "tensor", "level": 1}, "level is 1"),
        ({"task": "tensor", "tensor": []}, "not an object"),
        ({"task": "tensor", "tensor": {"scope": ["a"]}}, "scope has 1 names"),
        ({"task": "tensor", "tensor": {"list": "conv"}}, "list is 'conv'"),
        ({"task": "tensor", "tensor": {"data_mode": ["all", "input"]}}, "data_mode"),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": -3}}, "overflow_nums is -3"),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": "two"}}, "overflow_nums is 'two'"),
        ({"task": "free_benchmark", "level": "L0"}, "level L1 only"),
        ({"task": "free_benchmark", "free_benchmark": {"scope": ["a", "b"], "list": ["c"]}}, "not both"),
        ({"task": "free_benchmark", "free_benchmark": {"fuzz_device": "cpu"}}, "cpu goes with to_cpu"),
        ({"task": "free_benchmark", "free_benchmark": {"handler_type": "fix", "pert_mode": "add_noise"}}, "handler_type 'fix'"),
        ({"task": "grad_probe", "grad_probe": {"bounds": [1, 0]}}, "ascending"),
        ("[" * 100_000, "is no JSON"),
        (" " * (1 << 21), "far more than a config.json"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_sentence(tmp_path: Path, config: Any, sentence: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(InputError) as caught:
        read_config(file)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "nowhere.json")
