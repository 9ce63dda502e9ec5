"""Device functions of one transformer layer on a tile of rows: norm, attention, MLP, and the arithmetic they are done in.

The residual stream x is float32 [M, CP] (M rows, the width C padded to a power of two) and is the accumulator of every product
that adds to it, so neither the attention output nor the hidden layer of the MLP ever exists as a whole. A tile holds M / SLOT
prompts, each in SLOT rows of its own, and everything that sums over a prompt's tokens sums in the order of its own rows.

Operands of a product are pairs (high, low). PREC says what they are:

    bf16     high = bfloat16, low unused; float32 sums
    bf16x3   high + low = bfloat16 twice, three products (low x high, high x low, high x high): about float32 in accuracy
    tf32     float32 rounded by the matrix unit
    fp32     float32, no matrix unit

EMULATE is for Triton's interpreter, whose bfloat16 products multiply bit patterns: operands are rounded to the nearest even
bfloat16 and kept as float32, in which products of two of them are exact.
"""

import triton
import triton.language as tl


@triton.jit
def round_to_bf16(x):
    """The nearest bfloat16, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def operand(x, PREC: tl.constexpr, EMULATE: tl.constexpr):
    """float32 x as a pair that `mm` takes."""
    if PREC == "bf16":
        high = round_to_bf16(x) if EMULATE else x.to(tl.bfloat16)
        return high, high
    elif PREC == "bf16x3":
        high = round_to_bf16(x) if EMULATE else x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        low = round_to_bf16(rest) if EMULATE else rest.to(tl.bfloat16)
        return high, low
    else:
        return x, x


@triton.jit
def turned(a):
    """Both parts of a pair, transposed."""
    return tl.trans(a[0]), tl.trans(a[1])


@triton.jit
def mm(a, b, PREC: tl.constexpr):
    """a b of two pairs, in float32."""
    if PREC == "bf16":
        return tl.dot(a[0], b[0])
    elif PREC == "bf16x3":
        return tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0])))
    elif PREC == "tf32":
        return tl.dot(a[0], b[0], input_precision="tf32")
    else:
        return tl.dot(a[0], b[0], input_precision="ieee")


@triton.jit
def mma(a, b, x, PREC: tl.constexpr):
    """x + a b of two pairs, in float32."""
    if PREC == "bf16":
        return tl.dot(a[0], b[0], x)
    elif PREC == "bf16x3":
        return tl.dot(a[0], b[0], tl.dot(a[0], b[1], tl.dot(a[1], b[0], x)))
    elif PREC == "tf32":
        return tl.dot(a[0], b[0], x, input_precision="tf32")
    else:
        return tl.dot(a[0], b[0], x, input_precision="ieee")


@triton.jit
def tile(source, row, N: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr):
    """Rows row .. row + N of a packed weight [rows, K]."""
    if TMA:
        return source.load([row, 0])
    else:
        n = tl.arange(0, N)
        k = tl.arange(0, K)
        return tl.load(source + row * K + n[:, None] * K + k[None, :])


@triton.jit
def weight(source, row, low_rows, N: tl.constexpr, K: tl.constexpr, PREC: tl.constexpr, TMA: tl.constexpr):
    """A weight tile as the right-hand pair of a product: [K, N]. The low parts stand low_rows below the high ones."""
    high = tile(source, row, N, K, TMA)
    low = high
    if PREC == "bf16x3":
        low = tile(source, row + low_rows, N, K, TMA)
    return tl.trans(high), tl.trans(low)


@triton.jit
def normalise(x, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr):
    """LayerNorm or RMSNorm of every row without its affine part, which is folded into the next weight."""
    if NORM == "layernorm":
        d = x - (tl.sum(x, 1) * (1.0 / C))[:, None]
        if C != CP:  # padding lanes stay out of the variance
            d = tl.where((tl.arange(0, CP) < C)[None, :], d, 0.0)
        return d * tl.rsqrt(tl.sum(d * d, 1) * (1.0 / C) + EPS)[:, None]
    elif NORM == "rms":
        return x * tl.rsqrt(tl.sum(x * x, 1) * (1.0 / C) + EPS)[:, None]
    else:
        return x


@triton.jit
def activate(u, ACT: tl.constexpr, FAST: tl.constexpr):
    """ReLU, GELU or tanh-GELU; with FAST, the tanh of the special function unit, whose error is below bfloat16's rounding."""
    if ACT == "relu":
        return tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "gelu":
        return 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))
    else:
        z = u * (0.7978845608028654 + 0.035677408136300125 * u * u)
        if FAST:
            t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)
            half = 0.5 * u
            return half + half * t
        else:
            return u / (1.0 + tl.exp2(z * -2.8853900817779268))


@triton.jit
def gated(gate, u):
    """silu(gate) u, the hidden units of SwiGLU (Shazeer, 2020)."""
    return gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * u


@triton.jit
def row_lengths(lengths, M: tl.constexpr, NSLOT: tl.constexpr):
    """A value per slot [NSLOT], spread over the slot's rows: [M]."""
    return tl.reshape(tl.broadcast_to(lengths[:, None], [NSLOT, M // NSLOT]), [M])


@triton.jit
def slot_sum(rows, M: tl.constexpr, NSLOT: tl.constexpr):
    """Sum of a value per row [M] over each slot: [NSLOT], in an order that does not depend on the slot."""
    return tl.sum(tl.reshape(rows, [NSLOT, M // NSLOT]), 1)


@triton.jit
def mixed(
    q, k, v, own, M: tl.constexpr, NSLOT: tl.constexpr, CAUSAL: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr
):  # fmt: skip
    """One head's attention for prompts that lie whole in the tile: its output as a pair, and NaN [M] for rows to be spoilt
    (else 0).

    q, k: pairs; v float32. own [M]: tokens of the prompt of each row. Scores come in units of log 2: scale and log2(e) are
    folded into the query's weights, the value's bias into the output's, and a key bias changes no softmax.
    """
    SLOT: tl.constexpr = M // NSLOT
    bad = tl.zeros([M], tl.float32)
    if NSLOT > 1:  # 0 * NaN is NaN: a neighbour's must not enter the product
        bad = tl.sum(v * 0.0, 1)
        v = tl.where((bad == 0.0)[:, None], v, 0.0)
    s = mm(q, turned(k), PREC)
    r = tl.arange(0, M)[:, None]
    c = tl.arange(0, M)[None, :]
    if CAUSAL:
        keep = (c <= r) & (c // SLOT == r // SLOT)
    else:
        keep = ((c % SLOT < own[:, None]) | (c == r)) & (c // SLOT == r // SLOT)
    s = tl.where(keep, s, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    if NSLOT > 1:  # one slot is not zero: the outer sum is exact, the inner one slot-relative
        total = tl.sum(tl.sum(tl.reshape(p, [M, NSLOT, SLOT]), 2), 1)
    else:
        total = tl.sum(p, 1)
    o = mm(operand(p, PREC, EMULATE), operand(v, PREC, EMULATE), PREC) * (1.0 / total)[:, None]
    return operand(o, PREC, EMULATE), bad


@triton.jit
def store_keys(scratch, low, at, own_rows, k, v, HP: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr):
    """Keys and values [M, HP] of one head as operands in the scratch: values stand `low` behind keys, low parts 2 low."""
    c = tl.arange(0, HP)
    place = scratch + at + own_rows[:, None] * HP + c[None, :]
    keys = operand(k, PREC, EMULATE)
    values = operand(v, PREC, EMULATE)
    tl.store(place, keys[0])
    tl.store(place + low, values[0])
    if PREC == "bf16x3":
        tl.store(place + 2 * low, keys[1])
        tl.store(place + 3 * low, values[1])


@triton.jit
def load_keys(scratch, low, at, own_rows, HP: tl.constexpr, PREC: tl.constexpr):
    """A pair of operands that `store_keys` left."""
    c = tl.arange(0, HP)
    place = scratch + at + own_rows[:, None] * HP + c[None, :]
    high = tl.load(place)
    rest = high
    if PREC == "bf16x3":
        rest = tl.load(place + 2 * low)
    return high, rest


@triton.jit
def mixed_blocks(
    q, scratch, low, at, row0, n_blocks, own,
    M: tl.constexpr, HP: tl.constexpr, CAUSAL: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One head's attention of a row block that starts at row0, over n_blocks blocks of keys in the scratch, as a pair.

    Softmax runs on (Milakov and Gimelshein, 2018): the largest score, the sum and the output so far. own: the prompt's tokens.
    """
    r = row0 + tl.arange(0, M)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, HP], tl.float32)
    for b in range(n_blocks):
        c = b * M + tl.arange(0, M)
        k = load_keys(scratch, low, at, c, HP, PREC)
        v = load_keys(scratch + low, low, at, c, HP, PREC)
        s = mm(q, turned(k), PREC)
        if CAUSAL:
            keep = c[None, :] <= r[:, None]
        else:
            keep = (c[None, :] < own) | (c[None, :] == r[:, None])
        s = tl.where(keep, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        o = mma(operand(p, PREC, EMULATE), v, o * fade[:, None], PREC)
        top = higher
    return operand(o * (1.0 / total)[:, None], PREC, EMULATE)


@triton.jit
def load_rows(source, rows, valid, C: tl.constexpr, CP: tl.constexpr):
    """float32 rows [M, CP] at offsets rows [M] of a buffer; rows that are not valid, and padding lanes, are 0 and not read."""
    c = tl.arange(0, CP)
    if C == CP:
        mask = valid[:, None]
    else:
        mask = valid[:, None] & (c < C)[None, :]
    return tl.load(source + rows[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(target, rows, valid, x, C: tl.constexpr, CP: tl.constexpr):
    """The inverse of `load_rows`."""
    c = tl.arange(0, CP)
    if C == CP:
        mask = valid[:, None]
    else:
        mask = valid[:, None] & (c < C)[None, :]
    tl.store(target + rows[:, None] + c[None, :], x, mask=mask)


@triton.jit
def load_row(source, C: tl.constexpr, CP: tl.constexpr):
    """A float32 vector of C numbers, padded with zeros."""
    c = tl.arange(0, CP)
    return tl.load(source + c, mask=c < C, other=0.0)
