# SPDX-License-Identifier: Apache-2.0
"""Record a small program into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ulpscope.capture import CaptureSession, Selection
from ulpscope.model import CallRecord, TensorRecord
from ulpscope.store import MemoryRun


class Recording:
    """The recorded run, with the look-ups that tests need."""

    def __init__(self, session: CaptureSession, run: MemoryRun) -> None:
        self.session = session
        self.run = run

    @property
    def records(self) -> list[CallRecord]:
        return [record for step in self.run.steps(0) for record in self.run.records(0, step)]

    @property
    def ledger(self) -> list[str]:
        return [f"{entry.what}: {entry.why}" for entry in self.run.ledger(0)]

    def calls(self, op: str, phase: str = "forward") -> list[CallRecord]:
        return [record for record in self.records if record.call.op == op and record.phase == phase]

    def one(self, op: str, phase: str = "forward") -> CallRecord:
        (record,) = self.calls(op, phase)
        return record

    def array(self, record: CallRecord, slot: str) -> Any:
        import torch

        tensor = slot_of(record, slot)
        assert tensor.content is not None
        data = self.run.tensor(0, record.step, tensor.content)
        return torch.frombuffer(bytearray(data.buffer), dtype=getattr(torch, data.dtype)).reshape(data.shape)


def slot_of(record: CallRecord, slot: str) -> TensorRecord:
    (found,) = [tensor for tensor in record.slots if str(tensor.slot) == slot]
    return found


def slots_of(record: CallRecord) -> list[str]:
    return [str(tensor.slot) for tensor in record.slots]


@contextmanager
def recording(select: str | list[str] | None = None, steps: Any = None, **options: Any) -> Iterator[Recording]:
    run = MemoryRun()
    options.setdefault("keep", "tensors")
    session = CaptureSession(run.sink(0), selection=Selection.parse(select=select, steps=steps), **options)
    session.start()
    complete = False
    try:
        yield Recording(session, run)
        complete = True
    finally:
        session.stop(complete=complete)
