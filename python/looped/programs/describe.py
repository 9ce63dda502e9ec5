"""What a machine is, in numbers read off its weights, beside the paper's."""

from __future__ import annotations

from typing import Any

import torch

from looped.programs.addresses import least_lambda
from looped.programs.blocks import MatrixProduct, SigmoidSum
from looped.programs.fleq import LEAST_LAMBDA, FleqMachine
from looped.programs.subleq import CHUNK_BITS, SubleqMachine

# Giannou et al. (2023), Table 1 and Theorem 4: layers and heads.
PAPER = {"subleq": (9, "2"), "calculator": (12, "m"), "algebra and learning": (13, "1")}


def used_sizes(machine: SubleqMachine | FleqMachine) -> list[dict[str, Any]]:
    """Of every layer: its name, and the heads and hidden units whose weights are not all zero."""
    config = machine.model.config
    assert config.head_dim is not None
    rows = []
    blocks: Any = machine.model.core
    for layer, block in zip(machine.layers, blocks, strict=True):
        out, down = block.attn.proj.weight, block.mlp.proj.weight
        heads = out.reshape(config.d_model, config.n_heads, config.head_dim).abs().amax(dim=(0, 2)) > 0
        rows.append({"layer": layer.name, "heads": int(heads.sum()), "hidden": int((down.abs().amax(dim=0) > 0).sum())})
    return rows


def describe(machine: SubleqMachine | FleqMachine) -> dict[str, Any]:
    """Plain JSON values: sizes, lambda and its bound, limits; of functions, where they hold and how exactly."""
    config, layers = machine.model.config, used_sizes(machine)
    weights = sum(parameter.numel() for parameter in machine.model.parameters())
    facts: dict[str, Any] = {
        "kind": machine.kind,
        "dtype": str(machine.dtype).removeprefix("torch."),
        "layers": len(layers),
        "heads": max(layer["heads"] for layer in layers),
        "head_dim": config.head_dim,
        "width": config.d_model,
        "hidden": config.d_ff,
        "weights": weights,
        "nonzero_weights": sum(int((parameter != 0).sum()) for parameter in machine.model.parameters()),
        "most_tokens": 2**machine.address_bits,
        "lambda": machine.lam,
        "per_layer": layers,
    }
    if isinstance(machine, SubleqMachine):
        chunks = 3 if len(layers) == 9 else 1
        facts["least_lambda"] = least_lambda(machine.address_bits)
        facts["word_bits"] = machine.n_bits
        limits = {dtype: chunks * bits for dtype, bits in CHUNK_BITS.items()}
        facts["most_word_bits"] = {str(dtype).removeprefix("torch."): min(63, bits) for dtype, bits in limits.items()}
        facts["paper"] = PAPER["subleq"]
        return facts
    facts["least_lambda"] = LEAST_LAMBDA[machine.dtype]
    facts["matrix"] = machine.width
    facts["functions"] = list(machine.blocks.names)
    eps = torch.finfo(machine.dtype).eps
    facts["bounds"] = {
        name: {
            "of": block.of,
            "valid": list(block.valid),
            "error_at_1": block.bound(1.0, machine.width, eps),
            "error_at_most": block.bound(block.valid[1], machine.width, eps),
        }
        for name, block in machine.bounds().items()
    }
    product: MatrixProduct = machine.product
    facts["product"] = {"form": product.form, "kappa": product.kappa, "sink": product.sink, "largest": product.largest}
    sums: dict[str, SigmoidSum] = {"inv": machine.blocks.inv, "sqrt": machine.blocks.sqrt}
    for name, block in sums.items():
        if name in machine.blocks.names:
            facts[name] = {"terms": block.m, "range": [block.lo, block.hi], "relative_error": block.error}
    facts["paper"] = PAPER["calculator" if {"inv", "sqrt"} & set(machine.blocks.names) else "algebra and learning"]
    return facts


def description_tables(facts: dict[str, Any]) -> list[Any]:
    """Rich tables of `describe`."""
    from rich.table import Table

    whole = Table(title=f"{facts['kind'].upper()} machine", show_header=False)
    skipped = {"per_layer", "paper", "kind", "bounds"}
    for name, value in facts.items():
        if name not in skipped:
            text = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
            whole.add_row(name.replace("_", " "), f"{text:.4g}" if isinstance(text, float) else str(text))
    whole.add_row("in the paper", f"{facts['paper'][0]} layers, {facts['paper'][1]} heads")
    layers = Table("layer", "heads", "hidden units")
    for layer in facts["per_layer"]:
        layers.add_row(layer["layer"], str(layer["heads"] or "-"), str(layer["hidden"]))
    if "bounds" not in facts:
        return [whole, layers]
    bounds = Table("function", "of", "from", "to", "off by at most, at 1", "and at the largest", title="numbers below 1024")
    for name, block in facts["bounds"].items():
        (least, most), errors = block["valid"], (block["error_at_1"], block["error_at_most"])
        bounds.add_row(name, block["of"], f"{least:g}", f"{most:g}", *(f"{error:.1e}" for error in errors))
    return [whole, layers, bounds]
