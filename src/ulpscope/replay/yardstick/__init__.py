# SPDX-License-Identifier: Apache-2.0
"""Measure the error of an honest kernel on the inputs of one call."""
