# SPDX-License-Identifier: Apache-2.0
"""Compute operations of torch_npu by their formulas, and name the operations that have none, with the reason. New ones go here;
`fused` holds older ones and the fused kernels of ATen.

Sources are the vendor's API pages and the small-operator equivalents in its public tests. Where the two disagree, or neither says what
happens, there is no formula: a wrong one would blame a sound kernel. Low precision is widened to float32 inside and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope.replay.program import NotReplayable

__all__ = ["VENDOR_FORMULAS", "WITHOUT_FORMULA"]

_IOU_EPS = 1e-7
_BOX_EPS = 1e-10


def _inner(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---------------------------------------------------------------------------------------------------------------- boxes


def _iou(bboxes: Tensor, gtboxes: Tensor, mode: int = 0) -> Tensor:
    """Compute each box's shared area with each ground truth over their joint area; mode 1 divides by the ground truth's area alone."""
    boxes, truths = _inner(bboxes), _inner(gtboxes).unsqueeze(1)
    sides = (torch.minimum(boxes[:, 2:], truths[..., 2:]) - torch.maximum(boxes[:, :2], truths[..., :2])).clamp(min=0)
    shared = sides.prod(-1)
    truth_area = (truths[..., 2:] - truths[..., :2]).prod(-1)
    box_area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    whole = truth_area + box_area - shared if mode == 0 else truth_area.expand_as(shared)
    return (shared / (whole + _IOU_EPS)).to(bboxes.dtype)


def _corners(boxes: Tensor, trans: bool) -> tuple[Tensor, Tensor]:
    """Return lower and upper corners, each [2, n], of boxes [4, n]; `trans` says that they are given by centre and size."""
    if boxes.dim() != 2 or boxes.shape[0] != 4:
        raise NotReplayable(f"boxes of shape {list(boxes.shape)} have no formula here, only [4, n]")
    first, second = boxes[:2], boxes[2:]
    return (first - second / 2, first + second / 2) if trans else (first, second)


class _Boxes:
    """Boxes and their ground truths, one to one, with the measures that the three losses use."""

    def __init__(self, boxes: Tensor, truths: Tensor, trans: bool, is_cross: bool, mode: int) -> None:
        if is_cross or mode != 0:
            raise NotReplayable("boxes crossed with all others, or shared area over one box, have no formula here")
        (low, high), (truth_low, truth_high) = (_corners(_inner(each), trans) for each in (boxes, truths))
        self.sizes, self.truth_sizes = high - low, truth_high - truth_low
        shared = (torch.minimum(high, truth_high) - torch.maximum(low, truth_low)).clamp(min=0).prod(0)
        self.union = self.sizes.prod(0) + self.truth_sizes.prod(0) - shared + _BOX_EPS
        self.iou = shared / self.union
        self.hull = torch.maximum(high, truth_high) - torch.minimum(low, truth_low)
        self.offset = (low + high - truth_low - truth_high) / 2

    @property
    def distance(self) -> Tensor:
        """Return the square of the distance between centres over that of the hull's diagonal."""
        return self.offset.square().sum(0) / (self.hull.square().sum(0) + _BOX_EPS)


def _giou(boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0) -> Tensor:
    found = _Boxes(boxes, gtboxes, trans, is_cross, mode)
    hull = found.hull.prod(0) + _BOX_EPS
    return (found.iou - (hull - found.union) / hull).to(boxes.dtype).unsqueeze(1)


def _diou(boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = False, mode: int = 0) -> Tensor:
    found = _Boxes(boxes, gtboxes, trans, is_cross, mode)
    return (found.iou - found.distance).to(boxes.dtype).unsqueeze(0)


def _ciou(boxes: Tensor, gtboxes: Tensor, trans: bool = False, is_cross: bool = True, mode: int = 0, atan_sub_flag: bool = False) -> Tensor:
    if torch.is_grad_enabled() and (boxes.requires_grad or gtboxes.requires_grad):
        raise NotReplayable("whether its gradient goes through the weight of the aspect ratio is not published")
    found = _Boxes(boxes, gtboxes, trans, is_cross, mode)
    aspect, truth_aspect = (torch.atan(sizes[0] / sizes[1]) for sizes in (found.sizes, found.truth_sizes))
    penalty = 4 / math.pi**2 * (truth_aspect - aspect).square()
    weight = penalty / (1 + _BOX_EPS - found.iou + penalty)
    return (found.iou - found.distance - penalty * weight).to(boxes.dtype).unsqueeze(0)


def _bounding_box_encode(anchors: Tensor, truths: Tensor, *means_and_stds: float) -> Tensor:
    """Compute the offsets from anchors to ground truths that box regression learns; sizes count both end pixels."""
    if len(means_and_stds) != 8:
        raise NotReplayable("its means and standard deviations were not recorded by position")
    (centre, size), (truth_centre, truth_size) = (
        ((each[..., :2] + each[..., 2:]) / 2, each[..., 2:] - each[..., :2] + 1) for each in (_inner(anchors), _inner(truths))
    )
    moved = (truth_centre - centre) / (size + _IOU_EPS)
    grown = (truth_size.abs() / (size + _IOU_EPS).abs()).log()
    means, stds = (moved.new_tensor(each) for each in (means_and_stds[:4], means_and_stds[4:]))
    return ((torch.cat((moved, grown), -1) - means) / stds).to(anchors.dtype)


# ------------------------------------------------------------------------------------------------------ moving and filling


def _one_hot(x: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0) -> Tensor:
    """Encode indices as one-hot vectors; `num_classes` is the axis, whatever its name says, and an index beyond `depth` sets no element."""
    if num_classes not in (-1, x.dim()) or depth < 0:
        raise NotReplayable("a one-hot axis in the middle has no formula here")
    hot = x.unsqueeze(-1) == torch.arange(depth, device=x.device)
    return torch.where(hot, float(on_value), float(off_value)).to(torch.float32)


def _pad(x: Tensor, paddings: Sequence[int]) -> Tensor:
    """Pad an array; the pairs go from the first axis on, which is the reverse of torch's order."""
    pairs = [tuple(paddings[at : at + 2]) for at in range(0, len(paddings), 2)]
    return F.pad(x, [amount for pair in reversed(pairs) for amount in pair])


def _slice(x: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    return x[tuple(slice(start, start + length) for start, length in zip(offsets, size, strict=True))]


def _indexing(
    x: Tensor,
    begin: Sequence[int],
    end: Sequence[int],
    strides: Sequence[int],
    begin_mask: int = 0,
    end_mask: int = 0,
    *masks: int,
    **more: int,
) -> Tensor:
    if any((*masks, *more.values())) or any(stride < 1 for stride in strides):
        raise NotReplayable("indexing with new, shrunk or elided axes or backwards has no formula here")
    parts = enumerate(zip(begin, end, strides, strict=True))
    return x[
        tuple(
            slice(None if begin_mask >> at & 1 else first, None if end_mask >> at & 1 else last, stride)
            for at, (first, last, stride) in parts
        )
    ]


def _max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = x.max(dim, keepdim)
    return values, indices.to(torch.int32)


def _min(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = x.min(dim, keepdim)
    return values, indices.to(torch.int32)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    return x.sort(dim, descending)[0]


def _scatter(x: Tensor, indices: Tensor, updates: Tensor, dim: int) -> Tensor:
    """Scatter updates; `indices` may lack the axis `dim`, and then names one element along it for each of the others."""
    if indices.numel() == 0:
        return x.clone()
    if indices.dim() < x.dim():
        indices, updates = indices.unsqueeze(dim), updates.unsqueeze(dim)
    return x.scatter(dim, indices.long(), updates)


def _masked_fill_range(x: Tensor, start: Tensor, end: Tensor, value: Tensor, axis: int = -1) -> Tensor:
    """Fill ranges along an axis; along the last of several axes each column of `start` belongs to one row of the first."""
    axis %= x.dim()
    by_row = x.dim() > 1 and axis == x.dim() - 1
    out = x.clone()
    for (group, row), first in _each(start):
        target = out[row] if by_row else out
        last = int(end[group, row])
        if last > first:
            target.narrow(axis - 1 if by_row else axis, first, last - first).fill_(value[group])
    return out


def _each(start: Tensor) -> list[tuple[tuple[int, int], int]]:
    return [((group, row), int(start[group, row])) for group in range(start.shape[0]) for row in range(start.shape[1])]


def _sign_bits_pack(x: Tensor, size: int) -> Tensor:
    """Pack eight signs to a byte, the first in the lowest bit; missing signs at the end count as negative."""
    bits = F.pad((~(x < 0)).to(torch.int64), (0, -x.numel() % 8)).reshape(-1, 8)
    weights = torch.ones(8, dtype=torch.int64, device=x.device) << torch.arange(8, device=x.device)
    return (bits * weights).sum(1).to(torch.uint8).reshape(size, -1)


def _sign_bits_unpack(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Unpack signs: a set bit is 1, another is -1. The vendor's pages give the last two arguments in either order."""
    if isinstance(size, torch.dtype):
        size, dtype = dtype, size  # type: ignore[assignment]
    bits = x.to(torch.int64).unsqueeze(-1) >> torch.arange(8, device=x.device) & 1
    return (bits * 2 - 1).to(dtype).reshape(size, -1)


def _reshape(x: Tensor, shape: Sequence[int], can_refresh: bool = False) -> Tensor:
    return x.reshape(tuple(shape))


def _one_(x: Tensor) -> Tensor:
    return x.fill_(1)


# ------------------------------------------------------------------------------------------------------------ arithmetic


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(_inner(x), approximate=approximate).to(x.dtype)


def _geglu(x: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """Compute GEGLU; gelu is applied to the right half unless `activate_left`, and 1 is the tanh form."""
    left, right = x.chunk(2, dim)
    gate, value = (left, right) if activate_left else (right, left)
    activated = F.gelu(_inner(gate), approximate="tanh" if approximate == 1 else "none")
    return (activated * _inner(value)).to(x.dtype), activated.to(x.dtype)


def _group_norm_silu(x: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    inner = _inner(x)
    groups = inner.reshape(x.shape[0], group, -1)
    mean, rstd = groups.mean(-1), (groups.var(-1, correction=0) + eps).rsqrt()
    normal = ((groups - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    if weight is not None:
        normal = normal * _inner(weight).reshape(per_channel)
    if bias is not None:
        normal = normal + _inner(bias).reshape(per_channel)
    return (normal * torch.sigmoid(normal)).to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the loss and the logarithms of the probabilities; the other two results are empty."""
    if lse_square_scale_for_zloss or return_zloss:
        raise NotReplayable("the auxiliary loss has no formula here")
    inner = _inner(x)
    log_prob = inner - inner.logsumexp(-1, keepdim=True)
    scale = None if weight is None else weight.to(inner.dtype)
    loss = F.nll_loss(log_prob, target, scale, ignore_index=ignore_index, reduction=reduction) * (1 - label_smoothing)
    if label_smoothing:
        loss = loss + label_smoothing * _smoothed(log_prob, target, scale, ignore_index, reduction)
    return (loss if reduction == "none" else loss.reshape(1)).to(x.dtype), log_prob.to(x.dtype)


def _smoothed(log_prob: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    """Compute the loss of a target that weights all classes alike."""
    kept = target != ignore_index
    weighted = log_prob if weight is None else log_prob * weight
    each = torch.where(kept, -weighted.sum(-1) / log_prob.shape[-1], 0.0)
    if reduction != "mean":
        return each if reduction == "none" else each.sum()
    total = kept.sum() if weight is None else weight[target[kept]].sum()
    return each.sum() / total


def _normalize_batch(x: Tensor, seq_len: Tensor, normalize_type: int = 0) -> Tensor:
    """Normalize by mean and sample deviation of the first `seq_len` positions, for each feature or for all of them together."""
    rows = []
    for row, length in zip(_inner(x), seq_len.tolist(), strict=True):
        seen = row[:, :length]
        dims = (1,) if normalize_type == 0 else (0, 1)
        rows.append((row - seen.mean(dims, keepdim=True)) / (seen.std(dims, keepdim=True) + 1e-5))
    return torch.stack(rows).to(x.dtype)


def _apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None = None,
    amsgrad: bool | None = False,
    maximize: bool | None = False,
    *,
    out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Step AdamW; the powers are those of the step before. `out` is the parameter and its two moments, which are changed in place."""
    if amsgrad or max_grad_norm is not None:
        raise NotReplayable("the fused AdamW with a largest second moment has no formula here")
    parameter, first, second = out
    slope = -_inner(grad) if maximize else _inner(grad)
    mean = beta1 * _inner(first) + (1 - beta1) * slope
    square = beta2 * _inner(second) + (1 - beta2) * slope.square()
    root = (square / (1 - beta2_power * beta2)).sqrt() + epsilon
    decayed = _inner(parameter) * (1 - lr * weight_decay)
    first.copy_(mean)
    second.copy_(square)
    parameter.copy_(decayed - lr * mean / (1 - beta1_power * beta1) / root)
    return parameter, first, second


VENDOR_FORMULAS: dict[str, Callable[..., Any]] = {
    "npu_apply_adam_w": _apply_adam_w,
    "npu_bounding_box_encode": _bounding_box_encode,
    "npu_ciou": _ciou,
    "npu_cross_entropy_loss": _cross_entropy_loss,
    "npu_diou": _diou,
    "npu_geglu": _geglu,
    "npu_gelu": _gelu,
    "npu_giou": _giou,
    "npu_group_norm_silu": _group_norm_silu,
    "npu_indexing": _indexing,
    "npu_iou": _iou,
    "npu_masked_fill_range": _masked_fill_range,
    "npu_max": _max,
    "npu_min": _min,
    "npu_normalize_batch": _normalize_batch,
    "npu_one_hot": _one_hot,
    "npu_pad": _pad,
    "npu_ptiou": _iou,
    "npu_reshape": _reshape,
    "npu_scatter": _scatter,
    "npu_sign_bits_pack": _sign_bits_pack,
    "npu_sign_bits_unpack": _sign_bits_unpack,
    "npu_slice": _slice,
    "npu_sort_v2": _sort,
    "one_": _one_,
}

_CHOOSES = "it chooses among boxes, and how ties and order are settled is not published"
_UNPUBLISHED = "its formula is not published"
WITHOUT_FORMULA: dict[str, str] = {
    "_npu_dropout": "it draws random numbers and packs its mask in a layout of the vendor's",
    "empty_with_format": "the memory that it returns has no defined values",
    "npu_alloc_float_status": "it reads a register of the device",
    "npu_anchor_response_flags": _CHOOSES,
    "npu_batch_nms": _CHOOSES,
    "npu_bert_apply_adam": _UNPUBLISHED,
    "npu_bounding_box_decode": "the vendor's page and test compute the size of a region in two ways",
    "npu_clear_float_status": "it writes a register of the device",
    "npu_deformable_conv2d": "where its samples fall and how they are interpolated is not published",
    "npu_get_float_status": "it reads a register of the device",
    "npu_grid_assign_positive": _CHOOSES,
    "npu_ifmr": "how it searches for its scales is not published",
    "npu_nms_v4": _CHOOSES,
    "npu_nms_with_mask": _CHOOSES,
    "npu_ps_roi_pooling": _UNPUBLISHED,
    "npu_roi_align": "what its mode of ending a region does is not published",
    "npu_roi_alignbk": "what its mode of ending a region does is not published",
    "npu_stride_add": "it works on the vendor's blocked layout of channels",
    "npu_sub_sample": "it draws random numbers",
    "npu_yolo_boxes_encode": "its modes differ in a constant that is not published",
}
"""The vendor's operations of the published list that cannot be replayed, and why."""
