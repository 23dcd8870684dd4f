# SPDX-License-Identifier: Apache-2.0
"""List the operations of torch_npu that the old tool calls its own (the guide's table has 52 rows, one name twice)."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["NPU_OPS", "present_functions"]

NPU_OPS: tuple[str, ...] = tuple(
    """
    one_ npu_sort_v2 npu_transpose npu_broadcast npu_dtype_cast empty_with_format npu_one_hot npu_stride_add npu_ps_roi_pooling
    npu_roi_align npu_nms_v4 npu_iou npu_nms_with_mask npu_pad npu_bounding_box_encode npu_bounding_box_decode npu_batch_nms npu_slice
    _npu_dropout npu_indexing npu_ifmr npu_max npu_scatter npu_layer_norm_eval npu_alloc_float_status npu_get_float_status
    npu_clear_float_status npu_confusion_transpose npu_bmmV2 fast_gelu npu_sub_sample npu_deformable_conv2d npu_mish
    npu_anchor_response_flags npu_yolo_boxes_encode npu_grid_assign_positive npu_normalize_batch npu_masked_fill_range npu_linear
    npu_bert_apply_adam npu_giou npu_ciou npu_diou npu_sign_bits_pack npu_sign_bits_unpack npu_flash_attention npu_scaled_masked_softmax
    npu_rotary_mul npu_roi_alignbk npu_ptiou npu_fusion_attention
    """.split()
)


def present_functions() -> list[tuple[Any, str, str]]:
    """Return those that this process has, as owner, attribute and ulpscope's name of the call."""
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None:
        return []
    return [(torch_npu, name, f"npu.{name}") for name in NPU_OPS if callable(getattr(torch_npu, name, None))]
