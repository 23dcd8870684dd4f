# SPDX-License-Identifier: Apache-2.0
"""Show a check as the older tools do: rows for each result and each API by their names, and the saved tensors of failed calls."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from math import isnan
from pathlib import Path

from ulpscope.errors import InputError
from ulpscope.model.check.check_details import CheckDetail, CheckOutcome, SavedFailure
from ulpscope.model.check.checks import CheckedCall, CheckedSlot, CheckStatus
from ulpscope.model.check.standards import STANDARD_METRICS
from ulpscope.store.foreign.checker import own_name

__all__ = ["STATUS_WORDS", "details_of", "outcomes_of", "own_name", "recorded_key", "saved_failures"]

STATUS_WORDS: dict[CheckStatus, str] = {"passed": "pass", "warning": "warning", "failed": "error", "skipped": "SKIP"}
_DIRECTION = re.compile(r"[._](forward|backward)$")
_NAMESPACES = {"functional": "Functional", "torch": "Torch", "distributed": "Distributed", "npu": "NPU", "aten": "Aten"}


def recorded_key(call: CheckedCall) -> str:
    """Return the name of a call as another tool recorded it, `Functional*silu*0`, without its direction.

    A call of ulpscope's own run is named `Functional.silu.0`.
    """
    if call.recorded_as:
        return _DIRECTION.sub("", call.recorded_as)
    first, _, rest = call.call.op.partition(".")
    return f"{_NAMESPACES.get(first, first)}.{rest}.{call.call.index}" if rest else str(call.call)


def details_of(call: CheckedCall) -> tuple[CheckDetail, ...]:
    """Return a row for each result of one call; a skipped call gets one row without figures."""
    key = recorded_key(call)
    if not call.slots:
        return (CheckDetail(key=key, phase=call.phase, name=f"{key}.{call.phase}", status=call.status, message=call.reason),)
    return tuple(_detail(call, key, index, slot) for index, slot in enumerate(call.slots))


def _detail(call: CheckedCall, key: str, index: int, slot: CheckedSlot) -> CheckDetail:
    known = {name: slot.metrics.get(name) for name in STANDARD_METRICS}
    return CheckDetail(
        key=key,
        phase=call.phase,
        name=f"{key}.{call.phase}.output.{index}",
        index=index,
        golden_dtype=slot.golden_dtype,
        dtype=slot.dtype,
        shape=slot.shape,
        metrics={name: value for name, value in known.items() if value is not None and not isnan(value)},
        status=slot.status,
        message=slot.reason,
    )


def outcomes_of(calls: Iterable[CheckedCall]) -> tuple[CheckOutcome, ...]:
    """Return a row for each API, in the order of recording; an optimizer's step is no API and has none."""
    found: dict[tuple[int, int, str, str], dict[str, CheckedCall]] = {}
    for call in calls:
        if call.phase in ("forward", "backward"):
            found.setdefault((call.rank, call.step, call.module, recorded_key(call)), {})[call.phase] = call
    return tuple(_outcome(key, phases) for (_, _, _, key), phases in found.items())


def _outcome(key: str, phases: dict[str, CheckedCall]) -> CheckOutcome:
    forward, backward = (phases.get(name) for name in ("forward", "backward"))
    reasons = dict.fromkeys(call.reason for call in (forward, backward) if call is not None and call.reason)
    return CheckOutcome(
        key=key,
        forward=forward.status if forward else None,
        backward=backward.status if backward else None,
        message="; ".join(reasons),
    )


def saved_failures(folder: str | os.PathLike[str]) -> Iterator[SavedFailure]:
    """Yield the failed calls that `save_failures` kept, in the order of the recording."""
    if not Path(folder).is_dir():
        raise InputError(f"'{folder}' is no folder; give the one that --save-failures named")
    for file in sorted(Path(folder).glob("rank*_step*.safetensors")):
        yield _saved(file)


def _saved(file: Path) -> SavedFailure:
    from safetensors import safe_open

    from ulpscope.replay.calls.arguments import data_of

    with safe_open(file, framework="pt") as stored:
        facts = stored.metadata() or {}
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    data = {name: data_of(one) for name, one in tensors.items()}
    named = facts.get("recorded_as") or facts.get("call", "").rpartition("/")[2]
    return SavedFailure(
        key=_DIRECTION.sub("", named), phase=facts.get("phase", ""), reason=facts.get("reason", ""), tensors=dict(sorted(data.items()))
    )
