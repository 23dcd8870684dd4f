# SPDX-License-Identifier: Apache-2.0
"""`python -m ptdbg_ascend.parse`; see ulpscope.compat.ptdbg.shell. The function `parse` is in the package itself."""

from ulpscope.compat.ptdbg.shell import main

if __name__ == "__main__":
    main()
