# SPDX-License-Identifier: Apache-2.0
"""Compare the summaries that plain torch takes on the emulated npu with the host's. test_devices.py runs it in a process of its own, since
the device cannot be removed.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.capture import tensor_cases
from ulpscope.capture.device.queue import Devices
from ulpscope.capture.record.tensor_reader import TensorReader
from ulpscope.testing import npu


def main() -> int:
    warnings.simplefilter("ignore")
    npu.install()
    complaints: list[str] = []
    devices = Devices(statistics=True, complain=lambda what, why: complaints.append(f"{what}: {why}"))
    forms = TensorReader("statistics", lambda *_: None)
    blocks = [tensor_cases.block(name) for name in ("float32", "bfloat16", "int64", "bool", "float64")]
    tensors = [make(block.to("npu")) for block in blocks for make in tensor_cases.LAYOUTS.values()]
    taken = [(tensor, devices.take(tensor, forms._form(tensor))) for tensor in tensors]
    assert devices.is_waiting
    devices.send()
    devices.collect(wait=True)
    for tensor, values in taken:
        assert values is not None, complaints
        complaints += tensor_cases.wrong(tensor, values.summary_object(), values.fingerprint)
    print(len(taken), torch.__version__, *complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
