# SPDX-License-Identifier: Apache-2.0
"""Show a comparison: on a terminal, as tables, as JSON, as a page, for CI, and as a repro script."""
