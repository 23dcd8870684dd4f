# SPDX-License-Identifier: Apache-2.0
"""Run ulpscope.compat.ptdbg.shell as `python -m ptdbg_ascend.parse`. The function `parse` is in the package itself."""

from ulpscope.compat.ptdbg.shell import main

if __name__ == "__main__":
    main()
