"""Vector kernels: activation functions, norms, rotary embedding, quantization of activations.

In: addresses of f32 vectors. Out: the same, in place or elsewhere. Next: walk.py.
"""

import math

import numpy as np
from numba import njit

from hotcold.runtime.kernels.formats import ACT_BYTES, ACT_D, ACT_DSUM, ACT_HALF, ACT_SUM, ACT_SUMS
from hotcold.runtime.kernels.quants import first_half
from hotcold.runtime.kernels.rows import ONE, ZERO
from hotcold.runtime.kernels.simd import (
    add_w,
    div_w,
    dpbusd_small,
    eights,
    fma_w,
    hmax,
    hsum_w,
    ineg,
    isum,
    izero,
    ldexp_w,
    load_b32,
    load_f32,
    load_i32,
    load_v,
    load_w,
    max_w,
    min_w,
    mul_w,
    round_v,
    round_w,
    splat,
    splat_w,
    store_f32,
    store_i32,
    store_s8,
    store_s16,
    store_w,
    sub_w,
    to_f32w,
    vabs,
    vmax,
    vmul,
    zero_w,
)

# Activation functions, in the order of opcodes the program carries.
ACTIVATION_CODES = {"relu": 0, "fatrelu": 0, "drelu": 1, "relu2": 2, "silu": 3, "gelu": 4, "gelu_tanh": 5}
RELU, DRELU, RELU2, SILU, GELU, GELU_TANH = range(6)

# exp(r) on |r| <= ln2/2 by a polynomial; coefficients of the Cephes library's expf.
_LOG2E, _LN2_HI, _LN2_LO = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_EXP_MIN, _EXP_MAX = np.float32(-87.0), np.float32(88.0)
_SQRT_2_OVER_PI, _GELU_C, _SQRT_HALF = np.float32(0.7978845608028654), np.float32(0.044715), np.float32(0.70710678118)
_HALF = np.float32(0.5)
_MINUS_EIGHTH = np.float32(-0.125)
_INV_127, _127 = np.float32(1.0 / 127.0), np.float32(127.0)


@njit
def exp_w(x):
    """exp of 16 values, relative error about 2e-7; arguments are clamped to [-87, 88]."""
    x = min_w(max_w(x, splat_w(_EXP_MIN)), splat_w(_EXP_MAX))
    n = round_w(mul_w(x, splat_w(_LOG2E)))
    f = to_f32w(n)
    r = fma_w(f, splat_w(-_LN2_LO), fma_w(f, splat_w(-_LN2_HI), x))
    p = fma_w(splat_w(_C0), r, splat_w(_C1))
    p = fma_w(p, r, splat_w(_C2))
    p = fma_w(p, r, splat_w(_C3))
    p = fma_w(p, r, splat_w(_C4))
    p = fma_w(p, r, splat_w(_C5))
    return ldexp_w(add_w(fma_w(mul_w(r, r), p, r), splat_w(ONE)), n)


@njit
def silu_w(x):
    return div_w(x, add_w(splat_w(ONE), exp_w(sub_w(zero_w(), x))))


@njit
def activate(code, threshold, src, dst, n):
    """dst[i] = f(src[i]), f32. Buffers are padded to multiples of 16. May be in place."""
    if code <= DRELU:
        for i in range(n):
            x = load_f32(src + 4 * i)
            store_f32(dst + 4 * i, ZERO if x <= threshold else x)  # NaN stays
    elif code == RELU2:
        for i in range(n):
            x = load_f32(src + 4 * i)
            store_f32(dst + 4 * i, ZERO if x <= threshold else x * x)
    elif code == SILU:
        for i in range(0, 4 * n, 64):
            store_w(dst + i, silu_w(load_w(src + i)))
    elif code == GELU_TANH:
        for i in range(0, 4 * n, 64):  # x * sigmoid(2z) = x * (1 + tanh z) / 2
            x = load_w(src + i)
            z = mul_w(mul_w(x, splat_w(_SQRT_2_OVER_PI)), fma_w(mul_w(x, x), splat_w(_GELU_C), splat_w(ONE)))
            store_w(dst + i, div_w(x, add_w(splat_w(ONE), exp_w(sub_w(zero_w(), add_w(z, z))))))
    else:
        for i in range(n):
            x = load_f32(src + 4 * i)
            store_f32(dst + 4 * i, _HALF * x * (ONE + np.float32(math.erf(x * _SQRT_HALF))))


@njit
def gate(code, g, u, dst, n):
    """dst[i] = g[i] * u[i] where g is activated already; DRELU also clamps u at 0."""
    for i in range(0, 4 * n, 64):
        v = load_w(u + i)
        if code == DRELU:
            v = max_w(v, zero_w())
        store_w(dst + i, mul_w(load_w(g + i), v))


@njit
def clamp(src, dst, n):
    """dst[i] = max(src[i], 0); NaN stays. Buffers are padded to multiples of 16. May be in place."""
    for i in range(0, 4 * n, 64):
        store_w(dst + i, max_w(load_w(src + i), zero_w()))


@njit
def drop_small(threshold, values, n):
    """values[i] = 0 where |values[i]| <= threshold, in place; NaN stays."""
    for i in range(n):
        if abs(load_f32(values + 4 * i)) <= threshold:
            store_f32(values + 4 * i, ZERO)


@njit
def gather(values, ids, n):
    """values[i] = values[ids[i]] for i < n, in place: ids rise, so none is overwritten before it is used."""
    for i in range(n):
        store_f32(values + 4 * i, load_f32(values + 4 * load_i32(ids + 4 * i)))


@njit
def rms_norm(x, w, dst, n, eps):
    """dst = w * x / sqrt(mean(x^2) + eps)."""
    s = zero_w()
    for i in range(0, n - 15, 16):
        v = load_w(x + 4 * i)
        s = fma_w(v, v, s)
    total = np.float64(hsum_w(s))
    for i in range(n // 16 * 16, n):
        total += load_f32(x + 4 * i) * load_f32(x + 4 * i)
    r = np.float32(1.0 / math.sqrt(total / n + eps))
    for i in range(0, n - 15, 16):
        store_w(dst + 4 * i, mul_w(mul_w(load_w(x + 4 * i), splat_w(r)), load_w(w + 4 * i)))
    for i in range(n // 16 * 16, n):
        store_f32(dst + 4 * i, load_f32(x + 4 * i) * r * load_f32(w + 4 * i))


@njit
def layer_norm(x, w, b, dst, n, eps):
    """dst = w * (x - mean) / sqrt(var + eps) + b; b = 0: no bias."""
    s = zero_w()
    for i in range(0, n - 15, 16):
        s = add_w(s, load_w(x + 4 * i))
    total = np.float64(hsum_w(s))
    for i in range(n // 16 * 16, n):
        total += load_f32(x + 4 * i)
    mean = np.float32(total / n)
    s = zero_w()
    for i in range(0, n - 15, 16):
        v = sub_w(load_w(x + 4 * i), splat_w(mean))
        s = fma_w(v, v, s)
    total = np.float64(hsum_w(s))
    for i in range(n // 16 * 16, n):
        v1 = load_f32(x + 4 * i) - mean
        total += v1 * v1
    r = np.float32(1.0 / math.sqrt(total / n + eps))
    for i in range(n):
        y = (load_f32(x + 4 * i) - mean) * r * load_f32(w + 4 * i)
        store_f32(dst + 4 * i, y + load_f32(b + 4 * i) if b else y)


@njit
def quantize(x, dst, n):
    """n (a multiple of 32) f32 values -> act blocks, see formats.py."""
    for i in range(n // 32):
        p, o = x + 128 * i, dst + ACT_BYTES * i
        v0, v1, v2, v3 = load_v(p), load_v(p + 32), load_v(p + 64), load_v(p + 96)
        top = hmax(vmax(vmax(vabs(v0), vabs(v1)), vmax(vabs(v2), vabs(v3))))
        inv = splat(_127 / top if top > 0 else ZERO)
        store_s8(o, round_v(vmul(v0, inv)))
        store_s8(o + 8, round_v(vmul(v1, inv)))
        store_s8(o + 16, round_v(vmul(v2, inv)))
        store_s8(o + 24, round_v(vmul(v3, inv)))
        store_f32(o + ACT_D, top * _INV_127)
    for i in range(n // 32):  # second pass: the byte stores above have drained when they are read as one vector
        o = dst + ACT_BYTES * i
        m = ineg(dpbusd_small(izero(), eights(), load_b32(o)))
        store_s16(o + ACT_SUMS, m)
        total = isum(m)
        store_i32(o + ACT_SUM, total)
        store_i32(o + ACT_HALF, first_half(m))
        store_f32(o + ACT_DSUM, _MINUS_EIGHTH * np.float32(total) * load_f32(o + ACT_D))


@njit
def rotate(x, n_dims, interleaved, cos, sin):
    """Rotary embedding in place on the first n_dims of a head; cos, sin: f32[n_dims/2] of this position."""
    half = n_dims // 2
    for i in range(half):
        p = x + 8 * i if interleaved else x + 4 * i
        q = p + 4 if interleaved else p + 4 * half
        c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        a, b = load_f32(p), load_f32(q)
        store_f32(p, a * c - b * s)
        store_f32(q, a * s + b * c)
