# SPDX-License-Identifier: Apache-2.0
"""Decide what is dumped: check the old modes, scopes and filters as the old tool did, and choose each call by its old name.

A scope item stands for every API whose name begins with it (`Tensor_add_1` also for `Tensor_add_10_forward`), an item of api_list for every
API that has it anywhere in its name, in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.screen import print_warning
from ulpscope.errors import InputError

__all__ = ["MODES", "Chooser", "DumpOptions", "check_mode", "switched_on"]

MODES = ("all", "list", "range", "stack", "acl", "api_list", "api_stack")
WORDS = ("forward", "backward", "input", "output")
_WITH_STACKS = frozenset({"list", "range", "stack", "api_stack"})

Chooser = Callable[[str], bool]


def check_mode(mode: object, scope: object, api_list: object) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Refuse an unknown mode, and a scope that does not fit its mode."""
    if not isinstance(mode, str) or mode not in MODES:
        raise CompareException(CompareException.INVALID_DUMP_MODE, f"mode={mode!r} is not known; choose one of {', '.join(MODES)}")
    scopes, apis = _names("scope", scope), _names("api_list", api_list)
    _check_scope(mode, len(scopes), len(apis))
    return mode, scopes, apis


def _names(argument: str, given: object) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, str) and item for item in given):
        raise CompareException(
            CompareException.INVALID_PARAM_ERROR, f"{argument} is a list of API names, for example ['Tensor_add_0_forward'], not {given!r}"
        )
    return tuple(given)


def _check_scope(mode: str, num_scopes: int, num_apis: int) -> None:
    if mode == "range" and num_scopes != 2:
        raise InputError(f"mode='range' needs scope=[first, last], two API names, not {num_scopes}")
    if mode == "list" and num_scopes == 0:
        raise InputError("mode='list' needs at least one API name in scope, for example scope=['Tensor_add_0_forward']")
    if mode == "stack" and num_scopes > 2:
        raise InputError(f"mode='stack' takes no scope, one API name, or two for a range, not {num_scopes}")
    if mode == "acl" and num_scopes != 1:
        raise InputError(f"mode='acl' needs exactly one API name in scope, not {num_scopes}")
    if mode == "api_list" and num_apis == 0:
        raise InputError("mode='api_list' needs at least one part of a name in api_list, for example api_list=['relu']")


def switched_on(switch: object, what: str = "switch") -> bool:
    if switch not in ("ON", "OFF"):
        raise CompareException(CompareException.INVALID_PARAM_ERROR, f"{what} is 'ON' or 'OFF', not {switch!r}")
    return switch == "ON"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpOptions:
    """The choices of one dump. A name must have the parts in `words`: a phase, and input or output."""

    mode: str = "all"
    scope: tuple[str, ...] = ()
    api_list: tuple[str, ...] = ()
    floats_only: bool = False
    words: frozenset[str] = frozenset(WORDS)
    summary_only: bool = False

    @classmethod
    def parse(
        cls, mode: object, scope: object, api_list: object, filter_switch: object, input_output_mode: object, summary_only: object
    ) -> DumpOptions:
        """Check everything; where the mode or its scope has a wrong type, the code is that of a wrong parameter."""
        try:
            mode, scope, api_list = check_mode(mode, scope, api_list)
        except CompareException as error:
            raise CompareException(CompareException.INVALID_PARAM_ERROR, error.error_info) from error
        if not isinstance(summary_only, bool):
            raise CompareException(CompareException.INVALID_PARAM_ERROR, f"summary_only is True or False, not {summary_only!r}")
        return cls(
            mode=mode,
            scope=tuple(item.replace("backward", "forward") for item in scope) if mode == "acl" else scope,
            api_list=tuple(item.lower() for item in api_list),
            floats_only=switched_on(filter_switch, "filter_switch"),
            words=_words(input_output_mode),
            summary_only=summary_only,
        )

    @property
    def stem(self) -> str:
        """Return the stem of the pkl file, and of the folder beside it."""
        return "dump" if self.mode == "all" else f"{self.mode}_dump"

    @property
    def has_stacks(self) -> bool:
        return self.mode in _WITH_STACKS

    @property
    def has_tensors(self) -> bool:
        """Tell whether lines about tensors are written."""
        return self.mode != "stack"

    @property
    def has_files(self) -> bool:
        """Tell whether tensors are written."""
        return self.has_tensors and not self.summary_only

    @property
    def needs_backward(self) -> bool:
        """Tell whether anything of a backward pass can be wanted."""
        if "backward" not in self.words:
            return False
        return not self.scope or any(not item.endswith("_forward") for item in self.scope)

    def chooser(self) -> Chooser:
        """Return a function that tells by its name with its phase whether to dump an API.

        Ask it in the order of execution, since ranges count.
        """
        if self.mode == "api_list":
            return lambda name: any(item in name.lower() for item in self.api_list)
        if self.mode == "range" or (self.mode == "stack" and len(self.scope) == 2):
            return _Range(*self.scope)
        if self.mode in ("list", "stack", "acl") and self.scope:
            return lambda name: name.startswith(self.scope)
        return lambda name: True

    def foresight(self) -> Chooser:
        """Return a function that tells whether a call may be dumped in either phase, by its name without one; ask before the call."""
        if self.mode == "api_list" or (self.mode in ("list", "stack", "acl") and len(self.scope) == 1) or self.mode == "list":
            chosen = self.chooser()
            return lambda name: chosen(f"{name}_forward") or chosen(f"{name}_backward")
        if self.mode in ("range", "stack") and self.scope and not self.needs_backward:
            chosen = self.chooser()
            return lambda name: chosen(f"{name}_forward")
        return lambda name: True


class _Range:
    """Chooses from the first name that begins with `first` to the next that begins with `last`, both included; then it can open again."""

    def __init__(self, first: str, last: str) -> None:
        self._first, self._last = first, last
        self._is_open = False

    def __call__(self, name: str) -> bool:
        is_within = self._is_open or name.startswith(self._first)
        self._is_open = is_within and not name.startswith(self._last)
        return is_within


def _words(given: object) -> frozenset[str]:
    """Parse input_output_mode; a missing half is completed: ["backward"] is inputs and outputs of the backward pass."""
    if given is None:
        return frozenset(WORDS)
    if not isinstance(given, (list, tuple)):
        print_warning(f"input_output_mode should be a list; {given!r} is taken as [{given!r}]")
        given = [given]
    chosen: Sequence[object] = given
    unknown = [word for word in chosen if word not in ("all", *WORDS)]
    if unknown or not chosen:
        raise InputError(f"input_output_mode knows all, {', '.join(WORDS)}, not {list(chosen)!r}")
    if "all" in chosen:
        if len(chosen) > 1:
            print_warning("'all' in input_output_mode stands for everything and is given alone; everything is dumped")
        return frozenset(WORDS)
    words = {str(word) for word in chosen}
    for half in (WORDS[:2], WORDS[2:]):
        words |= set(half) if not words & set(half) else set()
    return frozenset(words)
