# SPDX-License-Identifier: Apache-2.0
"""The vendor's other operations against independent formulas: plain Python, torch's own kernel, or the example on the vendor's page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ulpscope.replay import NotReplayable
from ulpscope.replay.formulas.fused import formula_of
from ulpscope.replay.formulas.vendor import VENDOR_FORMULAS, WITHOUT_FORMULA

PUBLISHED = """
    one_ npu_sort_v2 npu_transpose npu_broadcast npu_dtype_cast empty_with_format npu_one_hot npu_stride_add npu_ps_roi_pooling
    npu_roi_align npu_nms_v4 npu_iou npu_nms_with_mask npu_pad npu_bounding_box_encode npu_bounding_box_decode npu_batch_nms npu_slice
    _npu_dropout npu_indexing npu_ifmr npu_max npu_scatter npu_layer_norm_eval npu_alloc_float_status npu_get_float_status
    npu_clear_float_status npu_confusion_transpose npu_bmmV2 fast_gelu npu_sub_sample npu_deformable_conv2d npu_mish
    npu_anchor_response_flags npu_yolo_boxes_encode npu_grid_assign_positive npu_normalize_batch npu_masked_fill_range npu_linear
    npu_bert_apply_adam npu_giou npu_ciou npu_diou npu_sign_bits_pack npu_sign_bits_unpack npu_flash_attention
    npu_scaled_masked_softmax npu_rotary_mul npu_roi_alignbk npu_ptiou npu_fusion_attention npu_rms_norm npu_swiglu
"""


def made(name: str) -> Callable[..., Any]:
    found = formula_of(f"torch_npu.{name}")
    assert found is not None
    return found


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", PUBLISHED.split())
def test_every_published_operation_has_a_formula_or_a_reason(name: str) -> None:
    if name in WITHOUT_FORMULA:
        with pytest.raises(NotReplayable, match=r"without a formula: .{10,}"):
            formula_of(f"npu.{name}")
    else:
        assert callable(made(name))


def test_no_operation_has_both() -> None:
    assert not VENDOR_FORMULAS.keys() & WITHOUT_FORMULA.keys()


# ------------------------------------------------------------------------------------------------------------------ boxes


def overlap(a: list[float], b: list[float]) -> tuple[float, float, list[float]]:
    """Shared area, area of both, and the hull, of boxes by their corners."""
    width, height = (max(0.0, min(a[2 + at], b[2 + at]) - max(a[at], b[at])) for at in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    hull = [min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])]
    return width * height, sum(areas) - width * height, hull


def loss_of(kind: str, a: list[float], b: list[float]) -> float:
    shared, both, hull = overlap(a, b)
    width, height = hull[2] - hull[0], hull[3] - hull[1]
    if kind == "giou":
        return shared / both - (width * height - both) / (width * height)
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (a, b)]
    found = shared / both - math.dist(*centres) ** 2 / (width**2 + height**2)
    if kind == "diou":
        return found
    angles = [math.atan((box[2] - box[0]) / (box[3] - box[1])) for box in (a, b)]
    penalty = 4 / math.pi**2 * (angles[1] - angles[0]) ** 2
    return found - penalty**2 / (1 - shared / both + penalty)


def boxes_and_corners(seed: int) -> tuple[torch.Tensor, list[list[float]]]:
    """Boxes [4, n] by centre and size, and their corners."""
    boxes = torch.rand(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 5 + 0.5
    x, y, width, height = boxes
    return boxes, torch.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2), 1).tolist()


@pytest.mark.parametrize("kind", ["giou", "diou", "ciou"])
def test_box_losses(kind: str) -> None:
    (boxes, corners), (truths, truth_corners) = boxes_and_corners(1), boxes_and_corners(2)
    expected = torch.tensor([loss_of(kind, a, b) for a, b in zip(corners, truth_corners, strict=True)], dtype=torch.float64)
    shape = (-1, 1) if kind == "giou" else (1, -1)
    assert torch.allclose(made(f"npu_{kind}")(boxes, truths, trans=True, is_cross=False), expected.reshape(shape))
    by_corners = [torch.tensor(each, dtype=torch.float64).T.contiguous() for each in (corners, truth_corners)]
    assert torch.allclose(made(f"npu_{kind}")(*by_corners, False, False, 0), expected.reshape(shape))


@pytest.mark.parametrize("name", ["npu_giou", "npu_diou", "npu_ciou"])
def test_box_losses_that_have_no_formula_say_so(name: str) -> None:
    boxes = boxes_and_corners(1)[0]
    for arguments in ((boxes, boxes, True, True), (boxes, boxes, True, False, 1), (boxes.T, boxes.T, True, False)):
        with pytest.raises(NotReplayable):
            made(name)(*arguments)


def test_the_gradient_of_ciou_is_not_guessed() -> None:
    boxes = boxes_and_corners(1)[0]
    with pytest.raises(NotReplayable, match="gradient"):
        made("npu_ciou")(boxes.clone().requires_grad_(), boxes, True, False)


@pytest.mark.parametrize("mode", [0, 1])
def test_iou_of_each_with_each(mode: int) -> None:
    boxes, truths = boxes_and_corners(3)[1][:5], boxes_and_corners(4)[1][:3]
    expected = [[0.0] * 5 for _ in range(3)]
    for row, truth in enumerate(truths):
        for column, box in enumerate(boxes):
            shared, both, _ = overlap(box, truth)
            expected[row][column] = shared / (both if mode == 0 else (truth[2] - truth[0]) * (truth[3] - truth[1]))
    found = made("npu_iou")(*(torch.tensor(each, dtype=torch.float64) for each in (boxes, truths)), mode)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_bounding_box_encode() -> None:
    """An anchor of 3 x 3 pixels, a truth as large and 4 pixels off: 4/3 of its size, over 0.1."""
    anchors, truths = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    found = made("npu_bounding_box_encode")(anchors, truths, 0, 0, 0, 0, 0.1, 0.1, 0.2, 0.2)
    assert torch.allclose(found, torch.tensor([[13.3333, 13.3333, 0.0, 0.0]]), atol=1e-4)
    with pytest.raises(NotReplayable):
        made("npu_bounding_box_encode")(anchors, truths, 0)


# ------------------------------------------------------------------------------------------------------- moving and filling


def test_one_hot_as_on_the_page() -> None:
    found = made("npu_one_hot")(torch.tensor([5, 3, 2, 1]), depth=5)
    assert found.tolist() == [[0] * 5, [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert found.dtype == torch.float32
    assert made("npu_one_hot")(torch.tensor([1]), -1, 2, 3, -1).tolist() == [[-1, 3]]
    with pytest.raises(NotReplayable):
        made("npu_one_hot")(torch.tensor([[1]]), 0, 2)


def test_padding_begins_with_the_first_axis() -> None:
    x = random(2, 3)
    expected = torch.zeros(2 + 3, 3 + 7, dtype=torch.float64)
    expected[1:3, 3:6] = x
    assert torch.equal(made("npu_pad")(x, (1, 2, 3, 4)), expected)


def test_slicing() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(made("npu_slice")(x, [0, 1, 2], [2, 2, 2]), x[0:2, 1:3, 2:4])
    assert torch.equal(made("npu_indexing")(x, [0, 0, 1], [2, 3, 4], [1, 2, 2]), x[:, ::2, 1::2])
    assert torch.equal(made("npu_indexing")(x, [1, 1, 1], [2, 2, 2], [1, 1, 1], 1, 4), x[:2, 1:2, 1:])
    for arguments in (([0], [2], [1], 0, 0, 1), ([0], [2], [-1])):
        with pytest.raises(NotReplayable):
            made("npu_indexing")(x, *arguments)


@pytest.mark.parametrize(("name", "pick"), [("npu_max", max), ("npu_min", min)])
def test_extremes_with_short_indices(name: str, pick: Callable[..., float]) -> None:
    x = random(3, 5)
    values, indices = made(name)(x, 1, True)
    rows = x.tolist()
    assert values.tolist() == [[pick(row)] for row in rows]
    assert indices.tolist() == [[row.index(pick(row))] for row in rows]
    assert indices.dtype == torch.int32


def test_sorting_gives_values_only() -> None:
    x = random(4, 6)
    assert made("npu_sort_v2")(x, 1, True).tolist() == [sorted(row, reverse=True) for row in x.tolist()]


def test_scattering_as_on_the_page() -> None:
    x = torch.tensor([[1.6279, 0.1226], [0.9041, 1.0980]])
    found = made("npu_scatter")(x, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([-1.1993, -1.5247]), 0)
    assert torch.equal(found, torch.tensor([[-1.1993, 0.1226], [0.9041, -1.5247]]))
    assert torch.equal(made("npu_scatter")(x, torch.tensor([], dtype=torch.int32), torch.tensor([]), 0), x)


def test_filling_ranges_of_rows() -> None:
    x = random(4, 4)
    expected = x.clone()
    expected[0, 0] = expected[1, 1] = expected[2, 2] = 1.0
    start, end, value = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]]), torch.tensor([1.0], dtype=torch.float64)
    assert torch.equal(made("npu_masked_fill_range")(x, start, end, value, 1), expected)
    deep = random(2, 3, 5)
    expected = deep.clone()
    expected[0, :, 1:3] = expected[1, :, 2:5] = 1.0
    assert torch.equal(made("npu_masked_fill_range")(deep, torch.tensor([[1, 2]]), torch.tensor([[3, 5]]), value), expected)
    expected = deep.clone()
    expected[:, 0:2] = 1.0
    assert torch.equal(made("npu_masked_fill_range")(deep, torch.tensor([[0]]), torch.tensor([[2]]), value, 1), expected)


def test_signs_to_bits_as_on_the_page() -> None:
    x = torch.tensor([5, 4, 3, 2, 0, -1, -2, 4, 3, 2, 1, 0, -1, -2], dtype=torch.float32)
    assert made("npu_sign_bits_pack")(x, 2).tolist() == [[159], [15]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_signs_to_bits_and_back(dtype: torch.dtype) -> None:
    x = random(64, dtype=torch.float32)
    packed = made("npu_sign_bits_pack")(x, 4)
    assert packed.flatten().tolist() == np.packbits(x.numpy() >= 0, bitorder="little").tolist()
    for order in ((4, dtype), (dtype, 4)):
        unpacked = made("npu_sign_bits_unpack")(packed.flatten(), *order)
        assert unpacked.shape == (4, 16)
        assert torch.equal(unpacked.flatten(), x.sign().to(dtype))


def test_small_ones() -> None:
    x = random(2, 3)
    assert torch.equal(made("npu_reshape")(x, [3, 2]), x.reshape(3, 2))
    changed = x.clone()
    assert made("one_")(changed) is changed
    assert torch.equal(changed, torch.ones_like(x))


# ------------------------------------------------------------------------------------------------------------- arithmetic


def test_geglu_activates_the_right_half() -> None:
    x = random(3, 8)
    left, right = x[:, :4], x[:, 4:]
    out, activated = made("npu_geglu")(x, -1, 0)
    by_definition = right * (1 + torch.erf(right / math.sqrt(2))) / 2
    assert torch.allclose(activated, by_definition)
    assert torch.allclose(out, left * by_definition)
    inside = math.sqrt(2 / math.pi) * (left + 0.044715 * left**3)
    assert torch.allclose(made("npu_geglu")(x, -1, 1, True)[1], left * (1 + torch.tanh(inside)) / 2)
    assert torch.allclose(made("npu_gelu")(x), x * (1 + torch.erf(x / math.sqrt(2))) / 2)


@pytest.mark.parametrize("is_affine", [True, False])
def test_group_norm_silu(is_affine: bool) -> None:
    x = random(2, 6, 4, 3)
    weight, bias = (random(6) + 1, random(6) - 1) if is_affine else (None, None)
    out, mean, rstd = made("npu_group_norm_silu")(x, weight, bias, 3, 1e-3)
    assert torch.allclose(out, F.silu(F.group_norm(x, 3, weight, bias, 1e-3)))
    assert torch.allclose(mean, x.reshape(2, 3, -1).mean(-1))
    assert torch.allclose(rstd, (x.reshape(2, 3, -1).var(-1, unbiased=False) + 1e-3) ** -0.5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_fused_cross_entropy(reduction: str, smoothing: float, is_weighted: bool) -> None:
    x, target = random(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    weight = torch.linspace(0.2, 1, 5, dtype=torch.float64) if is_weighted else None
    loss, log_prob = made("npu_cross_entropy_loss")(x, target, weight, reduction, 2, smoothing)
    expected = F.cross_entropy(x, target, weight, reduction=reduction, ignore_index=2, label_smoothing=smoothing)
    assert torch.allclose(loss, expected if reduction == "none" else expected.reshape(1))
    assert torch.allclose(log_prob, x.log_softmax(-1))
    with pytest.raises(NotReplayable):
        made("npu_cross_entropy_loss")(x, target, return_zloss=True)


@pytest.mark.parametrize("kind", [0, 1])
def test_normalize_batch(kind: int) -> None:
    x = random(2, 3, 7)
    found = made("npu_normalize_batch")(x, torch.tensor([4, 6]), kind)
    for row, length in enumerate((4, 6)):
        seen = x[row, :, :length].numpy()
        mean = seen.mean(1, keepdims=True) if kind == 0 else seen.mean()
        deviation = seen.std(1, ddof=1, keepdims=True) if kind == 0 else seen.std(ddof=1)
        assert np.allclose(found[row].numpy(), (x[row].numpy() - mean) / (deviation + 1e-5))


@pytest.mark.parametrize("maximize", [False, True])
def test_fused_adamw_is_torchs(maximize: bool) -> None:
    parameter = torch.nn.Parameter(random(7))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, maximize=maximize, foreach=False)
    mine, first, second = parameter.detach().clone(), torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for step in range(3):
        parameter.grad = random(7) + step
        optimizer.step()
        made("npu_apply_adam_w")(
            0.8**step, 0.9**step, 0.1, 0.2, 0.8, 0.9, 1e-3, parameter.grad, None, False, maximize, out=(mine, first, second)
        )
    assert torch.allclose(mine, parameter)
    assert torch.allclose(first, optimizer.state[parameter]["exp_avg"])
    with pytest.raises(NotReplayable):
        made("npu_apply_adam_w")(1, 1, 0.1, 0, 0.9, 0.9, 1e-3, first, None, True, out=(mine, first, second))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("npu_geglu", ()),
        ("npu_gelu", ()),
        ("npu_group_norm_silu", (random(4).float() + 2, None, 2)),
        ("npu_cross_entropy_loss", (torch.tensor([0, 1, 2, 3, 0, 1]), None, "none")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(name: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    x = random(6, 4).to(dtype)
    wide = [each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in arguments]
    found, exact = made(name)(x, *arguments), made(name)(x.double(), *wide)
    found, exact = (each[0] if isinstance(each, tuple) else each for each in (found, exact))
    assert found.dtype == dtype
    assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-7)
