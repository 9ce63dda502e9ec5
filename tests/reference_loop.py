"""docs/exits.md once more, for one prompt, in plain Python floats: the oracle of the batched loop."""

import math

import numpy as np
import torch

PHI = 2e-15


@torch.no_grad()
def reference(model, prompt, *, n_loops, rule="fixed", tol=0.0, patience=None, check_every=1, min_loops=0, window=16,
              on_stall="ignore", depth=0):  # fmt: skip
    """Returns F, used, status name, g / n. `prompt` is one prompt with a batch dimension of 1, in float64."""
    P = model.embed(prompt)
    Y = model.initial_state(P).numpy().copy()
    shape = Y.shape
    needed = {"contraction": 2, "readout": 3}.get(rule, 1) if patience is None else patience
    F, used, damped, passes, s_p, t_p, best, stuck = Y, 0, False, 0, None, 0, math.inf, 0
    p_before, history, last, stalled, residual = None, [], None, False, math.nan
    for t in range(1, n_loops + 1):
        F = model.step(torch.from_numpy(Y.reshape(shape)), P).numpy()
        r = (F - Y).ravel()
        g, n, used = float(np.sqrt((r * r).sum())), float(np.sqrt((F * F).sum())), t
        residual = 0.0 if g == 0 else g / n if n else math.inf
        if not (math.isfinite(g) and math.isfinite(n)):
            return F, used, "NONFINITE", residual

        Y_next = F
        if depth:
            if last is not None and g > last[2]:
                history, s_p = [], None
            elif last is not None:
                history = [(r - last[0], (F - last[1]).ravel()), *history][:depth]
            last = (r, F, g)
            if history and not damped and passes == 0:
                dR, dF = np.stack([h[0] for h in history], 1), np.stack([h[1] for h in history], 1)
                normal = dR.T @ dR
                gamma = np.linalg.solve(normal + 1e-8 * np.trace(normal) * np.eye(len(history)), dR.T @ r)
                Y_next = (F.ravel() - dF @ gamma).reshape(shape)
        if damped:
            Y_next = Y + 0.5 * (F - Y)
        s = float(np.sqrt(((Y_next - Y) ** 2).sum()))

        ends = False
        if t % check_every == 0:
            rho = (s / s_p) ** (1 / (t - t_p)) if s_p else math.nan
            s_p, t_p = s, t
            p = model.read(torch.from_numpy(F.reshape(shape))).numpy() if rule == "readout" else None
            if rule == "fixed" or (tol == 0 and rule != "exact"):
                passed = False
            elif rule == "exact":
                passed = np.array_equal(F.view(np.int64), Y.reshape(shape).view(np.int64))
            elif rule == "absolute":
                passed = g <= tol
            elif rule == "relative":
                passed = g <= tol * n
            elif rule == "contraction":
                far = max(g, s * rho / (1 - rho)) if rho < 1 else math.inf
                passed = g == 0 or (g <= tol * n and (g <= PHI * n or far <= tol * n))
            elif rule == "readout":
                passed = g == 0
                if p_before is not None:
                    passed = passed or np.linalg.norm(p - p_before) <= tol * np.linalg.norm(p)
            p_before = p
            passes = passes + 1 if passed else 0
            ends = passed and (passes >= needed or g == 0) and t >= min_loops
            if rule not in ("fixed", "exact") and tol:
                best, stuck = (g, 0) if g < 0.9 * best else (best, stuck + 1)
                stuck = 0 if passed else stuck
                stalled = stuck >= window and t >= min_loops
            if passes and depth and not damped:
                s_p = g
        if passes and depth and not damped:
            Y_next = F
        if ends:
            return F, used, "CONVERGED", residual
        acts = stalled and t % check_every == 0
        if acts and (on_stall == "exit" or (on_stall == "damp" and damped)):
            return F, used, "STALLED", residual
        if acts and on_stall == "damp":
            damped, passes, s_p, best, stuck = True, 0, None, math.inf, 0
        Y = Y_next
    return F, used, "STALLED" if stalled else "MAX_LOOPS", residual
