# SPDX-License-Identifier: Apache-2.0
"""Note memory that was never written to, and list the calls that do not read what they overwrite.

A tensor fresh from `torch.empty` holds whatever lay there. Capture follows which of its elements were written. It never reads the others: a
tensor without a written element has no values, and in a tensor that is written in part the rest counts as zero. Both capture and the judge
ask here; the answers rest on names, notes and recorded arguments alone.
"""

from __future__ import annotations

from ulpscope.model.records import Arguments, TensorRecord

__all__ = [
    "MAY_CARRY",
    "NEVER_WRITTEN",
    "NOTHING_WRITTEN",
    "OVERWRITTEN",
    "is_overwritten",
    "is_partly_written",
    "is_unfollowed",
    "is_unwritten",
    "is_written_over",
    "may_carry",
    "partly_written",
    "plain_name",
    "writes_in_place",
]

NEVER_WRITTEN = "uninitialised memory"
"""Each note about such memory begins so."""
NOTHING_WRITTEN = f"{NEVER_WRITTEN}: nobody has written to it, its values are not read"
MAY_CARRY = "made of uninitialised memory, in elements that are not known"
OVERWRITTEN = f"{NEVER_WRITTEN}: or old values, written over without being read"
_UNFOLLOWED = f"{NEVER_WRITTEN}: values are not read"
"""The note of older runs: their capture did not follow what became of such memory."""

_FILLING = frozenset(
    """
    fill_ zero_ copy_ normal_ uniform_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_ constant_ ones_ zeros_ eye_ dirac_
    trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_ _foreach_zero_ _foreach_copy_
    """.split()
)
_ASKING_FOR_SHAPE = frozenset(
    """
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_zeros new_ones new_full
    new_tensor resize_ resize_as_
    """.split()
)
_ASKING_FOR_SHAPE_OF_OTHER = frozenset("expand_as view_as reshape_as type_as resize_as_".split())
_SCALED_BY_BETA = frozenset("addmm addmm_ addmv addmv_ addr addr_ addbmm addbmm_ baddbmm baddbmm_ sspaddmm".split())
"""Operations that add to `beta` times their first argument; with `beta` 0 they do not read it."""


def partly_written(missing: int, total: int) -> str:
    """Write the note of a tensor of which `missing` elements were never written."""
    return f"{NEVER_WRITTEN} in {missing} of {total} elements, which are taken for zero"


def is_unwritten(record: TensorRecord | None) -> bool:
    """Tell whether a tensor has no values because its memory was never written."""
    return record is not None and record.note.startswith(f"{NEVER_WRITTEN}:")


def is_written_over(record: TensorRecord | None) -> bool:
    """Tell whether capture noted that the call wrote over a tensor without reading it."""
    return record is not None and record.note == OVERWRITTEN


def is_partly_written(record: TensorRecord | None) -> bool:
    """Tell whether some elements of a tensor were never written; its record counts them as zero."""
    return record is not None and record.note.startswith(f"{NEVER_WRITTEN} in ")


def is_unfollowed(record: TensorRecord | None) -> bool:
    """Tell whether a record is of an older run, which noted memory that was never written and did not follow what became of it."""
    return record is not None and record.note.startswith(_UNFOLLOWED)


def may_carry(record: TensorRecord | None) -> bool:
    """Tell whether a value may depend on memory that was never written."""
    return record is not None and record.note.startswith(MAY_CARRY)


def is_overwritten(op: str, path: tuple[int | str, ...], arguments: Arguments | None) -> bool:
    """Tell whether a call ignores the values of the tensor in this place: it writes over all of them, or asks for their shape alone.

    >>> is_overwritten("torch.nn.init.kaiming_uniform_", ("tensor",), None)
    True
    >>> is_overwritten("Tensor.add_", (0,), None)
    False
    """
    name = plain_name(op)
    if path[:1] == ("out",):
        return True
    if path[:1] in ((0,), ("tensor",), ("self",), ("input",)):
        return name in _FILLING or name in _ASKING_FOR_SHAPE or (name in _SCALED_BY_BETA and _is_scaled_by_nothing(arguments))
    return path[:1] in ((1,), ("other",)) and name in _ASKING_FOR_SHAPE_OF_OTHER


def writes_in_place(op: str, arguments: Arguments | None) -> bool:
    """Tell from name and arguments whether a call writes to memory that it is given; other tensors may be views of that memory."""
    name = plain_name(op)
    is_named = name == "__setitem__" or (name.startswith("__i") and name.endswith("__")) or (name.endswith("_") and not name.endswith("__"))
    return is_named or bool(arguments and arguments.kwargs and "out" in arguments.kwargs)


def plain_name(op: str) -> str:
    """Return an operation without its namespace and overload."""
    parts = op.split(".")
    if parts[0] == "ops" and len(parts) > 2:
        return parts[2]
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]


def _is_scaled_by_nothing(arguments: Arguments | None) -> bool:
    beta = (arguments.kwargs or {}).get("beta", 1) if arguments else 1
    return isinstance(beta, (int, float)) and beta == 0
