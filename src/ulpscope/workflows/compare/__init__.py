# SPDX-License-Identifier: Apache-2.0
"""Compare two runs: match, measure, judge, explain, replay, and write the reports."""
