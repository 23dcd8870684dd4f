# SPDX-License-Identifier: Apache-2.0
"""An error that a signal handler of the program raises while our own work is under way reaches the program, as it would without us."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from ulpscope.recording.safety import let_pass


class OutOfTime(OSError):
    """An error of a kind that our own work also meets."""


def plain(number: int, frame: Any) -> None:
    raise OutOfTime("the time is up")


def with_rest(*given: Any) -> None:
    raise OutOfTime("the time is up")


class Handler:
    def __call__(self, number: int, frame: Any) -> None:
        self.end()

    def end(self) -> None:
        raise OutOfTime("the time is up")


HANDLERS: dict[str, Callable[..., None]] = {"function": plain, "rest": with_rest, "object": Handler()}


class Slow:
    """An argument that is being printed when the signal comes."""

    def __repr__(self) -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        return "slow"


class Unprintable:
    def __repr__(self) -> str:
        raise OutOfTime("of the argument itself")


class Model(torch.nn.Linear):
    def forward(self, input: torch.Tensor, other: object = None) -> torch.Tensor:
        return super().forward(input)


@pytest.fixture(params=sorted(HANDLERS))
def _handled(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, HANDLERS[request.param])
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_handled")
@pytest.mark.parametrize("level", ["module", "both"])
def test_a_signal_handler_ends_what_it_means_to_end(tmp_path: Path, level: Any) -> None:
    model, given = Model(2, 2), torch.ones(1, 2)
    with ulpscope.Capture(tmp_path / "run", level=level) as capture:
        with pytest.raises(OutOfTime, match="the time is up"):
            model(given, Slow())
        model(given).sum().backward()
        capture.step()
    run = ulpscope.open_run(tmp_path / "run")
    assert not run.ledger(0)


@pytest.mark.usefixtures("_handled")
def test_a_watch_lets_it_pass_too(tmp_path: Path) -> None:
    model = Model(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def on_alert(alert: Any) -> None: ...

    class Rate(float):
        def __float__(self) -> float:
            os.kill(os.getpid(), signal.SIGUSR1)
            return 0.1

    with ulpscope.watch(model, optimizer, into=tmp_path / "run", quiet=True, on_alert=on_alert) as health:
        with pytest.raises(OutOfTime, match="the time is up"):
            health.log(rate=Rate(0.1))
        health.log(rate=0.1)


def test_what_an_argument_raises_stays_with_us(tmp_path: Path) -> None:
    model = Model(2, 2)
    with ulpscope.Capture(tmp_path / "run", level="module"):
        model(torch.ones(1, 2), Unprintable())


def test_the_errors_that_were_made_of_it_are_seen_through() -> None:
    number: Any = signal.SIGUSR1

    def work() -> None:
        frame = sys._getframe()
        try:
            plain(number, frame)
        except OSError as error:
            raise ValueError("the disk failed") from error

    with pytest.raises(ValueError, match="the disk failed") as caught:
        work()
    with pytest.raises(OutOfTime):
        let_pass(caught.value)
    let_pass(ValueError("of our own"))
