# SPDX-License-Identifier: Apache-2.0
"""Re-export ulpscope.compat.ptdbg under the old import name."""

from ulpscope.compat.ptdbg import __all__ as __all__
from ulpscope.compat.ptdbg import __getattr__ as __getattr__
