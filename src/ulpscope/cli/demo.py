# SPDX-License-Identifier: Apache-2.0
"""Run `ulpscope demo`: go the whole way, from two recordings to a finding, on a tiny model and with no accelerator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ulpscope._shell import command_line
from ulpscope.cli.terminal import open_console
from ulpscope.errors import InputError, MissingDependencyError, UlpscopeError
from ulpscope.report.escaping import visible

if TYPE_CHECKING:
    from ulpscope.model import Comparison

__all__ = ["demo"]

_WITHOUT_TRITON = "from ulpscope._optional import keep_triton_out; keep_triton_out(); from ulpscope.__main__ import main; main()"
"""`python -m ulpscope` for a script of our own: its optimizer would load triton wherever that is installed."""
_FAULT = "aten.gelu.default tanh_gelu call=1 phase=forward"
_CULPRIT = ("layers.1.mlp", "gelu")


@click.command()
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path("ulpscope-demo"),
    show_default=True,
    metavar="DIR",
    help="Folder for the runs and the report.",
)
@click.option("--open", "open_report", is_flag=True, help="Open the report in a browser.")
@click.pass_context
def demo(ctx: click.Context, into: Path, open_report: bool) -> None:
    """Train a tiny GPT twice, the second time on an emulated accelerator with one broken operation, and find that operation.

    Needs torch, but no accelerator and no network. Exit codes: 0 the planted fault was found, 1 it was not.

    \b
    Example:
      ulpscope demo --into /tmp/demo --open
    """
    if find_spec("torch") is None:
        raise MissingDependencyError("the demo trains a small model and needs the package 'torch': pip install 'ulpscope[torch]'")
    folder = _new_folder(into)
    script = Path(shutil.copy(_script(), folder))
    commands = {side: _command(folder / side, script, device) for side, device in (("reference", "cpu"), ("subject", "npu"))}
    click.echo("Training a tiny GPT on the CPU, recorded as the reference ...")
    _record(commands["reference"])
    click.echo("Training it again on an emulated accelerator with one broken kernel, recorded as the subject ...")
    _record(commands["subject"], ULPSCOPE_NPU_FAULTS=_FAULT)
    click.echo()
    comparison = _compare(folder)
    if open_report:
        webbrowser.open((folder / "report.html").resolve().as_uri())
    found = _is_found(comparison)
    click.echo(_explanation(folder, found=found))
    ctx.exit(0 if found else 1)


def _new_folder(into: Path) -> Path:
    """Make the folder `into`, or the first of `into-2`, `into-3` ... that is free."""
    folder, number = into, 1
    while folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        number += 1
        folder = into.with_name(f"{into.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the demo cannot write to '{folder}' ({error.strerror}); give another folder with --into DIR") from error
    if folder != into:
        click.echo(visible(f"'{into}' is left as it is; this demo goes to '{folder}'"))
    return folder


def _script() -> Path:
    spec = find_spec("ulpscope.testing.demo")
    assert spec is not None, "the demo is part of the package"
    assert spec.origin is not None
    return Path(spec.origin).with_name("train.py")


def _command(run: Path, script: Path, device: str) -> list[str]:
    options = ["--into", str(run), "--keep", "tensors", "--seed", "1", "--deterministic"]
    return ["ulpscope", "run", *options, str(script), "--device", device]


def _record(command: list[str], **environment: str) -> None:
    """Run a command of ulpscope with this interpreter; show its output only if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TRITON, *command[1:]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip() and not line.startswith("ulpscope:")]
        reason = lines[-1] if lines else "it said nothing more"
        raise UlpscopeError(f"the recording {command_line(*command)} ended with exit code {done.returncode}: {reason}")
    for line in done.stdout.splitlines():
        click.echo(f"  {visible(line)}")


def _compare(folder: Path) -> Comparison:
    from ulpscope.report.comparison.console import render_comparison
    from ulpscope.report.comparison.html import write_html
    from ulpscope.workflows.compare.comparing import compare_runs
    from ulpscope.workflows.compare.reproducing import with_repro

    comparison = with_repro(compare_runs(folder / "subject", folder / "reference"), folder / "report_repro", is_asked_for=False)
    render_comparison(comparison, open_console())
    write_html(comparison, folder / "report.html")
    return comparison


def _is_found(comparison: Comparison) -> bool:
    """Tell whether the first fault blames the kernel that was broken."""
    module, operation = _CULPRIT
    first = next(iter(comparison.faults), None)
    return first is not None and first.step == 0 and first.module == module and operation in first.call


def _explanation(folder: Path, *, found: bool) -> str:
    verdict = (
        "That is the kernel that was broken on purpose: the emulated accelerator computed the second gelu with its tanh approximation."
        if found
        else "That is not the kernel that was broken on purpose (the second gelu, in layers.1.mlp): please report this as a bug."
    )
    page, script = (visible(str(folder / name)) for name in ("report.html", "train.py"))
    return f"""
{verdict}
The report is {page}; it opens from disk. The script that was recorded is {script}.

The same with your own script, which needs no change:
  ulpscope run --into runs/reference --keep tensors --steps 0-1 --seed 1 --deterministic train.py ...   # where it trains well
  ulpscope run --into runs/subject --keep tensors --steps 0-1 --seed 1 --deterministic train.py ...     # where it trains badly
  ulpscope compare runs/subject runs/reference --html report.html"""
