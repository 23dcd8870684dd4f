# SPDX-License-Identifier: Apache-2.0
"""Write and read the native format: frames, shards, ledger and tables (docs/store-format.md)."""
