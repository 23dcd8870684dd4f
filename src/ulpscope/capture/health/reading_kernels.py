# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Read every tensor of a model by one launch, over a table of addresses. Needs triton.

A program of `partial_rows` reads one row of one tensor and writes low, high, sum, scale, squares, zeros, non-finite (and counts); a program
of `whole_rows` joins the rows of one tensor in float64, in a fixed order, so that the same values always give the same numbers. The sums
are of values scaled by a power of two, so that neither tiny nor huge gradients are lost. The scale is near the first value of the row,
which nearly always fits, or else near its largest, in a second pass. Non-finite values take a pass of their own too.

Triton reads the source of this file and knows little of Python: annotations have to be real (no `from __future__`), and of globals it takes
modules and other kernels only.
"""

import triton
import triton.language as tl

__all__ = ["partial_rows", "sampled_values", "tl", "whole_rows"]


@triton.jit
def power_below(value):
    """Return the bits of the power of two below a positive number, within those whose inverse is normal too."""
    return tl.minimum(tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000), 0x7E800000)


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
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_BOUNDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tensor = tl.load(row_tensors + row)
    address = tl.load(addresses + tensor)
    start = tl.load(row_numbers + row) * ROW
    used = tl.minimum(tl.load(numels + tensor) - start, ROW).to(tl.int32)
    used = tl.where(address == 0, 0, used)  # memory that was given back holds nothing
    base = address.to(tl.pointer_type(DTYPE)) + start
    aligned = tl.multiple_of((address // 16 * 16).to(tl.pointer_type(DTYPE)), 16) + start  # read from only where it is the same
    columns = tl.arange(0, WIDTH)
    tile_of = tl.arange(0, HEIGHT)[:, None] * WIDTH + columns[None, :]
    whole = tl.where(address % 16 == 0, used // (HEIGHT * WIDTH) * (HEIGHT * WIDTH), 0)  # in whole tiles; the rest goes line by line
    infinity = float("inf")
    one = tl.full([], 1.0, tl.float32)

    first = tl.abs(tl.load(base, mask=used > 0, other=0.0).to(tl.float32))
    if (first == 0.0) | (first - first != 0.0):
        first = one
    exponent = power_below(first)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)

    low = tl.full([WIDTH], infinity, tl.float32)
    high = tl.full([WIDTH], -infinity, tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    zeros = tl.zeros([WIDTH], tl.int32)
    for at in range(0, whole, HEIGHT * WIDTH):
        x = tl.load(aligned + at + tile_of).to(tl.float32)
        low = tl.minimum(low, tl.min(x, axis=0))
        high = tl.maximum(high, tl.max(x, axis=0))
        zeros += tl.sum((x == 0.0).to(tl.int32), axis=0)
        x = x * inverse
        sums += tl.sum(x, axis=0)
        squares += tl.sum(x * x, axis=0)
    for at in range(whole, used, WIDTH):
        is_used = columns < used - at
        x = tl.load(base + at + columns, mask=is_used, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.where(is_used, x, infinity))
        high = tl.maximum(high, tl.where(is_used, x, -infinity))
        zeros += ((x == 0.0) & is_used).to(tl.int32)
        x = x * inverse
        sums += x
        squares += x * x
    least, most = tl.min(low, axis=0), tl.max(high, axis=0)
    total, square = tl.sum(sums, axis=0), tl.sum(squares, axis=0)
    num_zero = tl.sum(zeros, axis=0)
    num_nonfinite = num_zero * 0
    num_nan = num_zero * 0
    largest = tl.maximum(tl.abs(least), tl.abs(most))

    if total - total != 0.0:  # something is not finite, or a sum overflows: look closer
        tops = tl.zeros([WIDTH], tl.float32)
        low = tl.full([WIDTH], infinity, tl.float32)
        high = tl.full([WIDTH], -infinity, tl.float32)
        odd = tl.zeros([WIDTH], tl.int32)
        nans = tl.zeros([WIDTH], tl.int32)
        for at in range(0, used, WIDTH):
            is_used = columns < used - at
            x = tl.load(base + at + columns, mask=is_used, other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.where(is_used & (x == x), x, infinity))
            high = tl.maximum(high, tl.where(is_used & (x == x), x, -infinity))
            tops = tl.maximum(tops, tl.where(tl.abs(x) < infinity, tl.abs(x), 0.0))
            odd += (x - x != 0.0).to(tl.int32)
            nans += (x != x).to(tl.int32)
        least, most, largest = tl.min(low, axis=0), tl.max(high, axis=0), tl.max(tops, axis=0)
        num_nonfinite, num_nan = tl.sum(odd, axis=0), tl.sum(nans, axis=0)
    reach = largest * inverse
    # Below 2^-44 squares begin to vanish, above 2^44 they begin to overflow.
    if (total - total != 0.0) | ((largest > 0.0) & (largest < infinity) & ((reach < 5.7e-14) | (reach > 1.7e13))):
        exponent = power_below(largest)
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        sums = tl.zeros([WIDTH], tl.float32)
        squares = tl.zeros([WIDTH], tl.float32)
        for at in range(0, used, WIDTH):
            x = tl.load(base + at + columns, mask=columns < used - at, other=0.0).to(tl.float32)
            x = tl.where(tl.abs(x) < infinity, x, 0.0) * inverse
            sums += x
            squares += x * x
        total, square = tl.sum(sums, axis=0), tl.sum(squares, axis=0)

    to = out + row * COLUMNS
    tl.store(to + 0, least)
    tl.store(to + 1, most)
    tl.store(to + 2, total)
    tl.store(to + 3, exponent.to(tl.float32, bitcast=True))
    tl.store(to + 4, square)
    tl.store(to + 5, num_zero.to(tl.float32))
    tl.store(to + 6, num_nonfinite.to(tl.float32))
    if NUM_BOUNDS > 0:
        for number in range(NUM_BOUNDS):
            bound = tl.load(bounds + number)
            above = tl.zeros([WIDTH], tl.int32)
            for at in range(0, whole, HEIGHT * WIDTH):
                x = tl.load(aligned + at + tile_of).to(tl.float32)
                above += tl.sum((x > bound).to(tl.int32), axis=0)
            for at in range(whole, used, WIDTH):
                is_used = columns < used - at
                x = tl.load(base + at + columns, mask=is_used, other=0.0).to(tl.float32)
                above += ((x > bound) & is_used).to(tl.int32)
            num_above = tl.sum(above, axis=0)
            if number == 0:
                tl.store(to + 7, (used - num_nan - num_above).to(tl.float32))
            tl.store(to + 8 + number, num_above.to(tl.float32))


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
    """Read the sampled values. `offsets` counts elements in memory; a negative one stands for no sample, whose value is 0. `codes` are the
    codes of the dtypes.
    """
    tensor = tl.program_id(0).to(tl.int64)
    address, code = tl.load(addresses + tensor), tl.load(codes + tensor)
    columns = tl.arange(0, BLOCK)
    places = tl.load(offsets + tensor * WIDTH + columns, mask=columns < WIDTH, other=-1)
    places = tl.where(address == 0, -1, places)
    # Two of these three loads are masked wholly: they read nothing and give 0.
    values = tl.load(address.to(tl.pointer_type(tl.float32)) + places, mask=tl.where(code == 0, places, -1) >= 0, other=0.0)
    values += tl.load(address.to(tl.pointer_type(tl.float16)) + places, mask=tl.where(code == 1, places, -1) >= 0, other=0.0).to(tl.float32)
    values += tl.load(address.to(tl.pointer_type(tl.bfloat16)) + places, mask=tl.where(code == 2, places, -1) >= 0, other=0.0).to(
        tl.float32
    )
    tl.store(out + tensor * WIDTH + columns, values, mask=columns < WIDTH)
