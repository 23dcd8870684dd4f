# SPDX-License-Identifier: Apache-2.0
"""Explain calls that err on agreeing inputs: in forward, in backward, in the optimizer, at a step's end."""
