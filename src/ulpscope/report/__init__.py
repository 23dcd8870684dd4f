# SPDX-License-Identifier: Apache-2.0
"""Show finished results: on the console, and as csv, xlsx, parquet, json and html files.

Each module writes one kind of file and is imported by itself, so that a report imports only what it needs.
"""
