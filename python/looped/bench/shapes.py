"""Models of a named shape with random weights, and the operations that one loop of a model counts."""

from __future__ import annotations

import os
import re

import torch

from looped.config import icl_config
from looped.model import LoopedTransformer

EXAMPLE = "C256H8T82"


def shape_sizes(name: str) -> tuple[int, int, int]:
    """Width C, heads H and tokens T of a name like ``C256H8T82``. Raises ValueError for another form."""
    found = re.fullmatch(r"C(\d+)H(\d+)T(\d+)", name.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"shape {name!r} is not of the form {EXAMPLE}: width C, heads H, tokens T")
    C, H, T = (int(number) for number in found.groups())
    if min(C, H, T) < 1 or C % H:
        raise ValueError(f"shape {name!r}: C, H and T must be at least 1 and C must divide by H")
    return C, H, T


def random_model(name: str, *, n_loops: int = 20, n_dims: int = 20, seed: int = 0) -> LoopedTransformer:
    """The looped in-context learner of a named shape, float32.

    Weights are N(0, 0.49 / n_in), not the small ones that training starts from: every part of the block moves the state by as
    much as the others, so that an error in any of them shows, and 20 loops still end within 1e-6 of float64. Raises ValueError
    for more weights than this machine's memory holds.
    """
    C, H, T = shape_sizes(name)
    most = _most_numbers() // 2  # as they are drawn, the normal numbers of a weight stand beside it
    if C * (12 * C + n_dims + T) > most:
        raise ValueError(f"shape {name!r} has more weights than the {most:.2g} that fit into this machine; take smaller sizes")
    generator = torch.Generator().manual_seed(seed)
    model = LoopedTransformer(icl_config(n_dims=n_dims, n_points=(T + 1) // 2, d_model=C, n_heads=H, n_loops=n_loops))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key and key.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.dim() == 2 and "positions" not in key:
                parameter.copy_(noise * 0.7 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.1 * noise)
    return model.eval()


def _most_numbers() -> int:
    """float32 numbers that the machine's memory holds, or 64 GiB where it does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):
        return 2**34


def operations(model: LoopedTransformer, n_tokens: int) -> int:
    """Floating-point operations of one loop over one prompt: products and attention, elementwise work not counted.

    For the looped in-context learner 24 C^2 T + 2 T (T + 1) C with a causal mask, and 24 C^2 T + 4 T^2 C with a full one.
    """
    config, T = model.config, n_tokens
    weights = sum(p.numel() for key, p in model.core.named_parameters() if p.dim() == 2)
    pairs = T * (T + 1) // 2 if config.mask_kind == "causal" else T * T
    return 2 * T * weights + 4 * pairs * config.attention_width * config.n_core
