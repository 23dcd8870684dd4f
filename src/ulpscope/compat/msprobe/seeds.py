# SPDX-License-Identifier: Apache-2.0
"""Seed as `seed_all` of msprobe does: as the older tools do, and with dropout off where that is asked for."""

from __future__ import annotations

from ulpscope.compat import seeding
from ulpscope.errors import InputError

__all__ = ["seed_all"]


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Seed every generator; with `mode` ask for deterministic algorithms, with `rm_dropout` let dropout drop nothing.

    >>> seed_all(seed=1234, mode=True)  # doctest: +SKIP

    `is_enhanced`, which made every random call return the same numbers, is accepted and does nothing beyond the seed.
    """
    for name, value in (("rm_dropout", rm_dropout), ("is_enhanced", is_enhanced)):
        if not isinstance(value, bool):
            raise InputError(f"seed_all wants {name}=True or {name}=False, not {value!r}")
    seeding.seed_all(seed, mode)
    if rm_dropout:
        from ulpscope.compat.ptdbg.dropout import switch_off_dropout

        switch_off_dropout()
