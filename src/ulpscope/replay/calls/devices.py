# SPDX-License-Identifier: Apache-2.0
"""Run a recorded call on the device under test: copy its inputs there, run it there in its own precision, copy its results back.

Nothing is widened or decomposed here: the results are those of the device's own kernels. Tensors that lay on the CPU while others of the
same call did not (lengths, indices, single numbers) stay there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from ulpscope.errors import InputError
from ulpscope.model import CallRecord, Slot
from ulpscope.replay.calls.evaluate import _Backward, _Forward
from ulpscope.replay.formulas.fused import formula_of
from ulpscope.replay.program import NotReplayable, Program

__all__ = ["DeviceLost", "has_own_kernel", "open_device", "run_on_device"]

_SMALL = 1 << 20
"""Bytes up to which a result is copied into pinned memory, which costs more to get than it saves for a large one."""
_LOST = ("CUDA error", "device-side assert", "ACL error", "aclrt", "ERR99999", "unspecified launch failure")


class DeviceLost(NotReplayable):
    """The device no longer answers in this process; another process may still use it."""


def open_device(name: str) -> str:
    """Return the name of a device that this process can use; import the vendor's package if it is installed."""
    kind = name.partition(":")[0]
    if kind == "npu" and not hasattr(torch, "npu") and find_spec("torch_npu") is not None:
        __import__("torch_npu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise InputError(f"the device '{name[:40]}' cannot be used here ({text[:120]}); choose another with --device, as in cpu") from error
    return str(device)


def has_own_kernel(record: CallRecord, device: str) -> bool:
    """Tell whether the device runs this operation by itself; a vendor's operation has no kernel anywhere else."""
    return formula_of(record.call.op) is None or _vendor_function(record.call.op, device) is not None


def run_on_device(program: Program, device: str) -> dict[Slot, torch.Tensor]:
    """Run the call on its recorded inputs on the device, and return the results on the CPU."""
    there = _placed(program, device)
    inputs = _moved(program, device)
    try:
        with _untouched_generator(device), ExitStack() as stack:
            if not inputs and device != "cpu":
                stack.enter_context(torch.device(device))
            results = _fetched(there(inputs), device)
    except NotReplayable as error:
        raise _explained(error, device) from error.__cause__
    except RuntimeError as error:
        raise _explained(NotReplayable(str(error)), device) from error
    if device == "cpu" and isinstance(program, (_Forward, _Backward)) and isinstance(there, (_Forward, _Backward)):
        program.has_drawn = there.has_drawn
    return results


def _placed(program: Program, device: str) -> Program:
    """Return the same program with its call on another device; a vendor's operation runs its own kernel where there is one."""
    if not isinstance(program, (_Forward, _Backward)):
        return program
    native = _vendor_function(program.call.record.call.op, device)
    call = replace(program.call, device=device, function=native or program.call.function)
    return replace(program, call=call)


def _vendor_function(op: str, device: str) -> Any:
    """Find the device's own kernel of an operation that has a formula here; None where this device has none."""
    if formula_of(op) is None:
        return None
    name, kind = op.removesuffix(".default").rpartition(".")[2], device.partition(":")[0]
    if op.startswith("aten."):
        return getattr(torch.ops.aten, name, None) if kind == "cuda" else None
    return getattr(sys.modules.get("torch_npu"), name, None) if kind == "npu" else None


def _moved(program: Program, device: str) -> dict[Slot, torch.Tensor]:
    if device == "cpu":
        return dict(program.inputs)
    stays = _on_cpu(program)
    seen: dict[int, torch.Tensor] = {}
    return {
        slot: value if slot in stays else seen.setdefault(id(value), _laid_out(value, device)) for slot, value in program.inputs.items()
    }


def _on_cpu(program: Program) -> frozenset[Slot]:
    if not isinstance(program, (_Forward, _Backward)):
        return frozenset()
    devices = {slot: record.device for slot, record in program.call.slots.items()}
    if all(where in ("", "cpu") for where in devices.values()):
        return frozenset()
    return frozenset(slot for slot, where in devices.items() if where == "cpu")


def _laid_out(value: torch.Tensor, device: str) -> torch.Tensor:
    there = value.to(device, non_blocking=device.startswith("cuda"))  # CUDA has read pageable memory when this returns
    if there.stride() == value.stride() or value.is_contiguous():
        return there
    try:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(there)
    except (RuntimeError, NotImplementedError):
        return there


def _fetched(results: Mapping[Slot, torch.Tensor], device: str) -> dict[Slot, torch.Tensor]:
    """Copy the results to the CPU: the small ones side by side, with one wait for all."""
    kind = device.partition(":")[0]
    synchronize = vars(getattr(torch, kind, torch)).get("synchronize") if kind in ("cuda", "npu") else None
    copies = {slot: _copied(value.detach(), is_waited_for=synchronize is not None) for slot, value in results.items()}
    if synchronize is not None:
        synchronize(device)
    return {slot: value.resolve_conj().resolve_neg() for slot, value in copies.items()}


def _copied(value: torch.Tensor, *, is_waited_for: bool) -> torch.Tensor:
    is_plain = not (value.is_conj() or value.is_neg())  # else torch would compute on the copy before it has arrived
    return value.to("cpu", non_blocking=is_waited_for and is_plain and value.numel() * value.element_size() <= _SMALL)


def _explained(error: NotReplayable, device: str) -> NotReplayable:
    text = str(error).replace("it fails on the CPU", f"it fails on {device}")
    kind = DeviceLost if any(word in text for word in _LOST) else NotReplayable
    return kind(text)


@contextmanager
def _untouched_generator(device: str) -> Iterator[None]:
    kind = device.partition(":")[0]
    module: Mapping[str, Any] = vars(getattr(torch, kind, torch)) if kind != "cpu" else {}
    if "get_rng_state" not in module or "set_rng_state" not in module:
        yield
        return
    state = module["get_rng_state"](device)
    try:
        yield
    finally:
        module["set_rng_state"](state, device)
