# SPDX-License-Identifier: Apache-2.0
"""List what is fuzzed: for each target its name, its share of all inputs, how an input is made of the samples, and how it is run."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from tests.hostile.mutations import NUMBERS, WORDS, spoiled
from ulpscope.cli import LazyGroup, cli
from ulpscope.compat.checker.checker_tables import finished_apis
from ulpscope.compat.msprobe.command import parser as msprobe
from ulpscope.compat.msprobe.command.flat_yaml import read_lists, read_names
from ulpscope.compat.msprobe.command.parse_shell import MsprobeShell
from ulpscope.compat.msprobe.config import read_config
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.ptdbg.shell import ParseShell
from ulpscope.errors import InputError
from ulpscope.match import read_mapping
from ulpscope.store import open_run
from ulpscope.store.acl.file import read_acl_file
from ulpscope.store.acl.statistics import read_statistics
from ulpscope.store.envelope import read_envelope
from ulpscope.store.foreign.check_table import read_check_table
from ulpscope.store.foreign.ptdbg_lines import read_written
from ulpscope.store.foreign.reader import open_tensor
from ulpscope.store.native.parquet import write_parquet
from ulpscope.store.series import open_health
from ulpscope.workflows.compare.baselines import BaselineRun, update_baseline
from ulpscope.workflows.compare.comparing import compare_runs


class Input(NamedTuple):
    """Files that differ from the samples, and words of a command."""

    files: Mapping[str, bytes] = MappingProxyType({})
    words: tuple[str, ...] = ()


class Target(NamedTuple):
    """`spoil` makes an input of the samples, `run` uses the folder in which it replaces them."""

    name: str
    share: int
    spoil: Callable[[dict[str, bytes], Random], Input]
    run: Callable[[Path, tuple[str, ...]], object]


# ---- files that are read


def files(*patterns: tuple[str, str]) -> Callable[[dict[str, bytes], Random], Input]:
    """Choose one of the files that fit a pattern, and spoil it as its kind is."""

    def spoil(samples: dict[str, bytes], chance: Random) -> Input:
        fitting = [(name, kind) for pattern, kind in patterns for name in samples if fnmatch(name, pattern)]
        name, kind = chance.choice(fitting)
        return Input({name: spoiled(kind, samples[name], chance)}, (name,))

    return spoil


def every_record(path: Path) -> object:
    """Read everything that a run holds: records, tensors and the ledger."""
    run, count = open_run(path), 0
    for rank in run.ranks():
        run.ledger(rank)
        for step in run.steps(rank):
            run.is_complete(rank, step)
            for record in run.records(rank, step):
                count += 1
                for slot in record.slots:
                    if slot.content is not None and count < 50:
                        with contextlib.suppress(InputError):
                            run.tensor(rank, step, slot.content)
    return count


def top(folder: Path, words: tuple[str, ...]) -> Path:
    return folder / words[0].partition("/")[0]


def compared(folder: Path, words: tuple[str, ...], against: str) -> object:
    found = compare_runs(top(folder, words), folder / against, replay="none")
    return len(found.calls), len(found.findings)


def parquet_copy(folder: Path, words: tuple[str, ...]) -> object:
    """Copy a run's records to a file for other programs; where that is impossible, the ledger says why."""
    table = folder / "out.parquet"
    try:
        write_parquet(folder / words[0], table)
    except Exception:  # as DirectorySink has it: a copy is not worth failing for
        return "none"
    import pyarrow.parquet as pq

    return pq.read_table(table).num_rows


def health(folder: Path, words: tuple[str, ...]) -> object:
    run = open_health(top(folder, words) / "run")
    return [(run.alerts(rank), run.series(rank).values.shape, run.ledger(rank)) for rank in run.ranks()]


def acl(folder: Path, words: tuple[str, ...]) -> object:
    if words[0].endswith(".csv") and "mapping" not in words[0]:
        return len(read_statistics(folder / words[0]))
    if "mapping" in words[0]:
        return every_record(folder / "acl")
    arrays = []
    for one in read_acl_file(folder / words[0]).tensors:
        with contextlib.suppress(InputError):
            arrays.append(one.array("ND").shape)
    return arrays


def baseline(folder: Path, words: tuple[str, ...]) -> object:
    read_envelope(folder / words[0])
    compare_runs(open_run(folder / "bad"), BaselineRun(folder / words[0], open_run(folder / "bad")), replay="none")
    return update_baseline(folder / "good", folder / words[0]).num_calls


def mapping(folder: Path, words: tuple[str, ...]) -> object:
    rules = read_mapping(folder / words[0])
    return [rules.rename(name) for name in ("mlp.fc1/functional.gelu.0", "net/npu.npu_gelu.3", "a" * 3000)]


def table(folder: Path, words: tuple[str, ...]) -> object:
    finished_apis(folder / words[0])
    return len(read_check_table(folder / words[0]))


def tensor(folder: Path, words: tuple[str, ...]) -> object:
    return open_tensor(folder / words[0]).shape


def yaml(folder: Path, words: tuple[str, ...]) -> object:
    return read_lists(folder / words[0]), read_names(folder / words[0])


def ptdbg(folder: Path, words: tuple[str, ...]) -> object:
    with contextlib.suppress(InputError, CompareException):
        read_written(folder / words[0])
    return every_record(folder / words[0])


# ---- commands

INPUTS = """good bad mixed health/run health2/run msprobe msprobe/step0 msprobe/step0/proc4711/dump.json msprobe1 md5 ptdbg ptdbg/dump.pkl
    ptdbg2/dump.pkl hooks.pkl checker checker/forward_info_12.json acl acl/Mul.mul.1.2.1675157077183551 tensors tensors/x.npy tensors/x.pt
    mapping.txt baseline.jsonl config.json compare.json names.yaml merge.yaml results own.csv details.csv train.py nothing good/run.json
    good/rank00000 probe out""".split()
OUTPUTS = ["out", "out/a", "out/b.x", "out/no/c", "out/" + "x" * 300, "good", "out/\n", "out/\x1b[31m", "out/é\udcff"]
VALUES = [
    *WORDS,
    *map(str, NUMBERS),
    "@calls.txt",
    "@train.py",
    "functional.gelu*",
    "module:mlp",
    "cpu",
    "cuda:99",
    "meta",
    "all",
    "0",
    "1",
    "0-3",
    "1,2",
]
SLOW = {"build": 0, "demo": 0, "run": 1, "check": 2, "watch": 2}
WRITES = {
    "into",
    "json_file",
    "html_file",
    "csv_file",
    "xlsx_file",
    "parquet_file",
    "junit_file",
    "github_summary",
    "repro_dir",
    "save_failures",
    "png_folder",
}


FITTING = {
    "subject reference run repeat": "good bad mixed msprobe msprobe1 md5 ptdbg hooks.pkl checker acl",
    "health": "health/run health2/run",
    "config config_path": "config.json merge.yaml",
    "mapping": "mapping.txt",
    "baseline": "baseline.jsonl",
    "csv": "own.csv details.csv",
    "input_path input_dir": "compare.json results msprobe/step0",
    "target_path golden_path api_info_file": "msprobe/step0/proc4711/dump.json msprobe1/step0/rank/dump.json msprobe/step0 msprobe1/step0",
    "data_mapping cell_mapping": "names.yaml",
    "npu_csv_path gpu_csv_path result_csv_path": "details.csv own.csv",
    "my_dump_path golden_dump_path name": "acl acl/Mul.mul.1.2.1675157077183551 acl/Add.add.2.2.1675157077183552 tensors/x.npy",
    "file": "ptdbg/dump.pkl ptdbg2/dump.pkl",
}
FITS = {name: files.split() for names, files in FITTING.items() for name in names.split()}


def value_of(name: str, kind: Any, chance: Random) -> str:
    """Return a value that fits an option, most of the time."""
    if name in FITS and chance.random() < 0.75:
        return chance.choice(FITS[name])
    if chance.random() < 0.15:
        return harmless(chance.choice(VALUES))
    if name in WRITES or "out" in name:
        return chance.choice(OUTPUTS)
    choices = getattr(kind, "choices", None)
    if choices:
        return str(chance.choice(list(choices)))
    if isinstance(kind, click.Path) or kind is Path:
        return chance.choice(INPUTS)
    return harmless(chance.choice(VALUES))


def harmless(word: str) -> str:
    """Make a word harmless: no path that leads out of the folder, since a destination that a user names is the user's own wish.

    Drop what no shell can hand over: a NUL, or half a character that stands for no byte.
    """
    word = word.replace("/", "_").replace("..", "_").replace("\0", "")
    return word.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def our_words(chance: Random) -> list[str]:
    names = [name for name in cli.list_commands(click.Context(cli)) for _ in range(SLOW.get(name, 6))]
    name = chance.choice(names)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    words, positional = [], []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            kind = {"watch": "health", "compare-health": "health", "check-devices": "csv"}.get(name, parameter.name or "")
            is_there = parameter.required or chance.random() < 0.7
            count = chance.randrange(3) if parameter.nargs == -1 else 1 if is_there else 0
            positional += [value_of(kind, parameter.type, chance) for _ in range(count)]
        elif chance.random() < 0.15:
            words += spelled(parameter, chance)
    if name == "run":  # what a script does is its own affair: the folder it is recorded into comes first, the script after it
        words = ["--into", "out/run", *words]
        positional = [chance.choice(("train.py", "good", "nothing.py", "hooks.pkl")), *positional[1:]]
    return [name, *disturbed([*words, *positional] if chance.random() < 0.5 else [*positional, *words], chance, may_drop=name != "run")]


def spelled(option: click.Parameter, chance: Random) -> list[str]:
    flag = chance.choice([*option.opts, *option.secondary_opts])
    if getattr(option, "is_flag", False):
        return [flag]
    value = value_of(option.name or "", option.type, chance)
    return [f"{flag}={value}"] if chance.random() < 0.2 and flag.startswith("--") else [flag, value]


def disturbed(words: list[str], chance: Random, *, may_drop: bool = True) -> list[str]:
    """Add, drop or double a word now and then."""
    if words and chance.random() < 0.2:
        at = chance.randrange(len(words))
        match chance.randrange(3) if may_drop else 2:
            case 0:
                del words[at]
            case 1:
                words.insert(at, words[chance.randrange(len(words))])
            case _:
                words.insert(at, chance.choice(("--", "--help", "--version", "--nothing", "-x", "-", "--quiet", "é")))
    return words


def their_words(chance: Random) -> list[str]:
    name = chance.choice([*msprobe.COMMANDS, *msprobe.COMMANDS, "offline_dump", "nothing"])
    words = chance.choice([[], ["-f", "pytorch"]] * 9 + [["-f", "mindspore"], ["--framework=pytorch"], ["-f"], ["--framework=x"]])
    command = msprobe.COMMANDS.get(name)
    if command is None or name == "parse":  # the shell has a target of its own, and waits for words
        return [*words, name, *(["-d", chance.choice(INPUTS), "-o", "out"] if name == "parse" else [])]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.options(parser)
    given: list[str] = []
    for action in parser._actions:
        is_usual = action.required or (name == "compare" and action.dest in ("target_path", "golden_path"))
        if action.dest == "help" or chance.random() > (0.95 if is_usual else 0.1):
            continue
        given.append(chance.choice(action.option_strings))
        if action.nargs != 0:
            given += [value_of(action.dest, action.type, chance) for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 1, 1, 1, 2)))]
    if "-o" not in given and name != "run_overflow_check":
        given += ["-o", "out"]
    return [*words, name, *disturbed(given, chance)]


def shell_line(chance: Random) -> list[str]:
    kind = chance.choice((ParseShell, MsprobeShell))
    name = chance.choice([*kind.parsers, "help", "history", "?", "pk", "cad"])
    words = [name]
    if name in kind.parsers:
        for action in kind.parsers[name]._actions:
            if action.dest != "ascend_path" and (action.required or chance.random() < 0.3):
                words.append(chance.choice(action.option_strings))
                if action.nargs != 0:
                    words.append(value_of(action.dest, action.type, chance))
    words = disturbed(words, chance) if len(words) > 1 else words
    line = " ".join(word if chance.random() < 0.3 else shlex.quote(word) for word in words[1:])
    return [kind.__name__, name, line]


def commands(make: Callable[[Random], list[str]]) -> Callable[[dict[str, bytes], Random], Input]:
    return lambda samples, chance: Input(words=tuple(make(chance)))


class Said(Exception):
    """Raised for a command that ended otherwise than it should."""


def told(act: Callable[[], object], codes: Sequence[int | None], *, is_quiet: bool = False) -> object:
    """Run it with its output caught: one of the exit codes, no traceback, and with 2 some word why."""
    out, error = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            code = act()
        except SystemExit as leaving:
            code = leaving.code
    texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, error)]  # type: ignore[attr-defined]
    if code not in codes or "Traceback" in "".join(texts) or (code == 2 and not "".join(texts).strip() and not is_quiet):
        raise Said(f"exit {code!r}; {texts[0][-500:]}; {texts[1][-2000:]}")
    if any(not (character.isprintable() or character in "\n\r\t") for character in texts[1]):
        raise Said(f"unprintable: {texts[1][-500:]!r}")
    return f"exit {code}"


def our_command(folder: Path, words: tuple[str, ...]) -> object:
    assert isinstance(cli, LazyGroup)
    return told(lambda: cli.main(list(words), prog_name="ulpscope"), (0, 1, 2, None), is_quiet="--quiet" in words)


def their_command(folder: Path, words: tuple[str, ...]) -> object:
    return told(lambda: msprobe.main(list(words)), (0, 2))


def shell(folder: Path, words: tuple[str, ...]) -> object:
    kind = {"ParseShell": ParseShell, "MsprobeShell": MsprobeShell}[words[0]]
    nobody = type("Shell", (kind,), {"do_run": lambda self, line: None, "do_shell": lambda self, line: None})  # no programs of others
    return told(lambda: 0 if nobody().onecmd(f"{words[1]} {words[2]}") in (None, True, False) else 3, (0,))


def with_file(patterns: Callable[[dict[str, bytes], Random], Input], *words: str) -> Callable[[dict[str, bytes], Random], Input]:
    """Make a good command about a spoiled file."""
    return lambda samples, chance: patterns(samples, chance)._replace(words=words)


COMPARE = ("compare", "-i", "compare.json", "-o", "out")
MERGE = ("merge_result", "-i", "results", "-o", "out", "-config", "merge.yaml")
RESULTS = files(("results/*.csv", "lines"), ("results/*.xlsx", "archive"), ("merge.yaml", "lines"))
NATIVE = files(
    ("good/*.msgpack", "frames"),
    ("mixed/*.msgpack", "frames"),
    ("good/*.journal", "frames"),
    ("good/*.safetensors", "bytes"),
    ("good/run.json", "json"),
    ("mixed/*.jsonl", "json lines"),
)
MSPROBE = files(("msprobe/*.json", "json"), ("msprobe1/*.json", "json"), ("md5/*.json", "json"))
TARGETS = {
    target.name: target
    for target in (
        Target("native runs", 150_000, NATIVE, lambda folder, words: every_record(top(folder, words))),
        Target("native runs, compared", 30_000, NATIVE, lambda folder, words: compared(folder, words, "bad")),
        Target("parquet copies", 40_000, files(("good/*.msgpack", "frames"), ("mixed/*records.msgpack", "frames")), parquet_copy),
        Target("watched runs", 50_000, files(("health/*.msgpack", "frames"), ("health/*.json", "json")), health),
        Target("dump.json", 130_000, MSPROBE, lambda folder, words: every_record(top(folder, words))),
        Target("dump.json, compared", 30_000, MSPROBE, lambda folder, words: compared(folder, words, "msprobe1")),
        Target("tensors", 200_000, files(("tensors/*.pt", "archive"), ("tensors/*.npy", "bytes")), tensor),
        Target("ptdbg", 60_000, files(("ptdbg/dump.pkl", "json lines"), ("hooks.pkl", "json lines")), ptdbg),
        Target("checker", 50_000, files(("checker/*.json", "json")), lambda folder, words: every_record(folder / "checker")),
        Target("acl", 80_000, files(("acl/*[0-9]", "bytes"), ("acl/*.csv", "lines")), acl),
        Target("mappings", 40_000, files(("mapping.txt", "lines")), mapping),
        Target("baselines", 20_000, files(("baseline.jsonl", "json lines")), baseline),
        Target("config.json", 40_000, files(("config.json", "json")), lambda folder, words: read_config(folder / words[0])),
        Target("yaml", 20_000, files(("*.yaml", "lines")), yaml),
        Target("tables", 20_000, files(("own.csv", "lines"), ("details.csv", "lines")), table),
        Target("msprobe compare", 4_000, with_file(files(("compare.json", "json")), *COMPARE), their_command),
        Target("msprobe merge_result", 4_000, with_file(RESULTS, *MERGE), their_command),
        Target("migrate", 6_000, with_file(files(("config.json", "json")), "migrate", "config.json"), our_command),
        Target("our commands", 14_000, commands(our_words), our_command),
        Target("msprobe's commands", 6_000, commands(their_words), their_command),
        Target("parse shell", 6_000, commands(shell_line), shell),
    )
}
