"""When a prompt leaves the loop and which one comes next: the queue, what is remembered of a prompt, and the stopping rule of
docs/exits.md on the device.

What is remembered between launches stands in two arrays, `ints` [B, 8] and `floats` [B, 4], in the order of INTS and FLOATS.
"""

import triton
import triton.language as tl

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
