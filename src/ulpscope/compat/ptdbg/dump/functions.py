# SPDX-License-Identifier: Apache-2.0
"""Hold the functions of the old tool: set_dump_path, register_hook, set_dump_switch and their kin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ulpscope.compat.ptdbg.dump import acl_settings as acl
from ulpscope.compat.ptdbg.dump.overflow_check import OverflowCheck, OverflowOptions
from ulpscope.compat.ptdbg.dump.process import PROCESS
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.ptdbg.files.modes import DumpOptions, switched_on
from ulpscope.compat.ptdbg.files.places import DEFAULT_TAG, DumpPlace
from ulpscope.compat.screen import print_info

__all__ = [
    "acc_cmp_dump",
    "overflow_check",
    "register_hook",
    "set_backward_input",
    "set_dump_path",
    "set_dump_switch",
    "set_overflow_check_switch",
]

_KEYWORDS = ("overflow_nums", "dump_mode", "dump_config", "rank")


def acc_cmp_dump(*args: Any, **kwargs: Any) -> None:
    """Name a dump for `register_hook`: dump what every API is given and returns."""


def overflow_check(*args: Any, **kwargs: Any) -> None:
    """Name the overflow check for `register_hook`: look for overflows."""


def set_dump_path(fpath: str | os.PathLike[str] | None = None, dump_tag: str = DEFAULT_TAG) -> None:
    """Choose the folder to dump into; without one, `${ASCEND_WORK_PATH}/dump_data`.

    >>> set_dump_path("./dump_path", dump_tag="dump_conv2d")  # doctest: +SKIP
    """
    PROCESS.place = DumpPlace.parse(fpath, dump_tag)


def register_hook(model: Any, hook: Any, **kwargs: Any) -> None:
    """Register `acc_cmp_dump` or `overflow_check`; the model needs nothing done to it.

    >>> register_hook(model, overflow_check, overflow_nums=3)  # doctest: +SKIP
    """
    unknown = sorted(set(kwargs) - set(_KEYWORDS))
    if unknown:
        raise _wrong(f"register_hook does not know {', '.join(unknown)}; it takes {', '.join(_KEYWORDS)}")
    name = getattr(hook, "__name__", repr(hook))
    if name not in ("acc_cmp_dump", "overflow_check"):
        raise _wrong(f"register_hook takes acc_cmp_dump or overflow_check, not {name}")
    dump_mode = kwargs.get("dump_mode", "api")
    if dump_mode not in ("api", "acl"):
        raise _wrong(f"dump_mode is 'api' or 'acl', not {dump_mode!r}")
    if dump_mode == "acl":
        acl.check_config(kwargs.get("dump_config"), "dump_config")
    PROCESS.rank = checked_rank(kwargs.get("rank"))
    if name == "overflow_check":
        options = OverflowOptions.parse(kwargs.get("overflow_nums", 1))
        if dump_mode == "acl":
            acl.refuse("an overflow check")
        _begin_overflow_check(options)
        return
    PROCESS.is_acl = dump_mode == "acl"
    PROCESS.known_place()
    PROCESS.is_registered = True
    if PROCESS.options is not None and PROCESS.dumping is None:
        PROCESS.begin_dump()


def _begin_overflow_check(options: OverflowOptions) -> None:
    PROCESS.end_overflow_check()
    PROCESS.overflow = OverflowCheck(PROCESS.known_place(), options, rank=PROCESS.rank)
    PROCESS.overflow.start()


def set_dump_switch(
    switch: str,
    mode: str = "all",
    scope: Sequence[str] | None = None,
    api_list: Sequence[str] | None = None,
    filter_switch: str = "OFF",
    dump_mode: Sequence[str] | None = None,
    summary_only: bool = False,
) -> None:
    """Begin a dump with "ON", end it with "OFF"; each "ON" begins its files anew.

    >>> set_dump_switch("ON", mode="api_stack", filter_switch="OFF")  # doctest: +SKIP
    """
    if not switched_on(switch):
        _end_dump()
        return
    options = DumpOptions.parse(mode, scope, api_list, filter_switch, dump_mode, summary_only)
    if mode == "acl":
        if not PROCESS.is_acl:
            raise _wrong("mode='acl' needs register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='./dump.json') before it")
        acl.refuse(f"a dump of {options.scope[0]}")
    PROCESS.known_place()
    PROCESS.options = options
    PROCESS.begin_dump()


def _end_dump() -> None:
    PROCESS.options = None
    folder = PROCESS.end_dump()
    if folder is not None:
        print_info(f"dump is off; its data are in '{folder}'")


def set_overflow_check_switch(switch: str, filter_switch: str = "OFF") -> None:
    """Look for overflows from "ON" to "OFF" only; without this function they are looked for all the time.

    >>> set_overflow_check_switch("ON")  # doctest: +SKIP
    """
    is_on, floats_only = switched_on(switch), switched_on(filter_switch, "filter_switch")
    if PROCESS.overflow is None:
        raise _wrong("set_overflow_check_switch comes after register_hook(model, overflow_check)")
    PROCESS.overflow.floats_only = floats_only
    if is_on:
        PROCESS.overflow.resume()
    else:
        PROCESS.overflow.pause()


def set_backward_input(backward_input: Sequence[str | os.PathLike[str]]) -> None:
    """Name the .npy files that a backward dump at ACL level would begin with.

    >>> set_backward_input(["./npu_dump/dump/Functional_conv2d_1_backward_input.0.npy"])  # doctest: +SKIP
    """
    PROCESS.backward_input = acl.check_backward_input(backward_input)


def checked_rank(rank: object) -> int | None:
    """Return a rank from 0 up, or None for all of them; refuse anything else."""
    if rank is None or (isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0):
        return rank
    raise _wrong(f"rank is a whole number from 0 up, not {rank!r}")


def _wrong(text: str) -> CompareException:
    return CompareException(CompareException.INVALID_PARAM_ERROR, text)
