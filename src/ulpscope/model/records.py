# SPDX-License-Identifier: Apache-2.0
"""Define what capture writes and stores read back: one record for each call and phase.

Non-tensor arguments travel as plain values (None, bool, int, float, str, list, dict). Any other value becomes a dict with one key that
begins with `$`:

    {"$tensor": "input.0"}   {"$dtype": "float32"}   {"$device": "cuda:0"}   {"$size": [2, 3]}
    {"$slice": [0, None, 2]}  {"$ellipsis": True}   {"$memory_format": "channels_last"}   {"$layout": "strided"}
    {"$complex": [0.0, 1.0]}  {"$tuple": [...]}     {"$int": "90071992547409930000"}
    {"$object": "package.Class", "repr": "..."}     anything else, shortened
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from ulpscope.model.names import INPUT_ROLES, CallName, Role, Slot
from ulpscope.model.nouns import dataclass

__all__ = [
    "RECEIVED_ROLES",
    "Arguments",
    "CallRecord",
    "Frame",
    "Level",
    "Modes",
    "Phase",
    "Summary",
    "TensorData",
    "TensorRecord",
    "view_content",
]

Phase: TypeAlias = Literal["start", "forward", "backward", "optimizer", "end"]
Level: TypeAlias = Literal["api", "module", "op", "state"]
RECEIVED_ROLES: dict[Phase, frozenset[Role]] = {
    "start": frozenset(),
    "forward": INPUT_ROLES,
    "backward": INPUT_ROLES - {"gradient"},
    "optimizer": frozenset({"gradient", "input"}),
    "end": frozenset(),
}
"""The roles of the slots that enter a call, by phase. The call makes the others (at step start they are simply given)."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of one tensor, as far as the tool that recorded the run took them.

    `min` and `max` are over everything but NaN; `mean` and `rms` over the finite elements, summed in float64. A complex number counts as
    two reals, a bool as 0 or 1. None means: not taken, or there is no such element.
    """

    numel: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: float | None = None
    num_nan: int | None = None
    num_posinf: int | None = None
    num_neginf: int | None = None
    num_zero: int | None = None
    num_subnormal: int | None = None

    @property
    def abs_max(self) -> float | None:
        if self.min is None or self.max is None:
            return None
        return max(abs(self.min), abs(self.max))

    @property
    def num_nonfinite(self) -> int | None:
        if self.num_nan is None or self.num_posinf is None or self.num_neginf is None:
            return None
        return self.num_nan + self.num_posinf + self.num_neginf


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor in one slot of a call.

    `fingerprint` is `scheme:hex`; two are comparable only when their schemes are equal (ours is `u1`, see the store format). `content` is
    the key for the run's `tensor()`; None when the values were not kept.
    """

    slot: Slot
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    device: str = ""
    requires_grad: bool = False
    summary: Summary | None = None
    fingerprint: str | None = None
    content: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack, innermost first within a record."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """The modes around a call that change what it computes."""

    autocast: str | None = None
    grad: bool = True
    inference: bool = False
    training: bool | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Positional and keyword arguments, tensors replaced by their slots (see the module's docstring)."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One phase of one call.

    `order` is the position in execution order within its step and rank. In a backward record the slots `input.*` are gradients of the
    call's outputs and `output.*` the gradients that this call contributes to its inputs, each under the path of that input. Records of
    level `state` are no calls. They hold the parameters and buffers at step start (`state.parameters`), the batch (`state.batch`), the
    random generators (`state.rng`, in `arguments`) and an optimizer's step (`optimizer.AdamW`: hyper-parameters in `arguments`; slots
    gradient.<name> before the step, mutated.<name> the parameters and state.<name>.<key> the optimizer's state after it). `state.end` holds
    what changed between the start of the step and its end: buffers, and the random generators in `arguments`. `recorded_as` is the name
    that another tool gave the call.
    """

    rank: int
    step: int
    order: int
    call: CallName
    phase: Phase
    level: Level = "api"
    module: str = ""
    parent: str = ""
    arguments: Arguments | None = None
    modes: Modes | None = None
    slots: tuple[TensorRecord, ...] = ()
    stack: tuple[Frame, ...] = ()
    recompute: bool = False
    recorded_as: str = ""

    @property
    def source(self) -> Frame | None:
        """Return the innermost line of the user's own code."""
        return self.stack[0] if self.stack else None

    def receives(self, slot: Slot) -> bool:
        """Tell whether the slot enters this call. The call makes any other slot (at step start it is simply given)."""
        return slot.role in RECEIVED_ROLES[self.phase]

    @property
    def name(self) -> str:
        """Return the text that `select` globs match: `module/call`."""
        return f"{self.module}/{self.call}"


def view_content(content: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> str:
    """Name a view of kept bytes: their hash, the dtype and shape of the view and, unless it is simply those bytes, strides and offset.

    >>> view_content("d41d8cd98f00b204e9800998ecf8427e:float32:6", "float32", (3, 2), (1, 3), 0)
    'd41d8cd98f00b204e9800998ecf8427e:float32:3x2:1x3:0'
    """
    key = f"{content.partition(':')[0]}:{dtype}:{'x'.join(map(str, shape))}"
    return key if strides is None else f"{key}:{'x'.join(map(str, strides))}:{offset}"


@dataclass(frozen=True, slots=True)
class TensorData:
    """The bytes of one tensor: C-contiguous, little-endian, `dtype` by its canonical name.

    `buffer` supports the buffer protocol (usually a memoryview into a mapped file).
    """

    dtype: str
    shape: tuple[int, ...]
    buffer: Any
