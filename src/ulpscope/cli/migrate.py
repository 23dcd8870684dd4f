# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope migrate`: print the command that does what an old config.json asks for."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["migrate"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
def migrate(config: Path) -> None:
    """Print the command that does what an old CONFIG of msprobe asks for.

    \b
    Example:
      ulpscope migrate config.json

    Scripts that use the old tools also run as they are, with the distribution ulpscope-legacy; see docs/migrating.md.
    """
    from ulpscope.compat.msprobe.config import read_config
    from ulpscope.compat.msprobe.migrating import migrate as translated
    from ulpscope.report.escaping import visible

    migration = translated(read_config(config))
    for command in migration.commands:
        click.echo(visible(command))
    for remark in migration.remarks:
        click.echo(f"# {visible(remark)}")
