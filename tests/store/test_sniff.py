# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest

from ulpscope.errors import InputError, NotARunError
from ulpscope.model import RunInfo
from ulpscope.store import DirectoryRun, DirectorySink, create_run, open_run


def sentence(path: Path | str) -> str:
    with pytest.raises(NotARunError) as caught:
        open_run(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_native_run_is_recognized(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo(seed=5))
    assert isinstance(open_run(path), DirectoryRun)
    assert open_run(str(path)).info.seed == 5


def test_what_does_not_exist_names_its_near_misses(tmp_path: Path) -> None:
    create_run(tmp_path / "runs" / "npu-old", RunInfo())
    assert sentence(tmp_path / "runs" / "npu-odl") == f"{tmp_path}/runs/npu-odl does not exist; {tmp_path}/runs has 'npu-old'"
    assert sentence(tmp_path / "rums" / "npu" / "x") == f"{tmp_path}/rums/npu/x does not exist; {tmp_path} has 'runs'"


def test_what_does_not_exist_says_what_does(tmp_path: Path) -> None:
    assert sentence(tmp_path / "a") == f"{tmp_path}/a does not exist; {tmp_path} has nothing in it"
    for name in ("qqq", "zzz"):
        (tmp_path / name).touch()
    assert sentence(tmp_path / "a").endswith("has 'qqq' and 'zzz'")


def test_an_empty_folder(tmp_path: Path) -> None:
    assert sentence(tmp_path) == f"{tmp_path} holds no run that we can read; it has nothing in it"


def test_a_folder_of_other_things(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").touch()
    assert "it has '00.txt', '01.txt'," in sentence(tmp_path)
    assert sentence(tmp_path).endswith("'07.txt' and 4 more")


def test_a_folder_of_runs_lists_them(tmp_path: Path) -> None:
    for name in ("gpu", "npu"):
        create_run(tmp_path / name, RunInfo())
    (tmp_path / "notes.txt").touch()
    assert sentence(tmp_path) == f"{tmp_path} is no run but holds 2: open 'gpu' or 'npu'"


def test_a_part_of_a_run_names_the_run(tmp_path: Path) -> None:
    path = create_run(tmp_path / "run", RunInfo())
    DirectorySink(path, 0).begin_step(0)
    for part in ("rank00000", "rank00000/step00000", "run.json"):
        assert sentence(path / part).endswith(f", {path}")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "an empty file"),
        (pickle.dumps([1, 2]), "a pickle, which is never loaded"),
        (b"PK\x03\x04....", "a zip archive"),
        (b"\x93NUMPY\x01\x00", "a NumPy array"),
        (b"PAR1xxxx", "a Parquet table"),
        (b"hello", "a .bin file"),
    ],
)
def test_a_file_is_said_to_be_one(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "thing.bin").write_bytes(content)
    assert f"thing.bin is {kind}" in sentence(tmp_path / "thing.bin")
    assert "a run is a folder" in sentence(tmp_path / "thing.bin")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in sentence(tmp_path / "pipe")


def test_odd_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "\x1b[31mred\nline").touch()
    assert re.search(r"it has '\\x1b\[31mred\\nline'$", sentence(tmp_path))


def test_every_answer_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        open_run(tmp_path / "nothing")
