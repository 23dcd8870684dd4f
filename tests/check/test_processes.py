# SPDX-License-Identifier: Apache-2.0
"""Calls are checked in processes of their own: a crash or a hang costs that call, and a check that was ended goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.check import loose_cannon
from ulpscope import Capture, InputError, open_run
from ulpscope.model.check.checks import Check, CheckedCall
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.check.messages import Journal
from ulpscope.workflows.check.processes import Processes
from ulpscope.workflows.check.rules import CheckOptions
from ulpscope.workflows.check.worker import Setup

MODULE = "tests.check.loose_cannon"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes") / "run"
    torch.manual_seed(0)
    with Capture(path, keep="tensors") as capture:
        x = torch.randn(8, 8).requires_grad_()
        F.gelu(x).sum().backward()
        loose_cannon.crash(x.detach())
        loose_cannon.hang(x.detach())
        loose_cannon.noisy(x.detach())
        loose_cannon.lose(x.detach())
        loose_cannon.Cube.apply(x).sum().backward()
        F.silu(x)
        capture.step()
    return path


def _statuses(check: Check) -> dict[str, tuple[str, str]]:
    return {
        f"{call.call.short} {call.phase}".replace("default", call.call.op.split(".")[-2]): (call.status, call.reason)
        for call in check.calls
    }


def test_a_crash_costs_one_call(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULPSCOPE_TEST_CANNON", "1")
    found = _statuses(check_run(run, imports=[MODULE], select=["*gelu*", "*crash*", "*noisy*", "*silu*", "*Cube*"]))
    assert found.pop("crash forward") == ("failed", "ended its process (SIGABRT) on cpu")
    assert {status for status, _ in found.values()} == {"passed"}, found
    assert set(found) == {"gelu forward", "gelu backward", "noisy forward", "Cube forward", "Cube backward", "silu forward"}


def test_a_lost_device_costs_one_call_and_its_process_no_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls that the process was given go to the next one."""
    monkeypatch.setenv("ULPSCOPE_TEST_CANNON", "1")
    found = _statuses(check_run(run, imports=[MODULE], select=["*gelu*", "*lose*", "*silu*", "*Cube*"]))
    assert found.pop("lose forward") == ("skipped", "it fails on cpu (RuntimeError: CUDA error: device-side assert triggered)")
    assert found == {name: ("passed", "") for name in ("gelu forward", "gelu backward", "Cube forward", "Cube backward", "silu forward")}


@pytest.mark.long
def test_a_hang_costs_one_call(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULPSCOPE_TEST_CANNON", "1")
    found = _statuses(check_run(run, imports=[MODULE], timeout_s=10, jobs=2, select=["*gelu*", "*hang*", "*silu*"]))
    assert found.pop("hang forward") == ("failed", "took more than 10 s on cpu")
    assert {status for status, _ in found.values()} == {"passed"}


def test_several_devices_share_the_calls_and_each_process_has_one_thread(run: Path) -> None:
    check = check_run(run, device=("cpu", "cpu"), jobs=2, select=["*gelu*", "*silu*"])
    assert (check.device, [call.status for call in check.calls]) == ("cpu, cpu", ["passed"] * 3)
    assert [call.key for call in check.calls] == sorted(call.key for call in check.calls)
    with pytest.raises(InputError, match="2 devices cannot be checked at once in one process"):
        check_run(run, device=("cpu", "cpu"), isolated=False)
    setups = [Setup(path="run", options=CheckOptions(device=name)) for name in ("npu:0", "npu:1")]
    members = Processes(setups, jobs=3, timeout_s=1.0)._members
    assert [(one.device, one._setup.num_threads) for one in members] == [("npu:0", 1), ("npu:1", 1), ("npu:0", 1)]
    assert len(Processes(setups, jobs=1, timeout_s=1.0)._members) == 2


def test_a_device_that_is_not_here_is_said_in_one_sentence(run: Path) -> None:
    with pytest.raises(InputError, match="the device 'nonsense' cannot be used here"):
        check_run(run, device="nonsense")
    with pytest.raises(InputError, match="cannot import"):
        check_run(run, imports=["no.such.module"], isolated=False)


def test_a_check_goes_on_where_it_was_ended(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    words = {"select": ["*gelu*", "*silu*"], "isolated": False, "journal": path}

    class Ended(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Ended

    with pytest.raises(Ended):
        check_run(run, **words, progress=stop)  # type: ignore[arg-type]
    with path.open("ab") as stream:
        stream.write(b"\x40\x00\x00\x00half a mess")
    check = check_run(run, **words, resume=True)  # type: ignore[arg-type]
    assert check.num_resumed == 2
    assert [call.status for call in check.calls] == ["passed"] * 3
    assert not path.exists()


def test_the_journal_of_another_check_is_not_taken(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {"run": "elsewhere"}, resume=False)
    journal.append(CheckedCall.of(_any_record(run), "cpu"))
    journal.close(is_done=False)
    with pytest.raises(InputError, match="the journal of another check"):
        check_run(run, journal=path, resume=True, isolated=False)
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match="no journal of a check"):
        check_run(run, journal=path, resume=True, isolated=False)


def _any_record(run: Path) -> object:
    return next(iter(open_run(run).records(0, 0)))


def test_what_is_ended_with_its_process_from_outside_is_not_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a user interrupts a check: the interrupted call is no finding, neither now nor in the journal."""
    monkeypatch.setenv("ULPSCOPE_TEST_CANNON", "1")
    setup = Setup(path=str(run), options=CheckOptions(), imports=(MODULE,))
    processes = Processes([setup], jobs=1, timeout_s=60.0)
    records = list(open_run(run).records(0, 0))
    place, stub = next(((0, 0, index), CheckedCall.of(record, "cpu")) for index, record in enumerate(records) if "hang" in record.call.op)
    told: list[CheckedCall] = []
    working = threading.Thread(target=processes.check, args=([(place, stub)], lambda place: {}, told.append))
    working.start()
    while processes._members[0]._num_open == 0:
        time.sleep(0.01)
    processes.close()
    working.join(30)
    assert not working.is_alive()
    assert told == []


@pytest.mark.long
def test_a_killed_command_leaves_a_journal_to_go_on_with(run: Path, tmp_path: Path) -> None:
    """SIGKILL while a call hangs; calls checked before are not checked again."""
    result = tmp_path / "check.json"
    some = "*['--select', '*gelu*', '--select', '*sum*', '--select', '*hang*']"
    code = f"from tests.check.command import main; main({str(run)!r}, {str(result)!r}, {some})"
    environment = {**os.environ, "ULPSCOPE_TEST_CANNON": "1"}
    journal = tmp_path / "check.json.journal"
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as child:
        deadline = time.monotonic() + 120
        while (not journal.exists() or journal.stat().st_size < 2000) and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
    assert journal.exists()
    environment.pop("ULPSCOPE_TEST_CANNON")
    again = f"from tests.check.command import main; main({str(run)!r}, {str(result)!r}, {some}, '--resume')"
    done = subprocess.run([sys.executable, "-c", again], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "found before" in done.stdout
    assert not journal.exists()


def test_a_run_whose_name_is_no_text_is_checked_and_gone_on_with(run: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"r\xff\x80")
    shutil.copytree(run, odd)
    for resume in (False, True):
        assert _statuses(check_run(odd, select="*gelu*", journal=tmp_path / "journal", resume=resume))["gelu forward"][0] == "passed"


@pytest.mark.parametrize("words", [{"device": "\udcff"}, {"imports": ["\udcff"]}])
def test_what_is_no_text_names_nothing(run: Path, words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"\\udcff is the name of nothing: it is not valid UTF-8"):
        check_run(run, **words)
