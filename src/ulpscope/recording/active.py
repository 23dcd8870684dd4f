# SPDX-License-Identifier: Apache-2.0
"""Know the session that this process is under. There is at most one: two sessions could not put their patches back in any order."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["is_one_active", "join", "leave"]


class _Session(Protocol):
    def deactivate(self) -> None: ...


_SESSIONS: weakref.WeakSet[_Session] = weakref.WeakSet()


def join(session: _Session) -> None:
    _SESSIONS.add(session)


def leave(session: _Session) -> None:
    _SESSIONS.discard(session)


def is_one_active() -> bool:
    return len(_SESSIONS) > 0


def _deactivate_in_child() -> None:
    """Deactivate the sessions in a forked worker: it has no business with its parent's run."""
    for session in list(_SESSIONS):
        session.deactivate()


os.register_at_fork(after_in_child=_deactivate_in_child)
