# SPDX-License-Identifier: Apache-2.0
"""Judge a training's health: alerts of one run, and where two runs part."""
