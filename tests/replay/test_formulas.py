# SPDX-License-Identifier: Apache-2.0
"""Vendor and fused operations by their formulas, against torch's own where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ulpscope.replay import NotReplayable
from ulpscope.replay.formulas.fused import formula_of
from ulpscope.testing import vendor_ops


def made(name: str) -> Callable[..., Any]:
    found = formula_of(f"torch_npu.{name}")
    assert found is not None
    return found


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", ["torch_npu.npu_swiglu", "npu.npu_swiglu", "ops.npu.npu_swiglu", "npu.npu_swiglu.default"])
def test_an_operation_has_many_names(name: str) -> None:
    assert formula_of(name) is made("npu_swiglu")


def test_other_operations_have_none() -> None:
    assert [formula_of(name) for name in ("torch.npu_swiglu", "npu_swiglu", "ops.mine.npu_swiglu", "aten.add.Tensor")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("npu_fast_gelu", (random(4, 6),)),
        ("npu_swiglu", (random(4, 6),)),
        ("npu_swiglu", (random(4, 6), 0)),
        ("npu_rms_norm", (random(4, 6), random(6), 1e-3)),
        ("npu_rotary_mul", (random(2, 3, 4, 8), random(1, 1, 4, 8), random(1, 1, 4, 8) * 2)),
        ("npu_format_cast", (random(4, 6), 2)),
    ],
)
def test_like_the_emulated_device(name: str, arguments: tuple[Any, ...]) -> None:
    found, expected = made(name)(*arguments), getattr(vendor_ops, name)(*arguments)
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other.double(), rtol=1e-6)


def test_interleaved_rotary_turns_pairs_of_neighbours() -> None:
    x, angle = random(1, 1, 3, 4), random(1, 1, 3, 2)
    cos, sin = (part.repeat_interleave(2, -1) for part in (angle.cos(), angle.sin()))
    turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    assert torch.allclose(made("npu_rotary_mul")(x, cos, sin, "interleave"), turned)
    with pytest.raises(NotReplayable, match="rotary mode"):
        made("npu_rotary_mul")(x, cos, sin, "quarter")


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_fused_attention(layout: str, mode: int) -> None:
    """Two heads of keys for four of queries; in modes 2 and 3 the vendor's mask is a fixed upper triangle."""
    q, k, v = random(2, 4, 5, 8), random(2, 2, 7, 8), random(2, 2, 7, 8) + 1
    masks = {
        0: random(5, 7) > 1,
        1: random(5, 7) > 1,
        2: torch.ones(5, 7, dtype=torch.bool).triu(1),
        3: torch.ones(5, 7, dtype=torch.bool).triu(3),
    }
    expected = F.scaled_dot_product_attention(q, k, v, ~masks[mode], scale=0.3, enable_gqa=True)
    to = {
        "BNSD": lambda x: x,
        "BSND": lambda x: x.transpose(1, 2),
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    }[layout]
    given = masks[mode] if mode < 2 else torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    (out,) = made("npu_fusion_attention")(to(q), to(k), to(v), 4, layout, atten_mask=given, scale=0.3, sparse_mode=mode)
    assert torch.allclose(out, to(expected))


def test_attention_that_has_no_formula_says_so() -> None:
    q = random(1, 2, 4, 8)
    attend = made("npu_fusion_attention")
    for arguments in (
        {"input_layout": "TND"},
        {"input_layout": "BNSD", "sparse_mode": 4, "atten_mask": torch.ones(4, 4) > 0},
        {"input_layout": "BNSD", "pse": random(1, 2, 4, 4)},
        {"input_layout": "BNSD", "actual_seq_qlen": [4]},
    ):
        with pytest.raises(NotReplayable, match="has no formula here"):
            attend(q, q, q, 2, **arguments)
    with pytest.raises(NotReplayable):
        made("npu_prompt_flash_attention")(q, q, q, num_heads=2, input_layout="BNSD", quant_scale1=random(1))


def test_prompt_attention_limits_what_is_seen() -> None:
    q, k, v = random(1, 6, 16), random(1, 6, 16) + 1, random(1, 6, 16) - 1
    no_mask = made("npu_prompt_flash_attention")(q, k, v, num_heads=2, scale_value=0.35)
    causal = made("npu_prompt_flash_attention")(q, k, v, num_heads=2, scale_value=0.35, atten_mask=torch.zeros(6, 6) > 0)
    heads = [x.unflatten(-1, (2, 8)).transpose(1, 2) for x in (q, k, v)]
    assert torch.allclose(no_mask, F.scaled_dot_product_attention(*heads, scale=0.35).transpose(1, 2).flatten(2))
    assert torch.allclose(causal, F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.35).transpose(1, 2).flatten(2))


def test_the_kernels_of_one_device_by_their_definition() -> None:
    q, k, v = (random(2, 3, 5, 8) + shift for shift in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    flash = formula_of("aten._scaled_dot_product_flash_attention.default")
    efficient = formula_of("aten._scaled_dot_product_efficient_attention.default")
    assert flash is not None
    assert efficient is not None
    assert torch.allclose(flash(q, k, v, 0.0, True, False)[0], expected)
    assert torch.allclose(efficient(q, k, v, None, True, 0.0, True)[0], expected)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("npu_confusion_transpose", (random(2, 3, 4), [1, 0, 2], [3, 8], True), lambda x: x.permute(1, 0, 2).reshape(3, 8)),
        ("npu_confusion_transpose", (random(6, 4), [1, 0, 2], [2, 3, 4], False), lambda x: x.view(2, 3, 4).permute(1, 0, 2)),
        ("npu_transpose", (random(2, 3, 4), [2, 0, 1]), lambda x: x.permute(2, 0, 1)),
        ("npu_broadcast", (random(1, 4), [3, 4]), lambda x: x.expand(3, 4)),
        ("npu_dtype_cast", (random(3), torch.float16), lambda x: x.half()),
        ("npu_silu", (random(3),), F.silu),
        ("npu_mish", (random(3),), F.mish),
        ("npu_linear", (random(3, 4), torch.ones(2, 4, dtype=torch.float64)), lambda x: x.sum(-1, keepdim=True).expand(3, 2)),
        ("npu_bmmV2", (random(2, 3, 4), torch.ones(2, 4, 1, dtype=torch.float64), []), lambda x: x.sum(-1, keepdim=True)),
        ("npu_layer_norm_eval", (random(3, 4), [4]), lambda x: F.layer_norm(x, (4,))),
        ("npu_scaled_masked_softmax", (random(1, 1, 3, 3), torch.zeros(1, 1, 3, 3), 2.0), lambda x: (2 * x).softmax(-1)),
    ],
)
def test_small_formulas(name: str, arguments: tuple[Any, ...], expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert torch.allclose(made(name)(*arguments), expected(arguments[0]))


@pytest.mark.parametrize("name", ["npu_swiglu", "npu_fast_gelu", "npu_silu", "npu_mish"])
def test_low_precision_is_rounded_once(name: str) -> None:
    x = random(64, 32, dtype=torch.float32).bfloat16()
    assert torch.equal(made(name)(x), made(name)(x.float()).bfloat16())


def test_a_sum_and_its_norm() -> None:
    x, y, gamma = random(3, 4), random(3, 4) * 2, random(4)
    out, rstd, total = made("npu_add_rms_norm")(x, y, gamma, 1e-5)
    assert torch.allclose(total, x + y)
    assert torch.allclose(out, F.rms_norm(total, (4,), gamma, 1e-5))
    assert torch.allclose(rstd, total.square().mean(-1, keepdim=True).add(1e-5).rsqrt())
