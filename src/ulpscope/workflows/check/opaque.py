# SPDX-License-Identifier: Apache-2.0
"""Find the opaque modules of a step: they ran, and none of the calls that they made was recorded.

A compiled module is opaque, and so is one that the recording kept whole for its fused kernel. How many calls each stands for is not known.
A lower bound is the number of layers whose parameters no recorded call reads, since each layer computes something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ulpscope.model import CallRecord, TensorRecord

__all__ = ["OPAQUE", "Opaqueness"]

OPAQUE = "its inside was not recorded: it is opaque to a check"
_SOME_CALL = 1


@dataclass(slots=True)
class Opaqueness:
    """Collects, record by record, what one step tells of its modules."""

    _parents: set[str] = field(default_factory=set)
    _modules: list[CallRecord] = field(default_factory=list)
    _inside: set[str] = field(default_factory=set)
    _layers: dict[str, set[str]] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def add(self, record: CallRecord) -> None:
        if record.phase == "start" and record.call.op == "state.parameters":
            for slot in record.slots:
                if slot.slot.role == "parameter" and slot.fingerprint is not None:
                    self._layers.setdefault(_owner(slot), set()).add(slot.fingerprint)
        if record.phase == "forward" and record.parent:
            self._parents.add(record.parent)
        if record.level == "module":
            self._modules.append(record)
        elif record.phase == "forward" and record.level in ("api", "op"):
            self._inside.add(record.module)
            self._read.update(slot.fingerprint for slot in record.slots if slot.fingerprint is not None and record.receives(slot.slot))

    def regions(self) -> dict[int, int]:
        """Return the order of each opaque record, and how many calls it stands for at least."""
        opaque = {(one.call, one.module) for one in self._modules if one.phase == "forward" and self._is_opaque(one)}
        records = [one for one in self._modules if (one.call, one.module) in opaque]
        layers = self._layers_of({one.module for one in records})
        return {one.order: layers[one.module] for one in records}

    @property
    def sees_layers(self) -> bool | None:
        """Tell whether a recorded call reads the parameters of a layer; None where no parameters were recorded."""
        return any(map(self._is_read, self._layers)) if self._layers else None

    def _is_opaque(self, record: CallRecord) -> bool:
        """Tell whether a module made something while nothing inside it was recorded; a module that hands on its input made nothing."""
        around = record.module
        has_calls = str(record.call) in self._parents or (
            bool(around) and any(one == around or _is_below(one, around) for one in self._inside)
        )
        return not has_calls and not _hands_on(record)

    def _layers_of(self, modules: Iterable[str]) -> Mapping[str, int]:
        """Count the layers that no call reads, by the module that they belong to; layers of no named module are shared by the others."""
        unread = [layer for layer in self._layers if not self._is_read(layer)]
        claimed = {one: {layer for layer in unread if one and (layer == one or _is_below(layer, one))} for one in modules}
        rest = set(unread).difference(*claimed.values())
        nameless = [one for one, layers in claimed.items() if not layers]
        shares = {one: len(rest) // len(nameless) for one in nameless}
        return {one: max(_SOME_CALL, len(layers) or shares[one]) for one, layers in claimed.items()}

    def _is_read(self, layer: str) -> bool:
        return not self._layers[layer].isdisjoint(self._read)


def _owner(slot: TensorRecord) -> str:
    """Return the module of a parameter: `layers.1.mlp` of `layers.1.mlp.weight`, without the names that a compiler adds."""
    return ".".join(str(part) for part in slot.slot.path[:-1] if part != "_orig_mod")


def _is_below(module: str, other: str) -> bool:
    return module.startswith(f"{other}.")


def _hands_on(record: CallRecord) -> bool:
    """Tell whether every result is one of the tensors that entered."""
    entered = {slot.fingerprint for slot in record.slots if record.receives(slot.slot)}
    made = [slot.fingerprint for slot in record.slots if slot.slot.is_output]
    return None not in made and set(made) <= entered
