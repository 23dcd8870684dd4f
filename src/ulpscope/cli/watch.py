# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope watch`, the older name of `ulpscope health`."""

from __future__ import annotations

import click

from ulpscope.cli.health import health

__all__ = ["watch"]

watch = click.Command("watch", params=health.params, callback=health.callback, help=health.help)
