# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Summarise a table of tensors: statistics and the fingerprint `u1` of many of them by few launches. Needs triton.

A tensor is a row of the table: address, number of words, bytes, first program, number of programs, correction of the fingerprint and, where
it is strided, sizes, divisors and strides. A program of `narrow_parts` or `wide_parts` reads CHUNK words of eight bytes of one tensor; a
program of `whole_tensors` joins the parts of one tensor. Every sum is taken in a fixed order, so the same values give the same bits.

The fingerprint is a sum of r**(n - 1 - j) * mix(w_j). Words beyond the end count as zeros, whose mix is zero. That makes the sum larger by
a power of r; the host knows the power and takes it back: r is odd and has an inverse.

`narrow_parts` is for float32, float16 and bfloat16. It sums the 16-bit ones by fours in float32 and everything else in float64, and counts
nothing. Where a sum could overflow or vanish, or where a value is not finite, zero or subnormal, it reads the part again, from the cache,
and counts. `wide_parts` is for all other dtypes.

Triton reads the source of this file and knows little of Python: annotations have to be real (no `from __future__`), and of globals it takes
modules and other kernels only.
"""

import triton
import triton.language as tl

__all__ = ["narrow_parts", "tl", "whole_tensors", "wide_parts"]


@triton.jit
def mixed(w):
    w = w * 0x9E3779B97F4A7C15
    w = w ^ (w >> 32)
    w = w * 0xD6E8FEB86659FD93
    return w ^ (w >> 32)


@triton.jit
def offsets_of(row, unit, FIRST: tl.constexpr, DIMS: tl.constexpr):
    """Return where the units of a strided tensor lie, in units from its address; the innermost dimension comes first in the table."""
    offset = unit.to(tl.int64) * 0
    rest = unit.to(tl.uint32)
    for dim in tl.static_range(0, DIMS):
        if dim == DIMS - 1:
            offset += rest.to(tl.int64) * tl.load(row + FIRST + 4 * dim + 3)
        else:
            size = tl.load(row + FIRST + 4 * dim).to(tl.uint32)
            magic = tl.load(row + FIRST + 4 * dim + 1).to(tl.uint32)
            shift = tl.load(row + FIRST + 4 * dim + 2).to(tl.uint32)
            quotient = (tl.umulhi(rest, magic) + rest) >> shift
            offset += (rest - quotient * size).to(tl.int64) * tl.load(row + FIRST + 4 * dim + 3)
            rest = quotient
    return offset


@triton.jit
def words_at(row, address, at, num_bytes, UNIT: tl.constexpr, DIMS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the words `at` of a tensor; zeros beyond its end, unless `IS_WHOLE` says that there is no end in them."""
    if UNIT == 0:
        if IS_ALIGNED:
            base = tl.multiple_of((address // 16 * 16).to(tl.pointer_type(tl.uint64)), 16)
        else:
            base = address.to(tl.pointer_type(tl.uint64))
        if IS_WHOLE:
            w = tl.load(base + at)
        else:
            left = num_bytes - at * 8
            w = tl.load(base + at, mask=left > 0, other=0)
            surplus = tl.minimum(tl.maximum(8 - left, 0), 7).to(tl.uint64) * 8
            w = (w << surplus) >> surplus
    else:
        w = at.to(tl.uint64) * 0
        for part in tl.static_range(0, 8 // UNIT):
            unit = at * (8 // UNIT) + part
            offset = offsets_of(row, unit, 8, DIMS)
            is_used = unit * UNIT < num_bytes
            if UNIT == 8:
                w = tl.load(address.to(tl.pointer_type(tl.uint64)) + offset, mask=is_used, other=0)
            elif UNIT == 4:
                value = tl.load(address.to(tl.pointer_type(tl.uint32)) + offset, mask=is_used, other=0)
                w = w | (value.to(tl.uint64) << (32 * part))
            elif UNIT == 2:
                value = tl.load(address.to(tl.pointer_type(tl.uint16)) + offset, mask=is_used, other=0)
                w = w | (value.to(tl.uint64) << (16 * part))
            else:
                value = tl.load(address.to(tl.pointer_type(tl.uint8)) + offset, mask=is_used, other=0)
                w = w | (value.to(tl.uint64) << (8 * part))
        if not IS_WHOLE:
            left = num_bytes - at * 8
            surplus = tl.minimum(tl.maximum(8 - left, 0), 7).to(tl.uint64) * 8
            w = tl.where(left > 0, (w << surplus) >> surplus, 0)
    return w


@triton.jit
def lines_at(row, address, start, num_bytes, UNIT: tl.constexpr, DIMS: tl.constexpr, IS_WHOLE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return 256 words from `start`, as 16 lines of 16; with UNIT 128 each line lies together, and strides place the lines."""
    lines = tl.arange(0, 16)
    columns = tl.arange(0, 16)
    if UNIT == 128:
        numbers = start // 16 + lines
        offsets = offsets_of(row, numbers, 8, DIMS)
        is_used = numbers * 128 < num_bytes
        w = tl.load(address.to(tl.pointer_type(tl.uint64)) + offsets[:, None] + columns[None, :], mask=is_used[:, None], other=0)
    else:
        w = words_at(row, address, start + lines[:, None] * 16 + columns[None, :], num_bytes, UNIT, DIMS, IS_WHOLE, IS_ALIGNED)
    return w


@triton.jit
def float_bits(w, part: tl.constexpr, KIND: tl.constexpr):
    """Return the bits of the magnitude, and the value as float32, of one number in a word; KIND is 0 bfloat16, 1 float16, 2 float32."""
    if KIND == 2:
        bits = (w >> (32 * part)).to(tl.int32)
        return bits & 0x7FFFFFFF, bits.to(tl.float32, bitcast=True)
    elif KIND == 0:
        half = (w >> (32 * (part // 2))).to(tl.int32)
        bits = half << 16 if part % 2 == 0 else half & -65536
        return bits & 0x7FFFFFFF, bits.to(tl.float32, bitcast=True)
    else:
        short = (w >> (16 * part)).to(tl.uint16)
        return short.to(tl.int32) & 0x7FFF, short.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def least_of_pairs(x, y):
    """Return the lesser of two numbers twice, each pair of bfloat16 in 32 bits."""
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def greatest_of_pairs(x, y):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def first_of_pairs(x):
    return (x << 16).to(tl.float32, bitcast=True)


@triton.jit
def second_of_pairs(x):
    return (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_lines(
    w,
    start,
    num_reals,
    s0,
    s1,
    low,
    high,
    least,
    total,
    squares,
    POWER,
    KIND: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    STATISTICS: tl.constexpr,
):
    """Add 256 words to the sums of their places; `least` is the smallest magnitude. With `IS_PAIRED` each of `low`, `high` and `least`
    holds two numbers, which the device compares at once.
    """
    m = mixed(w)
    s0 += m
    s1 = s1 * POWER + m
    if STATISTICS:
        infinity = float("inf")
        parts: tl.constexpr = 2 if KIND == 2 else 4
        line = tl.zeros([16, 16], tl.float32)
        square = tl.zeros([16, 16], tl.float32)
        if IS_PAIRED:
            for half in tl.static_range(0, 2):
                pair = (w >> (32 * half)).to(tl.int32)
                low = least_of_pairs(low, pair)
                high = greatest_of_pairs(high, pair)
                least = least_of_pairs(least, pair & 0x7FFF7FFF)
        for part in tl.static_range(0, parts):
            _, x = float_bits(w, part, KIND)
            if IS_PAIRED:
                pass
            elif IS_WHOLE:
                low = tl.minimum(low, x)
                high = tl.maximum(high, x)
                least = tl.minimum(least, tl.abs(x))
            else:
                places = start + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
                is_used = places * parts + part < num_reals
                low = tl.minimum(low, tl.where(is_used, x, infinity))
                high = tl.maximum(high, tl.where(is_used, x, -infinity))
                least = tl.minimum(least, tl.where(is_used, tl.abs(x), infinity))
            if KIND == 2:
                y = x.to(tl.float64)
                total += y
                squares += y * y
            else:
                line += x
                square += x * x
        if KIND != 2:
            total += line.to(tl.float64)
            squares += square.to(tl.float64)
    return s0, s1, low, high, least, total, squares


@triton.jit(do_not_specialize=["program_offset"])
def narrow_parts(
    table,
    firsts,
    lane_weights,
    out,
    program_offset,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    DIMS: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    STATISTICS: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    POWER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0) + program_offset
    number = tl.sum((tl.load(firsts + tl.arange(0, ROWS)) <= program).to(tl.int32), axis=0) - 1
    row = table + number.to(tl.int64) * FIELDS
    address = tl.load(row)
    num_bytes = tl.load(row + 1)
    begin = (program - tl.load(row + 2)) * CHUNK
    parts: tl.constexpr = 2 if KIND == 2 else 4
    num_reals = num_bytes // (8 // parts)
    weights = tl.load(lane_weights + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :])
    infinity = float("inf")

    s0 = tl.zeros([16, 16], tl.uint64)
    s1 = tl.zeros([16, 16], tl.uint64)
    low = tl.full([16, 16], infinity, tl.float32)
    high = tl.full([16, 16], -infinity, tl.float32)
    least = tl.full([16, 16], infinity, tl.float32)
    total = tl.zeros([16, 16], tl.float64)
    squares = tl.zeros([16, 16], tl.float64)
    end = tl.minimum(begin + CHUNK, (num_bytes + 7) // 8)
    is_full = (begin + CHUNK) * 8 <= num_bytes
    if is_full & ((UNIT != 0) | (address % 16 == 0)):
        if IS_PAIRED:
            lows = tl.full([16, 16], 0x7F807F80, tl.int32)  # inf twice
            highs = tl.full([16, 16], -0x007F0080, tl.int32)  # -inf twice
            leasts = tl.full([16, 16], 0x7F807F80, tl.int32)
        else:
            lows = low
            highs = high
            leasts = least
        for at in range(0, CHUNK, WIDTH * 4):
            start = begin + at
            w0 = lines_at(row, address, start, num_bytes, UNIT, DIMS, True, True)
            w1 = lines_at(row, address, start + WIDTH, num_bytes, UNIT, DIMS, True, True)
            w2 = lines_at(row, address, start + WIDTH * 2, num_bytes, UNIT, DIMS, True, True)
            w3 = lines_at(row, address, start + WIDTH * 3, num_bytes, UNIT, DIMS, True, True)
            s0, s1, lows, highs, leasts, total, squares = add_lines(
                w0, start, num_reals, s0, s1, lows, highs, leasts, total, squares, POWER, KIND, True, IS_PAIRED, STATISTICS
            )
            s0, s1, lows, highs, leasts, total, squares = add_lines(
                w1, start, num_reals, s0, s1, lows, highs, leasts, total, squares, POWER, KIND, True, IS_PAIRED, STATISTICS
            )
            s0, s1, lows, highs, leasts, total, squares = add_lines(
                w2, start, num_reals, s0, s1, lows, highs, leasts, total, squares, POWER, KIND, True, IS_PAIRED, STATISTICS
            )
            s0, s1, lows, highs, leasts, total, squares = add_lines(
                w3, start, num_reals, s0, s1, lows, highs, leasts, total, squares, POWER, KIND, True, IS_PAIRED, STATISTICS
            )
        whole = tl.sum(tl.sum(s1 * weights, axis=1), axis=0)
        if IS_PAIRED:
            low = tl.minimum(first_of_pairs(lows), second_of_pairs(lows))
            high = tl.maximum(first_of_pairs(highs), second_of_pairs(highs))
            least = tl.minimum(first_of_pairs(leasts), second_of_pairs(leasts))
        else:
            low = lows
            high = highs
            least = leasts
    else:
        for start in range(begin, end, WIDTH):
            w = lines_at(row, address, start, num_bytes, UNIT, DIMS, False, False)
            s0, s1, low, high, least, total, squares = add_lines(
                w, start, num_reals, s0, s1, low, high, least, total, squares, POWER, KIND, False, False, STATISTICS
            )
        whole = tl.sum(tl.sum(s1 * weights, axis=1), axis=0)
        for _ in range((end - begin + WIDTH - 1) // WIDTH, CHUNK // WIDTH):
            whole = whole * POWER

    to = out + program.to(tl.int64) * COLUMNS
    tl.store(to, tl.sum(tl.sum(s0, axis=1), axis=0).to(tl.int64, bitcast=True))
    tl.store(to + 1, whole.to(tl.int64, bitcast=True))
    if STATISTICS:
        lowest, highest = tl.min(tl.min(low, axis=1), axis=0), tl.max(tl.max(high, axis=1), axis=0)
        smallest = tl.min(tl.min(least, axis=1), axis=0)
        added, squared = tl.sum(tl.sum(total, axis=1), axis=0), tl.sum(tl.sum(squares, axis=1), axis=0)
        num_zero = tl.program_id(0) * 0
        num_small = num_zero
        num_nan = num_zero
        num_posinf = num_zero
        num_neginf = num_zero
        tiny: tl.constexpr = 0x400 if KIND == 1 else 0x00800000
        normal = 6.103515625e-05 if KIND == 1 else 1.1754943508222875e-38
        is_odd = (added - added != 0.0) | (squared - squared != 0.0)
        if KIND == 0:  # beyond these, squares of bfloat16 overflow or vanish in float32
            largest = tl.maximum(tl.abs(lowest), tl.abs(highest))
            is_odd = is_odd | ((largest < 8.9e-16) & (largest > 0.0)) | (largest > 1.1e18)
        if is_odd | (smallest < normal):
            zeros = tl.zeros([16, 16], tl.int32)
            smalls = tl.zeros([16, 16], tl.int32)
            for start in range(begin, end, WIDTH):
                w = lines_at(row, address, start, num_bytes, UNIT, DIMS, False, False)
                for part in tl.static_range(0, parts):
                    magnitude, _ = float_bits(w, part, KIND)
                    zeros += (magnitude == 0).to(tl.int32)
                    smalls += (magnitude < tiny).to(tl.int32)
            num_zero, num_small = tl.sum(tl.sum(zeros, axis=1), axis=0), tl.sum(tl.sum(smalls, axis=1), axis=0)
            surplus = (tl.cdiv(end - begin, WIDTH) * WIDTH * parts - tl.minimum(num_reals - begin * parts, CHUNK * parts)).to(tl.int32)
            num_zero, num_small = num_zero - surplus, num_small - surplus  # words beyond the end were read as zeros
        if is_odd:
            total = tl.zeros([16, 16], tl.float64)
            squares = tl.zeros([16, 16], tl.float64)
            nans = tl.zeros([16, 16], tl.int32)
            posinfs = tl.zeros([16, 16], tl.int32)
            neginfs = tl.zeros([16, 16], tl.int32)
            for start in range(begin, end, WIDTH):
                places = start + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
                w = lines_at(row, address, start, num_bytes, UNIT, DIMS, False, False)
                for part in tl.static_range(0, parts):
                    _, x = float_bits(w, part, KIND)
                    is_used = places * parts + part < num_reals
                    y = tl.where(is_used & (x - x == 0.0), x.to(tl.float64), 0.0)
                    total += y
                    squares += y * y
                    nans += ((x != x) & is_used).to(tl.int32)
                    posinfs += ((x == infinity) & is_used).to(tl.int32)
                    neginfs += ((x == -infinity) & is_used).to(tl.int32)
            added, squared = tl.sum(tl.sum(total, axis=1), axis=0), tl.sum(tl.sum(squares, axis=1), axis=0)
            num_nan = tl.sum(tl.sum(nans, axis=1), axis=0)
            num_posinf, num_neginf = tl.sum(tl.sum(posinfs, axis=1), axis=0), tl.sum(tl.sum(neginfs, axis=1), axis=0)
        tl.store(to + 2, lowest.to(tl.float64).to(tl.int64, bitcast=True))
        tl.store(to + 3, highest.to(tl.float64).to(tl.int64, bitcast=True))
        tl.store(to + 4, added.to(tl.int64, bitcast=True))
        tl.store(to + 5, squared.to(tl.int64, bitcast=True))
        tl.store(to + 6, (num_zero * 0).to(tl.int64))
        tl.store(to + 7, num_nan.to(tl.int64))
        tl.store(to + 8, num_posinf.to(tl.int64))
        tl.store(to + 9, num_neginf.to(tl.int64))
        tl.store(to + 10, num_zero.to(tl.int64))
        tl.store(to + 11, (num_small - num_zero).to(tl.int64))


@triton.jit
def wide_value(w, values, part: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Return one number of a word as float64, and its class. KIND is 0 float64, 1 a signed and 2 an unsigned integer, 3 a one-byte code
    with a table.

    Classes are 0 ordinary, 1 NaN, 2 inf, 3 -inf, 4 zero, 5 subnormal.
    """
    if KIND == 3:
        code = ((w >> (8 * part)) & 255).to(tl.int32)
        value = tl.load(values + code)
        kind = tl.load(values + 256 + code).to(tl.int32)
    elif KIND == 0:
        bits = w.to(tl.int64, bitcast=True)
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
        value = bits.to(tl.float64, bitcast=True)
        kind = tl.where(magnitude < 0x0010000000000000, 5, 0)
        kind = tl.where(magnitude == 0, 4, kind)
        kind = tl.where(magnitude > 0x7FF0000000000000, 1, kind)
        kind = tl.where(magnitude == 0x7FF0000000000000, tl.where(bits < 0, 3, 2), kind)
    else:
        surplus: tl.constexpr = 64 - 8 * SIZE
        if KIND == 1:
            integer = (w << (surplus - 8 * SIZE * part)).to(tl.int64, bitcast=True) >> surplus
            value = integer.to(tl.float64)
            kind = tl.where(integer == 0, 4, 0)
        else:
            natural = (w << (surplus - 8 * SIZE * part)) >> surplus
            value = natural.to(tl.float64)
            kind = tl.where(natural == 0, 4, 0)
    return value, kind


@triton.jit(do_not_specialize=["program_offset"])
def wide_parts(
    table,
    firsts,
    lane_weights,
    values,
    out,
    program_offset,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    DIMS: tl.constexpr,
    STATISTICS: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    POWER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0) + program_offset
    number = tl.sum((tl.load(firsts + tl.arange(0, ROWS)) <= program).to(tl.int32), axis=0) - 1
    row = table + number.to(tl.int64) * FIELDS
    address = tl.load(row)
    num_bytes = tl.load(row + 1)
    begin = (program - tl.load(row + 2)) * CHUNK
    lanes = tl.arange(0, WIDTH)
    infinity = float("inf")
    end = tl.minimum(begin + CHUNK, (num_bytes + 7) // 8)

    s0 = tl.zeros([WIDTH], tl.uint64)
    s1 = tl.zeros([WIDTH], tl.uint64)
    low = tl.full([WIDTH], infinity, tl.float64)
    high = tl.full([WIDTH], -infinity, tl.float64)
    top = tl.zeros([WIDTH], tl.float64)
    total = tl.zeros([WIDTH], tl.float64)
    squares = tl.zeros([WIDTH], tl.float64)
    nans = tl.zeros([WIDTH], tl.int32)
    posinfs = tl.zeros([WIDTH], tl.int32)
    neginfs = tl.zeros([WIDTH], tl.int32)
    zeros = tl.zeros([WIDTH], tl.int32)
    smalls = tl.zeros([WIDTH], tl.int32)
    for start in range(begin, end, WIDTH):
        places = start + lanes
        w = words_at(row, address, places, num_bytes, UNIT, DIMS, False, False)
        m = mixed(w)
        s0 += m
        s1 = s1 * POWER + m
        if STATISTICS:
            for part in tl.static_range(0, 8 // SIZE):
                is_used = (places * (8 // SIZE) + part) * SIZE < num_bytes
                value, kind = wide_value(w, values, part, SIZE, KIND)
                is_ordered = is_used & (kind != 1)
                is_finite = is_used & ((kind == 0) | (kind >= 4))
                low = tl.minimum(low, tl.where(is_ordered, value, infinity))
                high = tl.maximum(high, tl.where(is_ordered, value, -infinity))
                finite = tl.where(is_finite, value, 0.0)
                if KIND == 0:
                    top = tl.maximum(top, tl.abs(finite))
                    nans += ((kind == 1) & is_used).to(tl.int32)
                    posinfs += ((kind == 2) & is_used).to(tl.int32)
                    neginfs += ((kind == 3) & is_used).to(tl.int32)
                    smalls += ((kind == 5) & is_used).to(tl.int32)
                else:
                    total += finite
                    squares += finite * finite
                    if KIND == 3:
                        nans += ((kind == 1) & is_used).to(tl.int32)
                        posinfs += ((kind == 2) & is_used).to(tl.int32)
                        neginfs += ((kind == 3) & is_used).to(tl.int32)
                        smalls += ((kind == 5) & is_used).to(tl.int32)
                zeros += ((kind == 4) & is_used).to(tl.int32)
    whole = tl.sum(s1 * tl.load(lane_weights + lanes), axis=0)
    for _ in range((end - begin + WIDTH - 1) // WIDTH, CHUNK // WIDTH):
        whole = whole * POWER

    to = out + program.to(tl.int64) * COLUMNS
    tl.store(to, tl.sum(s0, axis=0).to(tl.int64, bitcast=True))
    tl.store(to + 1, whole.to(tl.int64, bitcast=True))
    if STATISTICS:
        exponent = tl.program_id(0).to(tl.int64) * 0
        if KIND == 0:  # squares of float64 overflow or vanish: scale by a power of two near the largest
            bits = tl.max(top, axis=0).to(tl.int64, bitcast=True)
            exponent = tl.minimum(tl.maximum((bits >> 52) - 1023, -1000), 1000)
            scale = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
            for start in range(begin, end, WIDTH):
                places = start + lanes
                w = words_at(row, address, places, num_bytes, UNIT, DIMS, False, False)
                value, kind = wide_value(w, values, 0, SIZE, KIND)
                finite = tl.where((places * 8 < num_bytes) & ((kind == 0) | (kind >= 4)), value, 0.0) * scale
                total += finite
                squares += finite * finite
        tl.store(to + 2, tl.min(low, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 3, tl.max(high, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 4, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 5, tl.sum(squares, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 6, exponent)
        tl.store(to + 7, tl.sum(nans, axis=0).to(tl.int64))
        tl.store(to + 8, tl.sum(posinfs, axis=0).to(tl.int64))
        tl.store(to + 9, tl.sum(neginfs, axis=0).to(tl.int64))
        tl.store(to + 10, tl.sum(zeros, axis=0).to(tl.int64))
        tl.store(to + 11, tl.sum(smalls, axis=0).to(tl.int64))


@triton.jit
def power_of_two(exponent):
    """Return 2.0**exponent for exponents up to 0; below the normal numbers, 0."""
    return tl.where(exponent < -1022, 0, (exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def whole_tensors(
    table,
    partial,
    chunk_weights,
    out,
    STATISTICS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    POWER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = table + number * FIELDS
    first = tl.load(row + 2)
    last = first + tl.load(row + 3)
    lanes = tl.arange(0, BLOCK)
    infinity = float("inf")
    s0 = tl.zeros([BLOCK], tl.uint64)
    s1 = tl.zeros([BLOCK], tl.uint64)
    for start in range(first, last, BLOCK):
        is_used = start + lanes < last
        at = partial + (start + lanes) * COLUMNS
        s0 += tl.load(at, mask=is_used, other=0).to(tl.uint64, bitcast=True)
        s1 = s1 * POWER + tl.load(at + 1, mask=is_used, other=0).to(tl.uint64, bitcast=True)
    weighted = tl.sum(s1 * tl.load(chunk_weights + lanes), axis=0)
    correction = tl.load(row + 4).to(tl.uint64, bitcast=True)
    to = out + number * COLUMNS
    tl.store(to, tl.sum(s0, axis=0).to(tl.int64, bitcast=True))
    tl.store(to + 1, (weighted * correction).to(tl.int64, bitcast=True))
    if STATISTICS:
        low = tl.full([BLOCK], infinity, tl.float64)
        high = tl.full([BLOCK], -infinity, tl.float64)
        tops = tl.full([BLOCK], -1000, tl.int64)
        for start in range(first, last, BLOCK):
            is_used = start + lanes < last
            at = partial + (start + lanes) * COLUMNS
            low = tl.minimum(low, tl.where(is_used, tl.load(at + 2, mask=is_used, other=0).to(tl.float64, bitcast=True), infinity))
            high = tl.maximum(high, tl.where(is_used, tl.load(at + 3, mask=is_used, other=0).to(tl.float64, bitcast=True), -infinity))
            tops = tl.maximum(tops, tl.load(at + 6, mask=is_used, other=-1000))
        exponent = tl.max(tops, axis=0)
        total = tl.zeros([BLOCK], tl.float64)
        squares = tl.zeros([BLOCK], tl.float64)
        for start in range(first, last, BLOCK):
            is_used = start + lanes < last
            at = partial + (start + lanes) * COLUMNS
            scale = power_of_two(tl.load(at + 6, mask=is_used, other=-1000) - exponent)
            total += tl.load(at + 4, mask=is_used, other=0).to(tl.float64, bitcast=True) * scale
            squares += tl.load(at + 5, mask=is_used, other=0).to(tl.float64, bitcast=True) * scale * scale
        tl.store(to + 2, tl.min(low, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 3, tl.max(high, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 4, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 5, tl.sum(squares, axis=0).to(tl.int64, bitcast=True))
        tl.store(to + 6, exponent)
        for column in tl.static_range(7, 12):
            count = tl.zeros([BLOCK], tl.int64)
            for start in range(first, last, BLOCK):
                count += tl.load(partial + (start + lanes) * COLUMNS + column, mask=start + lanes < last, other=0)
            tl.store(to + column, tl.sum(count, axis=0))
