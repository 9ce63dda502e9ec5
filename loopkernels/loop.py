"""The fused loop: one launch runs every loop of every prompt, decides on the device when a prompt has come to rest, and
puts the next prompt in its place.

A persistent program takes prompts from an atomic queue (`order`, longest first). `loop_tile` keeps the residual stream of its
tile in registers through all loops; a tile holds NSLOT prompts. `loop_blocks` serves prompts longer than a tile: row blocks
one after the other, with state, keys and values in a scratch that stays in L2. The stopping rule is the one of docs/exits.md,
per prompt, on [NSLOT] vectors; sums are fixed float32 trees.
"""

import triton
import triton.language as tl

from loopkernels.block import (
    load_rows,
    mixed_blocks,
    mm,
    mma,
    normalise,
    operand,
    row_lengths,
    slot_sum,
    store_keys,
    store_rows,
    tile,
    weight,
)
from loopkernels.layer import injected, resident_layer, streamed_layer, streamed_mlp
from loopkernels.stop import fill, judge, recall, remember

# Values that must not make kernels of their own: one compiled kernel serves any number of prompts and loops.
COUNTS = ("in_low", "out_low", "up_low", "down_low", "n_queue", "n_tokens", "n_loops", "first_loop", "check_every", "min_loops")
COUNTS += ("n_passes", "window", "max_steps")


@triton.jit(do_not_specialize=COUNTS)
def loop_tile(
    prompts, start, final, going, before, ints, floats, order, lengths, queue,
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down, norm_scale, norm_shift, positions,
    read_weight, read_bias, last_read, reads,
    n_queue, n_tokens, n_loops, first_loop, check_every, min_loops, n_passes, window, max_steps, tol, phi,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    N_CORE: tl.constexpr, M: tl.constexpr, NSLOT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr,
    CAUSAL: tl.constexpr, INJECT: tl.constexpr, HAS_POS: tl.constexpr, LOOP_NORM: tl.constexpr, READ: tl.constexpr,
    STRIDE: tl.constexpr, RULE: tl.constexpr, ON_STALL: tl.constexpr, ENDLESS: tl.constexpr, PREC: tl.constexpr, EMULATE:
    tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, RESIDENT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All loops of prompts of at most M / NSLOT tokens.

    prompts [B, T, C]: P, with positions where inject adds. start [B, T, C]: Y to begin with. final [B, T, C]: F of the last
    loop. going [B, T, C]: Y' of the last loop, written where on_stall damps. before [programs, 2, M, CP]: scratch for Y. order
    [n_queue]: prompts to run. lengths [B]. queue [1]: 0. Weights as `launch.pack` lays them out. reads [B, n_loops -
    first_loop, N] and last_read [B, N]: predictions. All state is float32.
    """
    SLOT: tl.constexpr = M // NSLOT
    HIDDEN: tl.constexpr = FP // KC
    PARTS: tl.constexpr = 2 if ACT == "silu_gated" else 1
    if RESIDENT:
        held_in = (tl.trans(tile(w_in, 0, HP, CP, False)),)
        held_out = (tl.trans(tile(w_out, 0, CP, HP, False)),)
        held_up = (tl.trans(tile(w_up, 0, KC, CP, False)),)
        held_down = (tl.trans(tile(w_down, 0, CP, KC, False)),)
        for i in tl.static_range(1, 3 * H * N_CORE):
            held_in = held_in + (tl.trans(tile(w_in, i * HP, HP, CP, False)),)
        for i in tl.static_range(1, H * N_CORE):
            held_out = held_out + (tl.trans(tile(w_out, i * CP, CP, HP, False)),)
        for i in tl.static_range(1, PARTS * HIDDEN * N_CORE):
            held_up = held_up + (tl.trans(tile(w_up, i * KC, KC, CP, False)),)
        for i in tl.static_range(1, HIDDEN * N_CORE):
            held_down = held_down + (tl.trans(tile(w_down, i * CP, CP, KC, False)),)

    program = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, M)
    within = r % SLOT
    n_read = (n_tokens + STRIDE - 1) // STRIDE
    zero = tl.zeros([NSLOT], tl.int32)
    counters = (zero, zero, zero, zero, zero, zero, tl.zeros([NSLOT], tl.float32), tl.zeros([NSLOT], tl.float32))
    own = zero
    x = tl.zeros([M, CP], tl.float32)
    step = tl.full((), 0, tl.int32)
    empty = tl.full((), 0, tl.int32)
    prompt, fresh, empty = fill(zero - 1, zero, empty, queue, order, ints, n_queue, n_loops, NSLOT)
    running = tl.sum((prompt >= 0).to(tl.int32), 0)
    while (running > 0) & (step < max_steps):
        token = row_lengths(prompt, M, NSLOT).to(tl.int64) * n_tokens + within
        rows = token * C
        if tl.sum(fresh, 0) > 0:
            new = fresh != 0
            counters = recall(ints, floats, prompt, fresh, counters)
            own = tl.where(new, tl.load(lengths + prompt, mask=new, other=0), own)
            rows_new = row_lengths(fresh, M, NSLOT) != 0
            reading = rows_new & (within < row_lengths(own, M, NSLOT))
            x = tl.where(rows_new[:, None], load_rows(start, rows, reading, C, CP), x)
            fresh = zero
        valid = within < row_lengths(own, M, NSLOT)
        t = counters[0] + 1
        damped = counters[4]
        wanted = (t % check_every == 0) | (t >= n_loops) | (damped != 0)
        if RULE == "fixed":
            wanted = t >= n_loops
        measured = tl.sum((wanted & (prompt >= 0)).to(tl.int32), 0) > 0
        # Y is kept outside the registers, and only where something is compared with it. Two buffers in turn: the addresses
        # change from loop to loop, or they would be computed once and kept in registers.
        scratch = before + (program * 2 + (step % 2)) * (M * CP)
        if measured:
            store_rows(scratch, r * CP, r < M, x, CP, CP)

        p = x
        if INJECT != "none":
            p = load_rows(prompts, rows, valid, C, CP)
        pos = x
        if HAS_POS:
            pos = load_rows(positions, within * C, valid, C, CP)
        x = injected(x, p, pos, INJECT, HAS_POS)
        spread = row_lengths(own, M, NSLOT)
        if RESIDENT:
            for layer in tl.static_range(N_CORE):
                x = resident_layer(
                    x, spread, layer, held_in, held_out, held_up, held_down, b_q, b_out, b_up, b_down,
                    C, CP, H, HP, FP, KC, M, NSLOT, NORM, EPS, ACT, CAUSAL, PREC, EMULATE, FAST,
                )  # fmt: skip
        else:
            for layer in range(N_CORE):
                x = streamed_layer(
                    x, spread, layer, w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down,
                    C, CP, H, HP, FP, KC, M, NSLOT, NORM, EPS, ACT, CAUSAL, PREC, EMULATE, FAST, TMA, STAGES,
                )  # fmt: skip
        if LOOP_NORM == "each":
            x = normalise(x, C, CP, EPS, NORM)
            x = x * tl.load(norm_scale + tl.arange(0, CP))[None, :] + tl.load(norm_shift + tl.arange(0, CP))[None, :]
        x = tl.where(valid[:, None], x, 0.0)

        n2 = slot_sum(tl.sum(x * x, 1), M, NSLOT)
        g2 = tl.zeros([NSLOT], tl.float32)
        differing = zero
        y = x
        if measured:
            tl.debug_barrier()
            y = load_rows(scratch, r * CP, r < M, CP, CP)
            d = x - y
            g2 = slot_sum(tl.sum(d * d, 1), M, NSLOT)
            if RULE == "exact":
                moved = x.to(tl.int32, bitcast=True) != y.to(tl.int32, bitcast=True)
                differing = slot_sum(tl.sum(moved.to(tl.int32), 1), M, NSLOT)
        change2 = tl.zeros([NSLOT], tl.float32)
        size2 = change2
        if READ:
            z = x
            if LOOP_NORM == "once":
                z = normalise(x, C, CP, EPS, NORM)
            read = tl.sum(z * tl.load(read_weight + tl.arange(0, CP))[None, :], 1) + read_bias
            reading = valid & (within % STRIDE == 0)
            place = row_lengths(prompt, M, NSLOT).to(tl.int64) * n_read + within // STRIDE
            if READ == 2:
                loops = (n_loops - first_loop).to(tl.int64)
                passage = row_lengths(prompt, M, NSLOT).to(tl.int64) * loops + row_lengths(t, M, NSLOT) - 1 - first_loop
                tl.store(reads + passage * n_read + within // STRIDE, read, mask=reading)
            if RULE == "readout":
                last = tl.load(last_read + place, mask=reading, other=0.0)
                change2 = slot_sum(tl.where(reading, (read - last) * (read - last), 0.0), M, NSLOT)
                size2 = slot_sum(tl.where(reading, read * read, 0.0), M, NSLOT)
                due = row_lengths((t % check_every == 0).to(tl.int32), M, NSLOT) != 0
                tl.store(last_read + place, read, mask=reading & due)

        counters = (t, counters[1], counters[2], counters[3], counters[4], counters[5], counters[6], counters[7])
        counters, leaving, status, done, residual = judge(
            counters, g2, n2, differing, change2, size2, n_loops, check_every, min_loops, n_passes, window, tol, phi,
            RULE, ON_STALL, ENDLESS,
        )  # fmt: skip
        leaving = leaving & (prompt >= 0)
        leaves = tl.sum(leaving.to(tl.int32), 0)
        if leaves > 0:
            writing = valid & (row_lengths(leaving.to(tl.int32), M, NSLOT) != 0)
            store_rows(final, rows, writing, x, C, CP)
            remember(ints, floats, prompt, leaving, counters, status, done, residual)
        if ON_STALL == "damp":
            halfway = row_lengths(damped, M, NSLOT) != 0
            x = tl.where(halfway[:, None], y + 0.5 * (x - y), x)
            if leaves > 0:
                writing = valid & (row_lengths(leaving.to(tl.int32), M, NSLOT) != 0)
                store_rows(going, rows, writing, x, C, CP)
        if leaves > 0:
            prompt = tl.where(leaving, -1, prompt)
            own = tl.where(leaving, 0, own)
            prompt, fresh, empty = fill(prompt, fresh, empty, queue, order, ints, n_queue, n_loops, NSLOT)
        running = tl.sum((prompt >= 0).to(tl.int32), 0)
        step += 1


@triton.jit(do_not_specialize=COUNTS)
def loop_blocks(
    prompts, start, final, going, before, ints, floats, order, lengths, queue,
    w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down, norm_scale, norm_shift, positions,
    read_weight, read_bias, last_read, reads, keys,
    n_queue, n_tokens, n_loops, first_loop, check_every, min_loops, n_passes, window, max_steps, tol, phi,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    N_CORE: tl.constexpr, M: tl.constexpr, TP: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr,
    CAUSAL: tl.constexpr, INJECT: tl.constexpr, HAS_POS: tl.constexpr, LOOP_NORM: tl.constexpr, READ: tl.constexpr,
    STRIDE: tl.constexpr, RULE: tl.constexpr, ON_STALL: tl.constexpr, ENDLESS: tl.constexpr, PREC: tl.constexpr,
    EMULATE: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All loops of prompts of up to TP tokens, a multiple of M: one prompt a program, row blocks one after the other.

    A layer is two passes over the blocks: keys and values of all of them into the scratch, then attention and MLP. The state
    stands in `before` [programs, 2, TP, CP]: Y in one half, the stream that becomes F in the other; the halves change roles
    every loop. keys [programs, 2 or 4, H, TP, HP]. The rest is as in `loop_tile`.
    """
    program = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, M)
    one = tl.arange(0, 1)
    n_read = (n_tokens + STRIDE - 1) // STRIDE
    low = H * TP * HP
    parts: tl.constexpr = 4 if PREC == "bf16x3" else 2
    keys += program * (parts * H * TP * HP)
    zero = tl.zeros([1], tl.int32)
    counters = (zero, zero, zero, zero, zero, zero, tl.zeros([1], tl.float32), tl.zeros([1], tl.float32))
    step = tl.full((), 0, tl.int32)
    empty = tl.full((), 0, tl.int32)
    own = tl.full((), 0, tl.int32)
    prompt, fresh, empty = fill(zero - 1, zero, empty, queue, order, ints, n_queue, n_loops, 1)
    running = tl.sum((prompt >= 0).to(tl.int32), 0)
    while (running > 0) & (step < max_steps):
        at = tl.sum(prompt, 0).to(tl.int64)
        own = tl.load(lengths + at)
        n_blocks = (own + M - 1) // M
        state = before + (program * 2 + (step % 2)) * (TP * CP)
        stream = before + (program * 2 + (1 - step % 2)) * (TP * CP)
        if tl.sum(fresh, 0) > 0:
            counters = recall(ints, floats, prompt, fresh, counters)
            for b in range(n_blocks):
                token = b * M + r
                x = load_rows(start, (at * n_tokens + token) * C, token < own, C, CP)
                store_rows(state, token * CP, token < TP, x, CP, CP)
            fresh = zero
            tl.debug_barrier()
        t = counters[0] + 1
        damped = counters[4]
        n2 = tl.zeros([1], tl.float32)
        g2 = tl.zeros([1], tl.float32)
        differing = zero
        change2 = tl.zeros([1], tl.float32)
        size2 = tl.zeros([1], tl.float32)
        for layer in range(N_CORE):
            for b in range(n_blocks):
                token = b * M + r
                if layer == 0:
                    x = load_rows(state, token * CP, token < TP, CP, CP)
                    p = x
                    if INJECT != "none":
                        p = load_rows(prompts, (at * n_tokens + token) * C, token < own, C, CP)
                    pos = x
                    if HAS_POS:
                        pos = load_rows(positions, token * C, token < own, C, CP)
                    x = injected(x, p, pos, INJECT, HAS_POS)
                    store_rows(stream, token * CP, token < TP, x, CP, CP)
                else:
                    x = load_rows(stream, token * CP, token < TP, CP, CP)
                h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
                for i in tl.range(0, H, num_stages=STAGES):
                    tiles = (layer * H + i) * (3 * HP)
                    k = mm(h, weight(w_in, tiles + HP, in_low, HP, CP, PREC, TMA), PREC)
                    v = mm(h, weight(w_in, tiles + 2 * HP, in_low, HP, CP, PREC, TMA), PREC)
                    store_keys(keys, low, i * (TP * HP), token, k, v, HP, PREC, EMULATE)
            tl.debug_barrier()
            for b in range(n_blocks):
                token = b * M + r
                # Another form of the addresses that the block is stored to: one form would stay in registers in between.
                x = load_rows(stream + b * (M * CP), r * CP, r < M, CP, CP)
                h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
                x += tl.load(b_out + layer * CP + tl.arange(0, CP))[None, :]
                sees = b + 1 if CAUSAL else n_blocks
                for i in range(H):
                    head = layer * H + i
                    bq = tl.load(b_q + head * HP + tl.arange(0, HP))
                    wq = weight(w_in, head * (3 * HP), in_low, HP, CP, PREC, TMA)
                    if STAGES > 1:
                        wo = weight(w_out, head * CP, out_low, CP, HP, PREC, TMA)
                    q = operand(mm(h, wq, PREC) + bq[None, :], PREC, EMULATE)
                    o = mixed_blocks(q, keys, low, i * (TP * HP), b * M, sees, own, M, HP, CAUSAL, PREC, EMULATE)
                    if STAGES == 1:
                        wo = weight(w_out, head * CP, out_low, CP, HP, PREC, TMA)
                    x = mma(o, wo, x, PREC)
                x = streamed_mlp(
                    x, layer, w_up, w_down, up_low, down_low, b_up, b_down,
                    C, CP, FP, KC, NORM, EPS, ACT, PREC, EMULATE, FAST, TMA, STAGES,
                )  # fmt: skip
                if layer == N_CORE - 1:
                    if LOOP_NORM == "each":
                        x = normalise(x, C, CP, EPS, NORM)
                        scale = tl.load(norm_scale + tl.arange(0, CP))
                        x = x * scale[None, :] + tl.load(norm_shift + tl.arange(0, CP))[None, :]
                    valid = token < own
                    x = tl.where(valid[:, None], x, 0.0)
                    y = load_rows(state, token * CP, token < TP, CP, CP)
                    n2 += tl.sum(tl.sum(x * x, 1), 0)
                    g2 += tl.sum(tl.sum((x - y) * (x - y), 1), 0)
                    if RULE == "exact":
                        moved = x.to(tl.int32, bitcast=True) != y.to(tl.int32, bitcast=True)
                        differing += tl.sum(tl.sum(moved.to(tl.int32), 1), 0)
                    if READ:
                        z = x
                        if LOOP_NORM == "once":
                            z = normalise(x, C, CP, EPS, NORM)
                        read = tl.sum(z * tl.load(read_weight + tl.arange(0, CP))[None, :], 1) + read_bias
                        reading = valid & (token % STRIDE == 0)
                        if READ == 2:
                            passage = at * (n_loops - first_loop) + tl.sum(t, 0) - 1 - first_loop
                            tl.store(reads + passage * n_read + token // STRIDE, read, mask=reading)
                        if RULE == "readout":
                            place = last_read + at * n_read + token // STRIDE
                            last = tl.load(place, mask=reading, other=0.0)
                            change2 += tl.sum(tl.where(reading, (read - last) * (read - last), 0.0), 0)
                            size2 += tl.sum(tl.where(reading, read * read, 0.0), 0)
                            due = row_lengths((t % check_every == 0).to(tl.int32), M, 1) != 0
                            tl.store(place, read, mask=reading & due)
                store_rows(stream, token * CP, token < TP, x, CP, CP)
            tl.debug_barrier()

        counters = (t, counters[1], counters[2], counters[3], counters[4], counters[5], counters[6], counters[7])
        counters, leaving, status, done, residual = judge(
            counters, g2, n2, differing, change2, size2, n_loops, check_every, min_loops, n_passes, window, tol, phi,
            RULE, ON_STALL, ENDLESS,
        )  # fmt: skip
        leaves = tl.sum(leaving.to(tl.int32), 0)
        halfway = tl.sum(damped, 0)
        if (leaves > 0) | (halfway > 0):
            for b in range(n_blocks):
                token = b * M + r
                rows = (at * n_tokens + token) * C
                x = load_rows(stream, token * CP, token < TP, CP, CP)
                if leaves > 0:
                    store_rows(final, rows, token < own, x, C, CP)
                if ON_STALL == "damp":
                    if halfway > 0:
                        y = load_rows(state, token * CP, token < TP, CP, CP)
                        x = y + 0.5 * (x - y)
                        store_rows(stream, token * CP, token < TP, x, CP, CP)
                    if leaves > 0:
                        store_rows(going, rows, token < own, x, C, CP)
            tl.debug_barrier()
        if leaves > 0:
            remember(ints, floats, prompt + one * 0, leaving, counters, status, done, residual)
            prompt, fresh, empty = fill(zero - 1, zero, empty, queue, order, ints, n_queue, n_loops, 1)
        running = tl.sum((prompt >= 0).to(tl.int32), 0)
        step += 1
