# SPDX-License-Identifier: Apache-2.0
"""Parse the options of the prompt's commands, in their old short and long forms."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

__all__ = ["MSACCUCMP", "PARSERS", "ShellParser", "UsageError", "add_ascend_path", "shell_parser"]

MSACCUCMP = Path("/usr/local/Ascend/ascend-toolkit/latest/tools/operator_cmp/compare/msaccucmp.py")


class UsageError(Exception):
    """Raised for a command that cannot be understood; the text says how it is written. It is empty where help was asked for and printed."""


class ShellParser(argparse.ArgumentParser):
    """Never leaves the process: the shell goes on after a mistyped command."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. {self.format_usage().strip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise UsageError(message or "")


def shell_parser(name: str, description: str) -> ShellParser:
    """Make the parser of one command."""
    return ShellParser(prog=name, description=description, allow_abbrev=False)


def add_ascend_path(parser: ShellParser) -> None:
    """Add the option to let CANN do the work."""
    parser.add_argument(
        "-asc", "--ascend_path", type=Path, nargs="?", const=MSACCUCMP, metavar="PATH",
        help=f"let CANN's msaccucmp do it; without a path the one at {MSACCUCMP}",
    )  # fmt: skip


def _vc() -> ShellParser:
    parser = shell_parser("vc", "Compare two dumps of Ascend's runtime; the result is a csv file.")
    parser.add_argument("-m", "--my_dump_path", type=Path, required=True, metavar="DIR", help="the dump in doubt")
    parser.add_argument("-g", "--golden_dump_path", type=Path, required=True, metavar="DIR", help="the dump that is trusted")
    parser.add_argument("-out", "--output_path", type=Path, metavar="DIR", help="an existing folder; else parse_data/compare_result")
    add_ascend_path(parser)
    return parser


def _dc() -> ShellParser:
    parser = shell_parser("dc", "Convert a dump file of Ascend's runtime, or all files of a folder, to .npy.")
    parser.add_argument("-n", "--name", type=Path, required=True, metavar="PATH", help="a dump file or a folder of them")
    parser.add_argument("-f", "--format", metavar="FORMAT", help="the format to convert to, as ND or NCHW; else as stored")
    parser.add_argument("-out", "--output_path", type=Path, metavar="DIR", help="an existing folder; else parse_data/dump_convert")
    add_ascend_path(parser)
    return parser


def _pt() -> ShellParser:
    parser = shell_parser("pt", "Show a .npy file, and save it as text beside it.")
    parser.add_argument("-n", "--name", required=True, metavar="FILE", help="the .npy file")
    return parser


def _pk() -> ShellParser:
    parser = shell_parser("pk", "Show what a dump file says about an API: statistics, and the stack where there is one.")
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="FILE", help="the pkl file of a dump")
    parser.add_argument("-n", "--name", required=True, metavar="NAME", help="the beginning of the API's name")
    return parser


def _cn() -> ShellParser:
    parser = shell_parser("cn", "Compare two .npy files element by element.")
    parser.add_argument("-m", "--my_dump_path", required=True, metavar="FILE", help="the .npy file in doubt")
    parser.add_argument("-g", "--golden_dump_path", required=True, metavar="FILE", help="the .npy file that is trusted")
    parser.add_argument("-p", "--print", type=_count, default=20, metavar="N", help="rows of each table (20)")
    parser.add_argument("-s", "--save", action="store_true", default=True, help="save both files as text beside them (always done)")
    parser.add_argument("-al", "--atol", type=_tolerance, default=0.001, metavar="X", help="absolute error that is allowed (0.001)")
    parser.add_argument("-rl", "--rtol", type=_tolerance, default=0.001, metavar="X", help="relative error that is allowed (0.001)")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 100_000:
        raise argparse.ArgumentTypeError("give a number of rows from 0 to 100000")
    return number


def _tolerance(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError("give a number from 0 up")
    return number


PARSERS = {"vc": _vc(), "dc": _dc(), "pt": _pt(), "pk": _pk(), "cn": _cn()}
