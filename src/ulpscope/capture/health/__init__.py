# SPDX-License-Identifier: Apache-2.0
"""Watch a training's health: statistics of gradients, parameters and updates at each optimizer step."""
