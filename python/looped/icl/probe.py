"""Probing: what the state holds of X'y and of the least-squares weights after each loop or layer (Yang et al., 2024, 5).

A probe pools the tokens of a prompt with learned weights and passes the result through two layers (Alain and Bengio, 2016;
Akyurek et al., 2022):

    alpha = softmax(s);  z = sum_t alpha_t Y_t;  W2' relu(W1' z + b1) + b2

with its own s, W1, b1, W2, b2 for every stage (loop or layer) and every number of examples; it sees these examples' tokens
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from looped.icl.prompts import interleave
from looped.model import LoopedTransformer

HIDDEN = 64
TARGETS = ("xty", "ols")


class Sample(NamedTuple):
    """states float32 [S, B, T, C] of B prompts after S stages; targets float32 [P, K, B, d]: P of them at K numbers of
    examples."""

    states: Tensor
    targets: Tensor


@torch.no_grad()
def stages(model: LoopedTransformer, prompts: Tensor, n_loops: int) -> Tensor:
    """The residual stream after every layer of every loop, before the final norm: [n_loops * n_core, B, T, C]."""
    kept: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, output: kept.append(output)) for block in model.core]
    try:
        for _ in model.iterate(prompts, n_loops):
            pass
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(kept)


def targets_of(xs: Tensor, ys: Tensor, n_examples: Sequence[int]) -> Tensor:
    """[2, K, B, d], by `TARGETS`: X'y / k, and the least-squares w of least norm, of the first k pairs for every k."""
    found = []
    for k in n_examples:
        X, y = xs[:, :k].double(), ys[:, :k].double()
        xty = (X.mT @ y[..., None]).squeeze(2) / k
        ols = (torch.linalg.pinv(X, rtol=1e-5) @ y[..., None]).squeeze(2)
        found.append(torch.stack([xty, ols]))
    return torch.stack(found, dim=1).float()


def sample_states(model: LoopedTransformer, xs: Tensor, ys: Tensor, *, n_loops: int, n_examples: Sequence[int]) -> Sample:
    """States and targets of prompts xs [B, n, d], ys [B, n]; n_examples at most n."""
    if not n_examples or not 1 <= min(n_examples) <= max(n_examples) <= ys.shape[1]:
        raise ValueError(f"sample_states: n_examples={list(n_examples)} must lie in 1 .. {ys.shape[1]}, the pairs of a prompt")
    n_points = max(n_examples)
    weight = next(model.parameters())
    prompts = interleave(xs[:, :n_points], ys[:, :n_points], keep_last_y=True).to(weight)
    return Sample(stages(model, prompts, n_loops), targets_of(xs, ys, n_examples).to(weight.device))


class Probes(nn.Module):
    """Independent probes for P targets, S stages and K numbers of examples, trained side by side."""

    def __init__(self, n_targets: int, n_stages: int, n_examples: Sequence[int], width: int, n_dims: int) -> None:
        super().__init__()
        many = (n_targets, n_stages, len(n_examples))
        self.n_examples = tuple(n_examples)
        self.pooling = nn.Parameter(torch.zeros(*many, 2 * max(n_examples)))
        own = torch.arange(2 * max(n_examples)) < 2 * torch.tensor(self.n_examples)[:, None]
        self.register_buffer("outside", ~own)  # [K, T]
        self.W1, self.b1 = self._linear(many, width, HIDDEN)
        self.W2, self.b2 = self._linear(many, HIDDEN, n_dims)

    @staticmethod
    def _linear(many: tuple[int, ...], n_in: int, n_out: int) -> tuple[nn.Parameter, nn.Parameter]:
        """PyTorch's start of a linear map."""
        bound = 1 / math.sqrt(n_in)
        weight, bias = torch.empty(*many, n_in, n_out), torch.empty(*many, 1, n_out)
        return nn.Parameter(weight.uniform_(-bound, bound)), nn.Parameter(bias.uniform_(-bound, bound))

    def forward(self, states: Tensor) -> Tensor:
        """states [S, B, T, C] -> [P, S, K, B, d]."""
        outside: Tensor = self.get_buffer("outside")
        alpha = self.pooling.masked_fill(outside, -math.inf).softmax(dim=-1)
        z = torch.einsum("pskt,sbtc->pskbc", alpha, states)
        return torch.relu(z @ self.W1 + self.b1) @ self.W2 + self.b2

    def errors(self, sample: Sample) -> Tensor:
        """Mean squared error over prompts and dimensions, [P, S, K]: the squared distance divided by d."""
        return (self(sample.states) - sample.targets[:, None]).square().mean(dim=(3, 4))


def fit_probes(
    draw: Callable[[torch.Generator], Sample],
    n_examples: Sequence[int],
    *,
    n_steps: int,
    lr: float = 1e-3,
    seed: int = 0,
    progress: bool = False,
) -> Probes:
    """Train probes by Adam on a fresh sample each step.

    draw: a sample from a CPU generator, of the same shapes each time. Probes do not share a parameter, so the sum of their
    errors trains each on its own.
    """
    generator = torch.Generator().manual_seed(seed)
    sample = draw(generator)
    n_targets, n_stages = len(sample.targets), len(sample.states)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed those of GPUs too
        probes = Probes(n_targets, n_stages, n_examples, sample.states.shape[3], sample.targets.shape[3])
    probes.to(sample.states.device)
    optimizer = torch.optim.Adam(probes.parameters(), lr=lr)
    for _ in tqdm(range(n_steps), desc="probing", disable=not progress, leave=False, dynamic_ncols=True):
        optimizer.zero_grad()
        probes.errors(sample).sum().backward()
        optimizer.step()
        sample = draw(generator)
    return probes
