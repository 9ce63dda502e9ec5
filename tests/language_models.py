"""Small language models for tests, and GPT-2 of transformers with the same weights. Weights N(0, 0.3), which matter."""

import torch
from models import random_weights
from transformers import GPT2Config, GPT2LMHeadModel

from looped.lm import LoopedGPT2, LoopedGPT2Config

SIZES = {  # vocabulary, positions, width, heads, layers
    "small": (61, 32, 32, 4, 2),
    "one layer": (61, 32, 32, 4, 1),
    "odd": (113, 40, 36, 3, 3),
}


def gpt2(size="small", seed=0, dtype=torch.float32, std=0.3, **changes):
    """GPT-2 of transformers."""
    vocab_size, n_positions, d_model, n_heads, n_layers = SIZES[size]
    fields = dict(vocab_size=vocab_size, n_positions=n_positions, n_embd=d_model, n_head=n_heads, n_layer=n_layers)
    fields |= dict(bos_token_id=None, eos_token_id=None)
    return varied(random_weights(GPT2LMHeadModel(GPT2Config(**(fields | changes))), std, seed, dtype)).eval()


def pair(size="small", seed=0, **changes):
    """GPT-2, and the looped model made from it."""
    theirs = gpt2(size, seed, **changes)
    return theirs, LoopedGPT2.from_gpt2(theirs)


def looped_lm(size="small", seed=0, std=0.3, dtype=torch.float32, **changes):
    """A model that loops one layer and injects its tokens, unless changes say otherwise."""
    vocab_size, n_positions, d_model, n_heads, _ = SIZES[size]
    fields = dict(vocab_size=vocab_size, n_positions=n_positions, d_model=d_model, n_heads=n_heads, n_core=1, n_loops=4)
    fields |= dict(inject="add", state_init="zeros", loop_norm="each", pos_when="each_loop")
    return varied(random_weights(LoopedGPT2(LoopedGPT2Config(**(fields | changes))), std, seed, dtype)).eval()


@torch.no_grad()
def varied(model):
    """Small biases and large positions, so that greedy decoding does not say one token for ever."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.mul_(0.1)
        elif "wpe" in name or "positions" in name:
            parameter.mul_(2)
    return model


def contracting_lm(**changes):
    """A model whose states come to rest, token by token at different loops."""
    model = looped_lm(**({"n_loops": 30, "dtype": torch.float64} | changes))
    with torch.no_grad():
        for block in model.transformer.core:
            block.attn.proj.weight.mul_(0.3)
            block.mlp.proj.weight.mul_(0.3)
            if block.mlp.proj.bias is not None:
                block.mlp.proj.bias.mul_(0.3)
        model.transformer.embedding.weight.mul_(3)
    return model


def prompts(n_rows=2, n_tokens=5, vocab_size=61, seed=0):
    return torch.randint(1, vocab_size, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(rows, pad=0):
    """ids and attention mask [B, T] of lists of ids."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
