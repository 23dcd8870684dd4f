# SPDX-License-Identifier: Apache-2.0
"""Decide when a non-finite value is a fault: where values began in a step, what became of them, and what they reached.

The live hunt and the analysis of a recorded run both ask here, each with beginnings of its own. Whether a beginning is a fault is known
when the step is over: it is a fault if it reached the loss, a gradient or a parameter and loss scaling does not explain it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from ulpscope.numerics.nonfinite_rule import Kinds, Origin, Passage

__all__ = ["Begun", "BegunKind", "BegunStep", "given_at_the_end", "origin_after", "reached_by"]

BegunKind: TypeAlias = Literal["made", "given", "received", "soft"]
"""What a call did where non-finite values began. made: it made them; given: it had them from outside; received: from another rank; soft: it
made -inf that may be meant."""


class Begun(Protocol):
    """A call where non-finite values began; `last_touch` says what the last call that had them did."""

    kind: BegunKind
    kinds: Kinds
    num_passed: int
    last_touch: Passage

    @property
    def phase(self) -> str: ...

    @property
    def is_half(self) -> bool:
        """Tell whether it is about float16, whose overflow loss scaling provokes."""


B = TypeVar("B", bound=Begun)


@dataclass(slots=True, kw_only=True)
class BegunStep(Generic[B]):
    """The beginnings of one step, in order of time, and what they reached; `is_skipped` says that a scaler left the weights alone."""

    beginnings: list[B] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    has_backward: bool = False
    has_update: bool = False
    is_skipped: bool = False
    scale: float | None = None

    def reach(self, what: str) -> None:
        if what not in self.reached:
            self.reached.append(what)

    @property
    def at_large(self) -> list[B]:
        """Return the beginnings that may explain something bad later in the step: those that were not swallowed, or all if all were."""
        return [begun for begun in self.beginnings if begun.last_touch != "swallowed"] or self.beginnings

    def is_expected(self, begun: B) -> bool:
        """Tell whether loss scaling explains it: a float16 gradient overflowed and the scaler left the weights alone."""
        return self.is_skipped and begun.phase in ("backward", "optimizer") and begun.is_half and begun.kinds is not Kinds.NAN

    def is_fault(self, begun: B) -> bool:
        """Tell whether it did harm; a value that vanished before the loss, or was a mask, did none."""
        if self.is_expected(begun):
            return False
        if self.reached:
            return begun in self.at_large
        if self.has_backward and begun.phase == "forward":
            return False
        if self.has_update and begun.phase == "backward":
            return False
        return begun.kind != "soft" and begun.last_touch != "swallowed"

    def in_backward(self, passage: Passage, is_given: bool, behind: list[B]) -> tuple[Passage, list[B]]:
        """Judge a call of the backward pass: a gradient is never a mask, and an earlier beginning of the step explains a gradient that was
        non-finite already.
        """
        if passage in ("masked", "soft", "given", "made") and is_given and self.beginnings:
            return "passed", behind or self.at_large
        return ("made" if passage in ("masked", "soft") else passage), behind

    def unseen_origin(self, kinds: Kinds) -> tuple[Origin | None, B | None]:
        """Blame a value without a known maker on an earlier beginning of the step, unless it may be a mask."""
        return ("made", self.at_large[0]) if self.beginnings and not kinds.is_mask else (None, None)

    def touch(self, begun: B, passage: Passage) -> None:
        """Note that a call passed on a beginning's values, or swallowed them; -inf that others pass on was not meant."""
        begun.last_touch = passage
        if passage == "passed":
            begun.num_passed += 1
            if begun.kind == "soft":
                begun.kind = "made"


def origin_after(passage: Passage, entering: Container[Origin | None]) -> Origin:
    """Tell where the non-finite results of a call come from, from what it did; `entering` are the origins of its inputs."""
    if passage in ("soft", "masked", "given"):
        return passage
    return "given" if passage == "passed" and "made" not in entering and "given" in entering else "made"


_REACHED: Mapping[str, str] = {"output": "loss", "gradient": "gradients"}


def reached_by(role: str) -> str:
    """Name what a value outside of calls has reached, by the role of its slot: the loss, the gradients or the parameters."""
    return _REACHED.get(role, "parameters")


def given_at_the_end(roles: Container[Any], *, world_size: int) -> BegunKind:
    """Tell how values began that an optimizer has and no recorded call made: with several ranks, gradients may come from another one."""
    return "received" if "gradient" in roles and world_size > 1 else "made"
