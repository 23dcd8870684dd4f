# SPDX-License-Identifier: Apache-2.0
"""Check the value of `--seed` as torch's generators do."""

from __future__ import annotations

import click

__all__ = ["checked_seed"]


def checked_seed(context: click.Context, parameter: click.Parameter, seed: int | None) -> int | None:
    """Return the seed; refuse one that no generator of torch takes."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise click.BadParameter("a seed has at most 64 bits; give a smaller number")
    return seed
