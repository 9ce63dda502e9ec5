"""One transformer layer on a tile of rows, with weights that were loaded before the loop or are read tile by tile in it."""

import triton
import triton.language as tl

from loopkernels.block import activate, gated, mixed, mm, mma, normalise, operand, weight


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
    PARTS: tl.constexpr = 2 if ACT == "silu_gated" else 1
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
        up = held_up[(layer * HIDDEN + i) * PARTS]
        down = held_down[layer * HIDDEN + i]
        b = tl.load(b_up + (layer * HIDDEN + i) * (PARTS * KC) + tl.arange(0, KC))
        u = mm(h, (up, up), PREC) + b[None, :]
        if PARTS == 2:
            rest = held_up[(layer * HIDDEN + i) * PARTS + 1]
            b = tl.load(b_up + (layer * HIDDEN + i) * (PARTS * KC) + KC + tl.arange(0, KC))
            u = gated(u, mm(h, (rest, rest), PREC) + b[None, :])
        else:
            u = activate(u, ACT, FAST)
        x = mma(operand(u, PREC, EMULATE), (down, down), x, PREC)
    return x


@triton.jit
def streamed_mlp(
    x, layer, w_up, w_down, up_low, down_low, b_up, b_down,
    C: tl.constexpr, CP: tl.constexpr, FP: tl.constexpr, KC: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    ACT: tl.constexpr, PREC: tl.constexpr, EMULATE: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x + MLP(norm(x)), the weights read chunk by chunk; of a gated one, a chunk of the gate and then one of the rest."""
    HIDDEN: tl.constexpr = FP // KC
    PARTS: tl.constexpr = 2 if ACT == "silu_gated" else 1
    h = operand(normalise(x, C, CP, EPS, NORM), PREC, EMULATE)
    x += tl.load(b_down + layer * CP + tl.arange(0, CP))[None, :]
    for i in tl.range(0, HIDDEN, num_stages=STAGES):
        at = layer * HIDDEN + i
        b = tl.load(b_up + at * (PARTS * KC) + tl.arange(0, KC))
        # In a pipeline all weights are read first. Without one they pass through registers, so each is read where it is used.
        up = weight(w_up, at * (PARTS * KC), up_low, KC, CP, PREC, TMA)
        if PARTS == 2:
            b_rest = tl.load(b_up + at * (PARTS * KC) + KC + tl.arange(0, KC))
            if STAGES > 1:
                rest = weight(w_up, at * (PARTS * KC) + KC, up_low, KC, CP, PREC, TMA)
        if STAGES > 1:
            down = weight(w_down, at * CP, down_low, CP, KC, PREC, TMA)
        if PARTS == 2:
            gate = mm(h, up, PREC) + b[None, :]
            if STAGES == 1:
                rest = weight(w_up, at * (PARTS * KC) + KC, up_low, KC, CP, PREC, TMA)
            u = operand(gated(gate, mm(h, rest, PREC) + b_rest[None, :]), PREC, EMULATE)
        else:
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
