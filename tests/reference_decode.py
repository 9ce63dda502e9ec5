"""Decoding by its definition, without a cache: one row at a time, whole, in plain PyTorch. The oracle of the decoding tests."""

import torch
import torch.nn.functional as F

from looped.exits import ROUNDING_LEVEL, Step, Watch


def layer(block, X, active, kept):
    """One block on the active tokens X [n, C] of a row (their places: active, int64 [n]); kept: keys and values of all T."""
    q, k, v = block.attn.project(block.norm_1(X))
    kept[0][active], kept[1][active] = k, v
    places = torch.arange(len(kept[0]))
    sees = places[None] <= active[:, None]
    heads = (x.transpose(0, 1) for x in (q, *kept))
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=sees).transpose(0, 1)
    X = X + block.attn.proj(mixed.flatten(1))
    return X + block.mlp(block.norm_2(X))


def empty(config, n_layers, n_tokens, dtype):
    shape = n_tokens, config.n_heads, config.head_dim
    return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(n_layers)]


@torch.no_grad()
def decode_row(model, embeds, n_loops, rule, positions=None):
    """Hidden states [T, C], loops [T] and the states after every loop of one row of embeddings [T, C].

    Token i moves at loop t <= u_i; at later loops the others see the keys and values that it had at loop u_i.
    """
    config, T = model.config, len(embeds)
    every = torch.arange(T)
    positions = every if positions is None else positions
    place = model.positions.weight[positions] if config.pos_kind == "learned" else 0.0
    P = embeds + place if config.pos_when == "once" else embeds
    for block, kept in zip(model.prelude, empty(config, config.n_prelude, T, embeds.dtype), strict=True):
        P = layer(block, P, every, kept)
    Y = model.initial_state(P).clone()
    states, n_used, active = [Y.clone()], torch.zeros(T, dtype=torch.int64), every
    kept_core = empty(config, config.n_core, T, embeds.dtype)
    watch = Watch(rule)
    live = watch.start(torch.zeros(T, dtype=torch.float64))
    for t in range(1, n_loops + 1):
        if len(active):
            X = model.inject(Y[active], P[active])
            if config.pos_when == "each_loop":
                X = X + (place[active] if config.pos_kind == "learned" else 0.0)
            for block, kept in zip(model.core, kept_core, strict=True):
                X = layer(block, X, active, kept)
            if config.loop_norm == "each":
                X = model.final_norm(X)
            g, n = (X - Y[active]).double().norm(dim=-1), X.double().norm(dim=-1)
            time = torch.full((len(active),), t)
            step = Step(time, g, n, g, g * torch.nan, Y[active], X, lambda: None, ROUNDING_LEVEL["fp64"], 1)
            leaving = watch.enough(live, step)
            Y[active], n_used[active] = X, t
            active, live = active[~leaving], {name: tensor[~leaving] for name, tensor in live.items()}
        states.append(Y.clone())
    closed = Y
    for block, kept in zip(model.coda, empty(config, config.n_coda, T, embeds.dtype), strict=True):
        closed = layer(block, closed, every, kept)
    if config.loop_norm == "once":
        closed = model.final_norm(closed)
    return closed, n_used, states
