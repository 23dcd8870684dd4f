# SPDX-License-Identifier: Apache-2.0
"""Preheat free_benchmark: its first steps learn, operation by operation, which difference is still harmless.

Step 0 counts the calls of each operation. Up to `preheat_step` some of them, at most `max_sample` a step, are also computed on the CPU in a
higher precision. If a call agrees with that, the difference that a disturbance made is harmless, and the limit follows it; otherwise the
limit stays below it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

__all__ = ["HONEST", "Preheating"]

HONEST = {"torch.float16": 2**-11, "torch.bfloat16": 2**-8}
"""The relative error up to which a result agrees with its computation in a higher precision; 2**-14 for every other dtype."""

_FIRST_LIMIT = 1.05
_FACTOR = 2.0


class Preheating:
    """Limits by operation and dtype; none falls below the one of the guide."""

    def __init__(self, preheat_step: int, max_sample: int) -> None:
        self._steps = preheat_step
        self._most = max_sample
        self._num_calls: Counter[str] = Counter()
        self._limits: dict[tuple[str, str], float] = {}
        self._is_settled: set[tuple[str, str]] = set()
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self._learn()
        self._step = step
        self._called: Counter[str] = Counter()

    def limit(self, op: str, dtype: str, default: float) -> float:
        return max(self._limits.get((op, dtype), _FIRST_LIMIT), default)

    def call(self, op: str) -> bool:
        """Count a call, and tell whether it is to be computed on the CPU too."""
        if self._step == 0:
            self._num_calls[op] += 1
            return False
        self._called[op] += 1
        return self._step < self._steps and self._called[op] in self._samples(op)

    def take(self, op: str, dtype: str, difference: float, *, is_honest: bool) -> None:
        """Note the difference that a disturbance made, and whether the call agrees with the CPU."""
        if (op, dtype) not in self._is_settled and not math.isnan(difference):
            self._taken[op, dtype].append((difference, is_honest))

    def _samples(self, op: str) -> frozenset[int]:
        """Return the calls of an operation that this step samples: other calls in each step, until all had their turn."""
        total = max(self._num_calls[op], 1)
        count = min(math.ceil(total / self._steps), self._most)
        return frozenset((self._steps * place + self._step - 1) % total + 1 for place in range(count))

    def _learn(self) -> None:
        for key, taken in getattr(self, "_taken", {}).items():
            self._limits[key] = self._learned(key, taken)
        self._taken: defaultdict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)

    def _learned(self, key: tuple[str, str], taken: list[tuple[float, bool]]) -> float:
        old = self._limits.get(key, _FIRST_LIMIT)
        harmless = [difference for difference, is_honest in taken if is_honest]
        harmful = [difference for difference, is_honest in taken if not is_honest]
        if not harmful:
            return old * _FACTOR if max(harmless) > old else max(old / _FACTOR, *harmless)
        if harmless and min(harmful) <= max(harmless):
            return old
        self._is_settled.add(key)
        return min(min(harmful), old)
