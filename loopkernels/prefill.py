"""`prefill_blocks`: several new tokens of one sequence through all loops in one launch.

The tokens stand in blocks of M rows that go through every loop and layer together, so that loops which share a cache slot see
each other as the eager model's do. A layer is two passes over the blocks: keys and values into the cache, then attention over
the sequence's cached keys and the MLP. The stream stands in a scratch of the program's own, which stays in L2. The rest is as
in `decode.decode_tile`.
"""

import triton
import triton.language as tl

from loopkernels.block import load_rows, mm, mma, normalise, operand, store_rows, turned, weight
from loopkernels.decode import affine, as_stored, at_rest, first_state, slot_of
from loopkernels.layer import injected, streamed_mlp


@triton.jit
def over_sequence(
    q, cache, keys_at, used_at, place, end, loop, base, step,
    D: tl.constexpr, HP: tl.constexpr, M: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr,
    PREC: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One head's attention of rows of one sequence over its first `end` keys, as a pair. place [M]: the rows' tokens."""
    keys, values, used, slot_stride = cache
    c = tl.arange(0, HP)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, HP], tl.float32)
    for start in range(0, end, KEYS):
        j = start + tl.arange(0, KEYS)
        u = tl.load(used + used_at + j, mask=j < end, other=1)
        slot = slot_of(loop, u, base, step, POLICY, PERIOD)
        at = (slot * slot_stride + keys_at + j * D)[:, None] + c[None, :]
        reads = (j < end)[:, None]
        if D != HP:
            reads = reads & (c < D)[None, :]
        k = operand(tl.load(keys + at, mask=reads, other=0.0).to(tl.float32), PREC, EMULATE)
        v = operand(tl.load(values + at, mask=reads, other=0.0).to(tl.float32), PREC, EMULATE)
        s = tl.where(j[None, :] <= place[:, None], mm(q, turned(k), PREC), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        fade = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        o = mma(operand(p, PREC, EMULATE), v, o * fade[:, None], PREC)
        top = higher
    return operand(o * (1.0 / total)[:, None], PREC, EMULATE)


@triton.jit
def sequence_layer(
    stream, alive, n_blocks, layer, weights, cache, row, capacity, place_0, n_new, loop, base, step,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    ACT: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One layer of all blocks of a sequence, in place in `stream` [blocks M, CP]; blocks without a live row are left out.

    alive [blocks M]: rows whose keys and values go into the cache.
    """
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down = weights
    keys, values, used, slot_stride = cache
    r = tl.arange(0, M)
    c = tl.arange(0, HP)
    slot_at = slot_of(loop, loop, base, step, POLICY, PERIOD) * slot_stride
    for b in range(n_blocks):
        i = b * M + r
        lives = tl.load(alive + i) != 0
        if tl.sum(lives.to(tl.int32), 0) > 0:
            x = load_rows(stream, i * CP, i >= 0, CP, CP)
            h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
            writes = lives[:, None]
            if D != HP:
                writes = writes & (c < D)[None, :]
            for head in range(H):
                tiles = (layer * H + head) * (3 * HP)
                k = mm(h, weight(w_in, tiles + HP, in_low, HP, CP, PREC, False), PREC)
                v = mm(h, weight(w_in, tiles + 2 * HP, in_low, HP, CP, PREC, False), PREC)
                at = (slot_at + (row * H + head) * capacity * D + (place_0 + i) * D)[:, None] + c[None, :]
                tl.store(keys + at, as_stored(k, PREC, EMULATE), mask=writes)
                tl.store(values + at, as_stored(v, PREC, EMULATE), mask=writes)
    tl.debug_barrier()
    for b in range(n_blocks):
        i = b * M + r
        if tl.sum(tl.load(alive + i), 0) > 0:
            # Another form of the addresses that the block is stored to: one form would stay in registers in between.
            x = load_rows(stream + b * (M * CP), r * CP, r < M, CP, CP)
            h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
            x += tl.load(b_out + layer * CP + tl.arange(0, CP))[None, :]
            end = place_0 + tl.minimum((b + 1) * M, n_new)
            for head in range(H):
                at = layer * H + head
                bq = tl.load(b_q + at * HP + tl.arange(0, HP))
                wq = weight(w_in, at * (3 * HP), in_low, HP, CP, PREC, False)
                q = operand(mm(h, wq, PREC) + bq[None, :], PREC, EMULATE)
                o = over_sequence(
                    q, cache, (row * H + head) * capacity * D, row * capacity, place_0 + i, end, loop, base, step,
                    D, HP, M, KEYS, POLICY, PERIOD, PREC, EMULATE,
                )  # fmt: skip
                x = mma(o, weight(w_out, at * CP, out_low, CP, HP, PREC, False), x, PREC)
            x = streamed_mlp(
                x, layer, w_up, w_down, up_low, down_low, b_up, b_down,
                C, CP, FP, KC, NORM, EPS, ACT, PREC, EMULATE, FAST, False, STAGES,
            )  # fmt: skip
            store_rows(stream, i * CP, i >= 0, x, CP, CP)
    tl.debug_barrier()


# Values that must not make kernels of their own: one compiled kernel serves any number of rows, loops and tokens.
COUNTS = ("in_low", "out_low", "up_low", "down_low", "n_queue", "n_pad", "capacity", "n_cache_rows", "n_loops", "check_every")
COUNTS += ("min_loops", "n_passes", "n_new")


@triton.jit(do_not_specialize=COUNTS)
def prefill_blocks(
    embeds, seats, hidden, loops, history, order, first, counts, lengths, keys, values, used, rest, positions,
    scratch, pace, marks,
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down, norm_scale, norm_shift,
    n_queue, n_new, n_pad, capacity, n_cache_rows, n_loops, check_every, min_loops, n_passes, tol, phi,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    N_PRELUDE: tl.constexpr, N_CORE: tl.constexpr, N_CODA: tl.constexpr, M: tl.constexpr, KEYS:
    tl.constexpr, POLICY: tl.constexpr, PERIOD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, INJECT:
    tl.constexpr, INIT: tl.constexpr, POS: tl.constexpr, LOOP_NORM: tl.constexpr, RULE: tl.constexpr, ENDLESS: tl.constexpr,
    PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr, WARM: tl.constexpr, KEEP:
    tl.constexpr,
):  # fmt: skip
    """All loops of the counts[row] new tokens of each row that `order` [n_queue] names, one row after the other in a program.

    scratch [programs, 4, n_pad, CP] float32, pace [programs, 2, n_pad] float32 and marks [programs, 4, n_pad] int32: a
    program's own; n_pad is a multiple of M that holds every row's new tokens. What a pass changes is written to another place
    than it is read from, in turn: threads that hold the same numbers may be apart by a pass. The rest is as in `decode_tile`.
    """
    weights = (w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down)
    capacity = capacity.to(tl.int64)
    cache = (keys, values, used, n_cache_rows.to(tl.int64) * H * capacity * D)
    program = tl.program_id(0).to(tl.int64)
    whole = n_pad.to(tl.int64) * CP
    signal = scratch + program * 4 * whole
    stream = signal + whole
    states = stream + whole
    marks += program * 4 * n_pad
    pace += program * 2 * n_pad
    r = tl.arange(0, M)
    for entry in range(tl.program_id(0), n_queue, tl.num_programs(0)):
        row = tl.load(order + entry).to(tl.int64)
        token_0 = tl.load(first + row).to(tl.int64)
        n_own = tl.load(counts + row)
        place_0 = tl.load(lengths + row)
        spots = row * capacity + place_0  # of the new tokens in `used` and `rest`
        n_blocks = (n_own + M - 1) // M
        for b in range(n_blocks):
            i = b * M + r
            own = i < n_own
            p = load_rows(embeds, (token_0 + i) * C, own, C, CP)
            if POS == "once":
                p += load_rows(positions, tl.load(seats + token_0 + i, mask=own, other=0).to(tl.int64) * C, own, C, CP)
            store_rows(signal, i * CP, i >= 0, p, CP, CP)
            tl.store(marks + i, own.to(tl.int32))
            tl.store(marks + 2 * n_pad + i, tl.zeros([M], tl.int32))
            tl.store(pace + i, tl.full([M], float("nan"), tl.float32))
            tl.store(used + spots + i, tl.zeros([M], tl.int32) + n_loops, mask=own)
            tl.store(loops + token_0 + i, tl.zeros([M], tl.int32) + n_loops, mask=own)
        tl.debug_barrier()
        for layer in range(N_PRELUDE):
            sequence_layer(
                signal, marks, n_blocks, layer, weights, cache, row, capacity, place_0, n_own, 1, layer, 0,
                C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST, STAGES,
            )  # fmt: skip
        for b in range(n_blocks):
            i = b * M + r
            p = load_rows(signal, i * CP, i >= 0, CP, CP)
            y = first_state(p, rest + (spots - 1 + i * 0) * C, (i < n_own) & (place_0 + i > i), C, CP, M, INIT, WARM)
            if KEEP:
                store_rows(history, (token_0 + i) * C, i < n_own, y, C, CP)
            store_rows(states, i * CP, i >= 0, y, CP, CP)
        tl.debug_barrier()
        loop = tl.full((), 0, tl.int32)
        going = n_own
        while (going > 0) & (loop < n_loops):
            now = loop % 2
            then = 1 - now
            loop += 1
            state = states + now * whole
            alive = marks + now * n_pad
            for b in range(n_blocks):
                i = b * M + r
                y = load_rows(state, i * CP, i >= 0, CP, CP)
                p = load_rows(signal, i * CP, i >= 0, CP, CP)
                pos = p
                if POS == "each_loop":
                    seat = tl.load(seats + token_0 + i, mask=i < n_own, other=0)
                    pos = load_rows(positions, seat.to(tl.int64) * C, i < n_own, C, CP)
                store_rows(stream, i * CP, i >= 0, injected(y, p, pos, INJECT, POS == "each_loop"), CP, CP)
            tl.debug_barrier()
            for layer in range(N_CORE):
                sequence_layer(
                    stream, alive, n_blocks, N_PRELUDE + layer, weights, cache, row, capacity, place_0, n_own, loop,
                    N_PRELUDE + N_CODA + layer, N_CORE,
                    C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST, STAGES,
                )  # fmt: skip
            going = tl.full((), 0, tl.int32)
            for b in range(n_blocks):
                i = b * M + r
                active = tl.load(alive + i) != 0
                y = load_rows(state, i * CP, i >= 0, CP, CP)
                if tl.sum(active.to(tl.int32), 0) > 0:
                    x = load_rows(stream, i * CP, i >= 0, CP, CP)
                    if LOOP_NORM == "each":
                        x = affine(x, norm_scale, norm_shift, C, CP, EPS, NORM)
                    passes = tl.load(marks + (2 + now) * n_pad + i)
                    s_prev = tl.load(pace + now * n_pad + i)
                    leaving, passes, s_prev = at_rest(
                        x, y, loop, passes, s_prev, n_loops, check_every, min_loops, n_passes, tol, phi, M, RULE, ENDLESS
                    )
                    y = tl.where(active[:, None], x, y)  # a token that has left keeps its state
                    if KEEP:
                        store_rows(history, (loop.to(tl.int64) * n_new + token_0 + i) * C, active, x, C, CP)
                    leaving = leaving & active
                    tl.store(used + spots + i, tl.zeros([M], tl.int32) + loop, mask=leaving)
                    tl.store(loops + token_0 + i, tl.zeros([M], tl.int32) + loop, mask=leaving)
                    active = active & (leaving == 0)
                    tl.store(marks + (2 + then) * n_pad + i, passes)
                    tl.store(pace + then * n_pad + i, s_prev)
                    going += tl.sum(active.to(tl.int32), 0)
                tl.store(marks + then * n_pad + i, active.to(tl.int32))
                store_rows(states + then * whole, i * CP, i >= 0, y, CP, CP)
            tl.debug_barrier()
        last = states + (loop % 2) * whole
        for b in range(n_blocks):
            i = b * M + r
            store_rows(rest, (spots + i) * C, i < n_own, load_rows(last, i * CP, i >= 0, CP, CP), C, CP)
            tl.store(marks + i, (i < n_own).to(tl.int32))
        tl.debug_barrier()
        for layer in range(N_CODA):
            sequence_layer(
                last, marks, n_blocks, N_PRELUDE + N_CORE + layer, weights, cache, row, capacity, place_0, n_own, 1,
                N_PRELUDE + layer, 0,
                C, CP, H, D, HP, FP, KC, M, KEYS, POLICY, PERIOD, NORM, EPS, ACT, PREC, EMULATE, FAST, STAGES,
            )  # fmt: skip
        for b in range(n_blocks):
            i = b * M + r
            x = load_rows(last, i * CP, i >= 0, CP, CP)
            if LOOP_NORM == "once":
                x = affine(x, norm_scale, norm_shift, C, CP, EPS, NORM)
            store_rows(hidden, (token_0 + i) * C, i < n_own, x, C, CP)
        tl.debug_barrier()
