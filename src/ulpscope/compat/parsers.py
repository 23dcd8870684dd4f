# SPDX-License-Identifier: Apache-2.0
"""The parser of the older commands: what it says of a word that it does not understand is safe to look at."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ulpscope.report.escaping import shortened

__all__ = ["CommandParser"]

_MOST_SAID = 1000


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose complaints are spelled out and not endless."""

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message, _MOST_SAID))
