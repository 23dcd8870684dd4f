# SPDX-License-Identifier: Apache-2.0
"""What draws random numbers: the names and arguments we know, held against torch's own tag and against its generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ulpscope.capture.intercept.naming import op_name
from ulpscope.capture.walk import encode_arguments
from ulpscope.model import Arguments
from ulpscope.model.operations.randomness import draws

_TAG = torch.Tag.nondeterministic_seeded
_SHARES = ("p", "dropout_p", "dropout")
_SWITCHES = ("train", "training")

# Operations that torch does not tag although they draw, most of them made of others that it tags. The generator says so below.
_UNTAGGED = frozenset(
    """
    random random_ binomial _sample_dirichlet rrelu rrelu_ dropout_ feature_dropout feature_dropout_ alpha_dropout_ feature_alpha_dropout
    feature_alpha_dropout_ scaled_dot_product_attention _scaled_dot_product_attention_math _lstm_mps
    """.split()
)
# Backward operations make the mask once more from the seed that they are given; they draw nothing.
_MADE_AGAIN = frozenset(
    """
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward _cudnn_attention_backward
    """.split()
)
# Torch says of these that they draw, and they only choose a kernel or take a softmax.
_TAGGED_IN_VAIN = frozenset({"_fused_sdp_choice", "_nested_tensor_softmax_with_shape"})
# These make masks and their state, whatever share they are given.
_MASKS = frozenset({"_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_"})


def overloads() -> list[tuple[str, Any]]:
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    packets = ((name, getattr(torch.ops.aten, name, None)) for name in sorted(names))
    return [
        (name, getattr(packet, overload))
        for name, packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()
    ]


def given(schema: Any, *, share: float, switch: bool) -> Arguments:
    """Arguments for a schema, all by their places: shares and switches as asked, layers many, tensors as slots."""
    values = []
    for at, one in enumerate(one for one in schema.arguments if not one.kwarg_only):
        kind = str(one.type)
        if one.name in _SHARES and "Tensor" not in kind:
            values.append(share)
        elif one.name in _SWITCHES:
            values.append(switch)
        elif one.name == "num_layers":
            values.append(2)
        else:
            values.append({"$tensor": f"input.{at}"} if "Tensor" in kind else True if kind == "bool" else 1)
    return Arguments(args=tuple(values))


def test_agrees_with_the_tag_of_every_operation_of_torch() -> None:
    known = overloads()
    wrong = []
    for name, overload in known:
        is_random = (_TAG in overload.tags or name in _UNTAGGED) and name not in _MADE_AGAIN | _TAGGED_IN_VAIN
        names = {one.name for one in overload._schema.arguments}
        has_share, has_switch = bool(names & {"dropout_p", "dropout", *(["p"] if "dropout" in name else [])}), bool(names & set(_SWITCHES))
        has_share, has_switch = has_share and name not in _MASKS, has_switch and name not in _MASKS
        expected = {(0.5, True): is_random, (0.5, False): is_random and not has_switch, (0.0, True): is_random and not has_share}
        for (share, switch), answer in expected.items():
            if draws(str(overload), given(overload._schema, share=share, switch=switch)) is not answer:
                wrong.append(f"{overload} with a share of {share} and {switch}")
    assert wrong == []
    assert sum(_TAG in overload.tags for _, overload in known) > 100


def is_nothing(result: Any) -> bool:
    """Whether there was nothing to draw: no element, or none that differs from another."""
    return isinstance(result, torch.Tensor) and (result.numel() == 0 or result.layout is not torch.strided)


class Watching(TorchFunctionMode):
    """Holds each outermost call against the state of the generator."""

    def __init__(self) -> None:
        self.num_drawn, self.wrong = 0, dict[str, tuple[bool, Any]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = op_name(func)
        arguments = encode_arguments(args, kwargs or {})[0]
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        has_drawn = not torch.equal(before, torch.default_generator.get_state())
        self.num_drawn += has_drawn
        if op is not None and draws(op, arguments) is not has_drawn and not is_nothing(result):
            self.wrong.setdefault(op, (has_drawn, arguments))
        return result


X = torch.linspace(0.1, 0.9, 64).reshape(1, 4, 16)


def weights(kind: str, *, layers: int, dropout: float, training: bool = True) -> Any:
    return getattr(torch.nn, kind)(16, 8, layers, dropout=dropout).train(training)


@pytest.mark.parametrize(
    "call",
    [
        *(
            lambda op=op, p=p, on=on: op(X, p, on)
            for op in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout, torch.feature_dropout, F.dropout1d)
            for p in (0.0, 0.3)
            for on in (False, True)
        ),
        lambda: F.dropout(X),
        lambda: F.alpha_dropout(X),
        lambda: F.dropout2d(X[None], training=False),
        lambda: F.dropout3d(X[None], inplace=False),
        lambda: torch.dropout_(X.clone(), 0.2, train=True),
        lambda: torch.native_dropout(X, 0.2, True),
        lambda: torch.native_dropout(X, 0.2, False),
        lambda: F.scaled_dot_product_attention(X, X, X),
        lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.1),
        lambda: F.scaled_dot_product_attention(X, X, X, None, 0.1),
        *(lambda on=on, q=q: torch.nn.MultiheadAttention(16, 2, dropout=q).train(on)(X, X, X) for on in (False, True) for q in (0.0, 0.5)),
        *(lambda k=k, n=n, q=q: weights(k, layers=n, dropout=q)(X) for k in ("LSTM", "GRU", "RNN") for n, q in ((2, 0.0), (2, 0.5))),
        lambda: weights("LSTM", layers=1, dropout=0.0)(X),
        lambda: weights("LSTM", layers=2, dropout=0.5, training=False)(X),
        lambda: weights("GRU", layers=2, dropout=0.5)(torch.nn.utils.rnn.pack_sequence([X[0], X[0]])),
        lambda: weights("RNN", layers=2, dropout=0.0)(torch.nn.utils.rnn.pack_sequence([X[0], X[0]])),
        *(lambda on=on, op=op: op(-X, 0.1, 0.3, on) for on in (False, True) for op in (F.rrelu, torch.rrelu)),
        lambda: F.rrelu(-X),
        lambda: F.gumbel_softmax(X, hard=True),
        lambda: F.fractional_max_pool2d(X, 2, output_size=2),
        lambda: F.fractional_max_pool2d(X, 2, output_size=2, _random_samples=torch.full((1, 1, 2), 0.5)),
        lambda: F.fractional_max_pool3d(X.reshape(1, 4, 4, 4), 2, output_size=2, return_indices=True),
        lambda: torch.poisson(X),
        lambda: F.poisson_nll_loss(X, X),
        lambda: torch.binomial(X * 9, X),
        lambda: torch._sample_dirichlet(X),
        lambda: torch._standard_gamma(X),
        lambda: torch.bernoulli(X),
        lambda: X.clone().bernoulli_(0.3),
        lambda: X.clone().random_(0, 9),
        lambda: torch.multinomial(X[0], 3),
        lambda: torch.normal(X, X),
        lambda: [torch.rand(3), torch.randn(3), torch.randint(9, (3,)), torch.randperm(3), torch.rand_like(X), torch.randn_like(X)],
        lambda: [getattr(X.clone(), f"{name}_")() for name in ("normal", "uniform", "exponential", "cauchy", "log_normal")],
        lambda: X.clone().geometric_(0.5),
        lambda: torch.svd_lowrank(X[0], 2),
        lambda: torch.pca_lowrank(X[0], 2),
        lambda: torch.lobpcg(torch.eye(64) * X[0, 0].repeat(4), 2),
        lambda: torch.lobpcg(torch.eye(64) * X[0, 0].repeat(4), 2, X=torch.eye(64)[:, :2]),
        lambda: [
            torch.nn.init.constant_(X.clone(), 1.0),
            torch.nn.init.sparse_(X[0].clone(), 0.5),
            torch.nn.init.orthogonal_(X[0].clone()),
        ],
        lambda: [torch.nn.init.kaiming_normal_(X.clone()), torch.nn.init.trunc_normal_(X.clone()), torch.nn.init.eye_(X[0].clone())],
    ],
)
def test_agrees_with_the_generator(call: Any) -> None:
    with Watching() as watching:
        call()
    assert watching.wrong == {}, watching.wrong


@pytest.mark.long
def test_agrees_with_the_generator_on_the_samples_of_torch() -> None:
    """All operations that torch's own tests know, with their first samples."""
    from torch.testing._internal.common_methods_invocations import op_db

    watching, num_tried = Watching(), 0
    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        try:
            samples = list(op.sample_inputs("cpu", torch.float32))[:12]
        except Exception:  # a sample that this build cannot make
            continue
        for sample in samples:
            try:
                with watching:
                    op(sample.input, *sample.args, **sample.kwargs)
                num_tried += 1
            except Exception:  # an operation that this build does not have
                continue
    assert watching.wrong == {}, watching.wrong
    assert num_tried > 3000
    assert watching.num_drawn > 100


@pytest.mark.parametrize(
    ("op", "arguments", "answer"),
    [
        ("module.Dropout", None, True),
        ("module.RReLU", None, True),
        ("module.Linear", None, False),
        ("functional.dropout", None, True),
        ("functional.scaled_dot_product_attention", None, False),
        ("ops.aten.bernoulli.default", None, True),
        ("ops.flash_attn._flash_attn_forward", {"dropout_p": 0.0}, False),
        ("ops.flash_attn._flash_attn_forward", {"dropout_p": 0.1}, True),
        ("torch_npu.npu_fusion_attention", {"keep_prob": 1.0}, False),
        ("torch_npu.npu_fusion_attention", {"keep_prob": 0.9}, True),
        ("torch_npu.npu_dropout_with_byte_mask", None, True),
        ("ops.mylib.fused_dropout_add", {"p": 0.5, "training": False}, False),
        ("ops.mylib.fused_dropout_add_backward", None, False),
        ("ops.mylib.operand_gather", None, False),
        ("torchvision.ops.stochastic_depth.stochastic_depth", {"p": 0.5, "mode": "row"}, True),
        ("functional.poisson_nll_loss", None, False),
        ("Tensor.normal_", None, True),
        ("aten.native_dropout_backward", None, False),
        ("functional.dropout", {"p": {"$object": "SymFloat", "repr": ""}}, True),
    ],
)
def test_tells_by_name_and_arguments(op: str, arguments: dict[str, Any] | None, answer: bool) -> None:
    assert draws(op, None if arguments is None else Arguments(kwargs=arguments)) is answer
