# SPDX-License-Identifier: Apache-2.0
"""Run ulpscope.compat.msprobe.command.parser as the old command."""

import sys

from ulpscope.compat.msprobe.command.parser import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
