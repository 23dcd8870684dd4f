# SPDX-License-Identifier: Apache-2.0
"""Run every call of one run again and judge it: `check_run`, and the processes that do the work."""
