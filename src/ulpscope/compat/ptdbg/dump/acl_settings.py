# SPDX-License-Identifier: Apache-2.0
"""Check the settings of kernel dumps (ACL level), and then refuse them clearly: only CANN on an Ascend device makes such dumps.

Dumps that CANN wrote elsewhere can be read: `python -m ptdbg_ascend.parse`, and `ulpscope.open_run` on the folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from ulpscope._files import read_small
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.errors import InputError, MissingDependencyError

__all__ = ["check_backward_input", "check_config", "refuse"]

_MOST_BYTES = 1 << 20
_CHOICES = {"dump_mode": ("output", "input", "all"), "dump_op_switch": ("off", "on")}


def check_config(config: object, argument: str) -> Path:
    """Check a dump.json, and return the folder that it names."""
    if config is None:
        raise CompareException(CompareException.INVALID_PARAM_ERROR, f"ACL level needs {argument}, for example {argument}='./dump.json'")
    if not isinstance(config, (str, os.PathLike)) or not Path(config).is_file() or Path(config).suffix != ".json":
        raise CompareException(CompareException.INVALID_PATH_ERROR, f"{argument}={config!r} is not an existing .json file")
    settings = _settings(Path(config))
    for name, choices in _CHOICES.items():
        if settings.get(name, choices[0]) not in choices:
            raise _bad(config, f"{name} is {settings[name]!r}, and only {' or '.join(choices)} are known")
    if settings.get("dump_list", []) != []:
        raise _bad(config, 'dump_list is not empty; write "dump_list": []')
    folder = settings.get("dump_path")
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise _bad(config, f"dump_path {folder!r} is not an existing folder")
    return Path(folder)


def _settings(config: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_small(config, _MOST_BYTES, "dump.json").decode())
    except InputError:
        raise _bad(config, "it is larger than a settings file can be") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(config, f"it is not JSON ({str(error)[:80]})") from None
    settings = content.get("dump") if isinstance(content, dict) else None
    if not isinstance(settings, dict):
        raise _bad(config, 'it has no object "dump"')
    return settings


def _bad(config: object, why: str) -> CompareException:
    return CompareException(
        CompareException.INVALID_FILE_ERROR, f"'{config}' is no dump.json: {why}; the guide's section on dump.json has a sample"
    )


def check_backward_input(files: object) -> tuple[Path, ...]:
    """Return the .npy files that hold the gradients to begin a backward call with."""
    if not isinstance(files, (list, tuple)) or not all(isinstance(file, (str, os.PathLike)) for file in files):
        raise CompareException(CompareException.INVALID_PARAM_ERROR, f"backward_input is a list of .npy files, not {files!r}")
    for file in files:
        if Path(file).suffix != ".npy" or not Path(file).is_file():
            raise CompareException(
                CompareException.INVALID_PATH_ERROR,
                f"backward_input names '{file}', which is not an existing .npy file; give one of an earlier dump",
            )
    return tuple(Path(file) for file in files)


def refuse(what: str) -> NoReturn:
    raise MissingDependencyError(
        f"{what} at ACL level needs Ascend's CANN to dump its kernels, and ulpscope does not drive CANN; dump at API level instead "
        "(mode='api_stack', or mode='list' with this scope), or dump with CANN and read its files with python -m ptdbg_ascend.parse"
    )
