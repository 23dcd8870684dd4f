# SPDX-License-Identifier: Apache-2.0
"""Run the command line: one small file for each command, imported when that command runs.

Exit codes: 0 nothing diverges, 1 something does, 2 the question could not be answered, 130 interrupted. An error on purpose is one
sentence; only an unforeseen one shows a traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import click

from ulpscope import __version__
from ulpscope.errors import sentence_for
from ulpscope.report.escaping import shortened, visible  # imported early: a process out of file handles must still be able to say so

__all__ = ["cli"]

_LONGEST_LINE = 1000
_COMMANDS = {
    "run": "Record a training script without changing it.",
    "compare": "Compare two runs and name the first divergence.",
    "refine": "Choose the calls to record again with their values.",
    "check": "Replay every recorded call against a higher precision.",
    "check-devices": "Compare the checks of two devices: where does one err more?",
    "nonfinite": "Name the call that made the first inf or NaN.",
    "show": "Show what a run recorded.",
    "health": "Draw the curves of a health run while it trains.",
    "watch": "Draw the curves of a health run: the older name of health.",
    "compare-health": "Compare two health runs: the step at which they part.",
    "build": "Compile the part of the recorder that fits the installed torch.",
    "migrate": "Translate an msprobe config.json into ulpscope options.",
    "demo": "Record, break and compare a tiny model, right here.",
}


class LazyGroup(click.Group):
    """Knows its commands by name; imports `ulpscope.cli.<name>` when a command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            _suggest(ctx, cmd_name)
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"ulpscope.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would exit with 1, which here means that something diverges
            sys.exit(_abandon_output())

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command and leave with its exit code."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            code = _told(error)
        sys.exit(code if isinstance(code, int) else 0)

    @staticmethod
    def leave_interrupted() -> NoReturn:
        """Exit as an interrupted command does, for an interrupt that came before a command ran."""
        click.echo(err=True)  # a line break after the terminal's ^C, as click prints it
        sys.exit(_complain("interrupted", 130))


def _suggest(ctx: click.Context, wrong: str) -> None:
    """Refuse an unknown command and name the one that was probably meant; without one, click writes its own error."""
    from difflib import get_close_matches

    near = get_close_matches(wrong, _COMMANDS, n=1, cutoff=0.6)
    if near:
        ctx.fail(f"No such command {wrong!r}. Did you mean {near[0]!r}?")


def _told(error: BaseException) -> int:
    """Print an error and return its exit code."""
    if isinstance(error, click.ClickException):
        _show_usage(error)
        return 2
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return _complain("interrupted", 130)
    if (sentence := sentence_for(error)) is not None:
        return _complain(sentence, 2)
    sys.excepthook(type(error), error, error.__traceback__)
    return 2


def _show_usage(error: click.ClickException) -> None:
    """Print click's usage error, with control characters spelled out."""
    text = StringIO()
    error.show(file=text)
    for line in text.getvalue().splitlines():
        click.echo(shortened(line, _LONGEST_LINE), err=True)


def _complain(sentence: str, code: int) -> int:
    """Print one line on stderr, whatever the sentence holds."""
    click.echo(f"ulpscope: {visible(' '.join(sentence.splitlines()))}", err=True)
    return code


def _abandon_output() -> int:
    """Send further output to nowhere: the reader of the pipe has left, as in `ulpscope show run | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _tell_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Print the version, the kernel that does the arithmetic on tensors, and the recorder."""
    if asked:
        from ulpscope._native_home import installed_torch
        from ulpscope._torch_versions import newer_than_tried
        from ulpscope.numerics.kernel import kernel_name

        click.echo(visible(f"ulpscope {__version__} ({kernel_name()}; {_recorder_name()})"))
        if line := newer_than_tried(installed_torch()):
            click.echo(visible(line))
        context.exit()


def _recorder_name() -> str:
    """Name the recorder that this machine would use, without importing torch."""
    built = [Path(__file__).parents[1] / "capture" / "native" / f"_compiled{suffix}" for suffix in EXTENSION_SUFFIXES]
    if os.environ.get("ULPSCOPE_NO_KERNEL") == "1" or not any(path.is_file() for path in built):
        return "recorder in Python"
    from ulpscope._native_home import expected_part, objection

    part = expected_part()
    if part is None or not os.path.lexists(part.file):
        return "compiled recorder"
    problem = objection(part.file)
    return f"compiled recorder, {f'without what was built, since {problem}' if problem else f'built for torch {part.torch}'}"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_tell_version, help="Show the version and exit.")
def cli() -> None:
    """Find the operation that broke a model's numerics.

    \b
    Example:
      ulpscope run --into runs/npu --keep tensors --seed 1 train.py
      ulpscope run --into runs/gpu --keep tensors --seed 1 train.py     (on the other machine)
      ulpscope compare runs/npu runs/gpu --html report.html

    Exit codes: 0 nothing diverges, 1 something does, 2 the question could not be answered.
    """
