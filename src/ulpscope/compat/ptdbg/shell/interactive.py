# SPDX-License-Identifier: Apache-2.0
"""Run the prompt: read a command, run it, and say in one sentence what was wrong with it. End of file and Ctrl+C leave."""

from __future__ import annotations

import cmd
import contextlib
import glob
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from rich.console import Console

from ulpscope.compat.ptdbg.compare.parsing import parsed_lines
from ulpscope.compat.ptdbg.shell.acl_dumps import compare_acl, convert_acl
from ulpscope.compat.ptdbg.shell.arrays import compare_arrays, show_array
from ulpscope.compat.ptdbg.shell.programs import matching_paths, run_line
from ulpscope.compat.ptdbg.shell.shell_parsers import PARSERS, ShellParser, UsageError
from ulpscope.errors import sentence_for
from ulpscope.report.escaping import visible

__all__ = ["ParseShell", "main"]

_DATA = Path("parse_data")
_HISTORY = _DATA / ".history"
_LONGEST_HISTORY = 1000
_WIDE = 400
_HELP = """Commands (each tells its options with -h):
  vc       compare two dumps of Ascend's runtime
  dc       convert dumps of Ascend's runtime to .npy
  pt       show a .npy file
  pk       show an API of a dump file
  cn       compare two .npy files
  run      run another program, as typing its name does; cd changes the folder
  history  what was typed
  exit     leave, as Ctrl+D and Ctrl+C do"""


class ParseShell(cmd.Cmd):
    """The commands, by the names that are typed."""

    prompt = "Parse >>> "
    parsers: ClassVar[dict[str, ShellParser]] = PARSERS
    about = _HELP

    def __init__(self) -> None:
        super().__init__()
        self._typed: list[str] = []
        self._console = _console()

    def do_vc(self, line: str) -> None:
        self._do("vc", line, lambda given: compare_acl(given.my_dump_path, given.golden_dump_path, given.output_path, given.ascend_path))

    def do_dc(self, line: str) -> None:
        self._do("dc", line, lambda given: convert_acl(given.name, given.format, given.output_path, given.ascend_path, self._console))

    def do_pt(self, line: str) -> None:
        self._do("pt", line, lambda given: show_array(given.name, self._console))

    def do_pk(self, line: str) -> None:
        self._do("pk", line, lambda given: [print(visible(text)) for text in parsed_lines(given.file, given.name)])

    def do_cn(self, line: str) -> None:
        self._do(
            "cn",
            line,
            lambda given: compare_arrays(given.my_dump_path, given.golden_dump_path, given.print, given.atol, given.rtol, self._console),
        )

    def do_run(self, line: str) -> None:
        _telling(lambda: run_line(line))

    do_shell = do_run

    def default(self, line: str) -> None:
        self.do_run(line)

    def do_history(self, line: str) -> None:
        for number, typed in enumerate(self._typed, 1):
            print(f"{number:5}  {visible(typed)}")

    def do_help(self, arg: str) -> None:
        print(self.parsers[arg].format_help() if arg in self.parsers else self.about)

    def do_exit(self, line: str) -> bool:
        return True

    do_quit = do_exit

    def do_EOF(self, line: str) -> bool:
        print()
        return True

    def emptyline(self) -> bool:
        return False

    def precmd(self, line: str) -> str:
        if line.strip() and line != "EOF":
            self._typed.append(line.strip())
        return line

    def completenames(self, text: str, *ignored: Any) -> list[str]:
        names = [name.removeprefix("do_") for name in self.get_names() if name.startswith(f"do_{text}")]
        return [name for name in names if name not in ("EOF", "shell")]

    def completedefault(self, text: str, *ignored: Any) -> list[str]:
        """Complete the paths that begin with the typed text."""
        return [f"{path}/" if Path(path).is_dir() else path for path in matching_paths(f"{glob.escape(text)}*")]

    def _do(self, name: str, line: str, action: Callable[[Any], object]) -> None:
        _telling(lambda: action(self.parsers[name].parse_args(shlex.split(line))))


def _console() -> Console:
    """Open a console as wide as the terminal; elsewhere wide enough that no path is broken."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=_WIDE)


def _telling(action: Callable[[], object]) -> None:
    """Run an action; print an error as one sentence, and let the shell go on."""
    try:
        action()
    except UsageError as error:
        if str(error):
            print(visible(str(error)))
    except Exception as error:
        sentence = sentence_for(error) or (str(error) if isinstance(error, ValueError) else None)
        if sentence is None:
            raise
        print(f"[ERROR] {visible(' '.join(sentence.splitlines()))}")


def main(kind: type[ParseShell] = ParseShell) -> None:
    """Read commands until the end of the input."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _DATA.mkdir(exist_ok=True)
    except OSError as error:
        print(f"[WARNING] the folder {_DATA} cannot be made here ({error.strerror}): give -out to vc and dc")
    readline, history = _line_editing(), _HISTORY.absolute()
    shell = kind()
    try:
        shell.cmdloop()
    except KeyboardInterrupt:
        print()
    finally:
        if readline is not None:
            _save_history(readline, history)


def _line_editing() -> ModuleType | None:
    """Set up history and completion, where Python has readline and someone is typing."""
    if not sys.stdin.isatty():
        return None
    try:
        import readline
    except ImportError:
        return None
    readline.set_completer_delims(" \t\n")
    readline.set_history_length(_LONGEST_HISTORY)
    with contextlib.suppress(OSError):
        readline.read_history_file(_HISTORY)
    return readline


def _save_history(readline: ModuleType, file: Path) -> None:
    with contextlib.suppress(OSError):
        readline.write_history_file(file)
        file.chmod(0o600)
