# SPDX-License-Identifier: Apache-2.0
"""Explain programs that are not the same: other arguments, settings, calls or random draws."""
