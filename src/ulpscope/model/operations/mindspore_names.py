# SPDX-License-Identifier: Apache-2.0
"""What MindSpore's cells, functions and methods are called in a record: torch's names, with torch's order of arguments.

This is the one table of that. Each line is a call of MindSpore, an arrow, and torch's call that computes the same:

    ops.softmax(input, axis := -1, dtype) -> functional.softmax(input, dim=axis, dtype=dtype)

On the left stand MindSpore's parameters: `axis | dim` where a parameter has two names, `*shape` for the rest, `:=` for a default that torch
has otherwise, so that it is written down even where nobody gave it. On the right stand what was given for a parameter, literals that torch
records with each such call, and `cell.weight` for an attribute of the cell or primitive (of a
tensor's method, `self` is the tensor). An argument that nobody gave is left out.
`if` tells when a line holds. Of several lines of one name the first that fits the arguments counts; a call that none fits keeps its own name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

from ulpscope.model.nouns import dataclass

__all__ = ["CELL_NAMES", "NOT_ARITHMETIC", "PARAMETER_NAMES", "NameRow", "canonical_call", "name_rows"]

_TABLE = """
mint.nn.functional.linear(input, weight, bias) -> functional.linear(input, weight, bias)
ops.dense(input, weight, bias) -> functional.linear(input, weight, bias)
nn.Dense(x) -> functional.linear(x, cell.weight, cell.bias) if not cell.activation_flag
mint.nn.Linear(x) -> functional.linear(x, cell.weight, cell.bias)
mint.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps) -> functional.layer_norm(input, normalized_shape, weight=weight, bias=bias, eps=eps)
nn.LayerNorm(input_x) -> functional.layer_norm(input_x, cell.normalized_shape, weight=cell.gamma, bias=cell.beta, eps=cell.epsilon)
mint.nn.LayerNorm(input) -> functional.layer_norm(input, cell.normalized_shape, weight=cell.weight, bias=cell.bias, eps=cell.eps)
nn.Embedding(ids) -> functional.embedding(ids, cell.embedding_table, padding_idx=cell.padding_idx, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False) if not cell.use_one_hot
mint.nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq) -> functional.embedding(input, weight, padding_idx=padding_idx, max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq)
mint.nn.Embedding(input) -> functional.embedding(input, cell.weight, padding_idx=cell.padding_idx, max_norm=cell.max_norm, norm_type=cell.norm_type, scale_grad_by_freq=cell.scale_grad_by_freq, sparse=False)
mint.nn.functional.group_norm(input, num_groups, weight, bias, eps) -> functional.group_norm(input, num_groups, weight=weight, bias=bias, eps=eps)
nn.GroupNorm(x) -> functional.group_norm(x, cell.num_groups, weight=cell.gamma, bias=cell.beta, eps=cell.eps)
mint.nn.GroupNorm(input) -> functional.group_norm(input, cell.num_groups, weight=cell.weight, bias=cell.bias, eps=cell.eps)
mint.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps) -> functional.batch_norm(input, running_mean, running_var, weight=weight, bias=bias, training=training, momentum=momentum, eps=eps)
ops.batch_norm(input_x, running_mean, running_var, weight, bias, training, momentum, eps) -> functional.batch_norm(input_x, running_mean, running_var, weight=weight, bias=bias, training=training, momentum=momentum, eps=eps)
mint.nn.functional.conv2d(input, weight, bias, stride, padding, dilation, groups) -> torch.conv2d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
mint.nn.Conv2d(input) -> torch.conv2d(input, cell.weight, cell.bias, cell.stride, cell.padding, cell.dilation, cell.groups) if cell.padding_mode == 'zeros'
ops.conv2d(input, weight, bias, stride, pad_mode := 'valid', padding, dilation, groups) -> torch.conv2d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups) if pad_mode != 'same'
ops.conv1d(input, weight, bias, stride, pad_mode := 'valid', padding, dilation, groups) -> torch.conv1d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups) if pad_mode != 'same'
nn.Conv2d(x) -> torch.conv2d(x, cell.weight, cell.bias, cell.stride, 0, cell.dilation, cell.group) if cell.pad_mode == 'valid' and cell.data_format == 'NCHW'
mint.nn.functional.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices) -> functional.max_pool2d(input, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode, return_indices=return_indices)
ops.max_pool2d(x, kernel_size, stride, padding, dilation, return_indices, ceil_mode) -> functional.max_pool2d(x, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode, return_indices=return_indices)
mint.nn.functional.avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override) -> functional.avg_pool2d(input, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=count_include_pad, divisor_override=divisor_override)
ops.avg_pool2d(input_x, kernel_size, stride := 1, padding, ceil_mode, count_include_pad) -> functional.avg_pool2d(input_x, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=count_include_pad)
mint.nn.functional.adaptive_avg_pool2d(input, output_size) -> functional.adaptive_avg_pool2d(input, output_size)
ops.adaptive_avg_pool2d(input, output_size) -> functional.adaptive_avg_pool2d(input, output_size)

mint.nn.functional.gelu(input, approximate) -> functional.gelu(input, approximate=approximate)
ops.gelu(input, approximate) -> functional.gelu(input, approximate=approximate)
nn.GELU(x) -> functional.gelu(x, approximate=cell.approximate)
mint.nn.GELU(input) -> functional.gelu(input, approximate=cell.approximate)
mint.nn.functional.relu(input, inplace) -> functional.relu(input, inplace=False)
nn.ReLU(input) -> functional.relu(input, inplace=False)
mint.nn.ReLU(input) -> functional.relu(input, inplace=False)
ops.relu(input, inplace) -> functional.relu(input, inplace=False)
ops.relu6(x) -> functional.relu6(x, inplace=False)
mint.nn.functional.silu(input, inplace) -> functional.silu(input, inplace=False)
ops.silu(input) -> functional.silu(input, inplace=False)
nn.SiLU(x) -> functional.silu(x, inplace=False)
mint.nn.SiLU(x) -> functional.silu(x, inplace=False)
mint.nn.functional.elu(input, alpha, inplace) -> functional.elu(input, alpha=alpha)
ops.elu(input_x, alpha) -> functional.elu(input_x, alpha=alpha)
mint.nn.functional.leaky_relu(input, negative_slope) -> functional.leaky_relu(input, negative_slope=negative_slope)
ops.leaky_relu(input, alpha := 0.2) -> functional.leaky_relu(input, negative_slope=alpha)
nn.LeakyReLU(x) -> functional.leaky_relu(x, negative_slope=cell.alpha)
ops.softplus(input, beta, threshold) -> functional.softplus(input, beta=beta, threshold=threshold)
ops.mish(x) -> functional.mish(x)
ops.hardswish(input) -> functional.hardswish(input)
ops.selu(input_x) -> functional.selu(input_x)
mint.nn.functional.logsigmoid(input) -> functional.logsigmoid(input)
mint.nn.functional.glu(input, dim) -> functional.glu(input, dim=dim)
mint.nn.functional.prelu(input, weight) -> functional.prelu(input, weight)
mint.nn.functional.tanh(input) -> torch.tanh(input)
mint.nn.functional.sigmoid(input) -> torch.sigmoid(input)
nn.Tanh(x) -> torch.tanh(x)
mint.nn.Tanh(input) -> torch.tanh(input)
nn.Sigmoid(x) -> torch.sigmoid(x)
mint.nn.Sigmoid(input) -> torch.sigmoid(input)
ops.tanh(input) -> torch.tanh(input)
ops.sigmoid(input) -> torch.sigmoid(input)
mint.nn.functional.softmax(input, dim, dtype := None) -> functional.softmax(input, dim=dim, _stacklevel=3, dtype=dtype)
ops.softmax(input, axis := -1, dtype := None) -> functional.softmax(input, dim=axis, _stacklevel=3, dtype=dtype)
mint.softmax(input, dim, dtype) -> torch.softmax(input, dim=dim, dtype=dtype)
mint.nn.Softmax(input) -> functional.softmax(input, dim=cell.dim, _stacklevel=5, dtype=None)
mint.nn.functional.log_softmax(input, dim, dtype := None) -> functional.log_softmax(input, dim=dim, _stacklevel=3, dtype=dtype)
ops.log_softmax(logits, axis := -1) -> functional.log_softmax(logits, dim=axis, _stacklevel=3, dtype=None)
mint.nn.LogSoftmax(x) -> functional.log_softmax(x, dim=cell.dim, _stacklevel=5, dtype=None)
mint.nn.functional.dropout(input, p := 0.5, training := True, inplace := False) -> functional.dropout(input, p=p, training=training, inplace=inplace)
ops.dropout(input, p := 0.5, training := True) -> functional.dropout(input, p=p, training=training, inplace=False)
nn.Dropout(x) -> functional.dropout(x, p=cell.p, training=cell.training, inplace=False) if cell.p != None
mint.nn.Dropout(input) -> functional.dropout(input, p=cell.p, training=cell.training, inplace=cell.inplace)

mint.nn.functional.cross_entropy(input, target, weight := None, ignore_index := -100, reduction := 'mean', label_smoothing := 0.0) -> functional.cross_entropy(input, target, weight=weight, size_average=None, ignore_index=ignore_index, reduce=None, reduction=reduction, label_smoothing=label_smoothing)
ops.cross_entropy(input, target, weight := None, ignore_index := -100, reduction := 'mean', label_smoothing := 0.0) -> functional.cross_entropy(input, target, weight=weight, size_average=None, ignore_index=ignore_index, reduce=None, reduction=reduction, label_smoothing=label_smoothing)
nn.CrossEntropyLoss(logits, labels) -> functional.cross_entropy(logits, labels, weight=cell.weight, size_average=None, ignore_index=cell.ignore_index, reduce=None, reduction=cell.reduction, label_smoothing=cell.label_smoothing)
mint.nn.CrossEntropyLoss(input, target) -> functional.cross_entropy(input, target, weight=cell.weight, size_average=None, ignore_index=cell.ignore_index, reduce=None, reduction=cell.reduction, label_smoothing=cell.label_smoothing)
mint.nn.functional.nll_loss(input, target, weight, ignore_index, reduction) -> functional.nll_loss(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
ops.nll_loss(inputs, target, weight, ignore_index, reduction) -> functional.nll_loss(inputs, target, weight=weight, ignore_index=ignore_index, reduction=reduction)
mint.nn.functional.mse_loss(input, target, reduction := 'mean') -> functional.mse_loss(input, target, size_average=None, reduce=None, reduction=reduction, weight=None)
ops.mse_loss(input, target, reduction := 'mean') -> functional.mse_loss(input, target, size_average=None, reduce=None, reduction=reduction, weight=None)
nn.MSELoss(logits, labels) -> functional.mse_loss(logits, labels, size_average=None, reduce=None, reduction='mean', weight=None) if cell.reduce and cell.average
nn.MSELoss(logits, labels) -> functional.mse_loss(logits, labels, size_average=None, reduce=None, reduction='sum', weight=None) if cell.reduce and not cell.average
nn.MSELoss(logits, labels) -> functional.mse_loss(logits, labels, size_average=None, reduce=None, reduction='none', weight=None) if not cell.reduce
mint.nn.MSELoss(input, target) -> functional.mse_loss(input, target, size_average=None, reduce=None, reduction=cell.reduction, weight=None)
ops.l1_loss(input, target, reduction) -> functional.l1_loss(input, target, reduction=reduction)
nn.L1Loss(logits, labels) -> functional.l1_loss(logits, labels, reduction=cell.reduction)
ops.smooth_l1_loss(input, target, beta, reduction := 'none') -> functional.smooth_l1_loss(input, target, reduction=reduction, beta=beta)
mint.nn.functional.binary_cross_entropy(input, target, weight, reduction) -> functional.binary_cross_entropy(input, target, weight=weight, reduction=reduction)
ops.binary_cross_entropy(logits, labels, weight, reduction) -> functional.binary_cross_entropy(logits, labels, weight=weight, reduction=reduction)
mint.nn.functional.binary_cross_entropy_with_logits(input, target, weight, reduction, pos_weight) -> functional.binary_cross_entropy_with_logits(input, target, weight=weight, reduction=reduction, pos_weight=pos_weight)
ops.binary_cross_entropy_with_logits(input, target, weight, pos_weight, reduction) -> functional.binary_cross_entropy_with_logits(input, target, weight=weight, pos_weight=pos_weight, reduction=reduction)
mint.nn.functional.kl_div(input, target, reduction, log_target) -> functional.kl_div(input, target, reduction=reduction, log_target=log_target)
ops.kl_div(logits, labels, reduction) -> functional.kl_div(logits, labels, reduction=reduction)
mint.nn.functional.normalize(input, p, dim, eps) -> functional.normalize(input, p=p, dim=dim, eps=eps)
mint.nn.functional.one_hot(tensor, num_classes) -> functional.one_hot(tensor, num_classes)
mint.nn.functional.pad(input, pad, mode, value) -> functional.pad(input, pad, mode=mode, value=value)
ops.pad(input_x, padding, mode, value) -> functional.pad(input_x, padding, mode=mode, value=value)
mint.nn.functional.unfold(input, kernel_size, dilation, padding, stride) -> functional.unfold(input, kernel_size, dilation=dilation, padding=padding, stride=stride)
mint.nn.functional.flatten(input, start_dim, end_dim) -> torch.flatten(input, start_dim=start_dim, end_dim=end_dim)
nn.Flatten(x) -> Tensor.flatten(x, cell.start_dim, cell.end_dim)
mint.nn.Flatten(input) -> Tensor.flatten(input, cell.start_dim, cell.end_dim)

mint.matmul(input, other) -> torch.matmul(input, other)
mint.mm(input, mat2) -> torch.mm(input, mat2)
mint.bmm(input, mat2) -> torch.bmm(input, mat2)
ops.bmm(input_x, mat2) -> torch.bmm(input_x, mat2)
mint.addmm(input, mat1, mat2, beta, alpha) -> torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
mint.baddbmm(input, batch1, batch2, beta, alpha) -> torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
ops.baddbmm(input, batch1, batch2, beta, alpha) -> torch.baddbmm(input, batch1, batch2, beta=beta, alpha=alpha)
mint.dot(input, other) -> torch.dot(input, other)
mint.outer(input, vec2) -> torch.outer(input, vec2)
mint.einsum(equation, *operands) -> torch.einsum(equation, *operands)
ops.einsum(equation, *operands) -> torch.einsum(equation, *operands)
mint.add(input, other, alpha) -> torch.add(input, other, alpha=alpha)
mint.sub(input, other, alpha) -> torch.sub(input, other, alpha=alpha)
mint.mul(input, other) -> torch.mul(input, other)
mint.div(input, other, rounding_mode) -> torch.div(input, other, rounding_mode=rounding_mode)
ops.add(input, other) -> torch.add(input, other)
ops.sub(input, other) -> torch.sub(input, other)
ops.mul(input, other) -> torch.mul(input, other)
ops.div(input, other, rounding_mode) -> torch.div(input, other, rounding_mode=rounding_mode)
mint.pow(input, exponent) -> torch.pow(input, exponent)
ops.pow(input, exponent) -> torch.pow(input, exponent)
mint.abs(input) -> torch.abs(input)
ops.abs(input) -> torch.abs(input)
mint.neg(input) -> torch.neg(input)
ops.neg(input) -> torch.neg(input)
mint.exp(input) -> torch.exp(input)
ops.exp(input) -> torch.exp(input)
mint.log(input) -> torch.log(input)
ops.log(input) -> torch.log(input)
mint.log1p(input) -> torch.log1p(input)
mint.expm1(input) -> torch.expm1(input)
mint.sqrt(input) -> torch.sqrt(input)
ops.sqrt(x) -> torch.sqrt(x)
mint.rsqrt(input) -> torch.rsqrt(input)
ops.rsqrt(input) -> torch.rsqrt(input)
mint.square(input) -> torch.square(input)
ops.square(input) -> torch.square(input)
mint.reciprocal(input) -> torch.reciprocal(input)
ops.reciprocal(input) -> torch.reciprocal(input)
mint.sign(input) -> torch.sign(input)
mint.floor(input) -> torch.floor(input)
mint.ceil(input) -> torch.ceil(input)
mint.round(input, decimals) -> torch.round(input, decimals=decimals)
mint.erf(input) -> torch.erf(input)
ops.erf(input) -> torch.erf(input)
mint.erfc(input) -> torch.erfc(input)
mint.sin(input) -> torch.sin(input)
ops.sin(input) -> torch.sin(input)
mint.cos(input) -> torch.cos(input)
ops.cos(input) -> torch.cos(input)
mint.tan(input) -> torch.tan(input)
mint.sinh(input) -> torch.sinh(input)
mint.cosh(input) -> torch.cosh(input)
mint.tanh(input) -> torch.tanh(input)
mint.sigmoid(input) -> torch.sigmoid(input)
mint.asin(input) -> torch.asin(input)
mint.acos(input) -> torch.acos(input)
mint.atan(input) -> torch.atan(input)
mint.atan2(input, other) -> torch.atan2(input, other)
mint.maximum(input, other) -> torch.maximum(input, other)
ops.maximum(input, other) -> torch.maximum(input, other)
mint.minimum(input, other) -> torch.minimum(input, other)
ops.minimum(input, other) -> torch.minimum(input, other)
mint.clamp(input, min, max) -> torch.clamp(input, min=min, max=max)
ops.clamp(input, min, max) -> torch.clamp(input, min=min, max=max)
ops.clip_by_value(x, clip_value_min, clip_value_max) -> torch.clamp(x, min=clip_value_min, max=clip_value_max)
mint.sum(input, dim, keepdim, dtype) -> torch.sum(input, dim=dim, keepdim=keepdim, dtype=dtype)
ops.sum(input, dim, keepdim, dtype) -> torch.sum(input, dim=dim, keepdim=keepdim, dtype=dtype)
mint.mean(input, dim, keepdim, dtype) -> torch.mean(input, dim=dim, keepdim=keepdim, dtype=dtype)
ops.mean(x, axis, keep_dims) -> torch.mean(x, dim=axis, keepdim=keep_dims)
mint.prod(input, dim, keepdim, dtype) -> torch.prod(input, dim=dim, keepdim=keepdim, dtype=dtype)
ops.prod(input, axis, keep_dims, dtype) -> torch.prod(input, dim=axis, keepdim=keep_dims, dtype=dtype)
mint.var(input, dim, correction, keepdim) -> torch.var(input, dim=dim, correction=correction, keepdim=keepdim)
mint.std(input, dim, correction, keepdim) -> torch.std(input, dim=dim, correction=correction, keepdim=keepdim)
ops.var(input, axis, ddof := 0, keepdims) -> torch.var(input, dim=axis, correction=ddof, keepdim=keepdims)
ops.std(input, axis, ddof := 0, keepdims) -> torch.std(input, dim=axis, correction=ddof, keepdim=keepdims)
mint.norm(input, p, dim, keepdim, dtype) -> torch.norm(input, p=p, dim=dim, keepdim=keepdim, dtype=dtype)
mint.max(input, dim, keepdim) -> torch.max(input, dim=dim, keepdim=keepdim)
mint.min(input, dim, keepdim) -> torch.min(input, dim=dim, keepdim=keepdim)
mint.argmax(input, dim, keepdim) -> torch.argmax(input, dim=dim, keepdim=keepdim)
mint.argmin(input, dim, keepdim) -> torch.argmin(input, dim=dim, keepdim=keepdim)
mint.logsumexp(input, dim, keepdim) -> torch.logsumexp(input, dim, keepdim=keepdim)
mint.all(input, dim, keepdim) -> torch.all(input, dim=dim, keepdim=keepdim)
mint.any(input, dim, keepdim) -> torch.any(input, dim=dim, keepdim=keepdim)
mint.cumsum(input, dim, dtype) -> torch.cumsum(input, dim, dtype=dtype)
ops.cumsum(x, axis, dtype) -> torch.cumsum(x, axis, dtype=dtype)
mint.topk(input, k, dim, largest, sorted) -> torch.topk(input, k, dim=dim, largest=largest, sorted=sorted)
ops.topk(input, k, dim, largest, sorted) -> torch.topk(input, k, dim=dim, largest=largest, sorted=sorted)
mint.sort(input, dim, descending, stable) -> torch.sort(input, dim=dim, descending=descending)
ops.sort(input_x, axis, descending) -> torch.sort(input_x, dim=axis, descending=descending)

mint.cat(tensors, dim) -> torch.cat(tensors, dim=dim)
ops.cat(tensors, axis) -> torch.cat(tensors, dim=axis)
ops.concat(tensors, axis) -> torch.cat(tensors, dim=axis)
mint.stack(tensors, dim) -> torch.stack(tensors, dim=dim)
ops.stack(tensors, axis) -> torch.stack(tensors, dim=axis)
mint.split(tensor, split_size_or_sections, dim := 0) -> torch.split(tensor, split_size_or_sections, dim=dim)
ops.split(tensor, split_size_or_sections, axis := 0) -> torch.split(tensor, split_size_or_sections, dim=axis)
mint.chunk(input, chunks, dim) -> torch.chunk(input, chunks, dim=dim)
ops.chunk(input, chunks, axis) -> torch.chunk(input, chunks, dim=axis)
mint.transpose(input, dim0, dim1) -> torch.transpose(input, dim0, dim1)
ops.transpose(input, dims) -> torch.permute(input, dims)
ops.swapaxes(input, axis0, axis1) -> torch.transpose(input, axis0, axis1)
mint.permute(input, dims) -> torch.permute(input, dims)
ops.permute(input, axis) -> torch.permute(input, axis)
mint.reshape(input, shape) -> torch.reshape(input, shape)
ops.reshape(input, shape) -> torch.reshape(input, shape)
mint.flatten(input, start_dim, end_dim) -> torch.flatten(input, start_dim=start_dim, end_dim=end_dim)
mint.squeeze(input, dim) -> torch.squeeze(input, dim=dim)
ops.squeeze(input, axis) -> torch.squeeze(input, dim=axis)
mint.unsqueeze(input, dim) -> torch.unsqueeze(input, dim)
ops.unsqueeze(input, dim) -> torch.unsqueeze(input, dim)
ops.expand_dims(input_x, axis) -> torch.unsqueeze(input_x, axis)
mint.broadcast_to(input, shape) -> torch.broadcast_to(input, shape)
ops.broadcast_to(input, shape) -> torch.broadcast_to(input, shape)
mint.tile(input, dims) -> torch.tile(input, dims)
ops.tile(input, dims) -> torch.tile(input, dims)
mint.flip(input, dims) -> torch.flip(input, dims)
mint.roll(input, shifts, dims) -> torch.roll(input, shifts, dims=dims)
mint.narrow(input, dim, start, length) -> torch.narrow(input, dim, start, length)
mint.unbind(input, dim) -> torch.unbind(input, dim=dim)
mint.where(condition, input, other) -> torch.where(condition, input, other)
ops.where(condition, input, other) -> torch.where(condition, input, other)
mint.tril(input, diagonal) -> torch.tril(input, diagonal=diagonal)
ops.tril(input, diagonal) -> torch.tril(input, diagonal=diagonal)
mint.triu(input, diagonal) -> torch.triu(input, diagonal=diagonal)
ops.triu(input, diagonal) -> torch.triu(input, diagonal=diagonal)
mint.gather(input, dim, index) -> torch.gather(input, dim, index)
ops.gather_elements(input, dim, index) -> torch.gather(input, dim, index)
ops.gather_d(x, dim, index) -> torch.gather(x, dim, index)
ops.gather(input_params, input_indices, axis) -> torch.index_select(input_params, axis, input_indices)
mint.index_select(input, dim, index) -> torch.index_select(input, dim, index)
ops.index_select(input, axis, index) -> torch.index_select(input, axis, index)
mint.scatter_add(input, dim, index, src) -> torch.scatter_add(input, dim, index, src)
mint.masked_select(input, mask) -> torch.masked_select(input, mask)
ops.masked_fill(input_x, mask, value) -> torch.masked_fill(input_x, mask, value)
mint.repeat_interleave(input, repeats, dim) -> torch.repeat_interleave(input, repeats, dim=dim)
mint.zeros(size, dtype) -> torch.zeros(size, dtype=dtype)
ops.zeros(size, dtype) -> torch.zeros(size, dtype=dtype)
ops.ones(shape, dtype) -> torch.ones(shape, dtype=dtype)
mint.full(size, fill_value, dtype) -> torch.full(size, fill_value, dtype=dtype)
ops.full(size, fill_value, dtype) -> torch.full(size, fill_value, dtype=dtype)
mint.zeros_like(input, dtype) -> torch.zeros_like(input, dtype=dtype)
ops.zeros_like(input, dtype) -> torch.zeros_like(input, dtype=dtype)
mint.ones_like(input, dtype) -> torch.ones_like(input, dtype=dtype)
ops.ones_like(input, dtype) -> torch.ones_like(input, dtype=dtype)
mint.full_like(input, fill_value, dtype) -> torch.full_like(input, fill_value, dtype=dtype)
mint.arange(start := 0, end, step := 1, dtype) -> torch.arange(start, end, step, dtype=dtype)
mint.eq(input, other) -> torch.eq(input, other)
mint.ne(input, other) -> torch.ne(input, other)
mint.gt(input, other) -> torch.gt(input, other)
mint.ge(input, other) -> torch.ge(input, other)
mint.lt(input, other) -> torch.lt(input, other)
mint.le(input, other) -> torch.le(input, other)
ops.equal(input, other) -> torch.eq(input, other)
ops.not_equal(input, other) -> torch.ne(input, other)
ops.greater(input, other) -> torch.gt(input, other)
ops.greater_equal(input, other) -> torch.ge(input, other)
ops.less_equal(input, other) -> torch.le(input, other)
mint.logical_and(input, other) -> torch.logical_and(input, other)
mint.logical_or(input, other) -> torch.logical_or(input, other)
mint.logical_not(input) -> torch.logical_not(input)
mint.isnan(tensor) -> torch.isnan(tensor)
mint.isinf(input) -> torch.isinf(input)
mint.isfinite(input) -> torch.isfinite(input)
mint.clone(input) -> torch.clone(input)
ops.cast(input, dtype) -> Tensor.to(input, dtype)
ops.stop_gradient(value) -> Tensor.detach(value)

Primitive.Dense(input, weight, bias) -> functional.linear(input, weight, bias)
Primitive.MatMul(input, mat2) -> torch.matmul(input, mat2) if not cell.transpose_a and not cell.transpose_b
Primitive.BatchMatMul(x, y) -> torch.matmul(x, y) if not cell.transpose_a and not cell.transpose_b
Primitive.Add(input, other) -> torch.add(input, other)
Primitive.Sub(input, other) -> torch.sub(input, other)
Primitive.Mul(input, other) -> torch.mul(input, other)
Primitive.RealDiv(x, y) -> torch.div(x, y)
Primitive.ReLU(input) -> functional.relu(input, inplace=False)
Primitive.Tanh(input) -> torch.tanh(input)
Primitive.Sigmoid(input) -> torch.sigmoid(input)
Primitive.Exp(input) -> torch.exp(input)
Primitive.Sqrt(x) -> torch.sqrt(x)
Primitive.Reshape(input, shape) -> torch.reshape(input, shape)
Primitive.Transpose(input, input_perm) -> torch.permute(input, input_perm)
Primitive.Cast(input, dtype) -> Tensor.to(input, dtype)

Tensor.__add__(self, other) -> Tensor.add(self, other)
Tensor.__radd__(self, other) -> Tensor.add(self, other)
Tensor.__iadd__(self, other) -> Tensor.add_(self, other)
Tensor.__sub__(self, other) -> Tensor.sub(self, other)
Tensor.__rsub__(self, other) -> Tensor.__rsub__(self, other)
Tensor.__isub__(self, other) -> Tensor.sub_(self, other)
Tensor.__mul__(self, other) -> Tensor.mul(self, other)
Tensor.__rmul__(self, other) -> Tensor.mul(self, other)
Tensor.__imul__(self, other) -> Tensor.mul_(self, other)
Tensor.__truediv__(self, other) -> Tensor.div(self, other)
Tensor.__rtruediv__(self, other) -> Tensor.__rtruediv__(self, other)
Tensor.__itruediv__(self, other) -> Tensor.div_(self, other)
Tensor.__floordiv__(self, other) -> Tensor.__floordiv__(self, other)
Tensor.__mod__(self, other) -> Tensor.remainder(self, other)
Tensor.__pow__(self, other) -> Tensor.__pow__(self, other)
Tensor.__rpow__(self, other) -> Tensor.__rpow__(self, other)
Tensor.__matmul__(self, other) -> Tensor.matmul(self, other)
Tensor.__neg__(self) -> Tensor.neg(self)
Tensor.__abs__(self) -> Tensor.abs(self)
Tensor.__eq__(self, other) -> Tensor.__eq__(self, other)
Tensor.__ne__(self, other) -> Tensor.ne(self, other)
Tensor.__gt__(self, other) -> Tensor.gt(self, other)
Tensor.__ge__(self, other) -> Tensor.ge(self, other)
Tensor.__lt__(self, other) -> Tensor.lt(self, other)
Tensor.__le__(self, other) -> Tensor.le(self, other)
Tensor.__getitem__(self, index) -> Tensor.__getitem__(self, index)
Tensor.__setitem__(self, index, value) -> Tensor.__setitem__(self, index, value)
Tensor.add(self, other, alpha) -> Tensor.add(self, other, alpha=alpha)
Tensor.add_(self, other, alpha) -> Tensor.add_(self, other, alpha=alpha)
Tensor.sub(self, other, alpha) -> Tensor.sub(self, other, alpha=alpha)
Tensor.sub_(self, other, alpha) -> Tensor.sub_(self, other, alpha=alpha)
Tensor.mul(self, other) -> Tensor.mul(self, other)
Tensor.mul_(self, other) -> Tensor.mul_(self, other)
Tensor.div(self, other, rounding_mode) -> Tensor.div(self, other, rounding_mode=rounding_mode)
Tensor.div_(self, other, rounding_mode) -> Tensor.div_(self, other, rounding_mode=rounding_mode)
Tensor.pow(self, exponent) -> Tensor.pow(self, exponent)
Tensor.matmul(self, other | tensor2) -> Tensor.matmul(self, other)
Tensor.exp(self) -> Tensor.exp(self)
Tensor.log(self) -> Tensor.log(self)
Tensor.sqrt(self) -> Tensor.sqrt(self)
Tensor.rsqrt(self) -> Tensor.rsqrt(self)
Tensor.square(self) -> Tensor.square(self)
Tensor.abs(self) -> Tensor.abs(self)
Tensor.neg(self) -> Tensor.neg(self)
Tensor.tanh(self) -> Tensor.tanh(self)
Tensor.sigmoid(self) -> Tensor.sigmoid(self)
Tensor.sum(self, axis | dim, keepdims | keepdim, dtype) -> Tensor.sum(self, dim=axis, keepdim=keepdims, dtype=dtype)
Tensor.mean(self, axis | dim, keep_dims | keepdim, dtype) -> Tensor.mean(self, dim=axis, keepdim=keep_dims, dtype=dtype)
Tensor.max(self, axis | dim, keepdims | keepdim) -> Tensor.max(self, dim=axis, keepdim=keepdims)
Tensor.min(self, axis | dim, keepdims | keepdim) -> Tensor.min(self, dim=axis, keepdim=keepdims)
Tensor.argmax(self, axis | dim, keepdims | keepdim) -> Tensor.argmax(self, dim=axis, keepdim=keepdims)
Tensor.softmax(self, axis | dim, dtype) -> Tensor.softmax(self, dim=axis, dtype=dtype)
Tensor.reshape(self, *shape) -> Tensor.reshape(self, *shape)
Tensor.view(self, *shape) -> Tensor.view(self, *shape)
Tensor.transpose(self, dim0, dim1) -> Tensor.transpose(self, dim0, dim1)
Tensor.transpose(self, *axes) -> Tensor.permute(self, *axes)
Tensor.permute(self, *axis) -> Tensor.permute(self, *axis)
Tensor.swapaxes(self, axis0, axis1) -> Tensor.transpose(self, axis0, axis1)
Tensor.flatten(self, start_dim, end_dim) -> Tensor.flatten(self, start_dim=start_dim, end_dim=end_dim)
Tensor.squeeze(self, axis | dim) -> Tensor.squeeze(self, dim=axis)
Tensor.unsqueeze(self, dim) -> Tensor.unsqueeze(self, dim)
Tensor.expand_dims(self, axis) -> Tensor.unsqueeze(self, axis)
Tensor.broadcast_to(self, shape) -> Tensor.broadcast_to(self, shape)
Tensor.tile(self, *dims) -> Tensor.tile(self, *dims)
Tensor.chunk(self, chunks, axis | dim) -> Tensor.chunk(self, chunks, dim=axis)
Tensor.split(self, split_size_or_sections, axis := 0) -> Tensor.split(self, split_size_or_sections, dim=axis)
Tensor.masked_fill(self, mask, value) -> Tensor.masked_fill(self, mask, value)
Tensor.astype(self, dtype) -> Tensor.to(self, dtype)
Tensor.to(self, dtype) -> Tensor.to(self, dtype)
Tensor.float(self) -> Tensor.float(self)
Tensor.half(self) -> Tensor.half(self)
Tensor.copy(self) -> Tensor.clone(self)
Tensor.clone(self) -> Tensor.clone(self)
"""

CELL_NAMES = {
    "Dense": "Linear",
    "SequentialCell": "Sequential",
    "CellList": "ModuleList",
}
"""Classes of MindSpore's cells that torch has under another name."""

PARAMETER_NAMES = {
    "gamma": "weight",
    "beta": "bias",
    "embedding_table": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
"""What MindSpore's own cells call a parameter, and torch's modules."""

NOT_ARITHMETIC = frozenset(
    """
    shape rank size dtype typeof is_tensor is_floating_point is_complex is_contiguous contiguous numel nelement ndimension stride storage_offset element_size
    asnumpy numpy item itemset tolist value get_bytes data_ptr assign_value_cpp set_data dim has_init init_data flush_from_cache set_const_arg assign_value register_hook remove_hook
    from_numpy const_arg requires_grad_ move_to is_pinned pin_memory is_shared untyped_storage print_ dyn_shape tensor_dump isinstance_
    offload delta_seed to_coo to_csr is_meta set_param_info setitem_index_info getitem_index_info convert_bytes_to_tensor wait_pipeline from_dlpack
    """.split()
)
"""Functions and methods that tell or set facts about a tensor, or leave MindSpore: calls of them are not recorded."""

_Value: TypeAlias = tuple[str, Any]
"""Where an argument comes from: ("given", parameter), ("rest", parameter), ("own", attribute) or ("literal", value)."""

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class NameRow:
    """One line of the table. `parameters` are names, alternatives and default; `condition` is the code of what stands behind `if`."""

    name: str
    parameters: tuple[tuple[tuple[str, ...], Any], ...]
    rest: str | None
    canonical: str
    arguments: tuple[tuple[str | None, _Value], ...]
    condition: ast.expr | None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was given for each parameter; None where the call does not fit."""
        if self.rest is None and len(args) > len(self.parameters):
            return None
        given = {names[0]: value for (names, _), value in zip(self.parameters, args, strict=False)}
        first = {name: names[0] for names, _ in self.parameters for name in names}
        for name, value in kwargs.items():
            if first.get(name) is None or first[name] in given:
                return None
            given[first[name]] = value
        if self.rest is not None:
            given[self.rest] = args[len(self.parameters) :]
        return given

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of MindSpore that are written down."""
        return {names[0]: default for names, default in self.parameters if default is not _NOTHING}


def canonical_call(
    rows: tuple[NameRow, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Any = None
) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Torch's name and arguments for a call of MindSpore, or None where no row fits; `own` is the cell that is called.

    >>> canonical_call(name_rows()["ops.concat"], (["a", "b"], 1), {})
    ('torch.cat', (['a', 'b'],), {'dim': 1})
    """
    for row in rows:
        given = row.bind(args, kwargs)
        if given is None or not _holds(row.condition, {**row.defaults, **given}, own):
            continue
        called = _called(row, {**row.defaults, **given}, own)
        if called is not None:
            return row.canonical, *called
    return None


def _called(row: NameRow, given: dict[str, Any], own: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    is_open = True
    for keyword, value in row.arguments:
        found = _value_of(value, given, own)
        if found is _NOTHING:
            is_open = is_open and keyword is not None
        elif keyword is not None:
            named[keyword] = found
        elif value[0] == "rest":
            positional += found
        elif is_open:
            positional.append(found)
        else:
            return None
    return tuple(positional), named


def _value_of(value: _Value, given: dict[str, Any], own: Any) -> Any:
    kind, what = value
    if kind in ("given", "rest"):
        return given.get(what, _NOTHING)
    return what if kind == "literal" else getattr(own, what, None)


def _holds(condition: ast.expr | None, given: dict[str, Any], own: Any) -> bool:
    if condition is None:
        return True
    if isinstance(condition, ast.BoolOp):
        holds = [_holds(part, given, own) for part in condition.values]
        return all(holds) if isinstance(condition.op, ast.And) else any(holds)
    if isinstance(condition, ast.UnaryOp):
        return not _holds(condition.operand, given, own)
    if isinstance(condition, ast.Compare):
        one, other = (_value_of(_source(side), given, own) for side in (condition.left, condition.comparators[0]))
        return bool((one == other) == isinstance(condition.ops[0], ast.Eq))
    return bool(_value_of(_source(condition), given, own))


@functools.cache
def name_rows() -> dict[str, tuple[NameRow, ...]]:
    """All rows of the table, by MindSpore's name."""
    rows: dict[str, tuple[NameRow, ...]] = {}
    for line in filter(None, _TABLE.splitlines()):
        row = _read_row(line)
        rows[row.name] = (*rows.get(row.name, ()), row)
    return rows


def _read_row(line: str) -> NameRow:
    ours, _, theirs = line.partition(" -> ")
    theirs, _, condition = theirs.partition(" if ")
    left, right = _read_call(ours), _read_call(theirs)
    rest = [one.value for one in left.args if isinstance(one, ast.Starred)]
    return NameRow(
        name=ast.unparse(left.func),
        parameters=tuple(_read_parameter(one) for one in left.args if not isinstance(one, ast.Starred)),
        rest=_names(rest[0])[0] if rest else None,
        canonical=ast.unparse(right.func),
        arguments=(*((None, _source(one)) for one in right.args), *((one.arg, _source(one.value)) for one in right.keywords)),
        condition=ast.parse(condition, mode="eval").body if condition else None,
    )


def _read_call(text: str) -> ast.Call:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call), text
    return call


def _read_parameter(parameter: ast.expr) -> tuple[tuple[str, ...], Any]:
    if isinstance(parameter, ast.NamedExpr):
        return _names(parameter.target), ast.literal_eval(parameter.value)
    return _names(parameter), _NOTHING


def _names(parameter: ast.expr) -> tuple[str, ...]:
    """A parameter's name, or both of its names."""
    if isinstance(parameter, ast.BinOp):
        return (*_names(parameter.left), *_names(parameter.right))
    assert isinstance(parameter, ast.Name), ast.dump(parameter)
    return (parameter.id,)


def _source(value: ast.expr) -> _Value:
    if isinstance(value, ast.Starred):
        return "rest", _names(value.value)[0]
    if isinstance(value, ast.Name):
        return "given", value.id
    if isinstance(value, ast.Attribute):
        return "own", value.attr
    return "literal", ast.literal_eval(value)
