# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Kernels over a table of addresses: every tensor of a model is read by one launch. Needs triton.

A program of `partial_rows` reads one row of one tensor and writes low, high, sum, scale, squares, zeros, non-finite (and counts);
a program of `whole_rows` joins the rows of one tensor in float64, in a fixed order, so that the same values always give the same
numbers. Squares are taken of values scaled by a power of two near the row's largest, so that neither tiny nor huge gradients are lost.

Triton reads the source of this file and knows little of Python: annotations have to be real (no `from __future__`), and of globals
it takes modules and other kernels only.
"""

import triton
import triton.language as tl

__all__ = ["partial_rows", "sampled_values", "tl", "whole_rows"]


@triton.jit
def partial_rows(
    addresses,
    numels,
    row_tensors,
    row_numbers,
    bounds,
    out,
    DTYPE: tl.constexpr,
    ROW: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tensor = tl.load(row_tensors + row)
    base = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        base = tl.multiple_of(base, 16)
    start = tl.load(row_numbers + row) * ROW
    left = tl.load(numels + tensor) - start
    places = tl.arange(0, ROW)
    at = base + start + places
    is_used = places < left
    infinity = float("inf")
    if left >= ROW:
        x = tl.load(at).to(tl.float32)
        low, high = tl.min(x, axis=0), tl.max(x, axis=0)
        num_zero = tl.sum((x == 0.0).to(tl.int32), axis=0)
    else:
        x = tl.load(at, mask=is_used, other=0.0).to(tl.float32)
        low = tl.min(tl.where(is_used, x, infinity), axis=0)
        high = tl.max(tl.where(is_used, x, -infinity), axis=0)
        num_zero = tl.sum(((x == 0.0) & is_used).to(tl.int32), axis=0)
    total = tl.sum(x, axis=0)
    num_nonfinite = num_zero * 0
    largest = tl.maximum(tl.abs(low), tl.abs(high))
    if total - total != 0.0:  # something is not finite, or the sum overflows: look closer
        is_finite = (x == x) & (tl.abs(x) < infinity)
        low = tl.min(tl.where(is_used & (x == x), x, infinity), axis=0)
        high = tl.max(tl.where(is_used & (x == x), x, -infinity), axis=0)
        num_nonfinite = tl.sum((~is_finite).to(tl.int32), axis=0)
        x = tl.where(is_finite, x, 0.0)
        largest = tl.max(tl.abs(x), axis=0)
    # The power of two below the largest value and its inverse, from the bits of its exponent; of no element at all, whatever.
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    scaled = x * inverse
    if total - total == 0.0:
        total *= inverse
    if total - total != 0.0:
        total = tl.sum(scaled, axis=0)
    to = out + row * COLUMNS
    tl.store(to + 0, low)
    tl.store(to + 1, high)
    tl.store(to + 2, total)
    tl.store(to + 3, exponent.to(tl.float32, bitcast=True))
    tl.store(to + 4, tl.sum(scaled * scaled, axis=0))
    tl.store(to + 5, num_zero.to(tl.float32))
    tl.store(to + 6, num_nonfinite.to(tl.float32))
    if NUM_BOUNDS > 0:
        again = tl.load(at, mask=is_used, other=0.0).to(tl.float32)
        first = tl.load(bounds)
        tl.store(to + 7, tl.sum(((again <= first) & is_used).to(tl.int32), axis=0).to(tl.float32))
        for number in range(NUM_BOUNDS):
            bound = tl.load(bounds + number)
            tl.store(to + 8 + number, tl.sum(((again > bound) & is_used).to(tl.int32), axis=0).to(tl.float32))


@triton.jit
def whole_rows(partial, row_starts, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    tensor = tl.program_id(0).to(tl.int64)
    first, last = tl.load(row_starts + tensor), tl.load(row_starts + tensor + 1)
    infinity = float("inf")
    low = tl.full([BLOCK], infinity, tl.float32)
    high = tl.full([BLOCK], -infinity, tl.float32)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    num_zero = tl.zeros([BLOCK], tl.float64)
    num_nonfinite = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        is_used = rows < last
        at = partial + rows * COLUMNS
        low = tl.minimum(low, tl.load(at + 0, mask=is_used, other=infinity))
        high = tl.maximum(high, tl.load(at + 1, mask=is_used, other=-infinity))
        scale = tl.load(at + 3, mask=is_used, other=0.0).to(tl.float64)
        total += tl.load(at + 2, mask=is_used, other=0.0).to(tl.float64) * scale
        squares += tl.load(at + 4, mask=is_used, other=0.0).to(tl.float64) * scale * scale
        num_zero += tl.load(at + 5, mask=is_used, other=0.0).to(tl.float64)
        num_nonfinite += tl.load(at + 6, mask=is_used, other=0.0).to(tl.float64)
    to = out + tensor * COLUMNS
    tl.store(to + 0, tl.min(low, axis=0).to(tl.float64))
    tl.store(to + 1, tl.max(high, axis=0).to(tl.float64))
    tl.store(to + 2, tl.sum(total, axis=0))
    tl.store(to + 3, 1.0)
    tl.store(to + 4, tl.sum(squares, axis=0))
    tl.store(to + 5, tl.sum(num_zero, axis=0))
    tl.store(to + 6, tl.sum(num_nonfinite, axis=0))
    for column in range(7, COLUMNS):
        count = tl.zeros([BLOCK], tl.float64)
        for start in range(first, last, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            count += tl.load(partial + rows * COLUMNS + column, mask=rows < last, other=0.0).to(tl.float64)
        tl.store(to + column, tl.sum(count, axis=0))


@triton.jit
def sampled_values(addresses, codes, offsets, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`offsets` counts elements in memory; a negative one stands for no sample, whose value is 0. `codes` are those of the dtypes."""
    tensor = tl.program_id(0).to(tl.int64)
    address, code = tl.load(addresses + tensor), tl.load(codes + tensor)
    columns = tl.arange(0, BLOCK)
    places = tl.load(offsets + tensor * WIDTH + columns, mask=columns < WIDTH, other=-1)
    is_there = places >= 0
    singles, halves, brains = (
        address.to(tl.pointer_type(tl.float32)),
        address.to(tl.pointer_type(tl.float16)),
        address.to(tl.pointer_type(tl.bfloat16)),
    )
    # Two of the three are masked wholly: nothing is read, and they give 0.
    values = tl.load(singles + places, mask=is_there & (code == 0), other=0.0)
    values += tl.load(halves + places, mask=is_there & (code == 1), other=0.0).to(tl.float32)
    values += tl.load(brains + places, mask=is_there & (code == 2), other=0.0).to(tl.float32)
    tl.store(out + tensor * WIDTH + columns, values, mask=columns < WIDTH)
