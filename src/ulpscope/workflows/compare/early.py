# SPDX-License-Identifier: Apache-2.0
"""Start to compare the first step of two runs while the rest of the command is imported (design/0007).

The import takes as long as comparing a small run, and the other cores would be idle. The calls are not matched yet, so the tensors are
paired in the order in which each run kept them, which is right where both come from the same program. Content hashes decide which results
are used: an unused pair costs time of an idle core, and changes no answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from threading import Thread

from ulpscope.errors import InputError
from ulpscope.model import Run
from ulpscope.numerics.difference.kept_pairs import KeptPairs, Scratch
from ulpscope.numerics.kernel import KINDS
from ulpscope.store import DirectoryRun

__all__ = ["begun_early", "early_start"]

_MOST_PAIRS = 1024
_MOST_THREADS = 8
_begun: dict[tuple[str, str, int, int], KeptPairs] = {}


@contextmanager
def early_start(words: list[str]) -> Iterator[None]:
    """Compare the first step of the two runs that a command names, in other threads, for as long as the block lasts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runs = [word for word in words if not word.startswith("-") and os.path.isfile(f"{word}/run.json")]  # noqa: PTH113
    with ExitStack() as stack:
        if cores > 1 and len(runs) > 1:
            try:
                pairs = _first_step(DirectoryRun(runs[0]), DirectoryRun(runs[1]))
            except (InputError, OSError):
                pairs = None  # the comparison itself will report what is wrong with the run
            if pairs is not None:
                stack.callback(_begun.clear)
                for _ in range(min(cores, _MOST_THREADS) - 1):
                    thread = Thread(target=pairs.work, name="ulpscope-early", daemon=True)
                    stack.callback(thread.join)
                    thread.start()
                stack.callback(pairs.stop)
        yield


def begun_early(subject: Run, reference: Run, rank: int, step: int) -> KeptPairs | None:
    """Return the pairs of this step if they were started early, and let the threads start no more of them."""
    if not isinstance(subject, DirectoryRun) or not isinstance(reference, DirectoryRun):
        return None
    pairs = _begun.get((str(subject.path), str(reference.path), rank, step))
    if pairs is not None:
        pairs.stop()
    return pairs


def _first_step(subject: DirectoryRun, reference: DirectoryRun) -> KeptPairs | None:
    """Pair the first step of the first rank that both have."""
    for rank in sorted({*subject.ranks()} & {*reference.ranks()})[:1]:
        for step in sorted({*subject.steps(rank)} & {*reference.steps(rank)})[:1]:
            pairs = KeptPairs(Scratch())
            for ours, theirs in islice(zip(subject.listed(rank, step), reference.listed(rank, step), strict=False), _MOST_PAIRS):
                if ours.dtype in KINDS and ours.hash != theirs.hash:  # equal tensors are not read, and other dtypes need NumPy
                    pairs.add(ours, theirs)
            pairs.begin()
            _begun[str(subject.path), str(reference.path), rank, step] = pairs
            return pairs
    return None
