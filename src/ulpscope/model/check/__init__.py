# SPDX-License-Identifier: Apache-2.0
"""The nouns of a check: checked calls, and what the older tools write of them."""
