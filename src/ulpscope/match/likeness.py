# SPDX-License-Identifier: Apache-2.0
"""How alike two calls are: keys from the strictest to the loosest for anchors, and a score for what lies between them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from ulpscope.model import CallRecord
from ulpscope.model.nouns import dataclass

__all__ = ["PAIRABLE", "Sketch", "plain_op", "sketch"]

PAIRABLE = 4.0
"""The score above which two calls may be paired: the same operation with something else in common."""

_ARITHMETIC = {"add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod", "and", "or", "xor"}
_SYNONYMS = {"truediv": "div", "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub", "floordiv": "floor_divide"}
_FAMILIES = {
    name: family
    for family, names in {
        "matmul": ("matmul", "mm", "bmm", "linear", "addmm", "baddbmm", "einsum", "mv", "dot"),
        "attention": ("scaled_dot_product_attention", "multi_head_attention_forward", "flash_attention"),
        "shape": ("view", "reshape", "flatten", "unflatten", "view_as", "squeeze", "unsqueeze"),
        "transpose": ("transpose", "permute", "t", "swapaxes", "movedim", "mt"),
        "conv": ("conv1d", "conv2d", "conv3d", "convolution"),
        "copy": ("to", "type", "float", "half", "bfloat16", "clone", "contiguous", "copy"),
    }.items()
    for name in names
}


@dataclass(frozen=True, slots=True)
class Sketch:
    """What alignment looks at in one record."""

    level: str
    module: str
    leaf: str
    op: str
    plain: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    line: tuple[str, str]
    fingerprints: tuple[str | None, str | None]

    @property
    def place(self) -> tuple[str, str, str, tuple[tuple[int, ...], ...], tuple[str, str]]:
        return self.level, self.module, self.op, self.inputs, self.line

    def keys(self) -> tuple[Hashable, ...]:
        """From the strictest to the loosest."""
        return (
            self.place,
            (self.level, self.module, self.op, self.inputs),
            (self.level, self.leaf, self.plain, self.inputs),
            (self.level, self.plain, self.inputs),
        )

    def without_values(self) -> Sketch:
        """The same without fingerprints, so that equal calls are equal sketches."""
        return replace(self, fingerprints=(None, None))

    def score(self, other: Sketch) -> float:
        """How alike; `PAIRABLE` or less means: not the same call."""
        if self.level != other.level:
            return 0.0
        named = _name_score(self, other)
        if not named:
            return 0.0
        module = 2.0 if self.module == other.module else 1.0 if self.leaf == other.leaf else 0.0
        shapes = 2.0 if self.inputs == other.inputs else 1.0 if self.outputs == other.outputs else -1.0
        dtypes = 0.5 if self.dtypes == other.dtypes else 0.0
        line = (1.5 if self.line == other.line else 0.5 if self.line[0] == other.line[0] else 0.0) if any(self.line) else 0.0
        seen = sum(2.0 for left, right in zip(self.fingerprints, other.fingerprints, strict=True) if left and left == right)
        return named + module + shapes + dtypes + line + seen


def sketch(record: CallRecord, module: str | None = None, op: str | None = None) -> Sketch:
    """Sketch a record, under another name where a mapping gives one."""
    module, op = module if module is not None else record.module, op or record.call.op
    inputs = [slot for slot in record.slots if slot.slot.role == "input"]
    outputs = [slot for slot in record.slots if slot.slot.role == "output"]
    source = record.source
    return Sketch(
        level=record.level,
        module=module,
        leaf=module.rpartition(".")[2],
        op=op,
        plain=plain_op(op),
        inputs=tuple(slot.shape for slot in inputs),
        outputs=tuple(slot.shape for slot in outputs),
        dtypes=tuple(slot.dtype for slot in inputs),
        line=(source.function, source.code) if source else ("", ""),
        fingerprints=(inputs[0].fingerprint if inputs else None, outputs[0].fingerprint if outputs else None),
    )


@lru_cache(maxsize=4096)
def plain_op(op: str) -> str:
    """The operation whatever it is called through: `add` for torch.add, Tensor.add_, __iadd__ and aten.add.Tensor."""
    parts = [part for part in op.split(".") if part]
    name = parts[1] if len(parts) > 1 and parts[0] == "aten" else parts[-1] if parts else op
    is_dunder = name.startswith("__")
    name = name.strip("_").lower() or name
    if is_dunder and name[:1] in ("i", "r") and name[1:] in _ARITHMETIC:
        name = name[1:]
    return _SYNONYMS.get(name, name)


def _name_score(left: Sketch, right: Sketch) -> float:
    if left.op == right.op:
        return 4.0
    if left.plain == right.plain:
        return 3.5
    if left.plain in _FAMILIES and _FAMILIES[left.plain] == _FAMILIES.get(right.plain):
        return 1.5
    short, long = sorted((left.plain, right.plain), key=len)
    return 1.5 if len(short) >= 4 and short in long else 0.0
