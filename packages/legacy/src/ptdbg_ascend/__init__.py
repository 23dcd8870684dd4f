# SPDX-License-Identifier: Apache-2.0
"""The old import name; see ulpscope.compat.ptdbg."""

from ulpscope.compat.ptdbg import __all__ as __all__
from ulpscope.compat.ptdbg import __getattr__ as __getattr__
