# SPDX-License-Identifier: Apache-2.0
"""Turn the recorded arguments of a call into values: the `$` notation of `model.records`, and the stored bytes of tensors.

Every value is made on the CPU, whatever device a record names. An object or a long text was recorded in part; decoding it raises
NotReplayable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ulpscope.model import DTYPES, Arguments, Slot, TensorData, TensorRecord
from ulpscope.numerics.casting import as_bytes
from ulpscope.replay.program import NotReplayable, Reader

__all__ = [
    "Decoding",
    "bytes_of",
    "data_of",
    "decode_arguments",
    "read_tensor",
    "slots_named",
    "tensor_of",
    "with_slots",
    "zeros_like_record",
]

_LONGEST_CONTAINER = 4096  # capture cuts there
_DEEPEST = 64
_LONGEST_INTEGER = 64
_SPARSEST = 8
_DEVICE = re.compile(r"(cpu|cuda|npu|xpu|mps|hpu|mlu|musa|ipu|mtia|privateuseone)(:\d{1,4})?")
_TENSOR_TYPE = re.compile(r"torch\.(?:\w{1,20}\.)?(Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Tensor")
_TENSOR_TYPES = {
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Double": torch.float64,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


@dataclass(frozen=True, slots=True)
class Decoding:
    """The values to put in for the notation: a tensor for each slot, a dtype for each recorded dtype, one device."""

    tensors: Mapping[Slot, Any]
    dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    device: str = "cpu"


def decode_arguments(arguments: Arguments, decoding: Decoding) -> tuple[list[Any], dict[str, Any]]:
    """Decode positional and keyword arguments to values."""
    args = [_decode(value, decoding, 0) for value in arguments.args]
    kwargs = {name: _decode(value, decoding, 0) for name, value in (arguments.kwargs or {}).items() if name != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = decoding.device
    return args, kwargs


def _decode(value: Any, decoding: Decoding, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _decode_text(value, decoding)
    if depth > _DEEPEST:
        raise NotReplayable("its arguments are nested too deeply")
    if isinstance(value, (list, tuple)):
        if len(value) >= _LONGEST_CONTAINER:
            raise NotReplayable("a long argument was recorded in part")
        return [_decode(item, decoding, depth + 1) for item in value]
    if not isinstance(value, dict):
        raise NotReplayable(f"an argument of type {type(value).__name__} was recorded, which is none of ours")
    key = next(iter(value), "")
    if not isinstance(key, str) or not key.startswith("$"):
        return {name: _decode(item, decoding, depth + 1) for name, item in value.items()}
    try:
        return _decode_marked(key, value[key], value, decoding, depth)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError):
        raise NotReplayable(f"the argument {str(value)[:60]} cannot be read") from None


def _decode_text(text: str, decoding: Decoding) -> Any:
    if text.endswith("…"):
        raise NotReplayable("a long text among its arguments was recorded in part")
    if _DEVICE.fullmatch(text):
        return decoding.device
    if match := _TENSOR_TYPE.fullmatch(text):
        return decoding.dtype(_TENSOR_TYPES[match[1]])
    return text


def _decode_marked(key: str, value: Any, whole: dict[str, Any], decoding: Decoding, depth: int) -> Any:
    match key:
        case "$tensor":
            return _tensor(value, decoding)
        case "$tuple":
            return tuple(_decode(list(value), decoding, depth + 1))
        case "$dtype":
            return decoding.dtype(_dtype(value))
        case "$device":
            if str(value).startswith("meta"):
                raise NotReplayable("it runs on the meta device, which has no values")
            return torch.device(decoding.device)
        case "$size":
            return torch.Size([int(size) for size in value])
        case "$slice":
            start, stop, step = value
            return slice(*(_decode(part, decoding, depth + 1) for part in (start, stop, step)))
        case "$ellipsis":
            return Ellipsis
        case "$memory_format":
            return _MEMORY_FORMATS[value]
        case "$layout":
            if value != "strided":
                raise NotReplayable(f"the layout {str(value)[:20]} is not replayed")
            return torch.strided
        case "$complex":
            real, imaginary = value
            return complex(float(real), float(imaginary))
        case "$int":
            if len(value) > _LONGEST_INTEGER:
                raise NotReplayable("an integer among its arguments is too long")
            return int(value)
        case "$object" if value == "torch._C.Generator":
            return None
        case "$object":
            raise NotReplayable(f"an argument of type {str(value)[:60]} is not part of the record")
    raise NotReplayable(f"the argument {str(whole)[:60]} is not in our notation")


def _tensor(text: Any, decoding: Decoding) -> Any:
    slot = Slot.parse(text)
    if slot not in decoding.tensors:
        raise NotReplayable(f"the record lacks the tensor {text[:60]} that its arguments name")
    return decoding.tensors[slot]


def _dtype(name: Any) -> torch.dtype:
    if name not in DTYPES:
        raise NotReplayable(f"the dtype {str(name)[:20]} is not replayed")
    return getattr(torch, name)  # type: ignore[no-any-return]


def slots_named(arguments: Arguments) -> tuple[Slot, ...]:
    """Return the slots that the arguments name, in order."""
    found: list[Slot] = []
    _walk([*arguments.args, *(arguments.kwargs or {}).values()], found, 0)
    return tuple(found)


def _walk(value: Any, found: list[Slot], depth: int) -> None:
    if depth > _DEEPEST:
        raise NotReplayable("its arguments are nested too deeply")
    if isinstance(value, dict):
        if "$tensor" in value:
            try:
                found.append(Slot.parse(str(value["$tensor"])))
            except ValueError:
                raise NotReplayable(f"the argument {str(value)[:60]} names no slot") from None
        else:
            for item in value.values():
                _walk(item, found, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _walk(item, found, depth + 1)


def with_slots(arguments: Arguments, slots: tuple[Slot, ...]) -> Arguments:
    """Return the same arguments with these slots in their places: the third slot named becomes the third of `slots`."""
    named = slots_named(arguments)
    if set(named) <= set(slots):
        return arguments
    if len(named) != len(slots):
        raise NotReplayable(f"{len(named)} tensors cannot take the places of {len(slots)}")
    texts = {str(old): str(new) for old, new in zip(named, slots, strict=True)}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: texts.get(item, item) if key == "$tensor" else renamed(item) for key, item in value.items()}
        return type(value)(renamed(item) for item in value) if isinstance(value, (list, tuple)) else value

    return Arguments(args=renamed(arguments.args), kwargs=renamed(arguments.kwargs) if arguments.kwargs else None)


def read_tensor(record: TensorRecord, read: Reader) -> torch.Tensor:
    """Read the values of a slot, with their recorded strides where those need little memory."""
    if record.content is None:
        raise NotReplayable(f"the values of {record.slot} were not kept" + (f" ({record.note})" if record.note else ""))
    data = read(record.content)
    if data.shape != record.shape:
        raise NotReplayable(f"of {record.slot} only the local shard {data.shape} was kept")
    tensor = tensor_of(data)
    if record.strides is None or tensor.stride() == record.strides or not _is_rebuildable(record.shape, record.strides):
        return tensor
    return torch.empty_strided(record.shape, record.strides, dtype=tensor.dtype).copy_(tensor)


def tensor_of(data: TensorData) -> torch.Tensor:
    """Copy the bytes into a new tensor."""
    dtype = getattr(torch, data.dtype)
    raw = as_bytes(data)
    if raw.size == 0:
        return torch.empty(data.shape, dtype=dtype)
    values = torch.from_numpy(raw.copy())
    if dtype is torch.bool:
        return (values != 0).reshape(data.shape)
    return values.view(dtype).reshape(data.shape)


def data_of(tensor: torch.Tensor) -> TensorData:
    """Return a tensor as TensorData; its bytes share the tensor's memory where that is contiguous."""
    return TensorData(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor).numpy())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in order.

    torch calls a single element contiguous whatever its stride, but gives bytes only for stride 1.
    """
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def zeros_like_record(record: TensorRecord) -> torch.Tensor:
    """Return zeros for an input whose memory nothing had written to."""
    return torch.zeros(record.shape, dtype=_dtype(record.dtype))


def _is_rebuildable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether the strides give each element a place of its own, without much memory between them."""
    if len(shape) != len(strides) or any(stride < 0 for stride in strides):
        return False
    extent = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size <= 1:
            continue
        if stride < extent:
            return False
        extent = stride * (size - 1) + extent
    return extent <= _SPARSEST * max(1, math.prod(shape))
