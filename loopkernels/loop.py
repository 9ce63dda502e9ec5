"""The fused loop: one launch runs every loop of every prompt, decides on the device when a prompt has come to rest, and
puts the next prompt in its place.

A persistent program takes prompts from an atomic queue (`order`, longest first). `loop_tile` keeps the residual stream of its
tile in registers through all loops; a tile holds NSLOT prompts. `loop_blocks` serves prompts longer than a tile: row blocks
one after the other, with state, keys and values in a scratch that stays in L2. The stopping rule is the one of docs/exits.md,
per prompt, on [NSLOT] vectors; sums are fixed float32 trees.

What is remembered of a prompt between launches stands in two arrays, `ints` [B, 8] and `floats` [B, 4], in the order of INTS
and FLOATS.
"""

import triton
import triton.language as tl

from loopkernels.block import (
    activate,
    load_rows,
    mixed,
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

INTS = ("t", "done", "status", "passes", "t_prev", "checks_without_gain", "damped", "has_prediction")
FLOATS = ("residual", "s_prev", "best_g", "unused")

RUNNING, CONVERGED, STALLED, NONFINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def claim(queue, order, ints, n_queue, n_loops):
    """The next prompt of the queue that still has loops to run, or -1 when the queue is empty."""
    prompt = tl.full((), -1, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching > 0:
        place = tl.atomic_add(queue, 1, sem="relaxed")
        searching = tl.full((), 0, tl.int32)
        if place < n_queue:
            candidate = tl.load(order + place)
            memory = ints + candidate.to(tl.int64) * 8
            if (tl.load(memory) >= n_loops) | (tl.load(memory + 1) != 0):
                searching = tl.full((), 1, tl.int32)
            else:
                prompt = candidate
    return prompt


@triton.jit
def fill(prompt, fresh, empty, queue, order, ints, n_queue, n_loops, NSLOT: tl.constexpr):
    """Prompts for the empty slots: (prompt, fresh, whether the queue is empty)."""
    slot = tl.arange(0, NSLOT)
    for i in tl.static_range(NSLOT):
        vacant = tl.sum(tl.where((slot == i) & (prompt < 0), 1, 0), 0)
        if (vacant > 0) & (empty == 0):
            taken = claim(queue, order, ints, n_queue, n_loops)
            if taken < 0:
                empty = tl.full((), 1, tl.int32)
            else:
                prompt = tl.where(slot == i, taken, prompt)
                fresh = tl.where(slot == i, 1, fresh)
    return prompt, fresh, empty


@triton.jit
def recall(ints, floats, prompt, fresh, counters):
    """Counters of the prompts that are fresh in their slots, read from memory; the others' stay."""
    t, passes, t_prev, stuck, damped, known, s_prev, best = counters
    i = ints + prompt.to(tl.int64) * 8
    f = floats + prompt.to(tl.int64) * 4
    new = fresh != 0
    t = tl.where(new, tl.load(i, mask=new, other=0), t)
    passes = tl.where(new, tl.load(i + 3, mask=new, other=0), passes)
    t_prev = tl.where(new, tl.load(i + 4, mask=new, other=0), t_prev)
    stuck = tl.where(new, tl.load(i + 5, mask=new, other=0), stuck)
    damped = tl.where(new, tl.load(i + 6, mask=new, other=0), damped)
    known = tl.where(new, tl.load(i + 7, mask=new, other=0), known)
    s_prev = tl.where(new, tl.load(f + 1, mask=new, other=0.0), s_prev)
    best = tl.where(new, tl.load(f + 2, mask=new, other=0.0), best)
    return t, passes, t_prev, stuck, damped, known, s_prev, best


@triton.jit
def remember(ints, floats, prompt, leaving, counters, status, done, residual):
    """Write the counters of prompts that leave."""
    t, passes, t_prev, stuck, damped, known, s_prev, best = counters
    i = ints + prompt.to(tl.int64) * 8
    f = floats + prompt.to(tl.int64) * 4
    tl.store(i, t, mask=leaving)
    tl.store(i + 1, done, mask=leaving)
    tl.store(i + 2, status, mask=leaving)
    tl.store(i + 3, passes, mask=leaving)
    tl.store(i + 4, t_prev, mask=leaving)
    tl.store(i + 5, stuck, mask=leaving)
    tl.store(i + 6, damped, mask=leaving)
    tl.store(i + 7, known, mask=leaving)
    tl.store(f, residual, mask=leaving)
    tl.store(f + 1, s_prev, mask=leaving)
    tl.store(f + 2, best, mask=leaving)


@triton.jit
def judge(
    counters, g2, n2, differing, change2, size2, n_loops, check_every, min_loops, n_passes, window, tol, phi,
    RULE: tl.constexpr, ON_STALL: tl.constexpr, ENDLESS: tl.constexpr,
):  # fmt: skip
    """One step of docs/exits.md for every slot, with t counted already.

    g2, n2: squared norms of F - Y and F (g2 is 0 where no check is due and the loop is not the last). differing: numbers
    whose bits changed. change2, size2: squared norms of the predictions' change and of the predictions. ENDLESS: infinite tol.
    Returns the counters, leaving, status, done, residual.
    """
    t, passes, t_prev, stuck, damped, known, s_prev, best = counters
    g = tl.sqrt(g2)
    n = tl.sqrt(n2)
    inf = float("inf")
    finite = (g < inf) & (n < inf)
    due = t % check_every == 0
    passed = t < 0
    enough = t < 0
    stalled = t < 0
    s = tl.where(damped != 0, 0.5 * g, g)
    limit = n * 0.0 + inf if ENDLESS else tol * n
    if RULE == "exact":
        passed = differing == 0
    if RULE == "absolute":
        passed = g <= tol
    if RULE == "relative":
        passed = g <= limit
    if RULE == "contraction":
        ratio = s / s_prev
        rho = tl.where(t - t_prev == 1, ratio, tl.exp2(tl.log2(ratio) / (t - t_prev).to(tl.float32)))
        to_go = s * rho / (1.0 - rho)
        contracts = (rho < 1.0) & (to_go <= limit)
        passed = (g == 0.0) | ((g <= limit) & ((g <= phi * n) | contracts))
    if RULE == "readout":
        still = tl.sqrt(change2) <= (inf if ENDLESS else tol * tl.sqrt(size2))
        passed = (still & (known != 0)) | (g == 0.0)
        known = tl.where(due, 1, known)
    if RULE != "fixed":
        passed = passed & due
        passes = tl.where(due, tl.where(passed, passes + 1, 0), passes)
        s_prev = tl.where(due, s, s_prev)
        t_prev = tl.where(due, t, t_prev)
        enough = passed & ((passes >= n_passes) | (g == 0.0)) & (t >= min_loops) & finite
    if (RULE != "fixed") & (RULE != "exact"):
        gains = due & (g < 0.9 * best)
        best = tl.where(gains, g, best)
        stuck = tl.where(gains | (due & (passes > 0)), 0, stuck + due.to(tl.int32))
        stalled = (stuck >= window) & (t - t % check_every >= min_loops)
    acts = stalled & due
    ends = t < 0
    if ON_STALL == "exit":
        ends = acts
    if ON_STALL == "damp":
        ends = acts & (damped != 0)
        starts = acts & (damped == 0)
        damped = tl.where(starts, 1, damped)
        s_prev = tl.where(starts, float("nan"), s_prev)
        passes = tl.where(starts, 0, passes)
        best = tl.where(starts, inf, best)
        stuck = tl.where(starts, 0, stuck)
    status = tl.where(stalled, STALLED, RUNNING)
    status = tl.where(enough, CONVERGED, status)
    status = tl.where(finite, status, NONFINITE)
    done = ((finite == 0) | enough | ends).to(tl.int32)
    residual = tl.where(g == 0.0, 0.0, g / n)
    leaving = (done != 0) | (t >= n_loops)
    return (t, passes, t_prev, stuck, damped, known, s_prev, best), leaving, status, done, residual


@triton.jit
def injected(x, p, pos, INJECT: tl.constexpr, HAS_POS: tl.constexpr):
    """inject(Y, P), and positions where they are not part of P."""
    if INJECT == "add":
        x += p
    if INJECT == "mul":
        x *= p
    if HAS_POS:
        x += pos
    return x


@triton.jit
def resident_layer(
    x, own, layer: tl.constexpr, held_in, held_out, held_up, held_down, b_q, b_out, b_up, b_down,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    M: tl.constexpr, NSLOT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, CAUSAL: tl.constexpr,
    PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One layer whose weights were loaded before the loop."""
    HIDDEN: tl.constexpr = FP // KC
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_out + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.static_range(H):
        wq = held_in[3 * (layer * H + i)]
        wk = held_in[3 * (layer * H + i) + 1]
        wv = held_in[3 * (layer * H + i) + 2]
        wo = held_out[layer * H + i]
        bq = tl.load(b_q + (layer * H + i) * HP + tl.arange(0, HP))
        q = operand(mm(h, (wq, wq), PREC) + bq[None, :], PREC, EMULATE)
        k = operand(mm(h, (wk, wk), PREC), PREC, EMULATE)
        o, bad = mixed(q, k, mm(h, (wv, wv), PREC), own, M, NSLOT, CAUSAL, PREC, EMULATE)
        x = mma(o, (wo, wo), x, PREC)
        if NSLOT > 1:
            x += bad[:, None]
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_down + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.static_range(HIDDEN):
        up = held_up[layer * HIDDEN + i]
        down = held_down[layer * HIDDEN + i]
        b = tl.load(b_up + (layer * HIDDEN + i) * KC + tl.arange(0, KC))
        u = activate(mm(h, (up, up), PREC) + b[None, :], ACT, FAST)
        x = mma(operand(u, PREC, EMULATE), (down, down), x, PREC)
    return x


@triton.jit
def streamed_mlp(
    x, layer, w_up, w_down, up_low, down_low, b_up, b_down,
    C: tl.constexpr, CP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    ACT: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x + MLP(norm(x)), the weights read chunk by chunk."""
    HIDDEN: tl.constexpr = FP // KC
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_down + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.range(0, HIDDEN, num_stages=STAGES):
        at = layer * HIDDEN + i
        b = tl.load(b_up + at * KC + tl.arange(0, KC))
        # In a pipeline all weights are read first. Without one they pass through registers, so each is read where it is used.
        up = weight(w_up, at * KC, up_low, KC, CP, PREC, TMA)
        if STAGES > 1:
            down = weight(w_down, at * CP, down_low, CP, KC, PREC, TMA)
        u = operand(activate(mm(h, up, PREC) + b[None, :], ACT, FAST), PREC, EMULATE)
        if STAGES == 1:
            down = weight(w_down, at * CP, down_low, CP, KC, PREC, TMA)
        x = mma(u, down, x, PREC)
    return x


@triton.jit
def streamed_layer(
    x, own, layer, w_in, w_out, w_up, w_down, in_low, out_low, up_low, down_low, b_q, b_out, b_up, b_down,
    C: tl.constexpr, CP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr,
    M: tl.constexpr, NSLOT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACT: tl.constexpr, CAUSAL: tl.constexpr,
    PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One layer whose weights are read tile by tile, in every loop."""
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_out + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.range(0, H, num_stages=STAGES):
        at = layer * H + i
        bq = tl.load(b_q + at * HP + tl.arange(0, HP))
        wq = weight(w_in, at * (3 * HP), in_low, HP, CP, PREC, TMA)
        if STAGES > 1:
            wk = weight(w_in, at * (3 * HP) + HP, in_low, HP, CP, PREC, TMA)
            wv = weight(w_in, at * (3 * HP) + 2 * HP, in_low, HP, CP, PREC, TMA)
            wo = weight(w_out, at * CP, out_low, CP, HP, PREC, TMA)
        q = operand(mm(h, wq, PREC) + bq[None, :], PREC, EMULATE)
        if STAGES == 1:
            wk = weight(w_in, at * (3 * HP) + HP, in_low, HP, CP, PREC, TMA)
        k = operand(mm(h, wk, PREC), PREC, EMULATE)
        if STAGES == 1:
            wv = weight(w_in, at * (3 * HP) + 2 * HP, in_low, HP, CP, PREC, TMA)
        v = mm(h, wv, PREC)
        o, bad = mixed(q, k, v, own, M, NSLOT, CAUSAL, PREC, EMULATE)
        if STAGES == 1:
            wo = weight(w_out, at * CP, out_low, CP, HP, PREC, TMA)
        x = mma(o, wo, x, PREC)
        if NSLOT > 1:
            x += bad[:, None]
    return streamed_mlp(
        x, layer, w_up, w_down, up_low, down_low, b_up, b_down, C, CP, FP, KC, NORM, EPS, ACT, PREC, EMULATE, FAST, TMA, STAGES
    )


@triton.jit(do_not_specialize=("n_rows", "K", "N"))
def linear_rows(
    source, weight, bias, target, n_rows, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KB: tl.constexpr
):  # fmt: skip
    """target [n_rows, N] = source [n_rows, K] weight [N, K]' + bias, float32, each row summed in the same order whatever the
    batch.

    Library products choose their kernel, and so the order of sums, by the number of rows.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, K, KB):
        k = at + tl.arange(0, KB)
        x = tl.load(source + r[:, None] * K + k[None, :], mask=(r < n_rows)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(weight + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(target + r[:, None] * N + n[None, :], total, mask=(r < n_rows)[:, None] & (n < N)[None, :])


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
    tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, RESIDENT: tl.constexpr, HOLD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All loops of prompts of at most M / NSLOT tokens.

    prompts [B, T, C]: P, with positions where inject adds. start [B, T, C]: Y to begin with. final [B, T, C]: F of the last
    loop. going [B, T, C]: Y' of the last loop, written where on_stall damps. before [programs, 2, M, CP]: scratch for Y. order
    [n_queue]: prompts to run. lengths [B]. queue [1]: 0. Weights as `launch.pack` lays them out. reads [B, n_loops -
    first_loop, N] and last_read [B, N]: predictions. All state is float32.
    """
    SLOT: tl.constexpr = M // NSLOT
    HIDDEN: tl.constexpr = FP // KC
    if RESIDENT:
        held_in = (tl.trans(tile(w_in, 0, HP, CP, False)),)
        held_out = (tl.trans(tile(w_out, 0, CP, HP, False)),)
        held_up = (tl.trans(tile(w_up, 0, KC, CP, False)),)
        held_down = (tl.trans(tile(w_down, 0, CP, KC, False)),)
        for i in tl.static_range(1, 3 * H * N_CORE):
            held_in = held_in + (tl.trans(tile(w_in, i * HP, HP, CP, False)),)
        for i in tl.static_range(1, H * N_CORE):
            held_out = held_out + (tl.trans(tile(w_out, i * CP, CP, HP, False)),)
        for i in tl.static_range(1, HIDDEN * N_CORE):
            held_up = held_up + (tl.trans(tile(w_up, i * KC, KC, CP, False)),)
            held_down = held_down + (tl.trans(tile(w_down, i * CP, CP, KC, False)),)

    program = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, M)
    within = r % SLOT
    n_read = (n_tokens + STRIDE - 1) // STRIDE
    zero = tl.zeros([NSLOT], tl.int32)
    counters = (zero, zero, zero, zero, zero, zero, tl.zeros([NSLOT], tl.float32), tl.zeros([NSLOT], tl.float32))
    own = zero
    x = tl.zeros([M, CP], tl.float32)
    p = x
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
            if HOLD:
                p = tl.where(rows_new[:, None], load_rows(prompts, rows, reading, C, CP), p)
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

        if not HOLD:
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
