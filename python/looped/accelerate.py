"""Anderson acceleration of the loop (Walker and Ni, 2011), per prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from looped.exits import Memory
from looped.integers import integer_of

RIDGE = 1e-8  # of the trace of the normal equations


@dataclass(frozen=True)
class Anderson:
    """Mix the last `depth` (1 to 3) steps into the next state.

    The same fixed points as plain iteration, usually in fewer loops; it changes the way there. The safeguard: when the
    residual g rises, the history is dropped and the plain step is taken.
    """

    depth: int = 3

    def __post_init__(self) -> None:
        depth = integer_of(self.depth)
        if depth not in (1, 2, 3):
            raise ValueError(f"Anderson: depth={self.depth!r} is not one of 1, 2, 3")
        object.__setattr__(self, "depth", depth)  # it may have been NumPy's

    def start(self, y: Tensor) -> Memory:
        """An empty history for states y [n, T, C]."""
        n, size = y.shape[0], y[0].numel() if len(y) else 0
        columns = y.new_zeros(n, self.depth, size)
        return {
            "aa.d_residual": columns,
            "aa.d_image": columns.clone(),
            "aa.residual": y.new_zeros(n, size),
            "aa.image": y.new_zeros(n, size),
            "aa.g": torch.zeros(n, dtype=torch.float64, device=y.device),
            "aa.n_seen": torch.zeros(n, dtype=torch.int64, device=y.device),
        }

    def step(self, live: Memory, Y: Tensor, F: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The next state Y' [n, T, C], and which prompts dropped their history, bool [n].

        Solves min over gamma of ||r - dR gamma|| by normal equations in float64; Y' = F - dF gamma. Columns that are not
        filled yet are zero and get no weight.
        """
        image, residual = F.flatten(1), (F - Y).flatten(1)
        rose = (live["aa.n_seen"] > 0) & (g > live["aa.g"])
        # A prompt that has left the finite numbers is stopped by the caller; without columns its system is regular.
        seen = (live["aa.n_seen"] > 0) & ~rose & torch.isfinite(g)
        for name, now in (("aa.d_residual", residual - live["aa.residual"]), ("aa.d_image", image - live["aa.image"])):
            columns = torch.cat([now[:, None], live[name][:, :-1]], dim=1)
            live[name] = columns.masked_fill(~seen[:, None, None], 0)
        live["aa.residual"], live["aa.image"], live["aa.g"] = residual, image, g
        live["aa.n_seen"] = live["aa.n_seen"] + 1
        # The scale of r cancels in gamma; without it, squares of small residuals would underflow.
        scale = torch.where((g > 0) & torch.isfinite(g), 1 / g, 1.0)[:, None]
        dR = live["aa.d_residual"].to(torch.float64) * scale[..., None]
        normal = dR @ dR.mT  # [n, m, m]
        trace = normal.diagonal(dim1=1, dim2=2).sum(-1)
        ridge = torch.where(trace > 0, RIDGE * trace, 1.0)
        normal = normal + ridge[:, None, None] * torch.eye(self.depth, dtype=normal.dtype, device=normal.device)
        gamma = torch.linalg.solve_ex(normal, dR @ (residual.to(torch.float64) * scale)[..., None])[0]  # [n, m, 1]
        gamma = torch.where(gamma.isfinite().all(dim=1, keepdim=True), gamma, 0.0)  # a plain step
        mixed = (image.to(torch.float64) - (live["aa.d_image"].mT.to(torch.float64) @ gamma).squeeze(-1)).to(F.dtype)
        return mixed.view_as(F), rose


def make_acceleration(accelerate: Anderson | str | None) -> Anderson | None:
    """``"anderson"`` or an `Anderson`, or None for plain iteration."""
    if accelerate is None or isinstance(accelerate, Anderson):
        return accelerate
    if accelerate == "anderson":
        return Anderson()
    raise ValueError(f'solve: accelerate={accelerate!r} is not one of None, "anderson", Anderson(depth)')
