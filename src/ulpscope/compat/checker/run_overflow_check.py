# SPDX-License-Identifier: Apache-2.0
"""Run `run_overflow_check.py`: tell whether an overflow is normal, since the reference overflows too.

python run_overflow_check.py -forward ./forward_info_0.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ulpscope.compat.checker.run_ut import best_device
from ulpscope.compat.parsers import CommandParser
from ulpscope.errors import InputError, sentence_for
from ulpscope.model.check.checks import Check, CheckedCall
from ulpscope.report.escaping import visible
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.check.old_tables import recorded_key

__all__ = ["main", "overflow_line", "tell_counts"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if it ran to its end, whatever it found."""
    parser = CommandParser(
        prog="run_overflow_check.py",
        description="Run the APIs that overflowed again, and say which of them should not have.",
        epilog="Example: python run_overflow_check.py -forward ./forward_info_0.json",
    )
    parser.add_argument("-forward", "--forward_input_file", required=True, type=Path, help="forward_info_{pid}.json of an overflow dump")
    parser.add_argument("-backward", "--backward_input_file", type=Path, help="backward_info_{pid}.json of the same dump")
    parser.add_argument("-j", "--jit_compile", action="store_true", help="accepted; nothing is compiled here")
    parser.add_argument("-d", "--device", type=int, default=0, help="index of the device; the CPU where there is none")
    options = parser.parse_args(arguments)
    try:
        if not options.forward_input_file.is_file():
            raise InputError(f"'{options.forward_input_file}' is no file; give the forward_info_*.json that the overflow check wrote")
        check = check_run(
            options.forward_input_file,
            backward=options.backward_input_file,
            device=best_device(options.device),
            overflow=True,
            found=lambda call: print(visible(overflow_line(call))),
        )
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        print(f"run_overflow_check: {visible(' '.join(sentence.splitlines()))}", file=sys.stderr)
        return 2
    tell_counts(check)
    return 0


def tell_counts(check: Check) -> None:
    """Print how many overflows are of each kind, in one line."""
    counts = {word: sum(call.overflow == word for call in check.calls) for word in ("normal", "abnormal", "not reproduced")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))


def overflow_line(call: CheckedCall) -> str:
    """Describe one API in the words of the old tool."""
    name = f"{recorded_key(call)} {call.phase}"
    if call.overflow == "normal":
        return f"{name}: normal overflow, the CPU overflows too in this dtype"
    if call.overflow == "abnormal":
        return f"{name}: abnormal overflow, the CPU does not overflow on the same inputs"
    if call.overflow == "not reproduced":
        return f"{name}: not reproduced, neither the device nor the CPU overflows now"
    return f"{name}: not run again, {call.reason or 'it did not overflow'}"
