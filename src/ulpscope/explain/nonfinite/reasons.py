# SPDX-License-Identifier: Apache-2.0
"""Why a call made inf or NaN, in words, and what would have prevented it: one small rule for each kind of operation.

The rules read statistics only. What the exact result would have been (`needed`) comes from replaying the call in a higher precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ulpscope.explain.nonfinite.origins import Beginning
from ulpscope.model import DTYPES, CallRecord, TensorRecord
from ulpscope.numerics.nonfinite_rule import Kinds, kinds_of

__all__ = ["cause_of", "magnitude", "maker_of", "remedy_of", "sure_magnitude"]

_DIVISIONS = frozenset("div div_ true_divide __truediv__ __rtruediv__ __itruediv__ divide divide_ reciprocal reciprocal_ __div__".split())
_LOGS = frozenset("log log2 log10 log_ logit".split())
_ROOTS = frozenset("sqrt sqrt_ rsqrt rsqrt_".split())
_EXPONENTIALS = frozenset("exp exp_ exp2 expm1 sinh cosh".split())
_CASTS = frozenset("to half bfloat16 type type_as float copy_ _to_copy".split())
_SUMS = frozenset("sum mean cumsum norm vector_norm logsumexp nansum mse_loss l1_loss prod cumprod var std".split())
_PRODUCTS = frozenset(
    "linear matmul mm bmm addmm baddbmm einsum __matmul__ conv1d conv2d conv3d dot mv scaled_dot_product_attention Linear Conv2d".split()
)
_SCALINGS = frozenset(
    "mul mul_ __mul__ __rmul__ square square_ pow pow_ __pow__ __rpow__ multiply add add_ __add__ sub sub_ addcmul".split()
)
_SOFTMAXES = frozenset("softmax log_softmax softmin".split())
_LOSSES = frozenset("cross_entropy nll_loss binary_cross_entropy kl_div".split())
_NORMS = frozenset(
    "norm vector_norm linalg_norm linalg_vector_norm cdist dist pairwise_distance normalize cosine_similarity std var_mean".split()
)
_BY_PARTS = frozenset("layer_norm batch_norm group_norm instance_norm rms_norm native_layer_norm".split())


def cause_of(beginning: Beginning) -> str:
    """The reason in one clause; empty where the statistics do not tell."""
    record = beginning.record
    if beginning.kind == "given":
        return _given(beginning)
    if beginning.kind == "received":
        return ""
    if record.level == "state":
        return _optimizer_cause(record) if record.phase == "optimizer" else ""
    rules = _BACKWARD if record.phase == "backward" else _FORWARD
    for names, rule in rules:
        if record.call.short in names:
            return rule(beginning)
    return "the gradient overflows" if record.phase == "backward" and Kinds.NAN not in beginning.kinds else ""


def _given(beginning: Beginning) -> str:
    record = beginning.record
    if record.call.op == "state.parameters":
        return "the parameters were not finite when the step began"
    if record.call.op == "state.batch":
        return "the batch holds it"
    bad = [slot for slot in record.slots if record.receives(slot.slot) and slot.summary is not None and _is_bad(slot)]
    if maker_of(beginning):
        return "no call of that module was watched: the graph of its inputs tells"
    return f"{bad[0].slot} was not finite when it came, and no call that was seen had made it" if bad else ""


def maker_of(beginning: Beginning) -> str:
    """`made by gelu`, where the watch saw only modules and the graph between two of them tells."""
    if beginning.kind != "given":
        return ""
    return next((slot.note for slot in beginning.record.slots if slot.note.startswith("made by ")), "")


def _is_bad(slot: TensorRecord) -> bool:
    return bool(kinds_of(slot.summary))


# ---- forward


def _divided(beginning: Beginning) -> str:
    record = beginning.record
    numerator, denominator = _input(record, 0), _input(record, 1)
    if record.call.short in ("reciprocal", "reciprocal_", "__rtruediv__"):
        numerator, denominator = None, numerator
    if denominator is None and _scalar(record, 1) == 0:
        return "division by the number 0" if Kinds.NAN not in beginning.kinds else "0/0: the divisor is the number 0"
    zeros = _zeros(denominator)
    if zeros and Kinds.NAN in beginning.kinds:
        return f"0/0: the divisor has {_count(zeros, 'zero')}{_where_zero(numerator)}"
    if zeros:
        return f"division by zero: the divisor has {_count(zeros, 'zero')}"
    return "the quotient is larger than the dtype holds"


def _where_zero(numerator: TensorRecord | None) -> str:
    zeros = _zeros(numerator)
    return f" and the dividend {zeros}" if zeros else ""


def _logged(beginning: Beginning) -> str:
    low = _low(_input(beginning.record, 0))
    if low is not None and low < 0:
        return f"the logarithm of a negative number ({_number(low)})"
    return "the logarithm of 0" if _zeros(_input(beginning.record, 0)) else ""


def _rooted(beginning: Beginning) -> str:
    entered = _input(beginning.record, 0)
    low = _low(entered)
    if low is not None and low < 0:
        return f"the square root of a negative number ({_number(low)})"
    return "1/sqrt(0)" if _zeros(entered) and "rsqrt" in beginning.record.call.short else ""


def _raised(beginning: Beginning) -> str:
    high = _high(_input(beginning.record, 0))
    entry = DTYPES.get(beginning.slots[0].dtype)
    if high is None or entry is None:
        return "the exponential overflows"
    return f"exp({_number(high)}) overflows: {entry.name} ends at exp({math.log(entry.max):.4g})"


def _cast(beginning: Beginning) -> str:
    largest = _magnitude(_input(beginning.record, 0)) or _magnitude(_input(beginning.record, 1))
    into = beginning.slots[0].dtype
    return f"a value of {_number(largest)} is cast to {into}" if largest is not None else ""


def _summed(beginning: Beginning) -> str:
    entered = _input(beginning.record, 0)
    if entered is not None and not _numel(entered):
        return "the mean of nothing: the input has no element"
    if beginning.record.call.short in ("std", "var") and Kinds.NAN in beginning.kinds:
        return "the spread of a single value: 0/0"
    if entered is None or (largest := _magnitude(entered)) is None:
        return "the sum overflows"
    return f"{_numel(entered)} values of up to {_number(largest)} add up to more than {beginning.slots[0].dtype} holds"


def _multiplied(beginning: Beginning) -> str:
    return f"a sum of products is larger than {beginning.slots[0].dtype} holds" if Kinds.NAN not in beginning.kinds else ""


def _scaled(beginning: Beginning) -> str:
    entered = [slot for slot in beginning.record.slots if slot.slot.role == "input"]
    infinite = any(slot.summary is not None and (slot.summary.num_posinf or slot.summary.num_neginf) for slot in entered)
    if Kinds.NAN in beginning.kinds and infinite:
        return "inf - inf" if beginning.record.call.short in ("add", "add_", "sub", "sub_", "__add__") else "0 * inf"
    if Kinds.NAN in beginning.kinds and "pow" in beginning.record.call.short:
        return "a negative number to a broken power"
    return f"the result is larger than {beginning.slots[0].dtype} holds"


def _softmaxed(beginning: Beginning) -> str:
    entered = _input(beginning.record, 0)
    masked = entered.summary.num_neginf if entered is not None and entered.summary is not None else None
    return "a row is masked wholly: every score in it is -inf, so the softmax divides 0 by 0" if masked else ""


def _lost(beginning: Beginning) -> str:
    if Kinds.NAN in beginning.kinds:
        return "the mean over no target at all (0/0): every target is ignored, or every weight is 0"
    return "the logarithm of 0: a probability of the target is 0"


def _normed_by_parts(beginning: Beginning) -> str:
    return "0/0: the variance is 0 and eps does not help" if Kinds.NAN in beginning.kinds else "the variance is 0 or eps is too small"


_Rule = Callable[[Beginning], str]
_FORWARD: tuple[tuple[frozenset[str], _Rule], ...] = (
    (_DIVISIONS, _divided),
    (_LOGS, _logged),
    (_ROOTS, _rooted),
    (_EXPONENTIALS, _raised),
    (_CASTS, _cast),
    (_SUMS, _summed),
    (_PRODUCTS, _multiplied),
    (_SCALINGS, _scaled),
    (_SOFTMAXES, _softmaxed),
    (_LOSSES, _lost),
    (_BY_PARTS, _normed_by_parts),
)

# ---- backward


def _of_root(beginning: Beginning) -> str:
    return "the square root has an infinite slope at 0" if _had_zeros(beginning) else ""


def _of_division(beginning: Beginning) -> str:
    return "the derivative of a division by zero" if _had_zeros(beginning, "other") else "the derivative of a quotient overflows"


def _of_logarithm(beginning: Beginning) -> str:
    return "the logarithm has an infinite slope at 0" if _had_zeros(beginning) else ""


def _of_norm(beginning: Beginning) -> str:
    return "the norm of a zero vector has no slope: 0/0" if _had_zeros(beginning) else ""


def _of_power(beginning: Beginning) -> str:
    return "a broken power has an infinite slope at 0" if _had_zeros(beginning) else ""


_BACKWARD: tuple[tuple[frozenset[str], _Rule], ...] = (
    (_ROOTS, _of_root),
    (_DIVISIONS, _of_division),
    (_LOGS, _of_logarithm),
    (_NORMS, _of_norm),
    (frozenset({"pow", "pow_", "__pow__", "float_power"}), _of_power),
)


def _had_zeros(beginning: Beginning, name: str = "") -> bool:
    """Whether what the forward call worked with, or left, has zeros; by what autograd kept of it, else by its record."""
    saved = [slot for slot in beginning.record.slots if slot.slot.path[:1] == ("saved",) and (not name or name in slot.slot.path)]
    slots = saved or ([slot for slot in beginning.forward.slots if slot.slot.is_input] if beginning.forward is not None else [])
    return any(_zeros(slot) for slot in slots)


def _optimizer_cause(record: CallRecord) -> str:
    groups = (record.arguments.kwargs or {}).get("groups") if record.arguments is not None else None
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    zeros = any(_zeros(slot) for slot in record.slots if slot.slot.role == "gradient")
    if any(group.get("eps") == 0 for group in groups):
        return "0/0: eps is 0" + (", and a gradient is 0, so its second moment is 0 too" if zeros else "")
    if any(slot.slot.role == "state" and _is_bad(slot) for slot in record.slots):
        return "a moment of the optimizer overflows"
    return "the gradients are finite and the update is not"


# ---- what would have prevented it


def remedy_of(beginning: Beginning, needed: float | None) -> str:
    """What would have prevented it, as far as that is known."""
    slot = beginning.slots[0] if beginning.slots else None
    entry = DTYPES.get(slot.dtype) if slot is not None else None
    if needed is not None and entry is not None and math.isfinite(needed) and needed > entry.max:
        return _wider(needed, entry.name, entry.max)
    if needed == math.inf and entry is not None and Kinds.NAN not in beginning.kinds:
        return f"no dtype holds it: the exact result is beyond {_number(DTYPES['float64'].max)}"
    return next((advice for words, advice in _ADVICE if words in cause_of(beginning)), "")


def _wider(needed: float, name: str, limit: float) -> str:
    scale = 2 ** math.ceil(math.log2(needed / limit))
    wider = next((other for other in ("bfloat16", "float32", "float64") if DTYPES[other].max > max(needed, limit)), None)
    ways = [wider] if wider is not None else []
    if scale <= 2**24:
        ways.append(f"a scale of 1/{scale}")
    would = f"; {' or '.join(ways)} would do" if ways else ""
    return f"it needs {_number(needed)}, {name} ends at {_number(limit)}{would}"


_ADVICE = (
    ("no slope", "add a small number under the root, or leave zero vectors out"),
    ("infinite slope", "add a small number before the call, or keep zeros out of it: torch.where after it does not help the gradient"),
    ("eps is 0", "give the optimizer an eps above 0"),
    ("masked wholly", "leave one position of every row unmasked, or replace the NaN rows behind the softmax"),
    ("no target", "skip batches without a target, or divide a sum by a count that is at least 1"),
    ("nothing", "skip what is empty, or divide a sum by a count that is at least 1"),
    ("division by zero", "add a small number to the divisor, or clamp it"),
    ("0/0", "add a small number to the divisor, or clamp it"),
    ("logarithm", "use log_softmax or logsumexp, or clamp before the logarithm"),
    ("square root of a negative", "clamp at 0 before the root"),
    ("overflows: ", "subtract the largest value first, as softmax and logsumexp do, or clamp"),
    ("the batch holds it", "look at the data: this sample should never have come here"),
)


def sure_magnitude(beginning: Beginning) -> float | None:
    """What the result needs where the statistics alone tell: a cast, an exponential."""
    record = beginning.record
    if record.phase != "forward":
        return None
    if record.call.short in _CASTS:
        return _magnitude(_input(record, 0)) or _magnitude(_input(record, 1))
    high = _high(_input(record, 0))
    if record.call.short in ("exp", "exp_") and high is not None:
        return math.exp(high) if high < 709 else math.inf
    return None


def magnitude(slot: TensorRecord) -> float | None:
    return _magnitude(slot)


# ---- reading statistics


def _input(record: CallRecord, position: int) -> TensorRecord | None:
    return next((slot for slot in record.slots if slot.slot.role == "input" and slot.slot.path == (position,)), None)


def _scalar(record: CallRecord, position: int) -> Any:
    args = record.arguments.args if record.arguments is not None else ()
    return args[position] if position < len(args) else None


def _numel(slot: TensorRecord) -> int:
    return math.prod(slot.shape)


def _zeros(slot: TensorRecord | None) -> int:
    return (slot.summary.num_zero or 0) if slot is not None and slot.summary is not None else 0


def _low(slot: TensorRecord | None) -> float | None:
    return slot.summary.min if slot is not None and slot.summary is not None else None


def _high(slot: TensorRecord | None) -> float | None:
    return slot.summary.max if slot is not None and slot.summary is not None else None


def _magnitude(slot: TensorRecord | None) -> float | None:
    if slot is None or slot.summary is None:
        return None
    known = slot.summary.abs_max
    return known if known is not None else slot.summary.max


def _number(value: float) -> str:
    if math.isfinite(value) and 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.4g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
