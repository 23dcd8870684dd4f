# SPDX-License-Identifier: Apache-2.0
"""Measure what an honest kernel errs on the inputs of one call."""
