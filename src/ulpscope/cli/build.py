# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope build`: compile what makes recording cheaper with the installed torch."""

from __future__ import annotations

import click

from ulpscope._optional import require
from ulpscope.errors import InputError
from ulpscope.report.escaping import visible

__all__ = ["build"]


@click.command()
def build() -> None:
    """Compile the part of the recorder that fits the installed torch, which makes recording cheaper.

    Needs a C++ compiler, 20 seconds and a gigabyte of memory, once for each torch and Python. The recorded runs stay the same.
    It goes to the user's cache, or to the folder that the environment variable ULPSCOPE_NATIVE names; see docs/building.md.

    \b
    Example:
      ulpscope build
    """
    torch = require("torch", extra="torch", purpose="compiling for the installed torch").__version__
    from ulpscope._native_home import expected_part
    from ulpscope.capture.native import building as native
    from ulpscope.capture.native.compiled import COMPILED

    if COMPILED is None:
        raise InputError("only the compiled recorder would use it, which is not in use here; docs/building.md says what that needs")
    if native.TABLE is not None and (part := expected_part()):
        click.echo(visible(f"already built for torch {torch}, and in use: '{part.file}'"))
        return
    click.echo(f"compiling the part of the recorder that fits torch {torch}, which takes about 20 seconds ...", err=True)
    click.echo(visible(f"built '{native.build()}': recordings with this Python and torch {torch} use it from now on"))
