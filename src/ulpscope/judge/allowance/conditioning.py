# SPDX-License-Identifier: Apache-2.0
"""How large an honest error of a call may be where its result is smaller than what it was summed from.

A relative yardstick fails where terms cancel: the gradient of a key bias in attention is zero in exact arithmetic and pure
rounding in every kernel. For sums and products of known kinds the sizes of what went in say how large the terms
were. Everything else is judged against the size of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, sqrt

from ulpscope.judge.allowance.sizes import Size
from ulpscope.judge.thresholds import threshold
from ulpscope.model import CallName, CallRecord, DType, Pair
from ulpscope.model.nouns import dataclass

__all__ = [
    "COMPOSITES",
    "CONTRACTIONS",
    "HANDING_ON",
    "Scale",
    "can_flip",
    "jump_of",
    "narrowed_error",
    "plain_name",
    "product_family",
    "scale_backward",
    "scale_forward",
    "scale_plain",
]

CONTRACTIONS = frozenset(
    "matmul rmatmul imatmul mm bmm mv dot linear addmm addmv baddbmm addbmm einsum bilinear inner outer tensordot chain_matmul conv1d "
    "conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear_fp8 mkldnn_linear".split()
)
COMPOSITES = frozenset("scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell".split())
_GROUPED = frozenset({"grouped_mm"})
_SUMS = frozenset(
    "add iadd radd sub isub rsub subtract sum mean nansum cumsum addcmul addcdiv lerp logsumexp cross_entropy nll_loss log_softmax "
    "mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div var std index_add scatter_add".split()
)
_PRODUCTS = frozenset(("mul", "imul", "rmul", "multiply"))
_NORMS = frozenset("layer_norm batch_norm group_norm instance_norm rms_norm native_layer_norm native_batch_norm normalize".split())
_SOFTMAX = frozenset("softmax softmin log_softmax".split())
_FLIP_FORWARD = frozenset(
    "sign round floor ceil trunc fix heaviside remainder fmod frac floor_divide fake_quantize quantize_per_tensor".split()
)
HANDING_ON = frozenset(
    "max min amax amin median sort topk max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d".split()
)
"""What hands its gradient on to those elements that it picked, and to no other."""
_FLIP_BACKWARD = HANDING_ON | frozenset(
    "relu relu6 leaky_relu rrelu prelu threshold hardtanh hardswish hardsigmoid hardshrink softshrink clamp clip clamp_min clamp_max abs "
    "maximum minimum where l1_loss smooth_l1_loss huber_loss".split()
)


_NORMALISING = ("adam", "rmsprop", "rprop", "adagrad", "adadelta", "adafactor", "lion", "lamb", "sign", "muon")


@dataclass(frozen=True, slots=True)
class Scale:
    """`terms`: the size of what was summed into a result; `carried`: the absolute error that enters with the inputs."""

    terms: float
    carried: float


def plain_name(call: CallName) -> str:
    return call.short.strip("_").lower()


def product_family(record: CallRecord) -> str | None:
    """Matrix products and convolutions: machines choose the format of their operands for each of the two."""
    name = plain_name(record.call)
    if record.level == "module" or name not in CONTRACTIONS | COMPOSITES | _GROUPED:
        return None
    return "convolution" if name.startswith("conv") else "matrix product"


def can_flip(record: CallRecord) -> bool:
    """Whether a tiny change of an input may change an element of the result by its whole size."""
    name, is_backward = plain_name(record.call), record.phase == "backward"
    jumps = name in _FLIP_FORWARD or (is_backward and (record.level == "module" or name in _FLIP_BACKWARD))
    return jumps or record.phase == "optimizer"


def jump_of(pair: Pair) -> float:
    """How far a parameter may jump on average where an optimizer divides a gradient by its own size, so that rounding decides its sign."""
    if pair.record.phase != "optimizer" or not any(name in plain_name(pair.record.call) for name in _NORMALISING):
        return 0.0
    return threshold("jump") * max((rate for side in (pair.subject, pair.reference) if side for rate in _learning_rates(side)), default=0.0)


def _learning_rates(record: CallRecord) -> list[float]:
    groups = (record.arguments.kwargs or {}).get("groups") if record.arguments else None
    rates = [group.get("lr") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return [abs(rate) for rate in rates if isinstance(rate, (int, float)) and isfinite(rate)]


def scale_plain(inputs: Sequence[Size], out: Size) -> Scale:
    """Against the size of the result itself."""
    apart = max((one.distance for one in inputs), default=0.0)
    return Scale(out.rms, _times(apart, out.rms))


def scale_forward(call: CallName, inputs: Sequence[Size], out: Size) -> Scale:
    name = plain_name(call)
    plain = scale_plain(inputs, out)
    if name in CONTRACTIONS and len(inputs) >= 2:
        return _contraction(inputs, out)
    if name in _SUMS and inputs:
        shrink = sqrt(max(1.0, inputs[0].numel / max(out.numel, 1))) if name == "sum" else 1.0
        return Scale(max(out.rms, shrink * max(one.rms for one in inputs)), max(plain.carried, shrink * max(one.error for one in inputs)))
    if name in _NORMS and inputs and inputs[0].deviation > 0:
        offset = max(1.0, inputs[0].rms / inputs[0].deviation)
        return Scale(out.rms * offset, plain.carried * offset)
    return plain


def scale_backward(
    call: CallName, gradients: Sequence[Size], forward: Sequence[Size], results: Sequence[Size], own: Size | None, out: Size
) -> Scale:
    """`forward` are the call's inputs, `own` the one whose gradient `out` is, `results` the call's outputs."""
    name = plain_name(call)
    plain = scale_plain([*gradients, *forward, *results], out)
    gradient = max(gradients, key=lambda one: one.numel, default=None)
    if gradient is None:
        return plain
    operands = sorted(forward, key=lambda one: one.numel, reverse=True)[:2]
    other = next((one for one in operands if one is not own), None)
    if name in CONTRACTIONS and other is not None and any(one is own for one in operands):
        return _contraction([gradient, other], out)
    summed = sqrt(max(1.0, gradient.numel / max(out.numel, 1)))
    if name in CONTRACTIONS or name in _SUMS or name in _NORMS:
        if summed == 1.0 and name in _NORMS:
            return plain
        return Scale(max(out.rms, summed * gradient.rms), max(plain.carried, summed * gradient.error))
    if name in _PRODUCTS and other is not None:
        return _product(gradient, other, out, summed, plain)
    if name in _SOFTMAX and results:
        return _product(gradient, results[0], out, 1.0, plain)
    return plain


def _contraction(inputs: Sequence[Size], out: Size) -> Scale:
    """A sum over k products; k follows from the numbers of elements, since those of A (m k), B (k n) and C (m n) give k*k."""
    a, b, *added = sorted(inputs, key=lambda one: one.numel, reverse=True)
    root = sqrt(sqrt(a.numel * b.numel / max(out.numel, 1)))
    carried = root * (_times(a.error, b.rms) + _times(b.error, a.rms))
    carried = max(carried, scale_plain([a, b], out).carried) + max((one.error for one in added), default=0.0)
    return Scale(max(out.rms, root * a.rms * b.rms, *(one.rms for one in added)), carried)


def _product(gradient: Size, other: Size, out: Size, summed: float, plain: Scale) -> Scale:
    terms = summed * gradient.rms * other.rms
    carried = summed * (_times(gradient.error, other.rms) + _times(other.error, gradient.rms))
    return Scale(max(out.rms, terms), max(plain.carried, carried))


def narrowed_error(record: CallRecord, gradients: Sequence[Size], inputs: Sequence[Size], out: Size, narrow: DType) -> float:
    """The absolute error of a call whose products round their operands to a narrower format, with that format's range."""
    if plain_name(record.call) not in CONTRACTIONS or record.level == "module":
        is_composite = record.level == "module" or plain_name(record.call) in COMPOSITES
        return threshold("rounding_low") * narrow.eps / 2 * out.rms if is_composite else 0.0
    operands = sorted(inputs, key=lambda one: one.numel, reverse=True)[:2]
    if not operands:
        return 0.0
    products = (
        [(gradient, one) for gradient in gradients for one in operands] if record.phase == "backward" else [(operands[0], operands[-1])]
    )
    return threshold("systemic") * max((_narrowed_product(a, b, out, narrow) for a, b in products), default=0.0)


def _narrowed_product(a: Size, b: Size, out: Size, narrow: DType) -> float:
    root = sqrt(sqrt(a.numel * b.numel / max(out.numel, 1)))
    unit, smallest = narrow.eps / 2, narrow.tiny * narrow.eps / 2
    return root * (max(a.rms * unit, smallest) * b.rms + max(b.rms * unit, smallest) * a.rms)


def _times(error: float, size: float) -> float:
    """No error stays none and an unbounded one unbounded, whatever the size."""
    return error * size if isfinite(error) else inf
