# SPDX-License-Identifier: Apache-2.0
"""Serve scripts of msprobe (1.x of 2024 to 26.x): its debugger, its config.json, its files and its command line."""
