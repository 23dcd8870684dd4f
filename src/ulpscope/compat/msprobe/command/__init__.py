# SPDX-License-Identifier: Apache-2.0
"""Run the command `msprobe` and its subcommands."""
