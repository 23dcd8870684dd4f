# SPDX-License-Identifier: Apache-2.0
"""These tests need MindSpore and run in an environment of its own: `make test-mindspore`. Elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("mindspore") is None else []
