# SPDX-License-Identifier: Apache-2.0
"""The old command; see ulpscope.compat.msprobe.command.parser."""

import sys

from ulpscope.compat.msprobe.command.parser import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
