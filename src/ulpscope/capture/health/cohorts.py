# SPDX-License-Identifier: Apache-2.0
"""Group parameters that are measured together, and find the part of each that lies on this rank.

A sharded parameter (a DTensor, as FSDP2 makes them) is measured where its shard lies. The positions whose signs are kept are chosen in the
whole tensor, so ranks hold disjoint parts of one sample and files of different layouts compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ulpscope._torch_private import local_part as part_of
from ulpscope._torch_private import local_shape_and_offset
from ulpscope.capture.health.readings import Sampler
from ulpscope.capture.torch_internals import is_foreign, without_class
from ulpscope.model.health import HealthTarget
from ulpscope.numerics.summary.composing import compose, sample_positions

__all__ = ["Cohort", "Member", "Merge", "is_readable", "local_part", "member_of"]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Member(NamedTuple):
    """One parameter: its names, its size here and everywhere, and which of the sampled positions are here."""

    name: str
    layer: str
    label: str
    numel: int
    global_numel: int
    is_counted: bool
    num_samples: int
    places: Any
    owned: Any


class _Shard(NamedTuple):
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_counted: bool


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether ulpscope can read the tensor's values without running the code of a class of the user's."""
    if type(tensor) in _PLAIN:
        return True
    return not is_foreign(without_class(part_of(tensor) if not is_foreign(tensor) else tensor))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a readable tensor that lies on this rank, dense and without a class of the user's. Call it where no graph is
    made.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return tensor
    tensor = without_class(tensor)
    to_local = getattr(tensor, "to_local", None)
    part: torch.Tensor = without_class(tensor if to_local is None else to_local()).detach()
    if part.layout is not torch.strided:
        part = part.to_dense()
    return part


def member_of(name: str, label: str, parameter: torch.Tensor, at_most: int) -> Member:
    """Describe a parameter that is measured under `label`, with at most so many sampled positions."""
    global_numel = int(parameter.numel())
    positions = sample_positions(name, global_numel, at_most)
    shard = _shard_of(parameter)
    places, owned = positions, np.ones(len(positions), dtype=bool)
    if shard is not None:
        places, owned = _places_in(shard, tuple(parameter.shape), positions)
    return Member(
        name=name,
        layer=name.rpartition(".")[0] or name,
        label=label,
        numel=int(local_part(parameter).numel()),
        global_numel=global_numel,
        is_counted=shard is None or shard.is_counted,
        num_samples=len(positions),
        places=places,
        owned=owned,
    )


def _shard_of(parameter: torch.Tensor) -> _Shard | None:
    """Return where the local part of a DTensor lies in the whole; None for a tensor that is whole already."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return None
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    shape, offset = local_shape_and_offset()(parameter.shape, mesh, placements)
    coordinate = mesh.get_coordinate() or [0] * len(placements)
    copies = [place for place, placement in zip(coordinate, placements, strict=True) if not placement.is_shard()]
    return _Shard(tuple(shape), tuple(offset), is_counted=not any(copies) and not any(each.is_partial() for each in placements))


def _places_in(shard: _Shard, shape: tuple[int, ...], positions: Any) -> tuple[Any, Any]:
    """Translate positions of the whole into places in the shard, and tell which of them lie in it."""
    if 0 in shard.shape or not shape:
        owned = np.full(len(positions), not shape)
        return positions[owned], owned
    index = np.stack(np.unravel_index(positions, shape), axis=1) - np.asarray(shard.offset)
    owned = ((index >= 0) & (index < np.asarray(shard.shape))).all(axis=1)
    return np.ravel_multi_index(tuple(index[owned].T), shard.shape).astype(np.int64), owned


class Cohort:
    """Members that are measured together: the same rows in the same order each time."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self._targets: dict[Any, tuple[HealthTarget, ...]] = {}

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler([member.places for member in self.members])

    @cached_property
    def is_whole(self) -> bool:
        """Tell whether every sampled position is on this rank."""
        return all(member.owned.all() for member in self.members)

    def targets(self, kinds: Sequence[str], dtypes: Sequence[torch.dtype]) -> tuple[HealthTarget, ...]:
        """Return the rows of these kinds, for tensors of these dtypes; the same object each time."""
        key = (tuple(kinds), tuple(dtypes))
        found = self._targets.get(key)
        if found is None:
            each = zip(kinds, self.members, dtypes, strict=True)
            found = self._targets[key] = tuple(_target(kind, member, str(dtype).removeprefix("torch.")) for kind, member, dtype in each)
        return found

    def sign_bits(self, matrix: Any) -> bytes:
        """Pack the signs at all sampled positions, those of other ranks as zeros, one member after the other at whole bytes."""
        if not self.is_whole:
            here = matrix
            matrix = np.zeros(self._is_owned.shape, dtype=bool)
            matrix[self._is_owned] = here[self._is_here]
        packed: bytes = np.packbits(matrix, axis=1)[self._is_packed].tobytes()
        return packed

    @cached_property
    def _is_here(self) -> Any:
        """Mark the values of each row that are no filling: [members, width of the sampler]."""
        return _first([len(member.places) for member in self.members])

    @cached_property
    def _is_owned(self) -> Any:
        """Mark the sampled positions that are on this rank: [members, most samples]."""
        owned = _first([member.num_samples for member in self.members])
        for row, member in zip(owned, self.members, strict=True):
            row[: member.num_samples] = member.owned
        return owned

    @cached_property
    def _is_packed(self) -> Any:
        """Mark the bytes that hold samples: [members, most bytes]."""
        return _first([-(-member.num_samples // 8) for member in self.members])


def _first(counts: list[int]) -> Any:
    """Make rows that begin with so many True."""
    return np.arange(max(counts, default=0)) < np.array(counts, dtype=np.int64)[:, None]


def _target(kind: str, member: Member, dtype: str) -> HealthTarget:
    has_signs = kind in ("gradient", "unclipped")
    is_sampled = kind == "update"
    return HealthTarget(
        kind=kind.partition(".exact")[0],
        name=member.label,
        numel=len(member.places) if is_sampled else member.numel,
        global_numel=member.num_samples if is_sampled else member.global_numel,
        dtype=dtype,
        layer=member.layer,
        is_counted=member.is_counted,
        num_samples=member.num_samples if has_signs else 0,
        owned=b"" if member.owned.all() or not has_signs else np.packbits(member.owned).tobytes(),
    )


class Merge:
    """Merges rows of the same kind and name into one: the parameters of a layer, the calls of a module."""

    def __init__(self, targets: Sequence[HealthTarget]) -> None:
        groups: dict[tuple[str, str], list[int]] = {}
        for row, target in enumerate(targets):
            groups.setdefault((target.kind, target.name), []).append(row)
        self.targets = tuple(_joined_target([targets[row] for row in rows]) for rows in groups.values())
        self._order = np.array([row for rows in groups.values() for row in rows], dtype=np.int64)
        self._numbers = np.repeat(np.arange(len(groups)), [len(rows) for rows in groups.values()])
        self._numel = np.array([target.numel for target in targets], dtype=np.int64)[self._order]
        sizes = np.array([-(-target.num_samples // 8) for target in targets], dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        self._sign_order = np.concatenate([np.arange(starts[row], starts[row] + sizes[row]) for row in self._order])

    def rows(self, values: Any) -> Any:
        """Merge the rows of statistics and counts."""
        values = values[self._order]
        counts = np.zeros((len(self.targets), values.shape[1] - 6))
        np.add.at(counts, self._numbers, values[:, 6:])
        return np.concatenate([compose(values[:, :6], self._numel, self._numbers, len(self.targets)), counts], axis=1)

    def signs(self, packed: bytes) -> bytes:
        """Put the signs in the order of the merged rows."""
        ordered: bytes = np.frombuffer(packed, dtype=np.uint8)[self._sign_order].tobytes() if packed else b""
        return ordered


def _joined_target(targets: list[HealthTarget]) -> HealthTarget:
    first = targets[0]
    if len(targets) == 1 or first.kind == "activation":
        return first
    return HealthTarget(
        kind=first.kind,
        name=first.name,
        numel=sum(target.numel for target in targets),
        global_numel=sum(target.global_numel for target in targets),
        dtype=first.dtype,
        layer=first.name,
        is_counted=all(target.is_counted for target in targets),
        num_samples=sum(-(-target.num_samples // 8) * 8 for target in targets),
        owned=b"".join(target.owned or _all_owned(target.num_samples) for target in targets),
    )


def _all_owned(num_samples: int) -> bytes:
    return np.packbits(np.ones(num_samples, dtype=bool)).tobytes()
