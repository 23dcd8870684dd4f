# SPDX-License-Identifier: Apache-2.0
"""Share code among the readers of other tools' dumps: our names for their words, and a `Run` over one text file for each rank and step.

Nothing in a dump is trusted. A file name is a plain name inside the folder of its dump, a tensor file is opened without running its code,
and its shape has to be the recorded one.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ulpscope.errors import DamagedRunError, NotARunError
from ulpscope.model import DTYPES, CallName, CallRecord, Frame, LedgerEntry, RunInfo, Slot, Summary, TensorData, TensorRecord
from ulpscope.store.foreign.torch_archive import open_plain_tensor, open_unusual_tensor

__all__ = [
    "NOT_RECORDED",
    "ForeignRun",
    "Numbering",
    "Place",
    "Reading",
    "canonical_dtype",
    "fingerprint",
    "is_crowded",
    "join_backward",
    "mark_late_inputs",
    "nested_arguments",
    "number",
    "number_ranks",
    "open_tensor",
    "operation",
    "summary",
    "tensor_shape",
    "user_frames",
]

NOT_RECORDED: dict[str, Any] = {"$object": "unknown", "repr": "not recorded by the tool"}

_NAMESPACES = {"Functional": "functional", "Torch": "torch", "Distributed": "distributed", "NPU": "npu", "Aten": "aten"}

# The name under which torch shows the call of an operator to a TorchFunctionMode, and so the name in a run of ours. An operator that is
# missing here keeps its name.
_OPERATORS = {
    "__abs__": "abs",
    "__add__": "add",
    "__div__": "div",
    "__ge__": "ge",
    "__gt__": "gt",
    "__iadd__": "add_",
    "__idiv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
    "__imul__": "mul_",
    "__isub__": "sub_",
    "__itruediv__": "div_",
    "__le__": "le",
    "__lt__": "lt",
    "__matmul__": "matmul",
    "__mod__": "remainder",
    "__mul__": "mul",
    "__ne__": "ne",
    "__neg__": "neg",
    "__pos__": "positive",
    "__radd__": "add",
    "__rand__": "bitwise_and",
    "__rdiv__": "__rtruediv__",
    "__rmul__": "mul",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__sub__": "sub",
    "__truediv__": "div",
}

# Calls that are a single autograd node, with one gradient for each tensor argument in order. Only for these does the
# node that the other tools hook say which argument a gradient belongs to. Calls that may return their argument itself
# (`to`, `contiguous`, `reshape`, `dropout`) are not among them: the node is then that of the call before.
_SINGLE_NODE = """
    abs add add_ avg_pool2d batch_norm bmm clamp clone conv1d conv2d conv3d cos div div_ elu embedding erf exp expand gelu group_norm
    hardswish hardtanh layer_norm leaky_relu log log_softmax masked_fill max_pool2d mean mul mul_ neg permute pow relu relu_ rsqrt
    sigmoid silu sin softmax softplus sqrt square sub sub_ sum t tanh transpose unsqueeze view __getitem__ __rsub__
"""
_SINGLE_NODE_CALLS = frozenset(_SINGLE_NODE.split())

_MOST_SKIPPED = 64  # arguments that are no tensors: the tool does not record them
_MOST_SKIPPED_OF_EACH = 16
_MOST_CROWDED = 16 << 20
_MOST_NPY_HEADER = 1 << 16

_NPY_HEADER = re.compile(
    rb"\{'descr': '(?P<dtype>[<|][a-z][0-9]{1,2})', 'fortran_order': False, "
    rb"'shape': \((?P<shape>(?:[0-9]{1,18}, )*(?:[0-9]{1,18},?)?)\), \} *\n"
)
_NPY_DTYPES = {
    b"<f2": "float16",
    b"<f4": "float32",
    b"<f8": "float64",
    b"<i2": "int16",
    b"<i4": "int32",
    b"<i8": "int64",
    b"<c8": "complex64",
    b"<c16": "complex128",
    b"|b1": "bool",
    b"|i1": "int8",
    b"|u1": "uint8",
}
_LIBRARY_FRAME = re.compile(r"[/\\](torch|torch_npu|msprobe|ptdbg_ascend)[/\\]|^<frozen ")


def operation(namespace: str, name: str) -> str:
    """Return our name of an operation: `operation("Tensor", "__add__")` is `Tensor.add`."""
    if namespace == "Tensor":
        name = _OPERATORS.get(name, name)
    return f"{_NAMESPACES.get(namespace, namespace)}.{name}"


class Numbering:
    """Call names for the calls of another tool, which may count apart calls that we count together.

    Where several of its operations become one of ours (`__add__` and `__radd__`, or two modules of one class), calls are counted anew in
    order of appearance. Elsewhere they keep their number, so that a partial dump still matches.
    """

    def __init__(self, calls: Iterable[tuple[str, Hashable, int]]) -> None:
        """Count the calls, each given as (our operation, its operation, its count)."""
        self._seen: dict[str, dict[tuple[Hashable, int], int]] = {}
        for op, source, index in calls:
            group = self._seen.setdefault(op, {})
            group.setdefault((source, index), len(group))
        self._folded = {op for op, group in self._seen.items() if len({source for source, _ in group}) > 1}

    def knows(self, op: str, source: Hashable, index: int) -> bool:
        return (source, index) in self._seen.get(op, {})

    def name(self, op: str, source: Hashable, index: int) -> CallName:
        return CallName(op, self._seen[op][source, index] if op in self._folded else index)


def mark_late_inputs(records: Iterable[CallRecord]) -> Iterator[CallRecord]:
    """Mark inputs that were recorded after the call: some versions read them too late, when an in-place call had changed them.

    In a dump of such a version the first input of every in-place call equals its output.
    """
    every = tuple(records)
    pairs = [_first_in_and_out(record) for record in every if _is_in_place(record)]
    is_late = bool(pairs) and all(first is not None and first == out for first, out in pairs)
    for record in every:
        yield replace(record, slots=tuple(map(_as_mutated, record.slots))) if is_late and _is_in_place(record) else record


def _is_in_place(record: CallRecord) -> bool:
    return record.phase == "forward" and re.fullmatch(r".*[^_]_", record.call.short) is not None


def _first_in_and_out(record: CallRecord) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
    slots = {str(slot.slot): (slot.shape, slot.summary, slot.fingerprint) for slot in record.slots}
    return slots.get("input.0"), slots.get("output.0")


def _as_mutated(record: TensorRecord) -> TensorRecord:
    is_first = str(record.slot) == "input.0"
    return replace(record, slot=Slot("mutated", (0,)), note="recorded after the call") if is_first else record


def _with_gradients_of_nodes(record: CallRecord, forward: CallRecord | None) -> CallRecord:
    """Put the gradients of an autograd node under the arguments that they belong to, where that is certain.

    The other tools hook the last node of a call, so the gradients of a composite call belong to an operation inside it. A gradient without
    a certain argument goes to `output.N.node`, which compares with another dump but not with a run of ours.
    """
    gradients = [slot for slot in record.slots if slot.slot.role == "output"]
    others = [slot for slot in record.slots if slot.slot.role != "output"]
    inputs = _differentiable(forward) if forward else []
    is_certain = record.call.short in _SINGLE_NODE_CALLS and [slot.shape for slot in inputs] == [slot.shape for slot in gradients]
    paths = [slot.slot.path for slot in inputs] if is_certain else [(*slot.slot.path, "node") for slot in gradients]
    named = (replace(slot, slot=Slot("output", path)) for slot, path in zip(gradients, paths, strict=True))
    return replace(record, slots=(*others, *named))


def _differentiable(forward: CallRecord) -> list[TensorRecord]:
    """Return the inputs that require a gradient; where the tool did not note that, those that might."""
    inputs = [slot for slot in forward.slots if slot.slot.role == "input"]
    floating = [slot for slot in inputs if slot.dtype in DTYPES and DTYPES[slot.dtype].is_floating]
    return [slot for slot in inputs if slot.requires_grad] or floating


def join_backward(
    records: Iterable[CallRecord],
    attribute: Callable[[CallRecord, CallRecord | None], CallRecord] = _with_gradients_of_nodes,
) -> Iterator[CallRecord]:
    """Let each backward record stand where its forward record stood; `attribute` gets both and says where its gradients belong."""
    forwards: dict[CallName, CallRecord] = {}
    for record in records:
        forward = forwards.get(record.call)
        if record.phase == "forward":
            forwards[record.call] = record
        elif forward is not None:
            record = replace(record, module=forward.module, parent=forward.parent, stack=record.stack or forward.stack)
        yield attribute(record, forward) if record.phase == "backward" and record.level == "api" else record


def canonical_dtype(text: str) -> str:
    """Return our name of a dtype: `float32` for `torch.float32` and `Float32`; an unknown name stays as it is."""
    name = text.rpartition(".")[2].lower()
    return name if name in DTYPES else text


def tensor_shape(value: object) -> tuple[int, ...] | None:
    """Return a JSON value as a shape, or None if no tensor can have it."""
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        return None
    return tuple(value) if math.prod(value) < 2**63 else None


def number(value: object) -> float | None:
    """Return a JSON value as a float, or None if it is no number."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def summary(dtype: str, shape: tuple[int, ...], *, low: object, high: object, mean: object, norm: object) -> Summary:
    """Make a summary of min, max, mean and 2-norm as other tools take them.

    Their extremes propagate NaN, so finite extremes prove that nothing is NaN or infinite. A count of 1 stands for "at least one". Of
    complex tensors they take the absolute values, of which only the norm means the same as ours.
    """
    numel = math.prod(shape)
    if dtype not in DTYPES or numel == 0:
        return Summary(numel)
    is_complex = DTYPES[dtype].kind == "complex"
    smallest, largest = number(low), number(high)
    length = _finite(number(norm))
    rms = abs(length) / math.sqrt(2 * numel if is_complex else numel) if length is not None else None
    if smallest is None or largest is None or is_complex:
        return Summary(numel, rms=rms)
    if math.isnan(smallest) or math.isnan(largest):
        return Summary(numel, num_nan=1)
    num_posinf = int(largest == math.inf)
    num_neginf = int(smallest == -math.inf)
    return Summary(numel, smallest, largest, _finite(number(mean)), rms, num_nan=0, num_posinf=num_posinf, num_neginf=num_neginf)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def fingerprint(text: object) -> str | None:
    """Return the checksum of a dump with its scheme: CRC-32 or a 64-bit XOR fold, both under the name md5 there, or a true MD5."""
    if not isinstance(text, str):
        return None
    for scheme, pattern in (("crc32", r"[0-9a-f]{8}"), ("xor64", r"0x[0-9a-f]{16}"), ("md5", r"[0-9a-f]{32}")):
        if re.fullmatch(pattern, text):
            return f"{scheme}:{text.removeprefix('0x')}"
    return None


def nested_arguments(leaves: Mapping[tuple[int | str, ...], Any], file: Path) -> list[Any]:
    """Nest values by path into lists; positions that the tool skipped are marked."""
    groups: dict[int, dict[tuple[int | str, ...], Any]] = {}
    for path, value in leaves.items():
        groups.setdefault(int(path[0]), {})[path[1:]] = value
    count = max(groups, default=-1) + 1
    if count > _MOST_SKIPPED + _MOST_SKIPPED_OF_EACH * len(groups):
        raise DamagedRunError(f"'{file}' tells of argument {count - 1} of a call but of only {len(groups)} others; dump this run again")
    values = (groups.get(at, {(): NOT_RECORDED}) for at in range(count))
    return [group[()] if () in group else nested_arguments(group, file) for group in values]


def is_crowded(text: bytes) -> bool:
    """Tell whether a JSON text is mostly brackets, each pair of which takes twenty times as much memory when parsed; no dump is."""
    return len(text) > _MOST_CROWDED and text.count(b"[") + text.count(b"{") > max(_MOST_CROWDED, len(text)) // 8


def user_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames of the user's own code; all frames if there are none."""
    every = tuple(frames)
    return tuple(frame for frame in every if not _LIBRARY_FRAME.search(frame.file)) or every


def number_ranks(folders: Iterable[Path], *, process_ids_from: int | None = None) -> dict[int, Path]:
    """Give each rank folder its number.

    `rank3` is rank 3. A folder named after a process (`proc4711`, or `rank` and a number from `process_ids_from` up) has no rank in its
    name: such folders get the lowest free ranks, in order of process id.
    """
    ranks: dict[int, Path] = {}
    processes: list[tuple[int, Path]] = []
    for folder in folders:
        match = re.fullmatch(r"(rank|proc|pid)(\d*)", folder.name)
        kind, count = (match[1], int(match[2] or 0)) if match else ("rank", 0)
        is_process = kind != "rank" or (process_ids_from is not None and count >= process_ids_from)
        if is_process or count in ranks:
            processes.append((count, folder))
        else:
            ranks[count] = folder
    free = (rank for rank in range(len(ranks) + len(processes)) if rank not in ranks)
    ranks.update(zip(free, (folder for _, folder in sorted(processes)), strict=False))
    return dict(sorted(ranks.items()))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one step of one rank: the text file with its records, and the folder of its tensors."""

    rank: int
    step: int
    file: Path
    tensors: Path

    def kept(self) -> frozenset[str]:
        """Return the names of the tensor files in the folder."""
        if not self.tensors.is_dir():
            return frozenset()
        return frozenset(entry.name for entry in self.tensors.iterdir() if entry.suffix in (".pt", ".npy"))


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of the text file of one place."""

    records: tuple[CallRecord, ...]
    ledger: tuple[LedgerEntry, ...] = ()
    is_complete: bool = True
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        slots = (slot for record in self.records for slot in record.slots)
        object.__setattr__(self, "shapes", {slot.content: slot.shape for slot in slots if slot.content is not None})


class ForeignRun:
    """A dump of another tool as a `Run`. It keeps the last step in memory."""

    def __init__(self, path: Path, info: RunInfo, places: Iterable[Place], read: Callable[[Place], Reading]) -> None:
        self._path = path
        self._info = info
        self._places = {(place.rank, place.step): place for place in places}
        self._read = read
        self._last: tuple[Place, Reading] | None = None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def info(self) -> RunInfo:
        return self._info

    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self._places}))

    def steps(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(step for found, step in self._places if found == rank))

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        yield from self._reading(rank, step).records

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        shape = self._reading(rank, step).shapes.get(content)
        folder = self._place(rank, step).tensors
        if shape is None or not (folder / content).is_file():
            raise DamagedRunError(f"'{folder}' keeps no tensor named '{content}'; compare by statistics, or copy the missing file there")
        file = folder / content
        if file.is_symlink() and file.resolve().parent != folder.resolve():
            raise DamagedRunError(f"'{file}' is a link that leads out of the dump to '{file.resolve()}'; it is not opened")
        data = open_tensor(file)
        if data.shape != shape:
            raise DamagedRunError(
                f"'{file}' holds a tensor of shape {list(data.shape)}, but its dump says {list(shape)}; dump this run again"
            )
        return data

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return tuple(entry for step in self.steps(rank) for entry in self._reading(rank, step).ledger)

    def is_complete(self, rank: int, step: int) -> bool:
        return self._reading(rank, step).is_complete

    def _place(self, rank: int, step: int) -> Place:
        try:
            return self._places[rank, step]
        except KeyError:
            raise NotARunError(f"'{self._path}' holds no step {step} of rank {rank}; it holds {_listing(self._places)}") from None

    def _reading(self, rank: int, step: int) -> Reading:
        place = self._place(rank, step)
        if self._last is None or self._last[0] != place:
            self._last = (place, self._read(place))
        return self._last[1]


def _listing(places: Iterable[tuple[int, int]]) -> str:
    names = [f"step {step} of rank {rank}" for rank, step in sorted(places)]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def open_tensor(file: Path) -> TensorData:
    """Open the tensor in a .npy or .pt file, without running any code in it."""
    try:
        return _open_npy(file) if file.suffix == ".npy" else _open_pt(file)
    except DamagedRunError:
        raise
    except Exception as error:
        # numpy and torch raise nearly any exception for bytes that they do not understand
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        raise DamagedRunError(f"'{file}' cannot be read as a tensor ({reason}); copy it again, or dump this run again") from error


def _open_npy(file: Path) -> TensorData:
    return _open_plain_npy(file) or _open_with_numpy(file)


def _open_plain_npy(file: Path) -> TensorData | None:
    """Map the array in a file as `numpy.save` writes it; None for any other layout, which NumPy may know."""
    with file.open("rb") as stream:
        head = stream.read(10)
        length = int.from_bytes(head[8:], "little")
        match = _NPY_HEADER.fullmatch(stream.read(length)) if head[:8] == b"\x93NUMPY\x01\x00" else None
        if match is None or (name := _NPY_DTYPES.get(match["dtype"])) is None:
            return None
        shape = tuple(int(size) for size in match["shape"].split(b",") if size.strip())
        begin, size = len(head) + length, math.prod(shape) * DTYPES[name].size_bytes
        if size == 0 or begin + size > os.fstat(stream.fileno()).st_size:
            return None
        mapping = mmap.mmap(stream.fileno(), begin + size, access=mmap.ACCESS_READ)
    return TensorData(name, shape, memoryview(mapping)[begin:])


def _open_with_numpy(file: Path) -> TensorData:
    import numpy as np

    with file.open("rb") as stream:
        head = stream.read(12)
    if head[:6] != b"\x93NUMPY":
        raise ValueError("it does not begin as numpy.save begins a file")
    if head[6:7] != b"\x01" and int.from_bytes(head[8:], "little") > _MOST_NPY_HEADER:
        raise ValueError("it claims a header that is larger than any")
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    name = array.dtype.newbyteorder("=").name
    if name not in DTYPES:
        raise DamagedRunError(f"'{file}' holds values of type '{array.dtype}', which is no tensor's; dump this run again")
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return TensorData(name, array.shape, flat.view(np.uint8).data)


def _open_pt(file: Path) -> TensorData:
    return open_plain_tensor(file) or open_unusual_tensor(file)
