# SPDX-License-Identifier: Apache-2.0
"""Hold `msCheckerConfig`, the settings that the old tool kept for the whole process."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["CheckerConfig", "msCheckerConfig"]


@dataclass(slots=True)
class CheckerConfig:
    """The settings of a dump: its folder, and the iteration that it takes."""

    dump_path: str = "./"
    real_data: bool = False
    enable_dataloader: bool = True
    target_iter: int = 1
    error_data_path: str = "./"
    jit_compile: bool = True
    precision: int = 14

    def update_config(self, **settings: Any) -> None:
        """Change settings by name.

        >>> msCheckerConfig.update_config(dump_path="my/dump/path", real_data=True, target_iter=1)  # doctest: +SKIP
        """
        types = {field.name: type(getattr(CheckerConfig(), field.name)) for field in fields(self)}
        for name, value in settings.items():
            if name not in types:
                raise ValueError(f"update_config knows no setting {name!r}; it knows {', '.join(types)}")
            if name == "target_iter" and isinstance(value, list) and len(value) == 1:
                value = value[0]
            if type(value) is not types[name]:
                raise ValueError(f"update_config wants {types[name].__name__} for {name}, not {value!r}")
            _check(name, value)
            setattr(self, name, value)


def _check(name: str, value: Any) -> None:
    if name == "dump_path" and not Path(value).is_dir():
        raise ValueError(f"update_config wants a folder that exists as dump_path, and '{value}' is none; make it first")
    if name in ("target_iter", "precision") and value < 0:
        raise ValueError(f"update_config wants a number from 0 up for {name}, not {value}")


msCheckerConfig = CheckerConfig()
