"""Row kernels: dot products with rows of a weight matrix, and sums of scaled rows, for every native format.

In: addresses of rows and activations. Out: dot4, axpy4, matvec, row16, row_part. Next: blocks.py (many tokens), ffn.py.

Every dot product of one row has one order of additions, whichever rows it is computed beside: exact mode equals dense
mode bit for bit because of that. Columns: any number for float formats, multiples of 32 for block formats, of 256 for
those of superblocks.py.
Activations: f32[n] at `x` for float formats, act blocks (formats.py) at `xb` for block formats.
"""

import numpy as np
from numba import njit

from hotcold.runtime.kernels.formats import (
    ACT_BYTES,
    ACT_D,
    ACT_DSUM,
    ACT_SUMS,
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_0_BYTES,
    Q4_1,
    Q4_1_BYTES,
    Q4_K,
    Q4_K_BYTES,
    Q5_0,
    Q5_0_BYTES,
    Q5_1,
    Q5_1_BYTES,
    Q5_K,
    Q5_K_BYTES,
    Q6_K,
    Q6_K_BYTES,
    Q8_0,
    Q8_0_BYTES,
    SUPER_BLOCK,
)
from hotcold.runtime.kernels.quants import (
    dot_q4_1,
    dot_q5_0,
    dot_q5_1,
    load_second,
    part_q4_1,
    part_q5_0,
    part_q5_1,
)
from hotcold.runtime.kernels.simd import (
    PAIRS,
    WIDE,
    add_halves,
    add_w,
    dot_q8,
    dpbusd_small,
    each0,
    each1,
    each2,
    each3,
    fma,
    fma_w,
    hsum,
    hsum_w,
    lane0,
    lane1,
    lane2,
    lane3,
    lane4,
    lane5,
    lane6,
    lane7,
    load_b32,
    load_bf16,
    load_dup,
    load_f16,
    load_f32,
    load_four_each,
    load_fours,
    load_nibbles,
    load_s8w,
    load_s16,
    load_scales,
    load_two,
    load_u8w,
    load_v,
    load_vb,
    load_vh,
    load_w,
    load_wb,
    load_wh,
    low_nibble_w,
    nibble_products,
    prefetch_l2,
    shr4w,
    signed_products,
    splat,
    splat_w,
    store_f32,
    store_v,
    store_w,
    to_f32,
    to_f32w,
    vadd,
    vmul,
    vzero,
    zero_w,
)
from hotcold.runtime.kernels.superblocks import (
    axpy4_q4k,
    axpy4_q5k,
    axpy4_q6k,
    dot4_q4k,
    dot4_q5k,
    dot4_q6k,
    part_q4k,
    part_q5k,
    part_q6k,
)

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NONE = np.int64(0)  # as an argument; typed, as AHEAD is: a plain int would compile the function and its callees twice
# Bytes to prefetch ahead in each of four streams of rows. Measured: four streams far from each other are read at 1.2
# times the speed of one, with little difference from 512 bytes to 4 KiB ahead.
AHEAD = np.int64(2048)


@njit(inline="always")
def ahead4(a0, a1, a2, a3, p0, p1, p2, p3):
    """Prefetch a line of each of four rows."""
    prefetch_l2(a0 + p0)
    prefetch_l2(a1 + p1)
    prefetch_l2(a2 + p2)
    prefetch_l2(a3 + p3)


# ------------------------------------------------------------------ float formats


def _float_format(load16, load8, load1, size):
    step, step8 = 16 * size, 8 * size

    @njit(inline="always")
    def ahead(a, p):
        for line in range(size):  # 64 weights are `size` cache lines
            prefetch_l2(a + p + 64 * line)

    @njit(inline="always")
    def step4(a, p, x0, x1, x2, x3, s):
        """64 weights of a row, added to its four sums."""
        ahead(a, p)
        return (
            fma_w(load16(a), x0, s[0]),
            fma_w(load16(a + step), x1, s[1]),
            fma_w(load16(a + 2 * step), x2, s[2]),
            fma_w(load16(a + 3 * step), x3, s[3]),
        )

    @njit(inline="always")
    def ending(a, n, x, s):
        """The last n % 64 weights, and all sums in one."""
        tail = vzero()
        for _ in range(n % 64 // 8):
            tail = fma(load8(a), load_v(x), tail)
            a += step8
            x += 32
        y = hsum_w(s) + hsum(tail)
        for _ in range(n % 8):
            y += load1(a) * load_f32(x)
            a += size
            x += 4
        return y

    @njit(inline="always")
    def four_sums(s):
        return add_w(add_w(s[0], s[1]), add_w(s[2], s[3]))

    @njit
    def dot4_wide(a0, a1, a2, a3, p0, p1, p2, p3, n, x):
        """The rows side by side, each with four sums: four streams from memory, x loaded once."""
        z = zero_w()
        s0 = s1 = s2 = s3 = (z, z, z, z)
        for _ in range(n // 64):
            x0, x1, x2, x3 = load_w(x), load_w(x + 64), load_w(x + 128), load_w(x + 192)
            s0 = step4(a0, p0, x0, x1, x2, x3, s0)
            s1 = step4(a1, p1, x0, x1, x2, x3, s1)
            s2 = step4(a2, p2, x0, x1, x2, x3, s2)
            s3 = step4(a3, p3, x0, x1, x2, x3, s3)
            a0 += 4 * step
            a1 += 4 * step
            a2 += 4 * step
            a3 += 4 * step
            x += 256
        return (ending(a0, n, x, four_sums(s0)), ending(a1, n, x, four_sums(s1)), ending(a2, n, x, four_sums(s2)),
                ending(a3, n, x, four_sums(s3)))  # fmt: skip

    @njit
    def dot4_narrow(a0, a1, a2, a3, p0, p1, p2, p3, n, x):
        """The same with one sum per row: with 16 registers of 256 bits, four rows have no more."""
        s0 = s1 = s2 = s3 = zero_w()
        for _ in range(n // 64):
            ahead(a0, p0)
            ahead(a1, p1)
            ahead(a2, p2)
            ahead(a3, p3)
            for _ in range(4):
                x0 = load_w(x)
                s0 = fma_w(load16(a0), x0, s0)
                s1 = fma_w(load16(a1), x0, s1)
                s2 = fma_w(load16(a2), x0, s2)
                s3 = fma_w(load16(a3), x0, s3)
                a0 += step
                a1 += step
                a2 += step
                a3 += step
                x += 64
        return ending(a0, n, x, s0), ending(a1, n, x, s1), ending(a2, n, x, s2), ending(a3, n, x, s3)

    dot4 = dot4_wide if WIDE else dot4_narrow

    @njit
    def axpy4(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc):
        w0, w1, w2, w3 = splat_w(c0), splat_w(c1), splat_w(c2), splat_w(c3)
        for _ in range(n // 16):
            ahead4(a0, a1, a2, a3, p0, p1, p2, p3)
            s = fma_w(load16(a0), w0, load_w(acc))
            s = fma_w(load16(a1), w1, s)
            s = fma_w(load16(a2), w2, s)
            store_w(acc, fma_w(load16(a3), w3, s))
            a0 += step
            a1 += step
            a2 += step
            a3 += step
            acc += 64
        for _ in range(n % 16 // 8):
            t = fma(load8(a0), splat(c0), load_v(acc))
            t = fma(load8(a1), splat(c1), t)
            t = fma(load8(a2), splat(c2), t)
            store_v(acc, fma(load8(a3), splat(c3), t))
            a0 += step8
            a1 += step8
            a2 += step8
            a3 += step8
            acc += 32
        for _ in range(n % 8):
            y = load_f32(acc) + load1(a0) * c0
            y = y + load1(a1) * c1
            y = y + load1(a2) * c2
            store_f32(acc, y + load1(a3) * c3)
            a0 += size
            a1 += size
            a2 += size
            a3 += size
            acc += 4

    return dot4, axpy4


dot4_f32, axpy4_f32 = _float_format(load_w, load_v, load_f32, 4)
dot4_f16, axpy4_f16 = _float_format(load_wh, load_vh, load_f16, 2)
dot4_bf16, axpy4_bf16 = _float_format(load_wb, load_vb, load_bf16, 2)


# ------------------------------------------------------------------ formats of blocks of 32


@njit(inline="always")
def _q8_sums(a, q, sums):
    return to_f32(dot_q8(sums, load_b32(a + 2), q))


@njit(inline="always")
def _q4_sums(a, q, sums):
    return to_f32(dpbusd_small(sums, load_nibbles(a + 2), q))


@njit
def _q8_scaled(a, c, lo, hi):
    d = splat_w(load_f16(a) * c)
    return fma_w(to_f32w(load_s8w(a + 2)), d, lo), fma_w(to_f32w(load_s8w(a + 18)), d, hi)


@njit
def _q4_scaled(a, c, lo, hi):
    d, bytes16 = splat_w(load_f16(a) * c), load_u8w(a + 2)
    return fma_w(low_nibble_w(bytes16), d, lo), fma_w(low_nibble_w(shr4w(bytes16)), d, hi)


def _scaled(part):
    @njit
    def scaled(a, c, lo, hi):
        d = splat_w(c)
        return fma_w(part(a, 0), d, lo), fma_w(part(a, 1), d, hi)

    return scaled


def _zero_point_block(sums):
    """As the blocks of quants.py, of one whose zero point is part of what the integer sums start at."""

    @njit(inline="always")
    def block(a, q, m, d, e, s):
        return fma(sums(a, q, m), vmul(splat(load_f16(a)), d), s)

    return block


def _last_block(block):
    """Where the number of a row's blocks is odd."""

    @njit(inline="always")
    def last(a0, a1, a2, a3, xb, s0, s1, s2, s3):
        q, m = load_b32(xb), load_s16(xb + ACT_SUMS)
        d, e = load_dup(xb + ACT_D), load_second(xb + ACT_DSUM)
        s0, s1 = block(a0, q, m, d, e, s0), block(a1, q, m, d, e, s1)
        return s0, s1, block(a2, q, m, d, e, s2), block(a3, q, m, d, e, s3)

    return last


def _zero_point_dot(sums, size):
    """Rows of blocks {f16 scale, values}, whose zero point is part of what the integer sums start at."""
    last = _last_block(_zero_point_block(sums))

    @njit
    def dot4(a0, a1, a2, a3, p0, p1, p2, p3, n, xb):
        """The activations are loaded once for four rows; each row's sum is independent of the others.

        Two blocks at a time: the scales of four rows are then eight numbers, which are converted at once.
        """
        s0, s1, s2, s3 = vzero(), vzero(), vzero(), vzero()
        t0, t1, t2, t3 = vzero(), vzero(), vzero(), vzero()
        for _ in range(n // 64):
            ahead4(a0, a1, a2, a3, p0, p1, p2, p3)  # one line for two blocks (36 to 68 bytes)
            d = vmul(load_scales(a0, a1, a2, a3, size), load_four_each(xb + ACT_D, xb + ACT_BYTES + ACT_D))
            q, m = load_b32(xb), load_s16(xb + ACT_SUMS)
            s0 = fma(sums(a0, q, m), lane0(d), s0)
            s1 = fma(sums(a1, q, m), lane1(d), s1)
            s2 = fma(sums(a2, q, m), lane2(d), s2)
            s3 = fma(sums(a3, q, m), lane3(d), s3)
            xb += ACT_BYTES
            q, m = load_b32(xb), load_s16(xb + ACT_SUMS)
            t0 = fma(sums(a0 + size, q, m), lane4(d), t0)
            t1 = fma(sums(a1 + size, q, m), lane5(d), t1)
            t2 = fma(sums(a2 + size, q, m), lane6(d), t2)
            t3 = fma(sums(a3 + size, q, m), lane7(d), t3)
            xb += ACT_BYTES
            a0 += 2 * size
            a1 += 2 * size
            a2 += 2 * size
            a3 += 2 * size
        if n % 64:
            s0, s1, s2, s3 = last(a0, a1, a2, a3, xb, s0, s1, s2, s3)
        return hsum(vadd(s0, t0)), hsum(vadd(s1, t1)), hsum(vadd(s2, t2)), hsum(vadd(s3, t3))

    return dot4


def _pair_dot(products, sums, size, zero):
    """The same rows, two blocks of a row in the halves of one vector: half the sums, and scales stay in their half.

    products: of two blocks; sums: of one, the zero point subtracted; zero: the zero point that products leave in.
    """
    last = _last_block(_zero_point_block(sums))

    @njit
    def dot4(a0, a1, a2, a3, p0, p1, p2, p3, n, xb):
        s0, s1, s2, s3 = vzero(), vzero(), vzero(), vzero()
        lows = vzero()  # scale * sum of activations: of each row and of the next block of it, as load_scales has them
        for _ in range(n // 64):
            ahead4(a0, a1, a2, a3, p0, p1, p2, p3)  # one line for two blocks (36 to 68 bytes)
            after = xb + ACT_BYTES
            scales, acts = load_scales(a0, a1, a2, a3, size), load_fours(xb + ACT_D, after + ACT_D)
            d = vmul(scales, each0(acts))
            if zero:
                lows = fma(scales, each2(acts), lows)  # ACT_DSUM, two words after ACT_D
            low, high = load_two(xb, after), load_two(xb + 16, after + 16)
            s0 = fma(products(a0 + 2, a0 + 2 + size, low, high), each0(d), s0)
            s1 = fma(products(a1 + 2, a1 + 2 + size, low, high), each1(d), s1)
            s2 = fma(products(a2 + 2, a2 + 2 + size, low, high), each2(d), s2)
            s3 = fma(products(a3 + 2, a3 + 2 + size, low, high), each3(d), s3)
            xb += 2 * ACT_BYTES
            a0 += 2 * size
            a1 += 2 * size
            a2 += 2 * size
            a3 += 2 * size
        if n % 64:
            s0, s1, s2, s3 = last(a0, a1, a2, a3, xb, s0, s1, s2, s3)
        y = add_halves(lows)
        return hsum(s0) - zero * y[0], hsum(s1) - zero * y[1], hsum(s2) - zero * y[2], hsum(s3) - zero * y[3]

    return dot4


def _block_dot(block, size):
    """Rows of the other formats."""
    last = _last_block(block)

    @njit
    def dot4(a0, a1, a2, a3, p0, p1, p2, p3, n, xb):
        """The activations are loaded once for four rows; each row's sum is independent of the others."""
        s0, s1, s2, s3 = vzero(), vzero(), vzero(), vzero()
        t0, t1, t2, t3 = vzero(), vzero(), vzero(), vzero()
        for _ in range(n // 64):
            ahead4(a0, a1, a2, a3, p0, p1, p2, p3)  # one line for two blocks (36 to 68 bytes)
            q, m = load_b32(xb), load_s16(xb + ACT_SUMS)
            d, e = load_dup(xb + ACT_D), load_second(xb + ACT_DSUM)
            s0 = block(a0, q, m, d, e, s0)
            s1 = block(a1, q, m, d, e, s1)
            s2 = block(a2, q, m, d, e, s2)
            s3 = block(a3, q, m, d, e, s3)
            xb += ACT_BYTES
            q, m = load_b32(xb), load_s16(xb + ACT_SUMS)
            d, e = load_dup(xb + ACT_D), load_second(xb + ACT_DSUM)
            t0 = block(a0 + size, q, m, d, e, t0)
            t1 = block(a1 + size, q, m, d, e, t1)
            t2 = block(a2 + size, q, m, d, e, t2)
            t3 = block(a3 + size, q, m, d, e, t3)
            xb += ACT_BYTES
            a0 += 2 * size
            a1 += 2 * size
            a2 += 2 * size
            a3 += 2 * size
        if n % 64:
            s0, s1, s2, s3 = last(a0, a1, a2, a3, xb, s0, s1, s2, s3)
        return hsum(vadd(s0, t0)), hsum(vadd(s1, t1)), hsum(vadd(s2, t2)), hsum(vadd(s3, t3))

    return dot4


def _block_axpy(scaled, size):
    @njit
    def axpy4(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc):
        for _ in range(n // 32):
            ahead4(a0, a1, a2, a3, p0, p1, p2, p3)
            lo, hi = load_w(acc), load_w(acc + 64)
            lo, hi = scaled(a0, c0, lo, hi)
            lo, hi = scaled(a1, c1, lo, hi)
            lo, hi = scaled(a2, c2, lo, hi)
            lo, hi = scaled(a3, c3, lo, hi)
            store_w(acc, lo)
            store_w(acc + 64, hi)
            a0 += size
            a1 += size
            a2 += size
            a3 += size
            acc += 128

    return axpy4


if PAIRS:
    dot4_q8 = _pair_dot(signed_products, _q8_sums, Q8_0_BYTES, ZERO)
else:
    dot4_q8 = _zero_point_dot(_q8_sums, Q8_0_BYTES)
dot4_q4 = _pair_dot(nibble_products, _q4_sums, Q4_0_BYTES, np.float32(8.0))
axpy4_q8, axpy4_q4 = _block_axpy(_q8_scaled, Q8_0_BYTES), _block_axpy(_q4_scaled, Q4_0_BYTES)
dot4_q5_0, axpy4_q5_0 = _block_dot(dot_q5_0, Q5_0_BYTES), _block_axpy(_scaled(part_q5_0), Q5_0_BYTES)
dot4_q4_1, axpy4_q4_1 = _block_dot(dot_q4_1, Q4_1_BYTES), _block_axpy(_scaled(part_q4_1), Q4_1_BYTES)
dot4_q5_1, axpy4_q5_1 = _block_dot(dot_q5_1, Q5_1_BYTES), _block_axpy(_scaled(part_q5_1), Q5_1_BYTES)


# ------------------------------------------------------------------ dispatch: one branch chain per four rows


@njit
def dot4(qt, a0, a1, a2, a3, p0, p1, p2, p3, n, x, xb):
    """Dot products of four rows of format `qt` with x (f32[n] / act blocks); returns four f32.

    p0..p3: bytes from each row to what is to be prefetched while it is read (never loaded, so any address will do).
    """
    if qt == Q8_0:
        return dot4_q8(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == Q4_0:
        return dot4_q4(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == F16:
        return dot4_f16(a0, a1, a2, a3, p0, p1, p2, p3, n, x)
    if qt == BF16:
        return dot4_bf16(a0, a1, a2, a3, p0, p1, p2, p3, n, x)
    if qt == Q4_1:
        return dot4_q4_1(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == Q5_0:
        return dot4_q5_0(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == Q5_1:
        return dot4_q5_1(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == Q4_K:
        return dot4_q4k(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == Q5_K:
        return dot4_q5k(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    if qt == Q6_K:
        return dot4_q6k(a0, a1, a2, a3, p0, p1, p2, p3, n, xb)
    return dot4_f32(a0, a1, a2, a3, p0, p1, p2, p3, n, x)


@njit
def axpy4(qt, a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc):
    """acc[0:n] += c0*row0, then c1*row1, c2*row2, c3*row3: in this order, each product fused with its addition."""
    if qt == Q8_0:
        axpy4_q8(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q4_0:
        axpy4_q4(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == F16:
        axpy4_f16(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == BF16:
        axpy4_bf16(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q4_1:
        axpy4_q4_1(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q5_0:
        axpy4_q5_0(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q5_1:
        axpy4_q5_1(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q4_K:
        axpy4_q4k(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q5_K:
        axpy4_q5k(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    elif qt == Q6_K:
        axpy4_q6k(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)
    else:
        axpy4_f32(a0, a1, a2, a3, p0, p1, p2, p3, c0, c1, c2, c3, n, acc)


@njit
def row16(qt, a, i):
    """Weights i..i+15 of the row at `a` as f32 (i a multiple of 16)."""
    if qt == Q8_0:
        a += i // 32 * Q8_0_BYTES
        return fma_w(to_f32w(load_s8w(a + 2 + i % 32)), splat_w(load_f16(a)), zero_w())
    if qt == Q4_0:
        a += i // 32 * Q4_0_BYTES
        bytes16 = load_u8w(a + 2)
        return fma_w(low_nibble_w(shr4w(bytes16) if i % 32 else bytes16), splat_w(load_f16(a)), zero_w())
    if qt == F16:
        return load_wh(a + 2 * i)
    if qt == BF16:
        return load_wb(a + 2 * i)
    if qt == Q4_1:
        return part_q4_1(a + i // 32 * Q4_1_BYTES, i // 16 % 2)
    if qt == Q5_0:
        return part_q5_0(a + i // 32 * Q5_0_BYTES, i // 16 % 2)
    if qt == Q5_1:
        return part_q5_1(a + i // 32 * Q5_1_BYTES, i // 16 % 2)
    if qt == Q4_K:
        return part_q4k(a, i)
    if qt == Q5_K:
        return part_q5k(a, i)
    if qt == Q6_K:
        return part_q6k(a, i)
    return load_w(a + 4 * i)


@njit
def part_unit(qt):
    """Rows are divided at multiples of so many columns: whole blocks, and whole cache lines of f32."""
    return SUPER_BLOCK if qt == Q4_K or qt == Q5_K or qt == Q6_K else 64


@njit
def row_part(qt, i):
    """Bytes from the start of a row to its column i, a multiple of part_unit()."""
    if qt == F32:
        return 4 * i
    if qt == F16 or qt == BF16:
        return 2 * i
    if qt == Q8_0:
        return i // 32 * Q8_0_BYTES
    if qt == Q4_0:
        return i // 32 * Q4_0_BYTES
    if qt == Q4_1:
        return i // 32 * Q4_1_BYTES
    if qt == Q5_0:
        return i // 32 * Q5_0_BYTES
    if qt == Q5_1:
        return i // 32 * Q5_1_BYTES
    if qt == Q4_K:
        return i // SUPER_BLOCK * Q4_K_BYTES
    if qt == Q5_K:
        return i // SUPER_BLOCK * Q5_K_BYTES
    return i // SUPER_BLOCK * Q6_K_BYTES


@njit
def row1(qt, a, i):
    """Weight i of a row of a float format."""
    if qt == F16:
        return load_f16(a + 2 * i)
    if qt == BF16:
        return load_bf16(a + 2 * i)
    return load_f32(a + 4 * i)


@njit
def copy_row(qt, a, n, scale, dst):
    """dst[0:n] = scale * row (f32)."""
    for i in range(0, n - 15, 16):
        store_w(dst + 4 * i, fma_w(row16(qt, a, i), splat_w(scale), zero_w()))
    for i in range(n // 16 * 16, n):
        store_f32(dst + 4 * i, row1(qt, a, i) * scale)


# ------------------------------------------------------------------ dense matrix times one vector


@njit
def matvec(qt, w, stride, r0, r1, n, x, xb, dst, gap):
    """dst[r] = row r . x for r0 <= r < r1; dst is the address of row 0's result.

    The four rows computed together lie a quarter of the range apart: memory is read fastest as several streams.
    gap: rows between r1 and where the caller goes on, with as many rows as now, so that the right ones are prefetched.
    """
    q = (r1 - r0 + 3) // 4
    turn, p_late = r1 * stride, AHEAD
    p_early = AHEAD
    if gap:
        size, jump = q * stride, (gap + r1 - r0 - q) * stride
        p_early = AHEAD + AHEAD // size * jump
        p_late = p_early + jump
        turn = r0 * stride + size - AHEAD % size
    for r in range(r0, r0 + q):
        a, last = w + r * stride, r1 - 1 - r  # rows past the end are the last one
        p = p_early if r * stride < turn else p_late
        y = dot4(qt, a, a + min(q, last) * stride, a + min(2 * q, last) * stride, a + min(3 * q, last) * stride,
                 p, p, p, p, n, x, xb)  # fmt: skip
        store_f32(dst + 4 * r, y[0])
        if last >= q:
            store_f32(dst + 4 * (r + q), y[1])
        if last >= 2 * q:
            store_f32(dst + 4 * (r + 2 * q), y[2])
        if last >= 3 * q:
            store_f32(dst + 4 * (r + 3 * q), y[3])
