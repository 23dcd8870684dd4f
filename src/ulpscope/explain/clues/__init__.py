# SPDX-License-Identifier: Apache-2.0
"""Recognise what a fault looks like in its numbers, and add it to the evidence."""
