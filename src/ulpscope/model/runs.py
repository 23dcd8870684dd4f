# SPDX-License-Identifier: Apache-2.0
"""What made a run."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ulpscope.model.nouns import dataclass

__all__ = ["FORMAT_VERSION", "LedgerEntry", "RunInfo"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What made a run: as much as its format tells."""

    format: str = "ulpscope"
    format_version: int = FORMAT_VERSION
    tool: str = ""
    created: str = ""
    command: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    world_size: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Something that capture could not do, and why."""

    what: str
    why: str
    step: int | None = None
    call: str = ""
    count: int = 1
