# SPDX-License-Identifier: Apache-2.0
"""A net in graph mode, recorded or not: `python -m tests.mindspore_live.in_graph_mode LEVEL|bare`. MindSpore compiles files only."""

from __future__ import annotations

import sys
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

import ulpscope.mindspore
from tests.mindspore_live.programs import array
from ulpscope.store import MemoryRun


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Dense(4, 3, has_bias=False)
        self.linear.weight.set_data(Tensor(array(3, 4)))

    def construct(self, x: Any) -> Any:
        return (self.linear(x).mean(1) * 2.0).sum()


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    net, x, run = Net(), Tensor(array(5, 4)), MemoryRun()
    if sys.argv[1] == "bare":
        found = net(x)
    else:
        with ulpscope.mindspore.Capture.into_sink(run.sink, level=sys.argv[1]):
            found = net(x)
        print("calls", *[record.call.op for record in run.records(0, 0)])
        print("ledger", *[entry.what for entry in run.ledger(0)])
    print("result", found.asnumpy().tobytes().hex())
