"""`looped::loop`, the loop as one operator of PyTorch: what `torch.compile` and `torch.export` see of a looped transformer.

    looped::loop(Tensor x, Tensor? lengths, Tensor[] weights, Tensor? state, str spec)
        -> (Tensor y, Tensor n_loops, Tensor status, Tensor residual, Tensor predictions)

x: padded prompts, as `LoopedTransformer.embed` takes them. lengths: int64 [B], or None where all T tokens are a prompt's own.
weights: `list(weights_of(model).values())`. state: Y_0 [B, T, C] of a model whose `state_init` is "given". spec: the model's
configuration and how to loop, as the JSON text that `encode` makes: a graph that holds the operator needs nothing beside it.

y [B, T, C] is the final state F; n_loops int64 [B], status int64 [B] (`looped.Status`) and residual float64 [B] are those of
`looped.LoopResult`; predictions is the read-out of y, or with "return_predictions" that after every loop, in a dimension 1 of
n_loops entries. The bits are those of `looped.solve`, but that under the rule `fixed` prompts whose state leaves the finite
numbers run all loops, as plain PyTorch runs them. Inference only: there is no gradient.

On a CPU this is the C++ engine. On a GPU it is the fused Triton kernels, or ordinary kernels in a CUDA graph where these cannot
run the model or a prompt, or else the eager backend; there a prompt whose state leaves the finite numbers keeps the state of
that loop under every rule: to look for such prompts, the host would have to wait for the device. A device joins with
`loop.register_kernel` and an entry in `looped.model.FUSED`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import torch
from torch import Tensor

from looped.accelerate import Anderson
from looped.backends import cpu, device, eager, graph, triton
from looped.config import LoopedConfig
from looped.exits import RULES, Exit, make_exit
from looped.loop import LoopResult, LoopSpec, Status
from looped.model import FUSED, LoopedTransformer
from looped.parts import Part, Run, by_length, run_parts
from looped.prompt_batch import checked_lengths
from looped.weights import weights_of

SCHEMA = (
    "(Tensor x, Tensor? lengths, Tensor[] weights, Tensor? state, str spec)"
    " -> (Tensor y, Tensor n_loops, Tensor status, Tensor residual, Tensor predictions)"
)

# The host reads the lengths, and looks at the device between graphs of its own, so torch.compile must not capture the operator
# in a graph; older versions of PyTorch have no word for it.
TAGS: dict[str, Any] = {"tags": torch.Tag.cudagraph_unsafe} if hasattr(torch.Tag, "cudagraph_unsafe") else {}

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def encode(
    config: LoopedConfig,
    *,
    n_loops: int,
    exit: Exit = None,
    on_stall: str = "ignore",
    accelerate: Anderson | str | None = None,
    return_predictions: bool = False,
) -> str:
    """The operator's `spec`; the parameters are those of `solve`, and so are the errors.

    Raises ValueError for a rule of your own, which no text can hold.
    """
    rule = make_exit(exit)
    if type(rule) not in RULES.values():
        raise ValueError(f"encode: {type(rule).__name__} is a rule of your own; a graph holds those of looped.exits alone")
    spec = LoopSpec.of(config, n_loops, rule, on_stall, accelerate, return_predictions)
    values = {
        "n_loops": spec.n_loops,
        "return_predictions": bool(return_predictions),
        "exit": {"rule": type(rule).__name__.lower()} | dataclasses.asdict(rule),
        "on_stall": on_stall,
        "anderson": spec.accelerate.depth if spec.accelerate else 0,
        "config": config.to_dict(),
    }
    return json.dumps(values)


@functools.lru_cache(maxsize=64)
def decode(spec: str) -> tuple[LoopedTransformer, LoopSpec]:
    """The inverse of `encode`, with the configuration as a model without weights. What the text leaves out has its default.

    Raises ValueError for another text.
    """
    try:
        values = json.loads(spec)
        rule = dict(values.get("exit", {"rule": "fixed"}))
        depth = values.get("anderson", 0)
        model = empty_model(json.dumps(values["config"]))
        how = LoopSpec.of(
            model.config,
            values["n_loops"],
            make_exit(rule.pop("rule"), **rule),
            values.get("on_stall", "ignore"),
            Anderson(depth) if depth else None,
            values.get("return_predictions", False),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        begin = spec if len(spec) <= 60 else f"{spec[:60]}..."
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"looped::loop: spec={begin!r} is not the JSON text that looped.op.encode makes of a model's config: {reason}"
        ) from error
    return model, how


@functools.lru_cache(maxsize=16)
def empty_model(config: str) -> LoopedTransformer:
    with torch.device("meta"):
        return LoopedTransformer(LoopedConfig.from_dict(json.loads(config)))


def with_weights(model: LoopedTransformer, weights: list[Tensor]) -> LoopedTransformer:
    """A model of the same configuration that holds these very tensors."""
    with torch.device("meta"):
        full = LoopedTransformer(model.config)
    full.load_state_dict(dict(zip(weights_of(model), weights, strict=True)), assign=True)
    return full


@torch.no_grad()
def run_on(
    model: LoopedTransformer, x: Tensor, lengths: Tensor | None, how: LoopSpec, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """All loops in plain PyTorch, whatever the numbers: the last state, and what is read."""
    read: list[Tensor] = []
    for Y in model.iterate(x, how.n_loops, lengths=lengths, state=state):
        if how.return_predictions:
            read.append(model.read(Y, lengths))
    return Y, torch.stack(read, dim=1) if how.return_predictions else model.read(Y, lengths)


@torch.library.custom_op("looped::loop", mutates_args=(), device_types="cpu", schema=SCHEMA, **TAGS)
def loop(x: Tensor, lengths: Tensor | None, weights: list[Tensor], state: Tensor | None, spec: str) -> Outputs:
    """The C++ engine where it is there and serves the dtype, else the eager backend."""
    model, how, named, x, lengths = _arguments(x, lengths, weights, spec)
    if cpu.cannot_run(weights[0], how) or not x.shape[1]:
        result = eager.run(with_weights(model, weights), x, lengths, how, state)
    else:
        result = cpu.run(model, x, lengths, how, state, weights=named)
    y, n_loops, status, residual, read = _outputs(result, how)
    wild = status == Status.NONFINITE
    if how.rule.is_fixed and bool(wild.any()):
        full, own = with_weights(model, weights), None if lengths is None else lengths[wild]
        y[wild], read[wild] = run_on(full, x[wild], own, how, None if state is None else state[wild])
    return y, n_loops, status, residual, read.clone() if read is y else read


@loop.register_kernel("cuda")
def loop_on_gpu(x: Tensor, lengths: Tensor | None, weights: list[Tensor], state: Tensor | None, spec: str) -> Outputs:
    """The fused kernels for prompts that they run, else a CUDA graph of ordinary ones, else the eager backend."""
    model, how, named, x, lengths = _arguments(x, lengths, weights, spec)
    own_lengths = [x.shape[1]] * len(x) if lengths is None else lengths.tolist()
    parts = []
    if not x.shape[1] or triton.cannot_run(model.config, named, how):
        parts.append(Part(range(len(x)), _without_kernels(model, how, weights, named, x.shape[1])))
    else:
        short, long = by_length(own_lengths, lambda length: triton.too_long(length) is None)
        if short or not long:
            parts.append(Part(short, functools.partial(triton.run, model, spec=how, weights=named)))
        if long:
            parts.append(Part(long, _without_kernels(model, how, weights, named, x.shape[1])))
    result = run_parts(model.config, parts, x, lengths, own_lengths, state, None)
    y, n_loops, status, residual, read = _outputs(result, how)
    return y, n_loops, status, residual, read.clone() if read is y else read


def _without_kernels(
    model: LoopedTransformer, how: LoopSpec, weights: list[Tensor], named: dict[str, Tensor], n_tokens: int
) -> Run:
    full = with_weights(model, weights)
    if n_tokens and graph.why_not(full, how) is None:
        return functools.partial(graph.run, full, spec=how, weights=named)
    return functools.partial(eager.run, full, spec=how)


def _arguments(
    x: Tensor, lengths: Tensor | None, weights: list[Tensor], spec: str
) -> tuple[LoopedTransformer, LoopSpec, dict[str, Tensor], Tensor, Tensor | None]:
    model, how = decode(spec)
    names = weights_of(model)
    if len(weights) != len(names):
        raise ValueError(f"looped::loop: spec describes a model of {len(names)} weights, got {len(weights)}")
    x = x.long() if model.config.input_kind == "tokens" else x
    if lengths is not None:
        lengths = checked_lengths(lengths, len(x), x.shape[1], "looped::loop")
    return model, how, dict(zip(names, weights, strict=True)), x, lengths


def _outputs(result: LoopResult, how: LoopSpec) -> Outputs:
    if result.interrupted:
        raise KeyboardInterrupt
    y, read = result.y, result.predictions if how.return_predictions else result.prediction
    assert isinstance(y, Tensor)
    assert isinstance(read, Tensor)
    return y, result.n_loops, result.status, result.residual, read


def _no_gradient(context: Any, *gradients: Tensor | None) -> None:
    raise RuntimeError(
        'looped::loop is for inference and has no gradient; for one, run model(..., backend="eager"), which is plain PyTorch'
    )


loop.register_autograd(_no_gradient)


@loop.register_fake
def _(x: Tensor, lengths: Tensor | None, weights: list[Tensor], state: Tensor | None, spec: str) -> Outputs:
    model, how = decode(spec)
    n_prompts, n_tokens = x.shape[:2]
    y = weights[0].new_empty(n_prompts, n_tokens, model.config.d_model)
    counts = torch.empty(n_prompts, dtype=torch.int64, device=x.device)
    shape = model.config.prediction_shape(n_prompts, n_tokens)
    if how.return_predictions:
        shape = (shape[0], how.n_loops, *shape[1:])
    residual = torch.empty(n_prompts, dtype=torch.float64, device=x.device)
    return y, counts, torch.empty_like(counts), residual, y.new_empty(shape)


@loop.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, lengths: Tensor | None, weights: list[Tensor], state: Tensor | None, spec: str
) -> tuple[Outputs, tuple[int, ...]]:
    def of(i: int, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        return tensor if tensor is None or dim is None else tensor.select(dim, i)

    results = []
    for i in range(info.batch_size):
        own = [of(i, weight, dim) for weight, dim in zip(weights, in_dims[2], strict=True)]
        results.append(loop(of(i, x, in_dims[0]), of(i, lengths, in_dims[1]), own, of(i, state, in_dims[3]), spec))
    y, n_loops, status, residual, predictions = (torch.stack(parts) for parts in zip(*results, strict=True))
    return (y, n_loops, status, residual, predictions), (0,) * 5


FUSED["cpu"] = tuple(cpu.DTYPES) if cpu.is_there() else ()
FUSED["cuda"] = device.DTYPES if device.is_there() else ()
