# SPDX-License-Identifier: Apache-2.0
"""Refuse the MindSpore side of msprobe's collecting: the names are here, and each says that it is not there yet."""

from __future__ import annotations

from typing import Any, NoReturn

from ulpscope.errors import InputError

__all__ = ["MsprobeStep", "PrecisionDebugger", "seed_all"]


def _refuse(what: str) -> NoReturn:
    raise InputError(
        f"msprobe.mindspore.{what}: collecting under MindSpore is not there yet; dumps that the real msprobe wrote under MindSpore "
        "are compared with: msprobe -f mindspore compare"
    )


class PrecisionDebugger:
    """Refuse in one sentence, which names what works instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("PrecisionDebugger")

    @classmethod
    def start(cls, *args: Any, **kwargs: Any) -> None:
        _refuse("PrecisionDebugger")

    stop = step = monitor = start


class MsprobeStep:
    """Refuse in one sentence, which names what works instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("MsprobeStep")


def seed_all(*args: Any, **kwargs: Any) -> None:
    """Refuse in one sentence, which names what works instead."""
    _refuse("seed_all")
