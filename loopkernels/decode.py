"""The decode kernels: new tokens of many sequences through all loops in one launch, over a cache that knows the loop.

`decode_tile` takes one new token of each of up to M sequences: a tile row is a sequence, the weights are read once for all of
them, and each row attends to its own cached keys. `prefill_blocks` takes several new tokens of one sequence, in blocks of M
rows that go through every loop and layer together. A token stops by itself (scope "token" of docs/exits.md): it takes part in
loops 1 .. u, writes keys and values in those, and is seen by others in loop t as it stood in loop min(t, u).

The cache: keys and values [slots, rows, H, capacity, D]; a layer of the prelude or the coda has one slot, a layer of the core
one for every loop, or fewer where POLICY lets loops share; slots of the prelude come first, then the coda's, then loop by
loop the core's. `used` [rows, capacity] holds u of every cached token and `rest` [rows, capacity, C] its last state. Rows of a
tile never mix and every sum runs along a row, so a row's bits do not depend on its neighbours.
"""

import triton
import triton.language as tl

from loopkernels.block import activate, load_rows, mm, mma, normalise, operand, store_rows, tile, weight
from loopkernels.layer import injected, streamed_mlp
from loopkernels.stop import judge


@triton.jit
def slot_of(loop, u, base, step, POLICY: tl.constexpr, PERIOD: tl.constexpr):
    """The cache slot, int64, in which a layer at a loop (from 1) finds a token that ran u loops, or writes one where u = loop.

    base: of the layer in loop 1. step: from a loop's slot to the next; 0 outside the core. A slot that the token never wrote
    shows what it wrote last.
    """
    at = loop - 1
    if POLICY == "last_only":
        at = loop * 0
    if POLICY == "modulo":
        at = at % PERIOD
    if POLICY == "first_then_shared":
        at = tl.minimum(at, 1)
    return (base + tl.minimum(at, u - 1) * step).to(tl.int64)


@triton.jit
def as_stored(x, PREC: tl.constexpr, EMULATE: tl.constexpr):
    """float32 keys or values as the cache holds them: bfloat16 where products are, else float32."""
    return operand(x, PREC, EMULATE)[0] if PREC == "bf16" else x


@triton.jit
def over_own_keys(
    q, k, v, cache, keys_at, used_at, place, longest, active, loop, base, step,
    D: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr,
):  # fmt: skip
    """One head's attention of one new token a row over the row's own cached tokens and itself: [M, HP], float32.

    q, k, v: float32 [M, HP] of the new tokens. keys_at, used_at: int64 [M], where the row's keys and loops begin. place [M]:
    cached tokens of the row. longest: the most of them in the tile; blocks of keys past a row's end change none of its bits.
    The softmax begins with the token itself and runs on (Milakov and Gimelshein, 2018).
    """
    keys, values, used, slot_stride = cache
    c = tl.arange(0, HP)
    top = tl.sum(q * k, 1)
    total = tl.full([M], 1.0, tl.float32)
    o = v
    for first in range(0, longest, KEYS):
        j = first + tl.arange(0, KEYS)
        keep = (j[None, :] < place[:, None]) & active[:, None]
        u = tl.load(used + used_at[:, None] + j[None, :], mask=keep, other=1)
        slot = slot_of(loop, u, base, step, POLICY, PERIOD)
        at = (slot * slot_stride + keys_at[:, None] + j[None, :] * D)[:, :, None] + c[None, None, :]
        reads = keep[:, :, None]
        if D != HP:
            reads = reads & (c < D)[None, None, :]
        cached = tl.load(keys + at, mask=reads, other=0.0).to(tl.float32)
        s = tl.where(keep, tl.sum(q[:, None, :] * cached, 2), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        cached = tl.load(values + at, mask=reads, other=0.0).to(tl.float32)
        o = o * fade[:, None] + tl.sum(p[:, :, None] * cached, 1)
        top = higher
    return o * (1.0 / total)[:, None]


@triton.jit
def decode_head(
    x, h, wq, wk, wv, wo, bq, cache, keys_at, used_at, place, longest, active, loop, base, step,
    D: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr,
    PREC: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """x + one head's attention of the normed rows h, whose keys and values go into the cache."""
    keys, values, used, slot_stride = cache
    c = tl.arange(0, HP)
    q = mm(h, wq, PREC) + bq[None, :]
    k = as_stored(mm(h, wk, PREC), PREC, EMULATE)
    v = as_stored(mm(h, wv, PREC), PREC, EMULATE)
    at = slot_of(loop, loop, base, step, POLICY, PERIOD) * slot_stride + keys_at + place * D
    writes = active[:, None]
    if D != HP:
        writes = writes & (c < D)[None, :]
    tl.store(keys + at[:, None] + c[None, :], k, mask=writes)
    tl.store(values + at[:, None] + c[None, :], v, mask=writes)
    o = over_own_keys(
        q, k.to(tl.float32), v.to(tl.float32), cache, keys_at, used_at, place, longest, active, loop, base, step,
        D, HP, M, KEYS, POLICY, PERIOD,
    )  # fmt: skip
    return mma(operand(o, PREC, EMULATE), wo, x, PREC)


@triton.jit
def decode_layer(
    x, layer, weights, cache, row, capacity, place, longest, active, loop, base, step,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    ACT: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One layer of a tile of rows, its weights read tile by tile. row int64 [M]: rows of the cache."""
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down = weights
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_out + layer * CP + tl.arange(0, CP))[None, :]
    for i in range(H):
        at = layer * H + i
        bq = tl.load(b_q + at * HP + tl.arange(0, HP))
        wq = weight(w_in, at * (3 * HP), in_low, HP, CP, PREC, False)
        wk = weight(w_in, at * (3 * HP) + HP, in_low, HP, CP, PREC, False)
        wv = weight(w_in, at * (3 * HP) + 2 * HP, in_low, HP, CP, PREC, False)
        wo = weight(w_out, at * CP, out_low, CP, HP, PREC, False)
        x = decode_head(
            x, h, wq, wk, wv, wo, bq, cache, (row * H + i) * capacity * D, row * capacity, place, longest, active, loop,
            base, step, D, HP, M, KEYS, POLICY, PERIOD, PREC, EMULATE,
        )  # fmt: skip
    return streamed_mlp(
        x, layer, w_up, w_down, up_low, down_low, b_up, b_down,
        C, CP, FP, KC, NORM, EPS, ACT, PREC, EMULATE, FAST, False, STAGES,
    )  # fmt: skip


@triton.jit
def decode_held_layer(
    x, layer: tl.constexpr, nth: tl.constexpr, held, weights, cache, row, capacity, place, longest, active, loop, base, step,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    ACT: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One layer of the core, the nth of those whose weights were loaded before the loop."""
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down = weights
    held_in, held_out, held_up, held_down = held
    HIDDEN: tl.constexpr = FP // KC
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_out + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.static_range(H):
        wq = held_in[3 * (nth * H + i)]
        wk = held_in[3 * (nth * H + i) + 1]
        wv = held_in[3 * (nth * H + i) + 2]
        wo = held_out[nth * H + i]
        bq = tl.load(b_q + (layer * H + i) * HP + tl.arange(0, HP))
        x = decode_head(
            x, h, (wq, wq), (wk, wk), (wv, wv), (wo, wo), bq, cache, (row * H + i) * capacity * D, row * capacity, place,
            longest, active, loop, base, step, D, HP, M, KEYS, POLICY, PERIOD, PREC, EMULATE,
        )  # fmt: skip
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_down + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.static_range(HIDDEN):
        up = held_up[nth * HIDDEN + i]
        down = held_down[nth * HIDDEN + i]
        b = tl.load(b_up + (layer * HIDDEN + i) * KC + tl.arange(0, KC))
        u = activate(mm(h, (up, up), PREC) + b[None, :], ACT, FAST)
        x = mma(operand(u, PREC, EMULATE), (down, down), x, PREC)
    return x


@triton.jit
def affine(x, norm_scale, norm_shift, C: tl.constexpr, CP: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr):
    """The final norm."""
    c = tl.arange(0, CP)
    return normalise(x, C, CP, EPS, NORM) * tl.load(norm_scale + c)[None, :] + tl.load(norm_shift + c)[None, :]


@triton.jit
def first_state(p, rest_at, warm, C: tl.constexpr, CP: tl.constexpr, M: tl.constexpr, INIT: tl.constexpr, WARM: tl.constexpr):
    """Y_0 [M, CP]: zeros, ones or the embedding p; in rows that are warm, C numbers from rest_at [M] on. Padding lanes: 0."""
    if INIT == "embedding":
        y = p
    elif INIT == "ones":
        y = tl.where((tl.arange(0, CP) < C)[None, :], tl.full([M, CP], 1.0, tl.float32), 0.0)
    else:
        y = tl.zeros([M, CP], tl.float32)
    if WARM:
        c = tl.arange(0, CP)
        last = tl.load(rest_at[:, None] + c[None, :], mask=warm[:, None] & (c < C)[None, :], other=0.0)
        y = tl.where(warm[:, None], last, y)
    return y


@triton.jit
def at_rest(
    x, y, loop, passes, s_prev, n_loops, check_every, min_loops, n_passes, tol, phi,
    M: tl.constexpr, RULE: tl.constexpr, ENDLESS: tl.constexpr,
):  # fmt: skip
    """`judge` of every row for itself, after a loop from y to x: (leaving, passes, s_prev)."""
    d = x - y
    g2 = tl.sum(d * d, 1)
    n2 = tl.sum(x * x, 1)
    zero = tl.zeros([M], tl.int32)
    differing = zero
    if RULE == "exact":
        differing = tl.sum((x.to(tl.int32, bitcast=True) != y.to(tl.int32, bitcast=True)).to(tl.int32), 1)
    before = loop - 1
    t = zero + loop
    counters = (t, passes, zero + (before - before % check_every), zero, zero, zero, s_prev, tl.zeros([M], tl.float32))
    counters, leaving, status, done, residual = judge(
        counters, g2, n2, differing, g2, n2, n_loops, check_every, min_loops, n_passes, n_loops + 1, tol, phi,
        RULE, "ignore", ENDLESS,
    )  # fmt: skip
    return leaving, counters[1], counters[6]


# Values that must not make kernels of their own: one compiled kernel serves any number of rows, loops and tokens.
COUNTS = ("in_low", "out_low", "up_low", "down_low", "n_queue", "capacity", "n_cache_rows", "n_loops", "check_every")
COUNTS += ("min_loops", "n_passes", "n_per_tile", "n_new")


@triton.jit(do_not_specialize=COUNTS)
def decode_tile(
    embeds, seats, hidden, loops, history, order, first, lengths, keys, values, used, rest, positions, scratch,
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down, norm_scale, norm_shift,
    n_queue, n_new, n_per_tile, capacity, n_cache_rows, n_loops, check_every, min_loops, n_passes, tol, phi,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    N_PRELUDE: tl.constexpr, N_CORE: tl.constexpr, N_CODA: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, POLICY:
    tl.constexpr, PERIOD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, INJECT: tl.constexpr, INIT:
    tl.constexpr, POS: tl.constexpr, LOOP_NORM: tl.constexpr, RULE: tl.constexpr, ENDLESS: tl.constexpr, PREC: tl.constexpr,
    EMULATE: tl.constexpr, FAST: tl.constexpr, RESIDENT: tl.constexpr, STAGES: tl.constexpr, WARM: tl.constexpr, KEEP:
    tl.constexpr,
):  # fmt: skip
    """All loops of one new token of each row that `order` [n_queue] names, n_per_tile rows a program.

    embeds [N, C] float32: the new tokens, packed, without positions; first [rows]: where a row's stand. seats [N]: their rows
    of `positions`. hidden [N, C]: what the head reads. loops [N]: u. history [n_loops + 1, N, C]: Y_0, Y_1, .. up to Y_u,
    written where KEEP. lengths [rows]: cached tokens; keys, values, used, rest: the cache. scratch [programs, 4, M, CP]: for P
    and Y. WARM: a row that has cached tokens begins with the last state of the last of them. Weights as `launch.pack` lays out
    the layers of prelude, core and coda in this order.
    """
    HIDDEN: tl.constexpr = FP // KC
    if RESIDENT:
        held_in = (tl.trans(tile(w_in, N_PRELUDE * H * 3 * HP, HP, CP, False)),)
        held_out = (tl.trans(tile(w_out, N_PRELUDE * H * CP, CP, HP, False)),)
        held_up = (tl.trans(tile(w_up, N_PRELUDE * FP, KC, CP, False)),)
        held_down = (tl.trans(tile(w_down, N_PRELUDE * HIDDEN * CP, CP, KC, False)),)
        for i in tl.static_range(1, 3 * H * N_CORE):
            held_in = held_in + (tl.trans(tile(w_in, (N_PRELUDE * H * 3 + i) * HP, HP, CP, False)),)
        for i in tl.static_range(1, H * N_CORE):
            held_out = held_out + (tl.trans(tile(w_out, (N_PRELUDE * H + i) * CP, CP, HP, False)),)
        for i in tl.static_range(1, HIDDEN * N_CORE):
            held_up = held_up + (tl.trans(tile(w_up, (N_PRELUDE * HIDDEN + i) * KC, KC, CP, False)),)
            held_down = held_down + (tl.trans(tile(w_down, (N_PRELUDE * HIDDEN + i) * CP, CP, KC, False)),)

    weights = (w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down)
    capacity = capacity.to(tl.int64)
    cache = (keys, values, used, n_cache_rows.to(tl.int64) * H * capacity * D)
    r = tl.arange(0, M)
    entry = tl.program_id(0) * n_per_tile + r
    live = (r < n_per_tile) & (entry < n_queue)
    row = tl.load(order + entry, mask=live, other=0).to(tl.int64)
    token = tl.load(first + row, mask=live, other=0).to(tl.int64)
    place = tl.load(lengths + row, mask=live, other=0)
    longest = tl.max(tl.where(live, place, 0), 0)
    p = load_rows(embeds, token * C, live, C, CP)
    seat = token
    if POS != "none":
        seat = tl.load(seats + token, mask=live, other=0).to(tl.int64)
    if POS == "once":
        p += load_rows(positions, seat * C, live, C, CP)
    for layer in range(N_PRELUDE):
        p = decode_layer(
            p, layer, weights, cache, row, capacity, place, longest, live, 1, layer, 0,
            C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST, STAGES,
        )  # fmt: skip
    spot = row * capacity + place  # of the new token in `used` and `rest`
    x = first_state(p, rest + (spot - 1) * C, live & (place > 0), C, CP, M, INIT, WARM)
    if KEEP:
        store_rows(history, token * C, live, x, C, CP)
    # P and Y wait outside the registers, in places that change from loop to loop: fixed addresses would be kept in registers.
    scratch += tl.program_id(0).to(tl.int64) * (4 * M * CP)
    store_rows(scratch, r * CP, r < M, p, CP, CP)
    store_rows(scratch + M * CP, r * CP, r < M, p, CP, CP)
    tl.debug_barrier()
    active = live
    u = tl.zeros([M], tl.int32)
    passes = tl.zeros([M], tl.int32)
    s_prev = tl.full([M], float("nan"), tl.float32)
    loop = tl.full((), 0, tl.int32)
    going = tl.sum(active.to(tl.int32), 0)
    while (going > 0) & (loop < n_loops):
        loop += 1
        half = scratch + (loop % 2) * (M * CP)
        store_rows(half + 2 * M * CP, r * CP, r < M, x, CP, CP)
        if INJECT != "none":
            p = load_rows(half, r * CP, r < M, CP, CP)
        pos = x
        if POS == "each_loop":
            pos = load_rows(positions, seat * C, live, C, CP)
        x = injected(x, p, pos, INJECT, POS == "each_loop")
        if RESIDENT:
            for nth in tl.static_range(N_CORE):
                x = decode_held_layer(
                    x, N_PRELUDE + nth, nth, (held_in, held_out, held_up, held_down), weights, cache, row, capacity, place,
                    longest, active, loop, N_PRELUDE + N_CODA + nth, N_CORE,
                    C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST,
                )  # fmt: skip
        else:
            for layer in range(N_CORE):
                x = decode_layer(
                    x, N_PRELUDE + layer, weights, cache, row, capacity, place, longest, active, loop,
                    N_PRELUDE + N_CODA + layer, N_CORE,
                    C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST, STAGES,
                )  # fmt: skip
        if LOOP_NORM == "each":
            x = affine(x, norm_scale, norm_shift, C, CP, EPS, NORM)
        tl.debug_barrier()
        y = load_rows(half + 2 * M * CP, r * CP, r < M, CP, CP)
        leaving, passed, s = at_rest(
            x, y, loop, passes, s_prev, n_loops, check_every, min_loops, n_passes, tol, phi, M, RULE, ENDLESS
        )
        x = tl.where(active[:, None], x, y)  # a row that has left keeps its state
        if KEEP:
            store_rows(history, (loop.to(tl.int64) * n_new + token) * C, active, x, C, CP)
        u = tl.where(active, loop, u)
        passes = passed
        s_prev = s
        active = active & (leaving == 0)
        going = tl.sum(active.to(tl.int32), 0)
    tl.store(used + spot, u, mask=live)
    tl.store(loops + token, u, mask=live)
    store_rows(rest, spot * C, live, x, C, CP)
    for layer in range(N_CODA):
        x = decode_layer(
            x, N_PRELUDE + N_CORE + layer, weights, cache, row, capacity, place, longest, live, 1, N_PRELUDE + layer, 0,
            C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST, STAGES,
        )  # fmt: skip
    if LOOP_NORM == "once":
        x = affine(x, norm_scale, norm_shift, C, CP, EPS, NORM)
    store_rows(hidden, token * C, live, x, C, CP)
