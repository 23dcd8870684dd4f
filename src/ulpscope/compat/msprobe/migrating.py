# SPDX-License-Identifier: Apache-2.0
"""Translate a config.json into ulpscope's commands, and name what they cannot carry over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ulpscope._shell import as_path, command_line
from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.store.foreign.reader import operation

__all__ = ["Migration", "migrate", "our_pattern"]

_LEVELS = {"L0": "module", "L1": "api", "mix": "both"}
_PREFIXES = {
    "Functional": "functional",
    "Torch": "torch",
    "Tensor": "Tensor",
    "Distributed": "distributed",
    "NPU": "torch_npu",
    "Aten": "aten",
}
_NAME = re.compile(r"(?P<prefix>[A-Za-z]+)[._](?P<op>.+?)[._](?P<index>\d+)(?:[._](?:forward|backward).*)?")
_MODULE = re.compile(r"(?:Module|Cell)[._](?P<path>.+)\.(?P<cls>[^.]+)\.(?:forward|backward)\.\d+.*")


@dataclass(frozen=True, slots=True)
class Migration:
    """The commands that replace a config, and remarks on the differences."""

    commands: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def migrate(config: DebuggerConfig) -> Migration:
    """Return the commands to type instead of writing this config.

    >>> migrate(DebuggerConfig(task="tensor", dump_path="runs/a", step=(0, 1))).commands
    ('ulpscope run --into runs/a --keep tensors --steps 0,1 train.py',)
    """
    if config.task in ("run_ut", "acc_check"):
        return _checking(config)
    if config.task == "free_benchmark":
        return Migration(
            (_run(config, ["--keep", "tensors"]), command_line("ulpscope", "check", _into(config))),
            ("free_benchmark disturbs each call and looks whether its result jumps; check runs each call again in a higher precision "
             "instead, and says how far it is from what an honest kernel computes",),
        )  # fmt: skip
    options, remarks = _kept(config)
    return Migration((_run(config, options),), (*remarks, *_remarks(config)))


def _kept(config: DebuggerConfig) -> tuple[list[str], tuple[str, ...]]:
    if config.task in ("overflow_check", "nan_check", "exception_dump"):
        limit = 0 if config.options.overflow_nums == -1 else config.options.overflow_nums
        return ["--nonfinite", "--nonfinite-limit", str(limit)], ("the call that made the first inf or NaN is named when the script ends",)
    if config.task == "grad_probe":
        return ["--health"], ("two health runs are compared with: ulpscope compare-health A B",)
    if config.task == "structure":
        return ["--keep", "fingerprint"], ("names, stacks and modules are in every run; look at them with: ulpscope show RUN",)
    if config.task == "tensor":
        return ["--keep", "tensors"], ()
    if config.options.summary_mode in ("md5", "xor"):
        return ["--keep", "fingerprint"], ("fingerprints take the place of checksums; they see the order of values too",)
    return [], ()


def _run(config: DebuggerConfig, options: Sequence[str]) -> str:
    words = ["ulpscope", "run", "--into", _into(config), *options]
    is_capture = not {"--nonfinite", "--health"} & set(options)
    if is_capture and _LEVELS.get(config.level, "api") != "api":
        words += ["--level", _LEVELS[config.level]]
    if config.step:
        words += ["--steps", ",".join(map(str, config.step))]
    if config.rank:
        words += ["--ranks", ",".join(map(str, config.rank))]
    for pattern in _patterns(config):
        words += ["--select", pattern]
    if config.seed is not None:
        words += ["--seed", str(config.seed)]
    if config.is_deterministic:
        words.append("--deterministic")
    return command_line(*words, "train.py")


def _into(config: DebuggerConfig) -> str:
    return as_path(config.dump_path or "runs/a")


def _checking(config: DebuggerConfig) -> Migration:
    select = [f"*{name}*" for name in config.options.white_list] + [f"!*{name}*" for name in config.options.black_list]
    options = [word for pattern in select for word in ("--select", pattern)]
    check = command_line("ulpscope", "check", _into(config), *options, "--save-failures", config.options.error_data_path)
    return Migration((command_line("ulpscope", "run", "--into", _into(config), "train.py"), check))


def _patterns(config: DebuggerConfig) -> Iterator[str]:
    options = config.options
    if options.scope:
        yield f"range:{our_pattern(options.scope[0])}..{our_pattern(options.scope[1])}"
    yield from (our_pattern(name) for name in options.list)
    yield from (f"phase:{mode}" for mode in ("forward", "backward") if mode in options.data_mode)
    yield from (f"slot:{mode}*" for mode in ("input", "output") if mode in options.data_mode)


def our_pattern(name: str) -> str:
    """Translate an old name into a selection pattern; a part of a name becomes a glob around it.

    >>> our_pattern("Functional.conv2d.0.forward"), our_pattern("Module.layers.1.Linear.forward.0"), our_pattern("relu")
    ('functional.conv2d.0', 'module:layers.1', '*relu*')
    >>> our_pattern("Tensor.__iadd__.3.backward")
    'Tensor.add_'
    """
    module = _MODULE.fullmatch(name)
    if module is not None:
        return f"module:{module['path']}"
    match = _NAME.fullmatch(name)
    if match is None or match["prefix"] not in _PREFIXES:
        return f"*{name}*"
    op = operation(match["prefix"], match["op"])
    return op if match["op"].startswith("__") else f"{op}.{match['index']}"  # ulpscope counts operators differently


def _remarks(config: DebuggerConfig) -> Iterator[str]:
    if config.level == "L2":
        yield "level L2 dumps kernels through CANN on an Ascend device; nothing here takes its place"
    if config.level == "debug":
        yield "level debug keeps what the script hands to save(); nothing here takes its place, record the calls around it instead"
    if config.options.tensor_list:
        again = " ".join(f"--select '*{name}*'" for name in config.options.tensor_list)
        yield f"tensor_list: record these once more with their values: --keep tensors {again}"
    yield from config.remarks
    if config.unused:
        yield f"not needed any more: {', '.join(config.unused)}"
