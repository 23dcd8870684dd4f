# SPDX-License-Identifier: Apache-2.0
"""Write runs of any number of records through the store's own writer, to see how cost grows.

    python -m bench.synthetic runs/subject --records 100000 --steps 100 [--off 1e-6] [--ranks 2]
    python -m bench.synthetic runs/subject --bytes 1000000000 [--off 1e-6]

A record is a call with two inputs and one output, in a model of `--modules` modules that is run again in every step; statistics and
fingerprints, no tensors. With `--off` every output is a little off, as on another machine.
"""

from __future__ import annotations

import argparse
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path

from ulpscope.model import Arguments, CallName, CallRecord, Frame, Modes, RunInfo, Slot, Summary, TensorRecord
from ulpscope.store import DirectorySink, create_run

__all__ = ["write_run"]

OPERATIONS = ("functional.linear", "functional.gelu", "functional.layer_norm", "tensor.add", "functional.softmax")
ROWS, WIDTH = 128, 256


def write_run(
    path: Path,
    *,
    records: int,
    steps: int,
    modules: int = 48,
    ranks: int = 1,
    seed: int = 0,
    off: float = 0.0,
    broken_from: int | None = None,
) -> None:
    """Write a run of `records` records in all, spread evenly over ranks and steps; from step `broken_from` on, outputs are far off."""
    create_run(path, RunInfo(tool="bench.synthetic", world_size=ranks))
    a_step = max(1, records // (ranks * steps))
    for rank in range(ranks):
        sink = DirectorySink(path, rank)
        for step in range(steps):
            sink.begin_step(step)
            far = 0.05 if broken_from is not None and step >= broken_from else off
            for record in step_records(rank, step, a_step, modules, random.Random(1000 * step + rank), random.Random(seed), far):
                sink.write(record)
            sink.end_step()
        sink.close()


def step_records(
    rank: int, step: int, many: int, modules: int, values: random.Random, noise: random.Random, off: float
) -> Iterator[CallRecord]:
    """Yield the calls of a forward pass, each fed by the one before."""
    calls: dict[str, int] = {}
    entering = tensor(Slot("input", (0,)), values, noise, 0.0)
    for order in range(many):
        operation = OPERATIONS[order % len(OPERATIONS)]
        index = calls[operation] = calls.get(operation, -1) + 1
        module = f"layers.{order // len(OPERATIONS) % modules}"
        made = tensor(Slot("output"), values, noise, off)
        yield CallRecord(
            rank=rank,
            step=step,
            order=order,
            call=CallName(operation, index),
            phase="forward",
            level="api",
            module=module,
            parent=module,
            arguments=Arguments(args=({"$tensor": "input.0"}, {"$tensor": "input.1"}), kwargs={}),
            modes=Modes(),
            slots=(entering, WEIGHT, made),
            stack=(Frame("model.py", 10 + order % 40, "forward", "return self.down(F.gelu(self.up(x)))"), Frame("train.py", 7, "<module>")),
        )
        entering = tensor(Slot("input", (0,)), values, noise, 0.0, made)


def write_tensors(path: Path, *, size_bytes: int, off: float = 0.0, tensors_a_step: int = 16) -> None:
    """Write a run of float32 tensors of 1 MB, or less for a small run: so many in all, each made by a call of its own."""
    import numpy as np

    from ulpscope.numerics.summary.summary import summarize

    numel = min(1 << 18, max(1, size_bytes // 4))
    rows = max(1, numel // WIDTH)
    create_run(path, RunInfo(tool="bench.synthetic"))
    sink = DirectorySink(path, 0)
    for number in range(max(1, size_bytes // (4 * rows * WIDTH))):
        if number % tensors_a_step == 0:
            sink.begin_step(number // tensors_a_step)
        values = np.random.default_rng(number).standard_normal((rows, WIDTH), np.float32)
        values *= np.float32(1 + 10 * off)
        summary, fingerprint = summarize("float32", values.reshape(-1).view(np.uint8))
        content = sink.keep("float32", values.shape, values)
        made = TensorRecord(
            slot=Slot("output"),
            dtype="float32",
            shape=values.shape,
            strides=(WIDTH, 1),
            device="cpu",
            summary=summary,
            fingerprint=fingerprint,
            content=content,
        )
        order = number % tensors_a_step
        sink.write(
            CallRecord(
                rank=0, step=number // tensors_a_step, order=order, call=CallName("functional.gelu", order), phase="forward", slots=(made,)
            )
        )
        if order == tensors_a_step - 1:
            sink.end_step()
    sink.close()


def tensor(slot: Slot, values: random.Random, noise: random.Random, off: float, same: TensorRecord | None = None) -> TensorRecord:
    """Make a tensor with statistics as of normal numbers; `same` is the same tensor in another slot."""
    if same is not None:
        summary, fingerprint = same.summary, same.fingerprint
    else:
        scale = values.uniform(0.5, 2.0)
        moved = scale * (1 + off * noise.gauss(0.0, 1.0))
        summary = Summary(ROWS * WIDTH, -4 * moved, 4 * moved, moved / math.sqrt(ROWS * WIDTH), moved, 0, 0, 0, 0, 0)
        fingerprint = f"u1:{struct.pack('<2d', scale, moved).hex()}"
    return TensorRecord(
        slot=slot, dtype="float32", shape=(ROWS, WIDTH), strides=(WIDTH, 1), device="cpu", summary=summary, fingerprint=fingerprint
    )


WEIGHT = tensor(Slot("input", (1,)), random.Random(-1), random.Random(0), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--records", type=int, help="a run of so many records with statistics")
    what.add_argument("--bytes", type=int, help="a run with so many bytes of tensors")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--off", type=float, default=0.0)
    options = parser.parse_args()
    if options.bytes is not None:
        write_tensors(options.path, size_bytes=options.bytes, off=options.off)
    else:
        write_run(options.path, records=options.records, steps=options.steps, ranks=options.ranks, off=options.off)


if __name__ == "__main__":
    main()
