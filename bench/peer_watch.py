# SPDX-License-Identifier: Apache-2.0
"""Measure our hunt and our health recording beside mindstudio-probe's answers to the same questions, as one table of training steps.

    python -m bench.peer_watch --peer-python ~/peer/bin/python              the GPT of health.py on the CPU
    python -m bench.peer_watch --device cuda --peer-path /tmp/peer          24 layers, width 1024, batch 8 x 1024, bfloat16
    python -m bench.peer_watch --tiny --peer-python ~/peer/bin/python       shows that it works, not how fast it is

The peer runs in a process of its own: with another Python (`--peer-python`), or with this one and its packages in a folder
(`--peer-path`). Its task nan_check needs an NPU and refuses to start elsewhere; what it has for other machines is `msprobe
overflow_check`, which reads a dump of statistics afterwards, so that dump is measured. Its monitor (TrainerMon) takes gradients, parameters
and moments in every step, as our health recording does. Each way takes its turns between bare turns of the same process; a step is the time
of a whole turn over its steps, with one wait for the device at its end. The best turns count, since noise only ever adds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import health

TINY = health.Size(2, 32, 2, 100, 2, 16, health.torch.float32)


class Way(NamedTuple):
    """One way to train: the context to enter, and the methods to call before and after each step."""

    open: Callable[[health.Training, Path], AbstractContextManager[Any]]
    before: str = ""
    after: str = ""


# ---- ours


def our_watch(training: health.Training, into: Path) -> AbstractContextManager[Any]:
    import ulpscope

    return ulpscope.Capture(into, training.model, nonfinite=True)


OURS = {"watch": Way(our_watch, after="step"), "health": Way(health.watched())}


# ---- the peer's


class _Dump:
    """The peer's debugger around each step."""

    def __init__(self, training: health.Training, into: Path) -> None:
        from msprobe.pytorch import PrecisionDebugger

        into.mkdir(parents=True)
        block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        config = {"task": "statistics", "dump_path": str(into / "dump"), "rank": [], "step": [], "level": "L1", "statistics": block}
        (into / "config.json").write_text(json.dumps(config))
        self._model = training.model
        self._debugger = PrecisionDebugger(config_path=str(into / "config.json"))

    def __enter__(self) -> _Dump:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def begin(self) -> None:
        self._debugger.start(model=self._model)

    def end(self) -> None:
        self._debugger.stop()
        self._debugger.step()


THEIRS = {"watch": Way(_Dump, "begin", "end"), "health": Way(health.peer)}


# ---- measuring


def measure(training: health.Training, way: Way, *, rounds: int, steps: int, scratch: Path, stays: bool) -> dict[str, float]:
    """Measure the best bare step and the best step under a tool; if it `stays` attached, its turns come after all bare turns."""
    training.turn(2, _nothing)
    bare = [training.turn(steps, _nothing) for _ in range(rounds if stays else 1)]
    watched = []
    for number in range(1 if stays else rounds):
        with way.open(training, scratch / f"{number}") as entered:
            _turn(training, way, entered, 1 if steps < 4 else 3)  # the first steps compile kernels and make tables
            watched += [_turn(training, way, entered, steps) for _ in range(rounds if stays else 1)]
        if not stays:
            bare.append(training.turn(steps, _nothing))
    return {"bare": min(bare), "watched": min(watched)}


def _turn(training: health.Training, way: Way, entered: Any, steps: int) -> float:
    before = getattr(entered, way.before) if way.before else _nothing
    after = getattr(entered, way.after) if way.after else _nothing
    return training.turn(steps, lambda loss: after(), before=before)


def _nothing(*_: object) -> None:
    return None


def measured(options: argparse.Namespace, ways: dict[str, Way], what: str) -> dict[str, float]:
    is_peer = ways is THEIRS
    size = TINY if options.tiny else health.LARGE if options.device == "cuda" else health.SMALL
    rounds = 1 if options.tiny else min(options.rounds, 2) if is_peer else options.rounds
    steps = 2 if options.tiny else (options.peer_steps if is_peer else options.steps)
    with tempfile.TemporaryDirectory(prefix="ulpscope-bench-") as scratch:
        training = health.Training(size, options.device)
        return measure(training, ways[what], rounds=rounds, steps=steps, scratch=Path(scratch), stays=is_peer and what == "health")


def peer_measured(options: argparse.Namespace, what: str) -> dict[str, float] | str:
    """Return the measurements of the peer's process, or why there are none."""
    words = ["--as-peer", what, "--device", options.device, "--rounds", str(options.rounds), "--peer-steps", str(options.peer_steps)]
    environment = dict(os.environ)
    if options.peer_path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(options.peer_path), environment.get("PYTHONPATH", "")]))
    command = [options.peer_python or sys.executable, __file__, *words, *(["--tiny"] if options.tiny else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=options.patience)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return f"it took longer than {options.patience} s"
    except (IndexError, ValueError):
        return ((done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1])[:300]


def show(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    names = {
        "watch": ("ours: nonfinite, every step", "peer: dump of statistics for overflow_check", 1.10),
        "health": ("ours: health, every step", "peer: monitor, every step", 1.05),
    }
    print(f"torch {health.torch.__version__}, {options.device}\n\n| what | bare ms | with it ms | ratio | asked |\n|---|---|---|---|---|")
    for what, (our, their, asked) in names.items():
        rows[our] = measured(options, OURS, what)
        rows[their] = peer_measured(options, what) if options.peer_python or options.peer_path else "not asked for"
        for name, asked_of in ((our, f"at most {asked:.2f}"), (their, "")):
            found = rows[name]
            if isinstance(found, str):
                print(f"| {name} | | | {found} | |")
            else:
                ratio = found["watched"] / found["bare"]
                print(f"| {name} | {found['bare'] * 1e3:.1f} | {found['watched'] * 1e3:.1f} | {ratio:.3f} | {asked_of} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peer-python", metavar="PATH")
    parser.add_argument("--peer-path", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn of ours")
    parser.add_argument("--peer-steps", type=int, default=2, help="steps of a turn of the peer, which may take seconds each")
    parser.add_argument("--patience", type=int, default=240, metavar="S", help="give a measurement of the peer up after so long")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-peer", choices=sorted(THEIRS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        print(json.dumps(measured(options, THEIRS, options.as_peer)))
        return
    rows = show(options)
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
