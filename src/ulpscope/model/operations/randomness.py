# SPDX-License-Identifier: Apache-2.0
"""Tell which calls draw random numbers, by their names and recorded arguments alone: no other file knows.

Some operations always draw. Others draw if an argument says so: dropout in training, attention with a dropout, the layers of an LSTM. Tests
hold the tables for torch's operations against torch's own tag and against its generator. An operation of another library counts as random
if its name sounds so or an argument is called a dropout.
"""

from __future__ import annotations

import re
from typing import Any

from ulpscope.model.nouns import dataclass
from ulpscope.model.records import Arguments

__all__ = ["draws", "silenced"]


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a call, by keyword or by place, and its default."""

    name: str
    place: int
    default: Any = None

    def of(self, arguments: Arguments) -> Any:
        if arguments.kwargs and self.name in arguments.kwargs:
            return arguments.kwargs[self.name]
        return arguments.args[self.place] if self.place < len(arguments.args) else self.default


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    """The condition under which a call draws: a share strictly between 0 and 1, a switch that is on, more than one layer.

    `unless` is an argument that replaces the draw. A switch that is None is on.
    """

    share: _Argument | None = None
    switch: _Argument | None = None
    layers: _Argument | None = None
    unless: _Argument | None = None

    def holds(self, arguments: Arguments) -> bool:
        is_shared = self.share is None or _is_share(self.share.of(arguments))
        is_on = self.switch is None or self.switch.of(arguments) is not False
        is_deep = self.layers is None or self.layers.of(arguments) != 1
        return is_shared and is_on and is_deep and (self.unless is None or self.unless.of(arguments) is None)


def _is_share(value: Any) -> bool:
    """Tell whether a probability leaves anything to chance; a value that was not recorded as a number may."""
    return 0 < value < 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else value is not None


_ALWAYS = frozenset(
    """
    rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform uniform_ bernoulli bernoulli_ exponential
    exponential_ geometric geometric_ cauchy cauchy_ log_normal log_normal_ random random_ poisson binomial multinomial _standard_gamma
    _sample_dirichlet gumbel_softmax svd_lowrank pca_lowrank normal_functional _cudnn_init_dropout_state _fill_mem_eff_dropout_mask_
    """.split()
)
_INITIAL = frozenset("uniform normal trunc_normal xavier_uniform xavier_normal kaiming_uniform kaiming_normal orthogonal sparse".split())
"""Functions of `torch.nn.init`; their names end in an underscore, except the remaining older spellings."""

_DROPOUT = _Condition(share=_Argument("p", 1, 0.5), switch=_Argument("train", 2, True))
_DROPOUT_IN_TRAINING = _Condition(share=_Argument("p", 1, 0.5), switch=_Argument("training", 2, True))
_DROPOUT_ON_DEMAND = _Condition(share=_Argument("p", 1, 0.5), switch=_Argument("training", 2, False))
_POOLING = _Condition(unless=_Argument("_random_samples", 5))


def _attention(place: int) -> _Condition:
    return _Condition(share=_Argument("dropout_p", place, 0.0))


def _rrelu(place: int) -> _Condition:
    return _Condition(switch=_Argument("training", place, False))


def _layers(num_layers: int, dropout: int, train: int) -> _Condition:
    return _Condition(
        share=_Argument("dropout", dropout, 0.0), switch=_Argument("train", train, True), layers=_Argument("num_layers", num_layers, 1)
    )


_CONDITIONS: dict[str, _Condition] = {
    **dict.fromkeys(("functional.dropout", "functional.dropout1d", "functional.dropout2d", "functional.dropout3d"), _DROPOUT_IN_TRAINING),
    **dict.fromkeys(("functional.alpha_dropout", "functional.feature_alpha_dropout"), _DROPOUT_ON_DEMAND),
    **dict.fromkeys(
        """
        dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_
        native_dropout
        """.split(),
        _DROPOUT,
    ),
    "_fused_dropout": _Condition(share=_Argument("p", 1, 0.5)),
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu(3)),
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"), _rrelu(4)),
    **dict.fromkeys(
        (
            "functional.fractional_max_pool2d",
            "functional.fractional_max_pool3d",
            "functional.fractional_max_pool2d_with_indices",
            "functional.fractional_max_pool3d_with_indices",
        ),
        _POOLING,
    ),
    "lobpcg": _Condition(unless=_Argument("X", 3)),
    "functional.multi_head_attention_forward": _Condition(share=_Argument("dropout_p", 10, 0.0), switch=_Argument("training", 13, True)),
    "scaled_dot_product_attention": _attention(4),
    "_scaled_dot_product_attention_math": _attention(4),
    "_scaled_dot_product_attention_math_for_mps": _attention(4),
    "_scaled_dot_product_fused_attention_overrideable": _attention(4),
    "_scaled_dot_product_flash_attention": _attention(3),
    "_scaled_dot_product_flash_attention.quantized": _attention(6),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(3),
    "_scaled_dot_product_efficient_attention": _attention(5),
    "_scaled_dot_product_cudnn_attention": _attention(5),
    "_cudnn_attention_forward": _attention(9),
    "_triton_scaled_dot_attention": _attention(3),
    "_efficient_attention_forward": _attention(8),
    "_flash_attention_forward": _attention(7),
    "_flash_attention_forward_no_dropout_inplace": _attention(8),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu", "_lstm_mps"), _layers(4, 5, 6)),
    "_cudnn_rnn": _layers(9, 11, 12),
    "miopen_rnn": _layers(7, 9, 10),
}
_PACKED_LAYERS = _layers(5, 6, 7)
"""Recurrent layers on packed sequences take the batch sizes as their second argument."""

_OF_TORCH = ("torch", "Tensor", "functional", "aten")
_SOUNDS = re.compile(
    r"dropout|drop_path|stochastic_depth|bernoulli|multinomial|rrelu|gumbel|(?<![a-z])rand(?:n|int|perm|om)?(?![a-z])"
    r"|(?:normal|uniform|exponential|geometric|cauchy|random)_$|(?<![a-z])poisson(?!_nll)"
)
_SHARES = re.compile(r"(?:^|_)dropout(?:_|$)|^p_drop|^drop_(?:prob|rate)|^keep_prob")
_SWITCHES = ("training", "train", "is_training")


def draws(op: str, arguments: Arguments | None) -> bool:
    """Tell whether an operation draws random numbers that its results depend on, when called with these arguments.

    Without arguments the defaults of the operation count.

    >>> draws("functional.scaled_dot_product_attention", Arguments(kwargs={"dropout_p": 0.1}))
    True
    >>> draws("functional.dropout", Arguments(args=({"$tensor": "input.0"}, 0.1), kwargs={"training": False}))
    False
    """
    given = arguments or Arguments()
    namespace, name = _parts(op)
    if namespace == "torch.nn.init":
        return name.removesuffix("_") in _INITIAL
    if namespace not in _OF_TORCH:
        return _sounds_random(name, given)
    if name in _ALWAYS:
        return True
    condition = _condition(op, given)
    return condition is not None and condition.holds(given)


def silenced(op: str, arguments: Arguments) -> Arguments | None:
    """Set the dropped share to 0 in the arguments of a call that computes more than its draw; return None for any other call.

    >>> silenced("functional.scaled_dot_product_attention", Arguments(args=(1, 2, 3), kwargs={"dropout_p": 0.1})).kwargs
    {'dropout_p': 0.0}
    """
    condition = _condition(op, arguments)
    share = condition.share if condition is not None and "dropout" not in _parts(op)[1] else None
    if share is None:
        return None
    if share.place < len(arguments.args):
        return Arguments(args=(*arguments.args[: share.place], 0.0, *arguments.args[share.place + 1 :]), kwargs=arguments.kwargs)
    return Arguments(args=arguments.args, kwargs={**(arguments.kwargs or {}), share.name: 0.0})


def _condition(op: str, arguments: Arguments) -> _Condition | None:
    """Find the condition under which an operation of torch draws; None if it never does, always does, or is not torch's."""
    namespace, name = _parts(op)
    if namespace not in _OF_TORCH:
        return None
    if _is_packed(name, arguments):
        return _PACKED_LAYERS
    return _CONDITIONS.get(f"{namespace}.{name}") or _CONDITIONS.get(op.rpartition("aten.")[2]) or _CONDITIONS.get(name)


def _parts(op: str) -> tuple[str, str]:
    """Split an operation into namespace and name, without its overload."""
    parts = op.split(".")
    if parts[0] == "ops" and len(parts) > 2:
        return ("aten", parts[2]) if parts[1] == "aten" else (".".join(parts[:2]), parts[2])
    if parts[0] == "aten" and len(parts) > 1:
        return "aten", parts[1]
    return ".".join(parts[:-1]), parts[-1]


def _is_packed(name: str, arguments: Arguments) -> bool:
    is_recurrent = name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    return is_recurrent and len(arguments.args) > 4 and isinstance(arguments.args[4], bool)


def _sounds_random(name: str, arguments: Arguments) -> bool:
    """Guess from the names of a foreign function and of its arguments. Only a switch that is off, or a share that drops nothing, overrules
    the name.
    """
    named = arguments.kwargs or {}
    if any(named.get(switch) is False for switch in _SWITCHES):
        return False
    shares = [
        value for key, value in named.items() if _SHARES.search(key) and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    if shares:
        return any(0 < share < 1 for share in shares)
    words = (name.lower(), re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    return "backward" not in words[0] and any(_SOUNDS.search(word) for word in words)
