# SPDX-License-Identifier: Apache-2.0
"""The command `msprobe` and its subcommands."""
