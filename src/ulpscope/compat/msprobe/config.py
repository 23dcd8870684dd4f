# SPDX-License-Identifier: Apache-2.0
"""Read config.json of msprobe, 1.x and 26.x, check it and make it one frozen noun.

A file that makes no sense is refused in one sentence that names the key, the value there, and the allowed values. Unknown keys are refused
too: a misspelt key would otherwise silently do nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ulpscope._files import read_small
from ulpscope.errors import InputError

__all__ = ["DebuggerConfig", "TaskConfig", "read_config"]

TASKS = (
    "statistics",
    "tensor",
    "overflow_check",
    "free_benchmark",
    "run_ut",
    "acc_check",
    "grad_probe",
    "structure",
    "nan_check",
    "exception_dump",
    "diff_check",
)
LEVELS = ("L0", "L1", "L2", "mix", "debug")
DATA_MODES = ("all", "forward", "backward", "input", "output")
SUMMARY_MODES = ("statistics", "md5", "xor")
_COMMON = frozenset(
    """
    task dump_path rank step level seed is_deterministic enable_dataloader acl_config async_dump dump_enable extra_info precision
    risk_level custom_op_namespaces load
    """.split()
)
_MEANINGLESS = ("precision", "risk_level", "custom_op_namespaces")
_MISSING = {
    "load": "inputs of modules are not replaced from a dump",
    "dump_enable": "config.json is read once, and not again when it changes",
    "slice": "tensors are taken whole",
    "request_id": "tensors are taken whole",
    "bench_path": "nothing is compared while the training runs; compare the two dumps afterwards",
}
_IN_BLOCKS = frozenset("diff_nums device file_format backward_input".split())
_BIGGEST_NUMBER = 1_000_000
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_brief = _SHORT.repr
_BIGGEST_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """The settings of one task."""

    scope: tuple[str, ...] = ()
    list: tuple[str, ...] = ()
    tensor_list: tuple[str, ...] = ()
    data_mode: tuple[str, ...] = ("all",)
    summary_mode: str = "statistics"
    overflow_nums: int = 1
    check_mode: str = "all"
    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    error_data_path: str = "./"
    grad_level: str = "L1"
    param_list: tuple[str, ...] = ()
    bounds: tuple[float, ...] = (-1.0, 0.0, 1.0)
    fuzz_device: str = "npu"
    pert_mode: str = "improve_precision"
    handler_type: str = "check"
    fuzz_level: str = "L1"
    fuzz_stage: str = "forward"
    if_preheat: bool = False
    preheat_step: int = 15
    max_sample: int = 20


@dataclass(frozen=True, slots=True)
class DebuggerConfig:
    """The settings that config.json asks for."""

    task: str = "statistics"
    dump_path: str = ""
    rank: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    level: str = "L1"
    seed: int | None = None
    is_deterministic: bool = False
    enable_dataloader: bool = False
    async_dump: bool = False
    acl_config: str = ""
    extra_info: bool = True
    is_enabled: bool = True
    unused: tuple[str, ...] = ()  # keys that are known but have no effect here
    remarks: tuple[str, ...] = ()  # requests that are not supported, and unknown keys
    options: TaskConfig = field(default_factory=TaskConfig)

    def overridden(self, **given: Any) -> DebuggerConfig:
        """Return the config with the debugger's own arguments, which win over the file; None means not given."""
        values = {name: value for name, value in given.items() if value is not None}
        if "step" in values:
            values["step"] = _numbers("step", values["step"])
        changed = replace(self, **values)
        _check(changed)
        return changed


def read_config(path: str | os.PathLike[str]) -> DebuggerConfig:
    """Read a config.json.

    >>> read_config("config.json").task  # doctest: +SKIP
    'statistics'
    """
    file = Path(path)
    try:
        values = json.loads(read_small(file, _BIGGEST_FILE, "config.json").decode())
    except OSError as error:
        raise InputError(f"the config '{file}' cannot be read ({error.strerror}); give the path of a config.json") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"the config '{file}' is no JSON ({error}); see whether a comma or a quote is missing") from None
    if not isinstance(values, dict):
        raise InputError(f"the config '{file}' holds a {type(values).__name__}, not an object with a task in it")
    return _parsed(values, file)


def _parsed(values: dict[str, Any], file: Path) -> DebuggerConfig:
    unknown = sorted(set(values) - _COMMON - set(TASKS))
    if unknown:
        raise InputError(
            f"the config '{file}' has the key {_brief(unknown[0])}, which no version knows; the keys are {_listed(_COMMON | set(TASKS))}"
        )
    task = _word(values, "task", TASKS, "statistics")
    block = values.get(task, {})
    if not isinstance(block, dict):
        raise InputError(f"{task} in '{file}' is {_brief(block)}, not an object")
    config = DebuggerConfig(
        task=task,
        dump_path=_text(values, "dump_path"),
        rank=_numbers("rank", values.get("rank") or ()),
        step=_numbers("step", values.get("step") or ()),
        level=_word(values, "level", LEVELS, "L1"),
        seed=_whole(values, "seed", None),
        is_deterministic=_flag(values, "is_deterministic"),
        enable_dataloader=_flag(values, "enable_dataloader"),
        async_dump=_flag(values, "async_dump"),
        acl_config=_text(values, "acl_config"),
        extra_info=_flag(values, "extra_info", True),
        is_enabled=values.get("dump_enable") is not False,
        unused=tuple(name for name in _MEANINGLESS if values.get(name)),
        remarks=(*_remarks(values, "config.json"), *_remarks(block, task), *_unknown(block, task)),
        options=_task(block),
    )
    _check(config)
    return config


def _remarks(values: Mapping[str, Any], where: str) -> Iterable[str]:
    return (f"{name} of {where} does nothing here: {why}" for name, why in _MISSING.items() if values.get(name))


def _unknown(block: Mapping[str, Any], task: str) -> Iterable[str]:
    known = {field.name for field in fields(TaskConfig)} | _IN_BLOCKS | set(_MISSING)
    return (f"{task} has the key {_brief(name)}, which is not known and does nothing" for name in sorted(set(block) - known))


def _task(block: Mapping[str, Any]) -> TaskConfig:
    words = {name: _words(block, name) for name in ("scope", "list", "tensor_list", "white_list", "black_list", "param_list")}
    return TaskConfig(
        **words,
        data_mode=_data_mode(block),
        summary_mode=_word(block, "summary_mode", SUMMARY_MODES, "statistics"),
        overflow_nums=_count(block, "overflow_nums", 1),
        check_mode=_word(block, "check_mode", ("aicore", "atomic", "all"), "all"),
        error_data_path=_text(block, "error_data_path") or "./",
        grad_level=_word(block, "grad_level", ("L0", "L1", "L2"), "L1"),
        bounds=_bounds(block),
        fuzz_device=_word(block, "fuzz_device", ("npu", "cpu"), "npu"),
        pert_mode=_word(
            block, "pert_mode", ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"), "improve_precision"
        ),
        handler_type=_word(block, "handler_type", ("check", "fix"), "check"),
        fuzz_level=_word(block, "fuzz_level", ("L1",), "L1"),
        fuzz_stage=_word(block, "fuzz_stage", ("forward", "backward"), "forward"),
        if_preheat=_flag(block, "if_preheat"),
        preheat_step=_count(block, "preheat_step", 15),
        max_sample=_count(block, "max_sample", 20),
    )


def _check(config: DebuggerConfig) -> None:
    """Refuse settings that contradict each other."""
    options = config.options
    if config.task not in TASKS:
        raise InputError(f"task is {_brief(config.task)}; it may be {_listed(TASKS)}")
    if config.level not in LEVELS:
        raise InputError(f"level is {_brief(config.level)}; it may be {_listed(LEVELS)}")
    if len(options.scope) not in (0, 2):
        raise InputError(f"scope has {len(options.scope)} names; it takes two, the first and the last call")
    if options.scope and options.list and config.task == "free_benchmark":
        raise InputError("free_benchmark takes scope or list, not both; leave one out")
    if options.overflow_nums < 1 and options.overflow_nums != -1:
        raise InputError(f"overflow_nums is {options.overflow_nums}; it may be a number from 1 up, or -1 for never stopping")
    if options.preheat_step < 1 or options.max_sample < 1:
        raise InputError(f"preheat_step is {options.preheat_step} and max_sample {options.max_sample}; both are numbers from 1 up")
    if config.task == "free_benchmark":
        _check_free_benchmark(config)


def _check_free_benchmark(config: DebuggerConfig) -> None:
    options = config.options
    if config.level != "L1":
        raise InputError(f"free_benchmark works at level L1 only, not {config.level}")
    if (options.fuzz_device == "cpu") != (options.pert_mode == "to_cpu"):
        raise InputError(
            f"fuzz_device {_brief(options.fuzz_device)} does not go with pert_mode {_brief(options.pert_mode)}; cpu goes with to_cpu alone"
        )
    if options.handler_type != "fix":
        return
    if options.pert_mode not in ("improve_precision", "to_cpu"):
        raise InputError(f"handler_type 'fix' goes with pert_mode improve_precision or to_cpu, not {_brief(options.pert_mode)}")
    if options.if_preheat or options.fuzz_stage == "backward":
        raise InputError("handler_type 'fix' goes neither with if_preheat nor with fuzz_stage 'backward'; set handler_type to 'check'")


def _word(values: Mapping[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = values.get(name, default) or default
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{name} is {_brief(value)} in the config; it may be {_listed(choices)}")
    return value


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name) or ""
    if not isinstance(value, str):
        raise InputError(f"{name} is {_brief(value)} in the config; it is a text")
    return value


def _flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"{name} is {_brief(value)} in the config; it is true or false")
    return value


def _whole(values: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = values.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{name} is {_brief(value)} in the config; it is a whole number")
    return value


def _count(values: Mapping[str, Any], name: str, default: int) -> int:
    value = _whole(values, name, default)
    return default if value is None else value


def _words(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = values.get(name) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise InputError(f"{name} is {_brief(value)} in the config; it is a list of names")
    return tuple(part for part in value if part)


def _data_mode(values: Mapping[str, Any]) -> tuple[str, ...]:
    modes = _words(values, "data_mode") or ("all",)
    wrong = [mode for mode in modes if mode not in DATA_MODES]
    if wrong or ("all" in modes and len(modes) > 1):
        raise InputError(f"data_mode is {list(modes)} in the config; it is ['all'], or some of {_listed(DATA_MODES[1:])}")
    return modes


def _bounds(values: Mapping[str, Any]) -> tuple[float, ...]:
    bounds = values.get("bounds") or [-1, 0, 1]
    is_list = isinstance(bounds, list) and all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds)
    if not is_list or not all(map(math.isfinite, bounds)) or sorted(set(bounds)) != bounds:
        raise InputError(f"bounds are {_brief(bounds)} in the config; they are numbers in ascending order")
    return tuple(float(bound) for bound in bounds)


def _numbers(name: str, given: Any) -> tuple[int, ...]:
    """Parse whole numbers, also as text, and ranges: 3, "3", "4-6"."""
    parts = given if isinstance(given, list | tuple | range) else [given]
    return tuple(sorted({number for part in parts for number in _range(name, part)}))


def _range(name: str, part: Any) -> Iterable[int]:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", str(part)) if not isinstance(part, bool | float) else None
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last or last > _BIGGEST_NUMBER:
        raise InputError(f"{name} holds {_brief(part)}; it takes numbers from 0 to {_BIGGEST_NUMBER}, or a range such as '4-6'")
    return range(first, last + 1)


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words) if isinstance(words, set | frozenset) else words)
