# SPDX-License-Identifier: Apache-2.0
"""Find the call of a program that an aten operator comes from, by torch's own names: `conv2d` runs `convolution`.

Most operators have the name of their function, perhaps with `native_` or an underscore before it. The table holds the exceptions.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

__all__ = ["calls_of_aten", "is_aten", "plain_name"]

_OTHER_NAMES = """
    adaptive_avg_pool2d: adaptive_avg_pool2d
    add: add iadd radd
    addmm: addmm linear
    bmm: bmm matmul
    clone: clone contiguous
    constant_pad_nd: pad
    convolution: conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    copy: copy
    cudnn_batch_norm: batch_norm
    div: div truediv itruediv true_divide divide
    embedding_dense_backward: embedding
    expand: expand expand_as
    hardtanh: hardtanh relu6
    index: getitem
    linalg_vector_norm: norm vector_norm normalize
    max_pool2d_with_indices: max_pool2d
    max_pool3d_with_indices: max_pool3d
    mm: mm matmul linear
    mul: mul imul rmul
    native_batch_norm_legit: batch_norm
    native_batch_norm_legit_no_training: batch_norm
    nll_loss2d_forward: nll_loss
    nll_loss_forward: nll_loss
    permute: permute transpose
    pow: pow
    reflection_pad1d: pad
    reflection_pad2d: pad
    replication_pad1d: pad
    replication_pad2d: pad
    rsub: rsub
    safe_softmax: softmax
    scaled_dot_product_efficient_attention: scaled_dot_product_attention
    scaled_dot_product_flash_attention: scaled_dot_product_attention
    scaled_dot_product_flash_attention_for_cpu: scaled_dot_product_attention
    select: select getitem
    slice: getitem
    split_with_sizes: split
    sub: sub isub
    t: t
    thnn_conv2d: conv2d
    to_copy: to type float half double bfloat16
    unsafe_view: view reshape
    upsample_bicubic2d: interpolate
    upsample_bilinear2d: interpolate
    upsample_linear1d: interpolate
    upsample_nearest1d: interpolate
    upsample_nearest2d: interpolate
    upsample_trilinear3d: interpolate
    view: view reshape
"""
_CALLS = {name.strip(): frozenset(calls.split()) for name, _, calls in (line.partition(":") for line in _OTHER_NAMES.strip().splitlines())}
_API_NAME = re.compile(r"[A-Za-z]+_(?P<name>\w+?)(?:\.\w+)?_\d{1,9}_(?:forward|backward|input|output)(?:[._].*)?")


def is_aten(operator: str) -> bool:
    return operator.startswith("Aten_")


def plain_name(operator: str) -> str:
    """Return the name of the function alone: `relu` of `Functional_relu__1_forward`; empty where there is none.

    >>> plain_name("Aten_convolution.default_1_forward")
    'convolution'
    """
    match = _API_NAME.fullmatch(operator)
    return match["name"].strip("_").lower() if match else ""


def calls_of_aten(operator: str) -> frozenset[str]:
    """Return the functions that an aten operator may come from."""
    name = plain_name(operator)
    calls = _CALLS.get(name)
    if calls is not None:
        return calls
    return frozenset({name.removeprefix("native_")}) if name and _exists(operator) else frozenset()


def _exists(operator: str) -> bool:
    """Tell whether torch knows the operator; without torch every name is believed."""
    if find_spec("torch") is None:
        return True
    import torch

    match = _API_NAME.fullmatch(operator)
    return match is not None and hasattr(torch.ops.aten, match["name"])
