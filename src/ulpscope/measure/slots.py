# SPDX-License-Identifier: Apache-2.0
"""Measure one slot of a pair, as well as both sides allow.

    a side lacks the slot, or shapes differ                  NotMeasured
    values kept on both sides, fingerprints equal            TensorMeasurement, equal, distance 0; no bytes are read
    values kept on both sides                                TensorMeasurement from one pass over both
    statistics on both sides                                 SummaryMeasurement; fingerprints decide `equal` where comparable
    comparable fingerprints                                  FingerprintMeasurement
    nothing in common                                        NotMeasured

Fingerprints are comparable when scheme and dtype are the same. Dtypes may differ otherwise: values are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ulpscope.measure.summaries import measure_summaries
from ulpscope.measure.tensors import measure_equal, measure_tensors
from ulpscope.model import DTYPES, FingerprintMeasurement, Measurement, NotMeasured, SlotPair, TensorData, TensorRecord

__all__ = ["measure_slot"]

Read: TypeAlias = Callable[[str], TensorData]


def measure_slot(pair: SlotPair, read_subject: Read, read_reference: Read) -> Measurement:
    """Measure one slot; the readers take a record's `content`. What they raise is not caught here."""
    subject, reference = pair.subject, pair.reference
    if subject is None or reference is None:
        return NotMeasured(f"only the {'reference' if subject is None else 'subject'} has this slot")
    if subject.shape != reference.shape:
        return NotMeasured(f"shapes differ: {subject.shape} and {reference.shape}")
    equal = _fingerprints_equal(subject, reference)
    if subject.content is not None and reference.content is not None:
        if equal:
            return measure_equal(subject, subject.summary or reference.summary)
        return _measure_values(read_subject(subject.content), read_reference(reference.content))
    if subject.summary is not None and reference.summary is not None:
        return measure_summaries(subject.dtype, subject.summary, reference.dtype, reference.summary, equal)
    if equal is not None:
        return FingerprintMeasurement(equal=equal)
    return NotMeasured(_nothing_in_common(subject, reference))


def _fingerprints_equal(subject: TensorRecord, reference: TensorRecord) -> bool | None:
    if subject.fingerprint is None or reference.fingerprint is None or subject.dtype != reference.dtype:
        return None
    schemes = {record.fingerprint.partition(":")[0] for record in (subject, reference) if record.fingerprint}
    return subject.fingerprint == reference.fingerprint if len(schemes) == 1 else None


def _measure_values(subject: TensorData, reference: TensorData) -> Measurement:
    unknown = [data.dtype for data in (subject, reference) if data.dtype not in DTYPES]
    if unknown:
        return NotMeasured(f"values of dtype {unknown[0]} cannot be read")
    if subject.shape != reference.shape:
        return NotMeasured(f"stored shapes differ: {subject.shape} and {reference.shape}")
    if DTYPES[subject.dtype].kind != DTYPES[reference.dtype].kind and "complex" in (
        DTYPES[subject.dtype].kind,
        DTYPES[reference.dtype].kind,
    ):
        return NotMeasured(f"one side is complex: {subject.dtype} and {reference.dtype}")
    return measure_tensors(subject, reference)


def _nothing_in_common(subject: TensorRecord, reference: TensorRecord) -> str:
    notes = [record.note for record in (subject, reference) if record.note]
    reason = "neither values, statistics nor comparable fingerprints exist on both sides"
    return f"{reason} ({'; '.join(dict.fromkeys(notes))})" if notes else reason
