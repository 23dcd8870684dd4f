# SPDX-License-Identifier: Apache-2.0
"""What tests need that older versions of torch do not have, each with the version that brought it."""

from __future__ import annotations

import re

import pytest
import torch

RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))

HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
needs_table = pytest.mark.skipif(
    not HAS_TABLE, reason="this torch has no table of C functions of DLPack's, without which nothing compiled records"
)

RESUMES_SEEN = RELEASE > (2, 9)
"""What was compiled before a capture is compiled again when modules are looked at; up to 2.9 none of its calls is seen."""

SHARDS_ON_CPU = RELEASE > (2, 6)
"""With 2.6, torch's own fully_shard asks the CPU for an event that its streams do not have."""
