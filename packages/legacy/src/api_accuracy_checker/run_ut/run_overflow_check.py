# SPDX-License-Identifier: Apache-2.0
"""The old path of the command; see ulpscope.compat.checker.run_overflow_check."""

import sys

from ulpscope.compat.checker.run_overflow_check import main

if __name__ == "__main__":
    sys.exit(main())
