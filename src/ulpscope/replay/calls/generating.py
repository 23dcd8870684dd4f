# SPDX-License-Identifier: Apache-2.0
"""Generate inputs for calls of which only statistics were kept: the recorded minimum and maximum, size, zeros and non-finite numbers.

Mean, rms and counts are met as well as the range allows. Some operations need more (indices without repetition, sorted boundaries, positive
definite matrices, classes, masks that hide no whole row); one table maps their names to the function that makes such values. Everything
follows from the seed and from the record, so a failure can be made again; slots with the same fingerprint get the same values. Sizes are
checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ulpscope.model import DTYPES, CallRecord, Phase, Summary, TensorData, TensorRecord
from ulpscope.replay.calls.arguments import data_of
from ulpscope.replay.program import NotReplayable

__all__ = ["Generated", "Planted"]

_MOST_ELEMENTS = 2**28
_UNKNOWN = Summary(numel=0)
_IGNORED_CLASS = -100

Shape = Callable[["_Draft"], torch.Tensor]


class Planted:
    """A cache of values made lately, up to so many bytes: a backward call runs on the same values as its forward call."""

    def __init__(self, most_bytes: int = 1 << 25) -> None:
        self._most_bytes = most_bytes
        self._values: dict[str, tuple[Summary, TensorData]] = {}
        self._num_bytes = 0

    def find(self, key: str, summary: Summary) -> TensorData | None:
        found = self._values.get(key)
        return found[1] if found is not None and found[0] == summary else None

    def keep(self, key: str, summary: Summary, data: TensorData) -> None:
        size = _size(data)
        if key in self._values or size > self._most_bytes:
            return
        while self._num_bytes + size > self._most_bytes:
            self._num_bytes -= _size(self._values.pop(next(iter(self._values)))[1])
        self._values[key] = summary, data
        self._num_bytes += size


def _size(data: TensorData) -> int:
    return max(memoryview(data.buffer).nbytes, 1024)


class Generated:
    """Generated values for tensors that were not kept: `record` names them, `read` makes them, or takes them from `planted`."""

    def __init__(self, seed: int = 0, planted: Planted | None = None) -> None:
        self._seed = seed
        self._planted = planted or Planted(0)
        self._drafts: dict[str, tuple[TensorRecord, CallRecord, int]] = {}

    def record(self, record: CallRecord, *, forward: CallRecord | None = None) -> CallRecord:
        """Return the record with a content key for every tensor; `forward` is the call that a backward record belongs to."""
        _check_sizes(record)
        return replace(record, slots=tuple(self._named(slot, forward or record, record.phase) for slot in record.slots))

    def read(self, content: str) -> TensorData:
        draft = _Draft(*self._drafts[content])
        structure = _structure_of(draft)
        found = self._planted.find(content, draft.summary) if structure is None else None
        if found is not None:
            return found
        tensor = (structure or _plain)(draft).reshape(draft.shape).to(draft.dtype)
        made = data_of(tensor)
        if structure is None:
            self._planted.keep(content, draft.summary, made)
        return made

    def _named(self, slot: TensorRecord, call: CallRecord, phase: Phase) -> TensorRecord:
        if slot.dtype not in DTYPES:
            return slot
        identity = slot.fingerprint or f"{call.rank}/{call.step}/{call.call}/{phase}/{slot.slot}"
        key = hashlib.sha256(f"{self._seed}/{identity}/{slot.dtype}/{slot.shape}".encode("utf-8", "replace")).hexdigest()[:32]
        self._drafts.setdefault(key, (slot, call, int(key[:15], 16)))
        return replace(slot, content=key)


class _Draft:
    """One tensor to be made, and the call that it is made for."""

    def __init__(self, slot: TensorRecord, call: CallRecord, seed: int) -> None:
        self.slot, self.call = slot, call
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def summary(self) -> Summary:
        return self.slot.summary or _UNKNOWN

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slot.shape

    @property
    def numel(self) -> int:
        return math.prod(self.slot.shape)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.slot.dtype)  # type: ignore[no-any-return]

    def argument(self, position: int, name: str, default: object = None) -> object:
        """Return a non-tensor argument of the call, by its place or its name."""
        arguments = self.call.arguments
        if arguments is None:
            return default
        named = arguments.kwargs or {}
        if name in named:
            return named[name]
        return arguments.args[position] if len(arguments.args) > position else default

    def size_of(self, path: tuple[int | str, ...], role: str = "input") -> tuple[int, ...] | None:
        return next((slot.shape for slot in self.call.slots if slot.slot.role == role and slot.slot.path == path), None)


def _check_sizes(record: CallRecord) -> None:
    total = 0
    for slot in record.slots:
        if any(size < 0 for size in slot.shape):
            raise NotReplayable(f"the recorded shape {slot.shape} of {slot.slot} is none")
        total += math.prod(slot.shape)
    if total > _MOST_ELEMENTS:
        raise NotReplayable(f"its tensors have {total:,} elements, more than are made up here")


# ------------------------------------------------------------------------------------------------------------ plain values


def _plain(draft: _Draft) -> torch.Tensor:
    if draft.dtype == torch.bool:
        return _booleans(draft)
    return _floats(draft) if DTYPES[draft.slot.dtype].is_floating else _integers(draft)


def _floats(draft: _Draft) -> torch.Tensor:
    """Draw normal numbers of the recorded mean, size and range, both ends included; plant the counted zeros and non-finite numbers."""
    if draft.dtype.is_complex:
        parts = [_reals(draft, draft.numel) for _ in range(2)]
        return torch.complex(*parts).to(torch.complex128)
    return _reals(draft, draft.numel)


def _reals(draft: _Draft, count: int) -> torch.Tensor:
    low, high = _range(draft)
    mean, spread = _moments(draft.summary, low, high)
    values = torch.empty(count, dtype=torch.float64).normal_(generator=draft.generator).mul_(spread).add_(mean)
    values = _folded(values, low, high)
    if not count:
        return values
    places = torch.randperm(count, generator=draft.generator) if count <= 1 << 22 else torch.arange(count)
    at = _plant_counts(values, draft.summary, places)
    if at + 1 < count:
        values[places[at]], values[places[at + 1]] = low, high
    elif at < count:
        values[places[at]] = high
    return values


def _plant_counts(values: torch.Tensor, summary: Summary, places: torch.Tensor) -> int:
    """Plant as many NaN, infinities and zeros as were counted, as far as both ends of the range keep a place."""
    at = 0
    wanted = ((math.nan, summary.num_nan), (math.inf, summary.num_posinf), (-math.inf, summary.num_neginf), (0.0, summary.num_zero))
    for value, many in wanted:
        room = len(places) - at - (2 if value == 0.0 and (summary.min or summary.max) else 0)
        many = max(0, min(many or 0, room))
        values[places[at : at + many]] = value
        at += many
    return at


def _folded(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Fold values beyond an end of the range back inside, so that none pile up at the end."""
    if not high > low:
        return values.fill_(low)
    width = high - low
    places = torch.remainder(values - low, 2 * width)
    return torch.where(places > width, 2 * width - places, places).add_(low).clamp_(low, high)


def _range(draft: _Draft) -> tuple[float, float]:
    """Return the recorded range without its infinities."""
    summary, kind = draft.summary, DTYPES[draft.slot.dtype]
    if summary.min is None or summary.max is None or math.isnan(summary.min) or math.isnan(summary.max):
        return (-3.0, 3.0)
    mean, rms = summary.mean or 0.0, summary.rms or 1.0
    low = summary.min if math.isfinite(summary.min) else mean - 4 * rms
    high = summary.max if math.isfinite(summary.max) else mean + 4 * rms
    low, high = (min(max(end, -kind.max), kind.max) for end in (low, high))
    return (low, high) if low <= high else (high, low)


def _moments(summary: Summary, low: float, high: float) -> tuple[float, float]:
    """Compute mean and spread of the draw; zeros are planted later and would lower both once more."""
    mean = summary.mean if summary.mean is not None and low <= summary.mean <= high else (low + high) / 2
    if summary.rms is None or not math.isfinite(summary.rms):
        return mean, (high - low) / 4
    share = 1 - (summary.num_zero or 0) / max(1, summary.numel)
    if 0 < share < 1:
        mean, square = mean / share, summary.rms**2 / share
    else:
        square = summary.rms**2
    return min(max(mean, low), high), math.sqrt(max(0.0, square - mean**2)) or (high - low) / 4


def _integers(draft: _Draft) -> torch.Tensor:
    """Draw uniformly from the recorded range, ends included; exactly as many elements as the range holds become a permutation."""
    low, high = _ends(draft)
    count = draft.numel
    if count == high - low + 1:
        return torch.randperm(count, generator=draft.generator) + low
    values = _uniform(draft, low, high)
    if count:
        values[0], values[-1] = low, high
    return values


def _uniform(draft: _Draft, low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high + 1, (draft.numel,), generator=draft.generator) if high > low else torch.full((draft.numel,), low)


def _ends(draft: _Draft) -> tuple[int, int]:
    low, high = draft.summary.min, draft.summary.max
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return (0, 0)
    limits = torch.iinfo(draft.dtype)
    most = min(limits.max, 2**62)
    return (max(limits.min, int(low)), min(most, int(high)))


def _booleans(draft: _Draft) -> torch.Tensor:
    """Make as many true values as were counted, so that indexing with them gives the recorded shape."""
    numel, summary = draft.numel, draft.summary
    if summary.num_zero is not None:
        true = numel - min(numel, summary.num_zero)
    elif summary.mean is not None:
        true = round(summary.mean * numel)
    else:
        low, high = summary.min or 0.0, 1.0 if summary.max is None else summary.max
        true = 0 if not high else numel if low else numel // 2
    values = torch.zeros(numel, dtype=torch.bool)
    values[torch.randperm(numel, generator=draft.generator)[:true]] = True
    return values


# ------------------------------------------------------------------------------------------------ what operations need


def _positive_definite(draft: _Draft) -> torch.Tensor:
    """Make a well-conditioned positive definite matrix; its largest entry (which lies on the diagonal) is as recorded."""
    *batch, rows, columns = draft.shape
    if rows != columns or not rows:
        return _floats(draft)
    noise = torch.empty(*batch, rows, 2 * rows, dtype=torch.float64).normal_(generator=draft.generator)
    found = noise @ noise.mT
    largest = draft.summary.max if draft.summary.max and math.isfinite(draft.summary.max) and draft.summary.max > 0 else float(found.max())
    return found * (largest / float(found.max()))


def _triangular(draft: _Draft) -> torch.Tensor:
    """Make a Cholesky factor, lower or upper."""
    factor = torch.linalg.cholesky(_positive_definite(draft)) if draft.shape[-1:] == draft.shape[-2:-1] else _floats(draft)
    is_upper = bool(draft.argument(2, "upper", False))
    return factor.mT if is_upper else factor


def _symmetric(draft: _Draft) -> torch.Tensor:
    found = _floats(draft).reshape(draft.shape)
    return (found + found.mT) / 2 if draft.shape[-1:] == draft.shape[-2:-1] else found


def _classes(draft: _Draft) -> torch.Tensor:
    """Draw target classes from the recorded range, and the ignored class where it was seen.

    Floating targets are shares, not classes, and are drawn as plain floats.
    """
    if DTYPES[draft.slot.dtype].is_floating:
        return _floats(draft)
    low, high = _ends(draft)
    ignored = draft.argument(6 if "cross_entropy" in draft.call.call.op else 4, "ignore_index", _IGNORED_CLASS)
    values = _uniform(draft, max(0, low), max(0, high))
    if draft.numel:
        values[-1] = max(0, high)
        if low < 0 and isinstance(ignored, int):
            values[: max(1, draft.numel // 8)] = ignored
    return values


def _distinct(draft: _Draft) -> torch.Tensor:
    """Draw indices without repetition: if two writes name one place, chance decides which of them stays."""
    if DTYPES[draft.slot.dtype].is_floating or draft.dtype == torch.bool:
        return _plain(draft)
    low, high = _ends(draft)
    along = draft.argument(1, "dim", 0)
    dim = along % max(1, len(draft.shape)) if isinstance(along, int) and not isinstance(along, bool) and len(draft.shape) > 1 else 0
    length = draft.shape[dim] if draft.shape else 1
    room = high - low + 1
    if room < length or room > 1 << 24 or draft.numel // max(1, length) * room > _MOST_ELEMENTS:
        return _integers(draft)
    others = [size for at, size in enumerate(draft.shape) if at != dim]
    order = torch.rand(*others, room, generator=draft.generator).argsort(-1)[..., :length]
    return order.movedim(-1, dim) + low if draft.shape else order[..., 0] + low


def _ascending(draft: _Draft) -> torch.Tensor:
    return _plain(draft).reshape(draft.shape).sort(-1).values


def _descending(draft: _Draft) -> torch.Tensor:
    return _integers(draft).reshape(draft.shape).sort(-1, descending=True).values


def _offsets(draft: _Draft) -> torch.Tensor:
    """Draw the offsets at which bags begin: ascending, from 0."""
    values = _integers(draft).reshape(draft.shape).sort(-1).values
    if values.numel():
        values[..., 0] = 0
    return values


def _counts(draft: _Draft) -> torch.Tensor:
    """Draw repetitions that add up to the recorded length of the result."""
    low, high = _ends(draft)
    values = _uniform(draft, low, high)
    made = draft.size_of((0,), "output")
    if made is None or not draft.numel:
        return values
    dim = draft.argument(2, "dim")
    wanted = made[dim] if isinstance(dim, int) and -len(made) <= dim < len(made) else math.prod(made)
    for at in range(draft.numel):
        missing = wanted - int(values.sum())
        if not missing:
            break
        values[at] = min(max(int(values[at]) + missing, low), high)
    return values


def _visible(draft: _Draft) -> torch.Tensor:
    """Draw a mask that leaves at least one position of every row visible."""
    values = _plain(draft).reshape(draft.shape)
    if len(draft.shape) < 2:
        return values
    if draft.dtype == torch.bool:
        values[..., 0] = True
    elif DTYPES[draft.slot.dtype].is_floating:
        first = values[..., 0]
        values[..., 0] = torch.where(torch.isfinite(first), first, torch.zeros_like(first))
    return values


def _probabilities(draft: _Draft) -> torch.Tensor:
    return _floats(draft).clamp(0.0, 1.0) if DTYPES[draft.slot.dtype].is_floating else _integers(draft)


_FIRST: tuple[tuple[int | str, ...], ...] = ((0,), ("input",), ("self",), ("A",))
_SECOND: tuple[tuple[int | str, ...], ...] = ((1,), ("input2",), ("target",), ("other",))
_INDEX: tuple[tuple[int | str, ...], ...] = ((1,), (2,), ("index",), (1, 0), (1, 1), (1, 2), ("indices",))

_STRUCTURES: tuple[tuple[str, tuple[tuple[int | str, ...], ...], Shape], ...] = (
    ("bernoulli", _FIRST, _probabilities),
    ("binary_cross_entropy", (*_FIRST, *_SECOND), _probabilities),
    ("cholesky cholesky_ex cholesky_inverse logdet", _FIRST, _positive_definite),
    ("cholesky_solve", _SECOND, _triangular),
    ("eigh eigvalsh", _FIRST, _symmetric),
    ("cross_entropy nll_loss nll_loss2d multi_margin_loss linear_cross_entropy", _SECOND, _classes),
    ("scatter scatter_ index_copy index_copy_ index_fill index_fill_ put_ index_put index_put_ __setitem__", _INDEX, _distinct),
    ("searchsorted", ((0,), ("sorted_sequence",)), _ascending),
    ("bucketize", ((1,), ("boundaries",)), _ascending),
    ("embedding_bag", ((2,), ("offsets",)), _offsets),
    ("_pack_padded_sequence", ((1,), ("lengths",)), _descending),
    ("repeat_interleave", ((1,), ("repeats",)), _counts),
    ("scaled_dot_product_attention", ((3,), ("attn_mask",)), _visible),
    ("multi_head_attention_forward", (("attn_mask",), ("key_padding_mask",)), _visible),
)
_BY_NAME = {name: (paths, shape) for names, paths, shape in _STRUCTURES for name in names.split()}


def _structure_of(draft: _Draft) -> Shape | None:
    name = draft.call.call.op.removesuffix(".default").rpartition(".")[2]
    known = _BY_NAME.get(name) or _BY_NAME.get(name.removeprefix("linalg_"))
    if known is None or draft.slot.slot.role != "input" or not _is_argument(draft):
        return None
    paths, shape = known
    return shape if draft.slot.slot.path in paths else None


def _is_argument(draft: _Draft) -> bool:
    """Tell whether the slot is an argument of the call: in a backward record, gradients of results have the same role."""
    return any(slot is draft.slot for slot in draft.call.slots)
