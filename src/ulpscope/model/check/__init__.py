# SPDX-License-Identifier: Apache-2.0
"""Define the nouns of a check: checked calls, and the rows that the older tools write about them."""
