"""Token-scope decoding in plain PyTorch, one row and one call after the other, with every loop of every token kept: the
definition that decode sessions are tested against."""

import torch

from looped.exits import ROUNDING_LEVEL, Step, Watch


def slot(policy, t):
    """The slot that loop t = 1, 2, ... writes."""
    return {"per_loop": t, "last_only": 0, "modulo": t % policy.period, "first_then_shared": min(t, 2)}[policy.kind]


class Row:
    """A row of tokens. `kept[part][layer][token][t]` is the pair of keys and values of loop t (0 outside the core)."""

    def __init__(self, model, policy, phi=ROUNDING_LEVEL["fp32"]):
        self.model, self.policy, self.phi = model, policy, phi
        self.kept = {part: [[] for _ in getattr(model, part)] for part in ("prelude", "core", "coda")}
        self.used = []
        self.last = None

    @torch.no_grad()
    def extend(self, embeds, n_loops, rule, positions=None, warm_start=False):
        """embeds [T, C]: (hidden [T, C], loops [T], states Y_0 .. Y_n)."""
        model, config, n_cached = self.model, self.model.config, len(self.used)
        T = len(embeds)
        if T == 0:
            return embeds, [], [embeds] * (n_loops + 1)
        place = torch.arange(n_cached, n_cached + T) if positions is None else positions
        self.used += [n_loops + 1] * T  # still going
        for layers in self.kept.values():
            for tokens in layers:
                tokens += [{} for _ in range(T)]
        P = embeds
        has_positions = config.pos_kind == "learned"
        if has_positions and config.pos_when == "once":
            P = P + model.positions.weight[place]
        P = self.layers("prelude", P, 0, range(T))
        Y = P if config.state_init == "embedding" else torch.full_like(P, float(config.state_init == "ones"))
        if warm_start and n_cached:
            Y = self.last[-1].expand_as(P)
        states, active = [Y], list(range(T))
        watch = Watch(rule)
        live = watch.start(torch.zeros(1, T, dtype=torch.float64))
        for t in range(1, n_loops + 1):
            X = model.inject(Y, P)
            if has_positions and config.pos_when == "each_loop":
                X = X + model.positions.weight[place]
            X = self.layers("core", X, t, active)
            F = model.final_norm(X) if config.loop_norm == "each" else X
            g, n = (torch.linalg.vector_norm(x, dim=1)[None] for x in (F - Y, F))
            step = Step(torch.tensor([t]), g, n, g, None, Y[None], F[None], None, self.phi, 1)
            leaves = watch.enough(live, step)[0] | ~torch.isfinite(g + n)[0]
            Y = torch.stack([F[i] if i in active else Y[i] for i in range(T)])
            states.append(Y)
            for i in active:
                if leaves[i] or t == n_loops:
                    self.used[n_cached + i] = t
            active = [i for i in active if not leaves[i]]
        if n_loops == 0:
            self.used[n_cached:] = [0] * T
        self.last = torch.cat([self.last, Y]) if self.last is not None else Y
        hidden = self.layers("coda", Y, 0, range(T))
        if config.loop_norm == "once":
            hidden = model.final_norm(hidden)
        return hidden, self.used[n_cached:], states

    def layers(self, part, X, t, active):
        n_cached = len(self.used) - len(X)
        for block, tokens in zip(getattr(self.model, part), self.kept[part], strict=True):
            q, k, v = block.attn.project(block.norm_1(X))
            for i in active:
                tokens[n_cached + i][t] = k[i], v[i]
            mixed = []
            for i in range(len(X)):
                seen = [tokens[j][self.loop_seen(j, t)] for j in range(n_cached + i)]
                seen.append((k[i], v[i]))
                keys, values = (torch.stack(x) for x in zip(*seen, strict=True))  # [n, H, D]
                p = torch.softmax(torch.einsum("hd,nhd->hn", q[i], keys) / q.shape[-1] ** 0.5, -1)
                mixed.append(torch.einsum("hn,nhd->hd", p, values).flatten())
            X = X + block.attn.proj(torch.stack(mixed))
            X = X + block.mlp(block.norm_2(X))
        return X

    def loop_seen(self, j, t):
        """Which loop of token j a token at loop t sees: the last in the slot of t, or the last of all where that is empty."""
        if t == 0:
            return 0
        n_cached_now = self.used[j] if self.used[j] <= t or self.done(j) else t
        same = [s for s in range(1, n_cached_now + 1) if slot(self.policy, s) == slot(self.policy, t)]
        return max(same, default=n_cached_now)

    def done(self, j):
        """Whether token j belongs to an earlier call."""
        return self.last is not None and j < len(self.last)

    def crop(self, n):
        keep = len(self.used) - n
        self.used, self.last = self.used[:keep], self.last[:keep]
        for layers in self.kept.values():
            for tokens in layers:
                del tokens[keep:]
