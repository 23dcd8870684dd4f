# SPDX-License-Identifier: Apache-2.0
"""The envelope file: it is read back as written, the same twice, and a file that is not ours gets one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.match.building import record
from ulpscope.errors import DamagedRunError, InputError, NewerFormatError
from ulpscope.model import Arguments, Modes, Slot, Summary, TensorRecord
from ulpscope.store.envelope import Envelope, EnvelopeCall, read_envelope, rounded, write_envelope


def summary(low: float, high: float, **counts: int) -> Summary:
    return Summary(32, low, high, (low + high) / 2, max(abs(low), abs(high)), **{"num_nan": 0, "num_posinf": 0, "num_neginf": 0, **counts})


def call(order: int = 0, *, fingerprint: str | None = "u1:aa", **rest: object) -> EnvelopeCall:
    one = record("torch.add", order=order, **rest)  # type: ignore[arg-type]
    slots = tuple(replace(slot, summary=summary(-1.0, 2.0 + order), fingerprint=fingerprint) for slot in one.slots)
    return EnvelopeCall(replace(one, slots=slots, modes=Modes()), tuple(slot.summary for slot in slots))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    first = call(
        arguments=Arguments(args=({"$tensor": "input.0"}, 1.5, None), kwargs={"value": -inf, "mode": "x", "of": {"$tuple": [1, inf]}})
    )
    wide = EnvelopeCall(call(1, module="layers.0").record, (summary(-1.0, 4.0), summary(-1.0, 4.5, num_nan=2)))
    odd = replace(first.record, order=2, phase="backward", recompute=True, modes=Modes(autocast="bfloat16", training=True, grad=False))
    bare = TensorRecord(slot=Slot("input", ("a.b", 0)), dtype="int64", shape=(), note="uninitialised memory")
    calls = (first, wide, EnvelopeCall(replace(odd, slots=(bare,)), (None,)))
    envelope = Envelope(num_runs=3, versions={"torch": "2"}, devices=("cpu",), seed=7, calls=calls)
    write_envelope(envelope, tmp_path / "b.jsonl")
    found = read_envelope(tmp_path / "b.jsonl")
    assert found == envelope
    write_envelope(found, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_lines_are_json_in_execution_order_and_equal_values_stand_once(tmp_path: Path) -> None:
    write_envelope(Envelope(calls=(call(1), call(0))), tmp_path / "b.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [line.get("order") for line in lines if "call" in line] == [0, 1]
    assert lines[3] == {"slot": "output.0", "like": "0/input.0"}
    assert "like" not in lines[2]


@given(st.floats(allow_nan=False, width=32), st.floats(allow_nan=False, width=32))
def test_every_range_survives(tmp_path_factory: pytest.TempPathFactory, one: float, other: float) -> None:
    path = tmp_path_factory.mktemp("ranges") / "b.jsonl"
    low, high = Summary(4, *[min(one, other)] * 4, 0, 0, 0), Summary(4, *[max(one, other)] * 4, 1, 2, 3)
    made = record()
    slots = tuple(replace(slot, summary=low) for slot in made.slots)
    envelope = Envelope(calls=(EnvelopeCall(replace(made, slots=slots, modes=Modes()), (high, high)),))
    write_envelope(envelope, path)
    assert [slot.summary for slot in read_envelope(path).calls[0].record.slots] == [replace(low, numel=4)] * 2
    assert read_envelope(path).calls[0].highest == (high, high)


@pytest.mark.parametrize(("dtype", "kept"), [("float32", 0.123456789), ("bfloat16", 0.123457), ("float64", 0.12345678901234567)])
def test_digits_are_those_that_a_verdict_can_see(dtype: str, kept: float) -> None:
    tensor = replace(record(dtype=dtype).slots[0], summary=Summary(32, mean=0.12345678901234567))
    found = rounded(tensor).summary
    assert found is not None
    assert found.mean == kept


HEAD = '{"schema":"ulpscope.baseline/1"}\n'
CALL = '{"call":"torch.add.0","rank":0,"step":0,"order":0,"phase":"forward"}\n'


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("", InputError, "is no baseline"),
        ("not json\n", InputError, "is no baseline"),
        ('{"schema":"other"}\n', InputError, "has the format 'other'"),
        ('{"schema":"ulpscope.baseline/9"}\n', NewerFormatError, "use the version that wrote it"),
        (HEAD + "nonsense\n", DamagedRunError, "line 2 of the baseline"),
        (HEAD + ' {"slot":"input.0","dtype":"float32","shape":[1]}\n', DamagedRunError, "line 2 of the baseline"),
        (HEAD + CALL + ' {"slot":"nowhere.0","dtype":"float32","shape":[1]}\n', DamagedRunError, "line 3 of the baseline"),
        (HEAD + CALL + ' {"slot":"input.0","dtype":"float32","shape":[-1]}\n', DamagedRunError, "negative size"),
        (HEAD + CALL + ' {"slot":"input.0","like":"7/output.0"}\n', DamagedRunError, "line 3 of the baseline"),
        (HEAD + CALL + ' {"slot":"input.0","dtype":"float32","shape":[1],"mean":[1]}\n', DamagedRunError, "two numbers"),
        (HEAD + CALL + ' {"slot":"input.0","dtype":"float32","shape":[1],"mean":"NaN"}\n', DamagedRunError, "line 3 of the baseline"),
        (HEAD + CALL.replace("torch.add.0", "torch.add"), DamagedRunError, "is not the name of a call"),
        (HEAD + CALL.replace('"order":0', '"order":-1'), DamagedRunError, "negative"),
        (HEAD + CALL.replace("forward", "sideways"), DamagedRunError, "line 2 of the baseline"),
        (HEAD + CALL.replace("0,", "0,\x00"), DamagedRunError, "line 2 of the baseline"),
    ],
)
def test_what_is_no_baseline_is_one_sentence(text: str, kind: type[Exception], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(text)
    with pytest.raises(kind, match=sentence):
        read_envelope(tmp_path / "b.jsonl")


def test_a_file_that_is_not_there_says_how_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="write it first with --update"):
        read_envelope(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="give the file that --update wrote"):
        read_envelope(tmp_path)
