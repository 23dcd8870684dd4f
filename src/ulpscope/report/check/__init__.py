# SPDX-License-Identifier: Apache-2.0
"""Show a check of one run: on a terminal, as a page, as tables."""
