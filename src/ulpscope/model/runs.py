# SPDX-License-Identifier: Apache-2.0
"""Describe a run: the tool, the machine and the options that made it, and what capture could not do."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from ulpscope.model.nouns import dataclass

__all__ = ["FORMAT_VERSION", "LedgerEntry", "RunInfo"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The tool, machine and options that made a run, as far as its format tells."""

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
