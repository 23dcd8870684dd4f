# SPDX-License-Identifier: Apache-2.0
"""Parse the command `msprobe`, as 1.x (`msprobe -f pytorch compare -i compare.json`) and as 26.x (`msprobe compare -tp A -gp B`) spell it.

Help and mistakes need no framework: the code of a command is imported when it runs. Exit codes: 0 the command ran to its end, whatever it
found, as in the old tool; 2 it could not, and one sentence says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ulpscope import __version__
from ulpscope._optional import keep_triton_out
from ulpscope.compat.parsers import CommandParser
from ulpscope.errors import InputError, sentence_for
from ulpscope.report.escaping import visible

__all__ = ["COMMANDS", "main"]

Framework: TypeAlias = Literal["pytorch", "mindspore"]
Options: TypeAlias = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its line of help, an example, its options and the function that runs it."""

    about: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options], int]
    has_mindspore: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is None:  # called as a program, not from a script
        keep_triton_out()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        framework, words = _framework(words)
        return _dispatch(framework, words)
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        return _complain(sentence)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)


def _complain(sentence: str, code: int = 2) -> int:
    print(f"msprobe: {visible(' '.join(sentence.splitlines()))}", file=sys.stderr)
    return code


def _framework(words: list[str]) -> tuple[Framework | None, list[str]]:
    """Split off the framework that 1.x asks for."""
    if not words or (words[0] not in ("-f", "--framework") and not words[0].startswith("--framework=")):
        return None, words
    name, rest = (words[0].partition("=")[2], words[1:]) if "=" in words[0] else ((words[1:2] or [""])[0], words[2:])
    if name == "pytorch" or name == "mindspore":
        return name, rest  # type: ignore[return-value]
    raise InputError(f"-f takes pytorch or mindspore, not {name!r}")


def _dispatch(framework: Framework | None, words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"msprobe served by ulpscope {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name in _INSTEAD:
        return _complain(f"{name} is not there: {_INSTEAD[name]}")
    if name not in COMMANDS:
        return _complain(f"there is no command {name!r}; choose one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    if framework == "mindspore" and not command.has_mindspore and not {"-h", "--help"} & set(rest):
        return _complain(f"{name} is not supported for mindspore; compare is, and ulpscope compare reads the same dumps")
    parser = CommandParser(
        prog=f"msprobe {f'-f {framework} ' if framework else ''}{name}",
        description=command.about,
        epilog=f"Example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(framework=framework)
    command.options(parser)
    return command.run(parser.parse_args(rest))


def _overview() -> str:
    lines = [f"  {name:<22} {command.about}" for name, command in COMMANDS.items()]
    missing = [f"  {name:<22} {sentence}" for name, sentence in _INSTEAD.items()]
    return "\n".join(
        [
            "usage: msprobe [-f pytorch|mindspore] COMMAND [-h] ...",
            "",
            "The commands of msprobe 1.x (with -f) and 26.x (without), served by ulpscope.",
            "",
            "Commands:",
            *lines,
            "",
            "Not there:",
            *missing,
            "",
            "Example:",
            "  msprobe compare -tp npu/step0 -gp gpu/step0 -o ./output",
            "  msprobe -f pytorch compare -i compare.json -o ./output -s",
        ]
    )


# --- compare


def _compare_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", "--input_path", type=Path, metavar="JSON", help="1.x: compare.json with npu_path, bench_path, stack_path")
    add("-tp", "--target_path", type=Path, metavar="PATH", help="the dump in doubt: a dump.json, or the folder of a step")
    add("-gp", "--golden_path", type=Path, metavar="PATH", help="the dump that is trusted, the same kind of path")
    add("-o", "--output_path", type=Path, default=Path("./output"), metavar="DIR", help="folder of the results (./output)")
    add("-s", "--stack_mode", action="store_true", help="1.x: a column with the stacks of the calls")
    add("-c", "--compare_only", action="store_true", help="1.x: no advice")
    add("-f", "-fm", "--fuzzy_match", action="store_true", help="the number of a call need not be the same on both sides")
    add("--xlsx", action="store_true", help="an xlsx file instead of csv; 1.x always writes xlsx")
    add("-dm", "--data_mapping", type=Path, metavar="YAML", help="rows that belong together: 'target row: golden row', one a line")
    add("-cm", "--cell_mapping", nargs="?", const="", metavar="YAML", help="modules that belong together: 'fc2.Dense: fc2.Linear'")
    add("-am", "--api_mapping", nargs="?", const="", metavar="YAML", help="MindSpore and PyTorch: the prefix of an API does not matter")
    add("-lm", "--layer_mapping", nargs="?", const="", metavar="YAML", help=argparse.SUPPRESS)
    add("-da", "--diff_analyze", action="store_true", help="also write diff_analyze_*.json: the calls where the dumps part")
    add("-tensor_log", "--is_print_compare_log", action="store_true", help="a line for each tensor")
    add("-m", "--mode", default="auto", choices=["auto", "offline_data", "torchair", "offline_model", "atb"], help="auto is there")
    add("--rank", "--step", dest="static", metavar="N", help=argparse.SUPPRESS)
    add("--consistent_check", action="store_true", help=argparse.SUPPRESS)
    add("--backend", help=argparse.SUPPRESS)
    add("--config", type=Path, help=argparse.SUPPRESS)


def _compare(given: Options) -> int:
    from ulpscope.compat.msprobe.command.compare_command import run_compare

    return run_compare(given)


# --- acc_check and its older spellings


def _check_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-api_info", "--api_info_file", type=Path, required=True, metavar="JSON", help="the dump.json whose APIs are checked")
    add("-o", "--out_path", type=Path, default=Path("./"), metavar="DIR", help="folder of the results (./)")
    add("-save_error_data", action="store_true", help="keep inputs and outputs of APIs that fail, in ut_error_data*")
    add("-j", "--jit_compile", action="store_true", help="accepted; nothing is compiled here")
    add("-d", "--device", nargs="+", type=int, default=[0], metavar="N", help="indices of the devices (0); the CPU where there is none")
    add("-csv_path", "--result_csv_path", type=Path, metavar="CSV", help="result csv of a check that broke off: go on after it")
    add("-f", "--filter_api", action="store_true", help="an API that was called again with the same kind of arguments is checked once")
    add("-config", "--config_path", type=Path, metavar="JSON", help="config.json with white_list, black_list or error_data_path")


def _multi_options(parser: argparse.ArgumentParser) -> None:
    _check_options(parser)
    parser.add_argument("-n", "--num_splits", type=int, default=8, metavar="N", help="processes that share the work, 1 to 64 (8)")


def _check(given: Options) -> int:
    from ulpscope.compat.msprobe.command.acc_check import run_check

    return run_check(given)


def _precision_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-npu", "--npu_csv_path", type=Path, required=True, metavar="CSV", help="accuracy_checking_details_*.csv of the device in doubt")
    add("-gpu", "--gpu_csv_path", type=Path, required=True, metavar="CSV", help="the same of the device that is trusted")
    add("-o", "--out_path", type=Path, default=Path("./"), metavar="DIR", help="folder of the results (./)")


def _precision(given: Options) -> int:
    from ulpscope.compat.msprobe.command.precision_compare import run_precision_compare

    return run_precision_compare(given)


# --- overflow


def _run_overflow_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-api_info", "--api_info_file", type=Path, required=True, metavar="JSON", help="the dump.json of an overflow dump")
    add("-j", "--jit_compile", action="store_true", help="accepted; nothing is compiled here")
    add("-d", "--device", nargs="+", type=int, default=[0], metavar="N", help="index of the device; the CPU where there is none")


def _run_overflow(given: Options) -> int:
    from ulpscope.compat.msprobe.command.overflow_command import run_overflow_check

    return run_overflow_check(given)


def _overflow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input_path", type=Path, required=True, metavar="DIR", help="the folder of a step, with its ranks")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("./output"), metavar="DIR", help="folder of the result (./output)")


def _overflow(given: Options) -> int:
    from ulpscope.compat.msprobe.command.overflow_command import run_anomaly_analyze

    return run_anomaly_analyze(given)


# --- the rest


def _merge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-i", "--input_dir", type=Path, required=True, metavar="DIR", help="folder with compare_result_rank*_*.csv or .xlsx")
    add("-o", "--output_dir", type=Path, required=True, metavar="DIR", help="folder of the merged xlsx")
    add("-config", "--config-path", type=Path, required=True, metavar="YAML", help="api: the APIs to merge; compare_index: the columns")


def _merge(given: Options) -> int:
    from ulpscope.compat.msprobe.command.merging import run_merge

    return run_merge(given)


def _graph_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-tp", "--target_path", type=Path, required=True, metavar="PATH", help="the dump in doubt")
    add("-gp", "--golden_path", type=Path, metavar="PATH", help="the dump that is trusted")
    add("-o", "--output_path", type=Path, required=True, metavar="DIR", help="folder of the page")
    for flags in (("-oc", "--overflow_check"), ("-fm", "--fuzzy_match"), ("-tensor_log",), ("-progress_log",)):
        add(*flags, action="store_true", help=argparse.SUPPRESS)
    for flags in (("-lm", "--layer_mapping"), ("--file_type",)):
        add(*flags, nargs="?", const="", help=argparse.SUPPRESS)
    for flag in ("--rank_size", "--tp", "--pp", "--vpp", "--order"):
        add(flag, nargs="+", help=argparse.SUPPRESS)


def _graph(given: Options) -> int:
    from ulpscope.compat.msprobe.command.graph_command import run_graph

    return run_graph(given)


def _parse_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-d", "--dump_path", type=Path, metavar="PATH", help="26.x: a dump file of Ascend's runtime, or a folder of them")
    add("-t", "--type", choices=["pt", "npy"], default="pt", help="26.x: the kind of files to write (pt)")
    add("-o", "--output_path", type=Path, default=Path("./output"), metavar="DIR", help="26.x: folder of the files (./output)")


def _parse(given: Options) -> int:
    from ulpscope.compat.msprobe.command.parse_shell import run_parse

    return run_parse(given)


COMMANDS: dict[str, Command] = {
    "compare": Command(
        "Compare two dumps.",
        "msprobe compare -tp npu/step0 -gp gpu/step0 -o ./output\n  msprobe -f pytorch compare -i compare.json -o ./output -s",
        _compare_options,
        _compare,
        has_mindspore=True,
    ),
    "acc_check": Command(
        "Run every API of a dump alone, against a higher precision.",
        "msprobe acc_check -api_info ./dump.json -o ./checked",
        _check_options,
        _check,
    ),
    "multi_acc_check": Command(
        "The same in several processes, on several devices.",
        "msprobe multi_acc_check -api_info ./dump.json -n 8 -d 0 1",
        _multi_options,
        _check,
    ),
    "run_ut": Command("1.x for acc_check.", "msprobe -f pytorch run_ut -api_info ./dump.json", _check_options, _check),
    "multi_run_ut": Command(
        "1.x for multi_acc_check.", "msprobe -f pytorch multi_run_ut -api_info ./dump.json -n 8 -d 0 1", _multi_options, _check
    ),
    "api_precision_compare": Command(
        "Compare the checks of two devices.",
        "msprobe api_precision_compare -npu npu_details.csv -gpu gpu_details.csv -o ./output",
        _precision_options,
        _precision,
    ),
    "run_overflow_check": Command(
        "Say which overflows of a dump are normal.",
        "msprobe -f pytorch run_overflow_check -api_info ./dump.json",
        _run_overflow_options,
        _run_overflow,
    ),
    "overflow_check": Command(
        "Name the call that made the first inf or NaN, across ranks.",
        "msprobe overflow_check -i npu/step0 -o ./output",
        _overflow_options,
        _overflow,
    ),
    "merge_result": Command(
        "Merge the results of several ranks into one xlsx.",
        "msprobe merge_result -i ./output -o ./merged -config merge.yaml",
        _merge_options,
        _merge,
    ),
    "graph_visualize": Command(
        "Write our page of a comparison.", "msprobe graph_visualize -tp npu/step0 -gp gpu/step0 -o ./output", _graph_options, _graph
    ),
    "parse": Command("The shell for dumps of Ascend's runtime; with -d, convert them.", "msprobe -f pytorch parse", _parse_options, _parse),
}
_INSTEAD = {
    "config_check": "compare two recorded runs with 'ulpscope compare A B', which names settings, seeds, batches and weights that differ.",
    "data2db": "a health run is its own database; look at it with 'ulpscope health RUN'.",
    "offline_dump": "it runs ONNX and OM models through CANN; nothing in ulpscope does.",
    "install_deps": "nothing has to be downloaded; 'pip install ulpscope[torch,xlsx]' is all.",
}
