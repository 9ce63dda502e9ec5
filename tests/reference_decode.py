"""Decoding by its definition, with every loop of every token kept: one row at a time, in plain PyTorch. The oracle of the
decoding tests, of the C++ engine and of the kernels."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from looped.exits import ROUNDING_LEVEL, Step, Watch

PER_LOOP = SimpleNamespace(kind="per_loop", period=1)


def layer(block, X, active, kept, seen=lambda keys, values: (keys, values)):
    """One block on the tokens X [n, C] of a row, whose places are active, int64 [n]. kept: keys and values [T, H, head_dim],
    into which theirs go. seen: gives what they look at, of every token up to their own."""
    q, k, v = block.attn.project(block.norm_1(X))
    kept[0][active], kept[1][active] = k, v
    looks = torch.arange(len(kept[0]))[None] <= active[:, None]
    heads = (x.transpose(0, 1) for x in (q, *seen(*kept)))
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=looks).transpose(0, 1)
    X = X + block.attn.proj(mixed.flatten(1))
    return X + block.mlp(block.norm_2(X))


def empty(config, n_layers, n_tokens, dtype):
    shape = n_tokens, config.n_heads, config.head_dim
    return [[torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)] for _ in range(n_layers)]


class Row:
    """A row of tokens, extended a call at a time. `kept[part][t][layer]`: keys and values of loop t, 0 outside the core."""

    def __init__(self, model, policy=PER_LOOP, phi=ROUNDING_LEVEL["fp64"]):
        self.model, self.policy, self.phi = model, policy, phi
        self.kept = {part: [] for part in ("prelude", "core", "coda")}
        self.used, self.n_cached = [], 0  # loops of each token, and the tokens of earlier calls
        self.last = None  # the state that a warm start begins with

    @torch.no_grad()
    def extend(self, embeds, n_loops, rule, positions=None, warm_start=False):
        """Hidden states [T, C] of embeddings [T, C], loops [T] and the states Y_0 .. Y_n.

        Token i moves at loop t <= u_i; at later loops the others see what `loops_seen` says.
        """
        model, config, n_new = self.model, self.model.config, len(embeds)
        if n_new == 0:
            return embeds, [], [embeds] * (n_loops + 1)
        self.n_cached = len(self.used)
        every = torch.arange(self.n_cached, self.n_cached + n_new)
        self.used += [n_loops + 1] * n_new  # still going
        self.make_room(n_new, n_loops, embeds.dtype)
        place = torch.zeros(n_new, 1, dtype=embeds.dtype)
        if config.pos_kind == "learned":
            place = model.positions.weight[every if positions is None else positions]
        P = self.layers("prelude", embeds + place if config.pos_when == "once" else embeds, 0, every)
        Y = model.initial_state(P).clone()
        if warm_start and self.last is not None:
            Y = self.last.expand_as(P).clone()
        states, active = [Y.clone()], torch.arange(n_new)
        watch = Watch(rule)
        live = watch.start(torch.zeros(n_new, dtype=torch.float64))
        for t in range(1, n_loops + 1):
            if len(active):
                X = model.inject(Y[active], P[active])
                if config.pos_when == "each_loop":
                    X = X + place[active]
                X = self.layers("core", X, t, every[active])
                if config.loop_norm == "each":
                    X = model.final_norm(X)
                g, n = (X - Y[active]).double().norm(dim=-1), X.double().norm(dim=-1)
                time = torch.full((len(active),), t)
                step = Step(time, g, n, g, g * torch.nan, Y[active], X, lambda: None, self.phi, 1)
                leaving = watch.enough(live, step)
                Y[active] = X
                for i in every[active[leaving]] if t < n_loops else every[active]:
                    self.used[i] = t
                active, live = active[~leaving], {name: tensor[~leaving] for name, tensor in live.items()}
            states.append(Y.clone())
        if n_loops == 0:
            self.used[self.n_cached :] = [0] * n_new
        self.last = Y[-1:]
        hidden = self.layers("coda", Y, 0, every)
        if config.loop_norm == "once":
            hidden = model.final_norm(hidden)
        return hidden, self.used[self.n_cached :], states

    def make_room(self, n_new, n_loops, dtype):
        for part, loops in self.kept.items():
            blocks = getattr(self.model, part)
            for layers in loops:
                for pair, more in zip(layers, empty(self.model.config, len(blocks), n_new, dtype), strict=True):
                    pair[:] = [torch.cat(both) for both in zip(pair, more, strict=True)]
            while len(loops) < (n_loops + 1 if part == "core" else 1):
                loops.append(empty(self.model.config, len(blocks), len(self.used), dtype))

    def layers(self, part, X, t, active):
        token, loops = torch.arange(len(self.used)), torch.tensor([self.loop_seen(j, t) for j in range(len(self.used))])
        for i, block in enumerate(getattr(self.model, part)):

            def seen(keys, values, i=i):
                return (torch.stack([layers[i][kind] for layers in self.kept[part]])[loops, token] for kind in (0, 1))

            X = layer(block, X, active, self.kept[part][t][i], seen)
        return X

    def loop_seen(self, j, t):
        """Which loop of token j a token at loop t sees: the last in the slot of t, or the last of all where that is empty."""
        if t == 0:
            return 0
        last = self.used[j] if j < self.n_cached else min(self.used[j], t)
        same = (s for s in range(last, 0, -1) if self.slot(s) == self.slot(t))
        return next(same, last)

    def slot(self, t):
        period = self.policy.period
        return {"per_loop": t, "last_only": 0, "modulo": t % period, "first_then_shared": min(t, 2)}[self.policy.kind]

    def crop(self, n):
        """Forget the last n tokens."""
        keep = len(self.used) - n
        self.used, self.n_cached, self.last = self.used[:keep], keep, None
        for loops in self.kept.values():
            for layers in loops:
                for pair in layers:
                    pair[:] = [x[:keep] for x in pair]


def decode_row(model, embeds, n_loops, rule, positions=None):
    """A whole row in one call: hidden states, loops as a tensor, states."""
    hidden, n_used, states = Row(model).extend(embeds, n_loops, rule, positions)
    return hidden, torch.tensor(n_used), states
