# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ulpscope.measure import measure_slot, measure_tensors
from ulpscope.model import (
    FingerprintMeasurement,
    Measurement,
    NotMeasured,
    SummaryMeasurement,
    TensorData,
    TensorMeasurement,
    TensorRecord,
    Undefined,
)

from .tensors import data, pair, record

ONE, OTHER = data([1.0, 2.0, 4.0]), data([1.0, 2.0, 5.0])


def measured(subject: TensorRecord | None, reference: TensorRecord | None, **stored: TensorData) -> Measurement:
    """Measure with readers that know only the tensors given here; reading anything else fails the test."""
    return measure_slot(pair(subject, reference), stored.__getitem__, stored.__getitem__)


def test_values_on_both_sides() -> None:
    found = measured(record(ONE, content="a"), record(OTHER, content="b"), a=ONE, b=OTHER)
    assert found == measure_tensors(ONE, OTHER)
    assert isinstance(found, TensorMeasurement)


@pytest.mark.parametrize(
    "tensor",
    [
        data([1.0, -2.0, 0.0]),
        data([0.0, 0.0]),
        data([3.0]),
        data([math.nan, math.inf, 2.0, 1.0]),
        data([math.nan]),
        data(np.zeros((0, 4))),
        data([[True, False]], "bool"),
        data([1e300, -2e300], "float64"),
        data([1 + 2j, 0j], "complex64"),
        data([1, 2], "int64"),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tensor.shape}",
)
def test_equal_fingerprints_are_measured_without_reading(tensor: TensorData) -> None:
    found = measured(record(tensor, content="a"), record(tensor, content="b"))
    assert isinstance(found, TensorMeasurement)
    assert found.equal
    assert found.distance == 0.0
    read = measure_tensors(tensor, tensor)
    close = {name: pytest.approx(getattr(read, name), rel=1e-12) for name in ("rms_subject", "rms_reference")}
    assert dataclasses.asdict(found) == {**dataclasses.asdict(read), **close}


def test_equal_fingerprints_without_statistics() -> None:
    found = measured(record(ONE, summary=False, content="a"), record(ONE, content="b"))
    assert isinstance(found, TensorMeasurement)
    assert (found.equal, found.distance, found.max_abs) == (True, 0.0, 0.0)
    assert found.cosine == 1.0
    found = measured(record(ONE, summary=False, content="a"), record(ONE, summary=False, content="b"))
    assert isinstance(found, TensorMeasurement)
    assert (found.equal, found.distance, found.max_abs) == (True, 0.0, 0.0)
    assert isinstance(found.cosine, Undefined)


def test_fingerprints_of_other_dtypes_say_nothing() -> None:
    """The same bytes as float32 and as int32 have the same fingerprint."""
    bits = TensorData("int32", ONE.shape, ONE.buffer)
    assert record(ONE).fingerprint == record(bits).fingerprint
    found = measured(record(ONE, content="a"), record(bits, content="b"), a=ONE, b=bits)
    assert isinstance(found, TensorMeasurement)
    assert not found.equal


def test_statistics_on_both_sides() -> None:
    found = measured(record(ONE, content="a"), record(OTHER))
    assert isinstance(found, SummaryMeasurement)
    assert found.equal is False
    assert found.differences["max"] == -1.0
    same = measured(record(ONE), record(ONE, content="a"))
    assert same == SummaryMeasurement(equal=True, distance=0.0, differences=same.differences)  # type: ignore[union-attr]
    assert set(same.differences.values()) == {0.0}  # type: ignore[union-attr]
    unknown = measured(record(ONE, fingerprint=False), record(ONE))
    assert isinstance(unknown, SummaryMeasurement)
    assert (unknown.equal, unknown.distance) == (None, 0.0)


def test_fingerprints_alone() -> None:
    assert measured(record(ONE, summary=False), record(OTHER)) == FingerprintMeasurement(equal=False)
    assert measured(record(ONE, summary=False), record(ONE)) == FingerprintMeasurement(equal=True)


def test_a_missing_side() -> None:
    assert measured(None, record(ONE)) == NotMeasured("only the reference has this slot")
    assert measured(record(ONE), None) == NotMeasured("only the subject has this slot")


def test_other_shapes_are_not_measured() -> None:
    row = TensorData("float32", (1, 3), ONE.buffer)
    found = measured(record(ONE, content="a"), record(row, content="b"))
    assert found == NotMeasured("shapes differ: (3,) and (1, 3)")


def test_nothing_in_common() -> None:
    other = dataclasses.replace(record(OTHER, summary=False), fingerprint="crc:00000000", note="not kept: the size limit was reached")
    found = measured(record(ONE, summary=False), other)
    assert found == NotMeasured(
        "neither values, statistics nor comparable fingerprints exist on both sides (not kept: the size limit was reached)"
    )


def test_what_cannot_be_compared_by_value() -> None:
    odd = TensorData("qint8", (3,), bytes(3))
    found = measured(record(ONE, content="a"), dataclasses.replace(record(ONE, content="b"), dtype="qint8"), a=ONE, b=odd)
    assert found == NotMeasured("values of dtype qint8 cannot be read")
    other = data([1j, 2j, 3j], "complex64")
    found = measured(record(ONE, content="a"), record(other, content="b"), a=ONE, b=other)
    assert found == NotMeasured("one side is complex: float32 and complex64")
    longer = data([1.0, 2.0])
    found = measured(record(ONE, content="a"), record(OTHER, content="b"), a=ONE, b=longer)
    assert found == NotMeasured("stored shapes differ: (3,) and (2,)")
