# SPDX-License-Identifier: Apache-2.0
"""The versions that the recorder and the part of `ulpscope build` must have to be used: what is left over from another source is not."""

__all__ = ["PART_VERSION", "RECORDER_VERSION"]

# begin of versions: tools/layouts.py writes it
RECORDER_VERSION = 6
PART_VERSION = 1
# end of versions: tools/layouts.py writes it
