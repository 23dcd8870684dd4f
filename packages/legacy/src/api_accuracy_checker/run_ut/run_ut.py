# SPDX-License-Identifier: Apache-2.0
"""Run ulpscope.compat.checker.run_ut at the old path of the command."""

import sys

from ulpscope.compat.checker.run_ut import main

if __name__ == "__main__":
    sys.exit(main())
