# SPDX-License-Identifier: Apache-2.0
"""Undo the layouts in which Ascend stores tensors.

Most formats keep the axes of a tensor and only order them (`NCHW`, `HWCN`, `NDHWC` ...). The others cut axes into blocks, as the matrix
unit takes them, and pad the last block with zeros. `convert` brings such a tensor back to its axes, cuts it to its original shape, and
orders the axes as asked.

The header has the original shape but, for inputs, not the order of its axes. The order is found by trying those that the stored shape
allows; where several fit, the one that the header names is taken, then the one that was asked for, then the first of the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ulpscope.errors import DamagedRunError, InputError

__all__ = ["FORMATS", "PLAIN", "convert", "format_name", "is_convertible"]

Array: TypeAlias = npt.NDArray[Any]
Sizes: TypeAlias = dict[str, int]

# By number.
FORMATS: Final = tuple(
    """NCHW NHWC ND NC1HWC0 FRACTAL_Z NC1C0HWPAD NHWC1C0 FSR_NCHW FRACTAL_DECONV C1HWNC0 FRACTAL_DECONV_TRANSPOSE
    FRACTAL_DECONV_SP_STRIDE_TRANS NC1HWC0_C04 FRACTAL_Z_C04 CHWN FRACTAL_DECONV_SP_STRIDE8_TRANS HWCN NC1KHKWHWC0 BN_WEIGHT FILTER_HWCK
    HASHTABLE_LOOKUP_LOOKUPS HASHTABLE_LOOKUP_KEYS HASHTABLE_LOOKUP_VALUE HASHTABLE_LOOKUP_OUTPUT HASHTABLE_LOOKUP_HITS C1HWNCoC0 MD NDHWC
    FRACTAL_ZZ FRACTAL_NZ NCDHW DHWCN NDC1HWC0 FRACTAL_Z_3D CN NC DHWNC FRACTAL_Z_3D_TRANSPOSE FRACTAL_ZN_LSTM FRACTAL_Z_G RESERVED ALL NULL
    ND_RNN_BIAS FRACTAL_ZN_RNN YUV YUV_A NCL FRACTAL_Z_WINO C1HWC0 FRACTAL_NZ_C0_16 FRACTAL_NZ_C0_32""".split()
)
PLAIN: Final = ("NCHW", "NHWC", "HWCN", "CHWN", "NCDHW", "NDHWC", "DHWCN", "DHWNC", "NCL", "NC", "CN")

_BLOCK = 16
# The axis C cut into C1 blocks of C0. Where there is a Co too, only its diagonal with C0 holds values.
_SPLIT: Final = {
    "NC1HWC0": "N C1 H W C0",
    "NC1HWC0_C04": "N C1 H W C0",
    "NHWC1C0": "N H W C1 C0",
    "C1HWNC0": "C1 H W N C0",
    "C1HWC0": "C1 H W C0",
    "C1HWNCoC0": "C1 H W N Co C0",
    "NDC1HWC0": "N D C1 H W C0",
}
# The last two axes cut into blocks: which block comes first.
_MATRICES: Final = {"FRACTAL_NZ": "W1 H1", "FRACTAL_NZ_C0_16": "W1 H1", "FRACTAL_NZ_C0_32": "W1 H1", "FRACTAL_ZZ": "H1 W1"}
# Orders in which an original shape may have its axes, the likeliest first; short ones belong to tensors that were given axes of size 1.
_ORDERS: Final = ("NCHW", "HWCN", "NHWC", "CHWN", "NCDHW", "DHWCN", "NDHWC", "DHWNC", "C", "NC", "CHW", "NCW")


def format_name(number: int) -> str:
    """Return the name of a format; the low byte counts, since the number may also carry a sub-format."""
    number &= 0xFF
    return FORMATS[number] if number < len(FORMATS) else f"FORMAT_{number}"


def is_convertible(source: str) -> bool:
    """Tell whether the format can be turned into ND."""
    return source in ("ND", "MD", *PLAIN) or source in _MATRICES or source in _BLOCKED


def convert(
    stored: Array,
    source: str,
    target: str,
    *,
    original: tuple[int, ...],
    original_format: str = "",
    groups: int = 1,
    place: str = "the tensor",
) -> Array:
    """Convert a tensor to the target format. `ND` is the original shape, whatever the order of its axes."""
    if target == source:
        return stored
    if target != "ND" and target not in PLAIN:
        raise InputError(f"{place} cannot be converted to {target[:40]!r}; choose ND or one of {', '.join(PLAIN)}")
    if source in ("ND", "MD", *PLAIN):
        return _ordered(stored, source if source in PLAIN else "", target, place)
    if source in _MATRICES:
        return _ordered(_matrix(stored, source, original, place), original_format or "NCHW", target, place)
    if source in _BLOCKED:
        array, order = _unblocked(stored, source, (original_format, target), original, groups, place)
        return _ordered(array, order, target, place)
    raise InputError(f"{place} has the format {source}, which cannot be undone; take it as it is stored, without a format")


def _ordered(array: Array, axes: str, target: str, place: str) -> Array:
    """Reorder the axes. A format with another number of axes than the tensor says nothing about its order."""
    if target == "ND" or len(target) != array.ndim or len(axes) != array.ndim:
        return array
    if set(axes) != set(target):
        raise InputError(f"{place} has the axes {axes}, which cannot be ordered as {target}; ask for ND")
    turned: Array = array.transpose([axes.index(axis) for axis in target])
    return turned


@dataclass(frozen=True, slots=True)
class _Blocked:
    """A format that cuts axes into blocks: the axes of the tensor when undone, the stored shape that sizes give, and the function that
    undoes it.

    `whole` computes the sizes, padding included, from a stored shape, where that is possible.
    """

    axes: str
    shape: Callable[[Sizes, tuple[int, ...], int], tuple[int, ...]]
    undo: Callable[[Array, Sizes, int], Array]
    whole: Callable[[tuple[int, ...]], Sizes | None]


def _unblocked(
    stored: Array, source: str, likely: tuple[str, ...], original: tuple[int, ...], groups: int, place: str
) -> tuple[Array, str]:
    """Return the tensor in its original shape, and the order of its axes."""
    blocked = _BLOCKED[source]
    for order, sizes in _candidates(blocked, stored.shape, likely, original):
        if blocked.shape(sizes, stored.shape, groups) == stored.shape:
            padded = blocked.undo(stored, sizes, groups)
            array = padded[tuple(slice(sizes[axis]) for axis in blocked.axes)]
            filled = "".join(axis for axis in blocked.axes if axis not in order)
            array = array.transpose([blocked.axes.index(axis) for axis in filled + order])
            return array.reshape(original or array.shape), order
    raise DamagedRunError(
        f"{place} is stored as {source} of shape {list(stored.shape)}, which no tensor of original shape {list(original)} gives"
        + (f" with {groups} groups" if groups > 1 else "")
        + "; take it as it is stored, without a format"
    )


def _candidates(
    blocked: _Blocked, stored: tuple[int, ...], likely: tuple[str, ...], original: tuple[int, ...]
) -> Iterator[tuple[str, Sizes]]:
    """List the orders of axes that an original shape of that length may have, with the size of each axis."""
    if not original:
        whole = blocked.whole(stored)
        if whole is not None:
            yield blocked.axes, whole
        return
    for order in dict.fromkeys((*likely, *_ORDERS)):
        if len(order) == len(original) and set(order) <= set(blocked.axes):
            yield order, dict.fromkeys(blocked.axes, 1) | dict(zip(order, original, strict=True))


def _ceil(size: int, block: int) -> int:
    return -(-size // block) if block > 0 else -1


def _split(layout: str) -> _Blocked:
    """Make the format that cuts C into blocks and leaves the other axes whole."""
    names = layout.split()
    axes = "NCDHW" if "D" in names else "NCHW"

    def shape(sizes: Sizes, stored: tuple[int, ...], _: int) -> tuple[int, ...]:
        inner = stored[-1] if stored else 0
        parts = sizes | {"C1": _ceil(sizes["C"], inner), "C0": inner, "Co": inner}
        return tuple(parts[name] for name in names) if "N" in names or sizes["N"] == 1 else ()

    def undo(stored: Array, sizes: Sizes, _: int) -> Array:
        array = np.diagonal(stored, axis1=names.index("Co"), axis2=names.index("C0")) if "Co" in names else stored
        kept = [name for name in names if name != "Co"]
        order = [kept.index(part) for axis in axes for part in (("C1", "C0") if axis == "C" else (axis,)) if part in kept]
        sizes = sizes | {"C": array.shape[kept.index("C1")] * array.shape[kept.index("C0")]}
        whole: Array = array.transpose(order).reshape([sizes[axis] for axis in axes])
        return whole

    def whole(stored: tuple[int, ...]) -> Sizes | None:
        parts = {"N": 1, "D": 1} | dict(zip(names, stored, strict=False))
        return {axis: parts["C1"] * parts["C0"] if axis == "C" else parts[axis] for axis in axes} if len(stored) == len(names) else None

    return _Blocked(axes, shape, undo, whole)


def _sharing(sizes: Sizes, inner: int, groups: int) -> tuple[int, int, int, int]:
    """Return how groups share blocks: how many in one block, how many blocks of them, and how many rows and columns of blocks each has."""
    outputs = sizes["N"] // groups
    if min(outputs, sizes["C"], inner) < 1:
        return 1, groups, _ceil(sizes["C"], inner), _ceil(outputs, _BLOCK)
    together = min(math.lcm(inner // math.gcd(sizes["C"], inner), _BLOCK // math.gcd(outputs, _BLOCK)), groups)
    return together, _ceil(groups, together), _ceil(together * sizes["C"], inner), _ceil(together * outputs, _BLOCK)


def _fractal(axes: str, *, is_transposed: bool = False) -> _Blocked:
    """Make the format of a convolution's weights: blocks of 16 outputs and C0 inputs. Transposed, inputs and outputs change places."""
    swapped = str.maketrans("NC", "CN") if is_transposed else {}

    def named(sizes: Sizes) -> Sizes:
        return {"D": 1} | {axis.translate(swapped): size for axis, size in sizes.items()}

    def shape(sizes: Sizes, stored: tuple[int, ...], groups: int) -> tuple[int, ...]:
        sizes, inner = named(sizes), stored[-1] if stored else 0
        if sizes["N"] % groups:
            return ()
        _, num_blocks, rows, columns = _sharing(sizes, inner, groups)
        return num_blocks * sizes["D"] * rows * sizes["H"] * sizes["W"], columns, _BLOCK, inner

    def undo(stored: Array, sizes: Sizes, groups: int) -> Array:
        sizes, inner = named(sizes), stored.shape[-1]
        together, num_blocks, rows, columns = _sharing(sizes, inner, groups)
        blocks = stored.reshape(num_blocks, sizes["D"], rows, sizes["H"], sizes["W"], columns * _BLOCK, inner)
        blocks = blocks.transpose(0, 5, 2, 6, 1, 3, 4)
        outputs, inputs = sizes["N"] // groups, sizes["C"]
        rest = sizes["D"], sizes["H"], sizes["W"]
        whole = blocks.reshape(num_blocks, columns * _BLOCK, rows * inner, *rest)
        parts = [whole[:, at * outputs : (at + 1) * outputs, at * inputs : (at + 1) * inputs] for at in range(together)]
        array = (
            (np.stack(parts, 1) if together > 1 else parts[0])
            .reshape(-1, outputs, inputs, *rest)[:groups]
            .reshape(sizes["N"], inputs, *rest)
        )
        array = array.swapaxes(0, 1) if is_transposed else array
        return array if "D" in axes else array[:, :, 0]

    return _Blocked(axes, shape, undo, lambda stored: None)


def _fractal_of_four() -> _Blocked:
    """Make the format of a convolution's weights with at most four inputs: they are padded to four and lie with H and W in one axis."""
    width = 4

    def shape(sizes: Sizes, stored: tuple[int, ...], groups: int) -> tuple[int, ...]:
        inner = stored[-1] if stored else 0
        if sizes["C"] > width or groups > 1:
            return ()
        return _ceil(width * sizes["H"] * sizes["W"], inner), _ceil(sizes["N"], _BLOCK), _BLOCK, inner

    def undo(stored: Array, sizes: Sizes, _: int) -> Array:
        rows = stored.transpose(1, 2, 0, 3).reshape(stored.shape[1] * _BLOCK, stored.shape[0] * stored.shape[3])
        used = rows[:, : width * sizes["H"] * sizes["W"]]
        array: Array = used.reshape(rows.shape[0], sizes["H"], sizes["W"], width).transpose(0, 3, 1, 2)
        return array

    return _Blocked("NCHW", shape, undo, lambda stored: None)


_BLOCKED: Final = {name: _split(layout) for name, layout in _SPLIT.items()} | {
    "FRACTAL_Z": _fractal("NCHW"),
    "FRACTAL_Z_3D": _fractal("NCDHW"),
    "FRACTAL_Z_3D_TRANSPOSE": _fractal("NCDHW", is_transposed=True),
    "FRACTAL_Z_C04": _fractal_of_four(),
}


def _matrix(stored: Array, source: str, original: tuple[int, ...], place: str) -> Array:
    """Put the last two axes together from their blocks, and cut them to their original sizes; axes before them may be merged."""
    if stored.ndim < 4:
        raise DamagedRunError(
            f"{place} is stored as {source} with {stored.ndim} axes, which has at least four; take it as it is stored, without a format"
        )
    *leading, first, second, block_h, block_w = stored.shape
    is_w_first = _MATRICES[source].startswith("W")
    num_w, num_h = (first, second) if is_w_first else (second, first)
    wanted = original or (*leading, num_h * block_h, num_w * block_w)
    *batch, height, width = (1, *wanted) if len(wanted) == 1 else wanted
    if (_ceil(height, block_h), _ceil(width, block_w)) != (num_h, num_w) or math.prod(batch) != math.prod(leading):
        raise DamagedRunError(
            f"{place} is stored as {source} of shape {list(stored.shape)}, which no tensor of original shape {list(original)} gives; "
            "take it as it is stored, without a format"
        )
    blocks = stored.reshape(-1, *stored.shape[-4:])
    blocks = blocks.transpose(0, 2, 3, 1, 4) if is_w_first else blocks.transpose(0, 1, 3, 2, 4)
    array: Array = blocks.reshape(blocks.shape[0], num_h * block_h, num_w * block_w)[:, :height, :width].reshape(wanted)
    return array
