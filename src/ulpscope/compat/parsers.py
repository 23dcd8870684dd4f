# SPDX-License-Identifier: Apache-2.0
"""Parse the older commands; an error message shows an unknown word with its control characters spelled out."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ulpscope.report.escaping import shortened

__all__ = ["CommandParser"]

_MOST_SAID = 1000


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose error messages are spelled out and cut to a limit."""

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message, _MOST_SAID))
