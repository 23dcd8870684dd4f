# SPDX-License-Identifier: Apache-2.0
"""Provide a comparison from a real run, and the same with every foreign string as nasty as possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.report.sample import sample_comparison
from ulpscope.model import CallName, CallRecord, Comparison, Finding, FingerprintMeasurement, Frame, JudgedCall, Pair, Verdict

NASTY = "\x1b[31m[bold]=cmd()\r\n\u202e\x00</script>\ud800"


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return sample_comparison()


@pytest.fixture(scope="session")
def doubtful(comparison: Comparison) -> Comparison:
    """Return a comparison without a fault, where of one slot only the bits are known to differ."""
    verdict = Verdict("unmeasured", "derived", "differs bitwise, size unknown: only fingerprints were kept")
    at = next(at for at, call in enumerate(comparison.calls) if call.slots)
    first, *rest = comparison.calls[at].slots
    slots = (replace(first, measurement=FingerprintMeasurement(equal=False), verdict=verdict), *rest)
    calls = (*comparison.calls[:at], replace(comparison.calls[at], slots=slots), *comparison.calls[at + 1 :])
    evidence = ("inputs agree bitwise", "3 later calls differ bitwise too; nothing was kept that tells by how much")
    note = Finding(
        level="note", kind="bitwise", headline="first bitwise difference: gelu", evidence=evidence, next="record again: ulpscope run"
    )
    return replace(comparison, calls=calls, findings=(note,))


def with_names(call: JudgedCall, text: str) -> JudgedCall:
    """Put `text` into the call wherever a run can put one."""

    def renamed(record: CallRecord | None) -> CallRecord | None:
        frame = Frame(text, 1, text, text)
        return record and replace(record, call=CallName(text, 0), module=text, stack=(frame,))

    pair = call.pair
    names = Pair(subject=renamed(pair.subject), reference=renamed(pair.reference), matched_by=pair.matched_by, slots=pair.slots)
    slots = tuple(replace(slot, verdict=replace(slot.verdict, reason=text)) for slot in call.slots)
    return replace(call, pair=names, slots=slots)


@pytest.fixture(scope="session")
def nasty(comparison: Comparison) -> Comparison:
    findings = tuple(
        replace(finding, headline=NASTY, evidence=(NASTY,), next=NASTY, source=Frame(NASTY, 1, NASTY, NASTY))
        for finding in comparison.findings
    )
    calls = tuple(with_names(call, NASTY) for call in comparison.calls)
    return replace(comparison, subject_path=NASTY, findings=findings, calls=calls)
