# SPDX-License-Identifier: Apache-2.0
"""Define the exception of the old functions. Its numbers are an interface: scripts around the old tool look at the exit status."""

from __future__ import annotations

from ulpscope.errors import InputError

__all__ = ["CompareException"]


class CompareException(InputError):
    """Raised for input that cannot be used; `code` is the old tool's exit status."""

    INVALID_PATH_ERROR = 1
    INVALID_FILE_ERROR = 6
    NO_DUMP_FILE_ERROR = 9
    INVALID_PARAM_ERROR = 11
    INVALID_DUMP_FILE = 13
    INVALID_DUMP_MODE = 15
    INVALID_COMPARE_MODE = 17

    def __init__(self, code: int, error_info: str = "") -> None:
        super().__init__(error_info)
        self.code = code
        self.error_info = error_info
