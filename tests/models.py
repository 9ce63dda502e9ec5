"""Small models for tests: random weights that are large enough to matter."""

import torch

import looped


def random_weights(model, std=0.3, seed=0, dtype=torch.float64):
    """N(0, std) in every linear map; norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            parameter.copy_(1 + 0.1 * noise if name.endswith("weight") and "norm" in name else std * noise)
    return model


def icl_model(std=0.3, seed=0, dtype=torch.float64, **changes):
    fields = dict(n_dims=3, n_points=8, d_model=16, n_heads=2, n_loops=6) | changes
    return random_weights(looped.LoopedTransformer(looped.icl_config(**fields)), std, seed, dtype)


def states_model(apply=None, d_model=1, **changes):
    """A model on raw states without norms or positions; zero weights unless `apply` sets them."""
    fields = dict(
        input_kind="states",
        readout="none",
        d_model=d_model,
        n_heads=1,
        norm_kind="none",
        loop_norm="none",
        pos_kind="none",
        n_loops=50,
    )
    model = looped.LoopedTransformer(looped.LoopedConfig(**(fields | changes))).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        if apply:
            apply(model)
    return model


def scalar_map(a, **changes):
    """One token of width 1 with Y <- a (Y + P): attention over one token is its value."""

    def weights(model):
        model.core[0].attn.qkv.weight[2] = 1.0
        model.core[0].attn.proj.weight.fill_(a - 1.0)

    return states_model(weights, **changes)
