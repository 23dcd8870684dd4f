# SPDX-License-Identifier: Apache-2.0
"""Two runs become pairs: ranks and steps by number, calls by name and alignment, slots by their place in the call."""

from ulpscope.match.calls import match_calls
from ulpscope.match.ends import with_ends_told
from ulpscope.match.gradients import with_makers_first
from ulpscope.match.mapping import Mapping, read_mapping
from ulpscope.match.slots import pair_slots
from ulpscope.match.steps import Overlap, match_steps

__all__ = ["Mapping", "Overlap", "match_calls", "match_steps", "pair_slots", "read_mapping", "with_ends_told", "with_makers_first"]
