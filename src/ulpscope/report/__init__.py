# SPDX-License-Identifier: Apache-2.0
"""A finished comparison made into something to look at: console, csv, xlsx, parquet, json, html.

Each file draws one kind and is imported by itself, so that a report costs no import that it does not need.
"""
