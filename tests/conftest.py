# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: one thread for each process, and properties that are never judged by the clock."""

from __future__ import annotations

import os

import hypothesis

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("ulpscope", deadline=None)
hypothesis.settings.load_profile("ulpscope")
