# SPDX-License-Identifier: Apache-2.0
"""Tell whether a device is here: `python -m ulpscope.workflows.check.device_probe npu MODULE...` exits with 0 if it is.

The probe is a process of its own, since loading a vendor's package takes memory and time, and cannot be undone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["is_usable"]


def is_usable(device: str, imports: Sequence[str]) -> bool:
    """Tell whether a tensor can be made on the device, once these modules were imported."""
    from ulpscope.errors import InputError
    from ulpscope.replay.calls.devices import open_device
    from ulpscope.replay.calls.registered import import_and_register

    for name in imports:
        import_and_register(name)
    try:
        open_device(device)
    except InputError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(0 if is_usable(sys.argv[1], sys.argv[2:]) else 1)
