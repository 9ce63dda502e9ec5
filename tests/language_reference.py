"""`looped.lm.session`'s semantics written out token by token, with a Python loop for everything: the oracle of the exits.

Token i at loop t attends to its own keys and values of loop t and, of each token j before it, to those of loop min(t, u_j).
"""

import math

import torch


class Reference:
    """One row of a model without padding or batches. `stops(t, states, logits, gates)` says whether a token leaves after
    loop t; states are Y_0 .. Y_t, logits and gates those after loops 1 .. t. period: of the cache policy modulo."""

    def __init__(self, model, n_loops, stops=None, period=None):
        self.period = period
        self.lm, self.model, self.config = model, model.transformer, model.transformer.config
        self.n_loops, self.stops = n_loops, stops
        self.kv = {"prelude": [], "core": [], "coda": [], "check": []}  # per token: {loop: [(k, v) per layer]}
        self.used = []

    def run(self, ids):
        """Logits [T, V] of a row; self.used has the loops of each token."""
        return torch.stack([self.token(int(i), place) for place, i in enumerate(ids)])

    def token(self, token_id, place):
        model, config = self.model, self.config
        P = model.embedding.weight[token_id]
        if config.pos_when == "once":
            P = P + model.positions.weight[place]
        for part in self.kv.values():
            part.append({})
        P = self.layers("prelude", model.prelude, P, 0)
        Y = P if config.state_init == "embedding" else torch.full_like(P, float(config.state_init == "ones"))
        states, logits, gates, t = [Y], [], [], 0
        self.used.append(math.inf)
        while t < self.n_loops:
            t += 1
            X = {"add": Y + P, "mul": Y * P, "none": Y}[config.inject]
            if config.pos_when == "each_loop":
                X = X + model.positions.weight[place]
            Y = self.layers("core", model.core, X, t)
            if config.loop_norm == "each":
                Y = model.final_norm(Y)
            states.append(Y)
            if self.stops is not None:
                logits.append(self.head(self.close("check", Y, t)))
                if self.lm.exit_gate is not None:
                    gates.append(self.lm.exit_gate(Y))
                if self.stops(t, states, logits, gates):
                    break
        self.used[-1] = t
        return self.head(self.close("coda", Y, 0))

    def seen(self, t, u):
        """The loop in which a token at loop t sees one that runs u."""
        if t > u and self.period is not None:
            return next((s for s in range(u, 0, -1) if s % self.period == t % self.period), u)
        return min(t, u)

    def close(self, part, Y, t):
        Y = self.layers(part, self.model.coda, Y, t)
        return self.model.final_norm(Y) if self.config.loop_norm == "once" else Y

    def head(self, Y):
        return Y @ (self.model.embedding.weight if self.config.tie_readout else self.model.read_out.weight).T

    def layers(self, part, blocks, X, t):
        for layer, block in enumerate(blocks):
            q, k, v = block.attn.qkv(block.norm_1(X)).unflatten(-1, (3, self.config.n_heads, -1))
            self.kv[part][-1].setdefault(t, []).append((k, v))
            seen = [of[self.seen(t, u)][layer] for of, u in zip(self.kv[part], [*self.used, t], strict=False)]
            keys, values = (torch.stack([pair[i] for pair in seen]) for i in (0, 1))  # [places, H, head_dim]
            scores = torch.einsum("hd,phd->hp", q, keys) / math.sqrt(q.shape[-1])
            mixed = torch.einsum("hp,phd->hd", scores.softmax(-1), values)
            X = X + block.attn.proj(mixed.flatten())
            X = X + block.mlp(block.norm_2(X))
        return X


def change(states):
    return float((states[-1] - states[-2]).norm()), float(states[-1].norm())


def relative(tol):
    def stops(t, states, logits, gates):
        g, n = change(states)
        return g <= tol * n

    return stops


def contraction(tol):
    """Passes twice in a row; see docs/exits.md."""

    def passes(states):
        g, n = change(states)
        if g == 0:
            return True
        if len(states) < 3:
            return g <= 2e-15 * n
        rho = g / change(states[:-1])[0]
        return g <= tol * n and (g <= 2e-15 * n or (rho < 1 and max(g, g * rho / (1 - rho)) <= tol * n))

    def stops(t, states, logits, gates):
        return passes(states) and (change(states)[0] == 0 or (t > 1 and passes(states[:-1])))

    return stops


def entropy(tol):
    def of(logits):
        p = logits.softmax(-1)
        return float(-(p * p.log()).sum())

    return lambda t, states, logits, gates: t > 1 and abs(of(logits[-1]) - of(logits[-2])) <= tol


def kl(tol):
    def stops(t, states, logits, gates):
        if t < 2:
            return False
        p, q = logits[-1].log_softmax(-1), logits[-2].log_softmax(-1)
        return float((p.exp() * (p - q)).sum()) <= tol

    return stops


def argmax(patience):
    return lambda t, states, logits, gates: t >= patience and len({int(x.argmax()) for x in logits[-patience:]}) == 1


def gate(threshold):
    def stops(t, states, logits, gates):
        stay = 1.0
        for value in gates:
            stay *= 1 - float(value.sigmoid())
        return 1 - stay >= threshold

    return stops
