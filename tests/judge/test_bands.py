# SPDX-License-Identifier: Apache-2.0
"""A/A calibration: what a repeat of the reference shows is benign, and no more than that."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.match.building import Change, Where, scale, train
from ulpscope.explain.arithmetic.nondeterminism import remark_on_nondeterminism
from ulpscope.judge.bands import bands_of
from ulpscope.model import Bands, FingerprintMeasurement, JudgedCall, NotMeasured, TensorMeasurement
from ulpscope.workflows.compare.comparing import compare_runs


def jitter(relative: float, seed: int, op: str = "functional.linear", module: str = "layers.1") -> Change:
    """A call that gives other bits each time."""
    random = np.random.default_rng(seed)

    def change(where: Where, value: np.ndarray) -> np.ndarray:
        is_it = (where.phase, where.op, where.module) == ("forward", op, module)
        return (value * (1 + relative * random.standard_normal(value.shape))).astype("f4") if is_it else value

    return change


def calls(subject: Change, reference: Change, keep: str = "tensors") -> list[JudgedCall]:
    return list(compare_runs(train(keep=keep, change=subject), train(keep=keep, change=reference), replay="none").calls)


def beyond(judged: list[JudgedCall], bands: Bands) -> list[str]:
    return [
        f"{call.pair.record.name} {slot.pair.slot}"
        for call in judged
        for slot in call.slots
        if slot.verdict.level != "same" and not bands.allows(call.pair, slot.pair, slot.measurement)
    ]


@pytest.mark.parametrize("relative", [1e-6, 1e-3, 1e-1])
@pytest.mark.parametrize("seed", range(4))
def test_another_run_of_the_same_kind_is_within_the_bands(relative: float, seed: int) -> None:
    bands = bands_of(calls(jitter(relative, 10 * seed + 1), jitter(relative, 10 * seed + 2)))
    assert beyond(calls(jitter(relative, 10 * seed + 3), jitter(relative, 10 * seed + 1)), bands) == []


def test_a_fault_elsewhere_is_not_within_the_bands() -> None:
    bands = bands_of(calls(jitter(1e-4, 1), jitter(1e-4, 2)))
    wrong = scale(1.5, phase="forward", module="layers.0", op="functional.linear")
    assert beyond(calls(wrong, jitter(1e-4, 1)), bands)[0] == "layers.0/functional.linear.0 output.0"


def test_a_fault_in_the_very_call_is_seen_beyond_its_band() -> None:
    bands = bands_of(calls(jitter(1e-4, 1), jitter(1e-4, 2)))
    wrong = scale(1.5, phase="forward", module="layers.1", op="functional.linear")
    assert beyond(calls(wrong, jitter(1e-4, 1)), bands)[0] == "layers.1/functional.linear.1 output.0"


def test_only_the_call_that_makes_it_is_nondeterministic() -> None:
    bands = bands_of(calls(jitter(1e-4, 1), jitter(1e-4, 2)))
    assert {(key.module, str(key.call), key.phase) for key in bands.nondeterministic} == {("layers.1", "functional.linear.1", "forward")}
    [note] = remark_on_nondeterminism(bands)
    assert (note.level, note.kind, note.module, note.call) == ("note", "nondeterministic", "layers.1", "functional.linear.1")
    assert note.headline.startswith(
        "nondeterministic: 1 call of the reference gave other bits on bitwise equal inputs, first layers.1  linear"
    )


def test_a_repeat_that_is_bitwise_equal_allows_nothing_and_says_nothing() -> None:
    bands = bands_of(calls(lambda where, value: value, lambda where, value: value))
    assert remark_on_nondeterminism(bands) == []
    assert bands.slots == {}
    assert beyond(calls(jitter(1e-6, 1), lambda where, value: value), bands)


def test_a_repeat_with_another_batch_is_not_called_nondeterministic() -> None:
    judged = compare_runs(train(data_seed=1), train(data_seed=2), replay="none").calls
    bands = bands_of(judged)
    assert bands.nondeterministic == ()
    assert "differs before any recorded call" in remark_on_nondeterminism(bands)[0].headline


def test_fingerprints_alone_tell_which_calls_but_not_how_far() -> None:
    judged = calls(jitter(1e-4, 1), jitter(1e-4, 2), "fingerprint")
    bands = bands_of(judged)
    assert [key.module for key in bands.nondeterministic] == ["layers.1"]
    assert set(bands.slots.values()) == {inf}
    assert beyond(judged, bands) == []


@given(band=st.floats(1e-9, 1e3), share=st.floats(0, 2), num_slots=st.integers(1, 10**7))
def test_the_band_is_an_exact_limit_that_grows_with_the_number_of_slots(band: float, share: float, num_slots: int) -> None:
    call = _CALL
    slot = next(one for one in call.slots if one.verdict.level != "same")
    assert slot.pair.reference is not None
    assert isinstance(slot.measurement, TensorMeasurement)
    bands = replace(_BANDS, slots=dict.fromkeys(_BANDS.slots, band), calls={}, num_slots=num_slots)
    measured = replace(slot.measurement, distance=share * bands.factor * band)
    assert bands.allows(call.pair, slot.pair, measured) == (measured.distance <= bands.factor * band)
    assert bands.factor <= replace(bands, num_slots=2 * num_slots).factor
    assert not bands.allows(call.pair, slot.pair, NotMeasured("nothing was kept"))
    assert bands.allows(call.pair, slot.pair, FingerprintMeasurement(equal=False))


_JUDGED = calls(jitter(1e-4, 1), jitter(1e-4, 2))
_BANDS = bands_of(_JUDGED)
_CALL = next(call for call in _JUDGED if call.pair.record.module == "layers.1" and call.level != "same")
