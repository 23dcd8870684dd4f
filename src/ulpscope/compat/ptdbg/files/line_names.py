# SPDX-License-Identifier: Apache-2.0
"""Give calls the names of the old tool: our `Tensor.__add__.0` is `Tensor___add___0`, our `functional.conv2d.1` `Functional_conv2d_1`.

The old tool counts the calls of a name over the whole process, and begins anew only with a step of its debugger. One capture counts from 0;
`Counts` adds the counts of earlier captures.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

from ulpscope.compat.ptdbg.files.vendor_ops import NPU_OPS
from ulpscope.model import CallName

__all__ = ["Counts", "api_name", "is_plain_name"]

_PREFIXES = {
    "functional": "Functional",
    "Tensor": "Tensor",
    "torch": "Torch",
    "distributed": "Distributed",
    "aten": "Aten",
    "npu": "NPU",
    "torch_npu": "NPU",
    "module": "Module",
    "_VF": "VF",
}
_NO_CALLS = frozenset({"Function", "state", "optimizer"})
# nn.LSTM and its kin reach these through torch._VF, where the old tool wraps them.
_VF = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
# The same function has a name in torch and one in torch.nn.functional; models call it by the latter.
_FUNCTIONAL = frozenset(
    """
    adaptive_avg_pool1d avg_pool1d bilinear celu_ channel_shuffle conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d cosine_similarity hardshrink native_channel_shuffle pairwise_distance pdist pixel_shuffle pixel_unshuffle prelu relu_
    rrelu_ selu_ threshold_
    """.split()
)
_NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9_.\-]")
_LONGEST_NAME = 150


@lru_cache(maxsize=8192)
def api_name(op: str) -> str | None:
    """Return the old name of an operation, without a count; None where the old tool does not record it.

    >>> api_name("Tensor.__add__"), api_name("torch.lstm"), api_name("ops.npu.npu_iou"), api_name("Function.MyFunction")
    ('Tensor___add__', 'VF_lstm', 'NPU_npu_iou', None)
    """
    namespace, name = _parted(op)
    if namespace in _NO_CALLS:
        return None
    return f"{_PREFIXES[namespace]}_{_NOT_IN_A_FILE_NAME.sub('_', name.replace('.', '_'))[:_LONGEST_NAME]}"


def _parted(op: str) -> tuple[str, str]:
    """Split a name into the namespace that decides the prefix, and the rest."""
    namespace, _, name = op.partition(".")
    short = op.rpartition(".")[2]
    if op.startswith("ops.npu.") or short in NPU_OPS:
        return "npu", short
    if namespace == "torch":
        return "functional" if name in _FUNCTIONAL else "_VF" if name in _VF else namespace, name
    return (namespace, name) if namespace in _PREFIXES or namespace in _NO_CALLS else ("torch", op)


def is_plain_name(name: str) -> bool:
    """Tell whether a user's name may stand in a file name."""
    return 0 < len(name) <= _LONGEST_NAME and _NOT_IN_A_FILE_NAME.search(name) is None and name.strip(".") != ""


class Counts:
    """Counts how often each operation was called: in finished captures, and in the running one."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self._now: dict[str, int] = {}

    def see(self, call: CallName) -> None:
        self._now[call.op] = call.index + 1

    def number(self, call: CallName) -> int:
        return self._before[call.op] + call.index

    def end_capture(self) -> None:
        self._before.update(self._now)
        self._now.clear()

    def reset(self) -> None:
        self._before.clear()
        self._now.clear()
