"""The fused Triton kernels as a backend: one launch runs every loop of every prompt on the GPU.

Its memory has the eager backend's names, so that one `LoopState` serves both. Arithmetic follows the parameters: bfloat16 ones
give "bf16"; float32 ones what `torch.set_float32_matmul_precision` asks for: "highest" bf16x3 (about float32 in accuracy),
"high" tf32, "medium" bf16. The residual stream, norms, softmax and all sums are float32 in each.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from looped.backends import device, graph
from looped.backends.device import (
    after_every_loop,
    groups_of,
    is_interpreted,
    kernels,
    memory_of,
    remembered,
    stop_of,
    why_not_spec,
)
from looped.config import LoopedConfig
from looped.exits import Readout
from looped.loop import LoopResult, LoopSpec, LoopState, Status, not_begun
from looped.model import LoopedTransformer, clear_padding, own_tokens
from looped.weights import weights_of

PRECISION_OF_SETTING = {"highest": "bf16x3", "high": "tf32", "medium": "bf16"}
KEPT = 4  # packed copies under one first weight

Weights = Mapping[str, Tensor]

_packed: Any = WeakTensorKeyDictionary()  # the first weight: {(config, precision): (marks, parts)}; goes with that weight
_lock = threading.Lock()


def precision_of(weight: Tensor) -> str | None:
    """The arithmetic for weights like this one, or None where there is none."""
    if weight.dtype == torch.bfloat16:
        return "bf16"
    return PRECISION_OF_SETTING[torch.get_float32_matmul_precision()] if weight.dtype == torch.float32 else None


def why_not(model: LoopedTransformer, spec: LoopSpec | None = None) -> str | None:
    """Why this backend cannot run the model this way, and None where it can."""
    return cannot_run(model.config, weights_of(model), spec) or model.why_not_as_configured()


def cannot_run(config: LoopedConfig, weights: Weights, spec: LoopSpec | None = None) -> str | None:
    """`why_not` of a model of this configuration that holds these weights."""
    weight = next(iter(weights.values()))
    if not device.is_on_gpu(weight) and not is_interpreted():
        return f"the Triton kernels run on a GPU and the model is on {weight.device}"
    launch = kernels()
    if isinstance(launch, str):
        return launch
    precision = precision_of(weight)
    if precision is None:
        return f"the Triton kernels compute in float32 or bfloat16 and the model is {weight.dtype}"
    target = launch.target_of(weight.device)
    too_old: str | None = launch.why_not_compiled(target)
    if too_old:
        return too_old
    if launch.choose(block_of(config, weights), precision, target) is None:
        rows = [row for row in launch.LAUNCHES if target in row.targets and row.precision == precision]
        if not rows:
            return f"the Triton kernels have no {precision} launch for {target} ({weight.device})"
        width = launch.padded(config.d_model)
        heads = [row.widest_head for row in rows if row.width == width]
        if heads:
            limit = f"the Triton kernels on {target} take heads of up to {max(heads)} lanes in {precision} at width {width}"
            return f"{limit} and the model's have {config.head_dim}"
        reason = launch.why_not_offered(width, precision, target)
        limit = (
            f"the Triton kernels on {target} take widths up to {max(row.width for row in rows)} in {precision} and the model is"
        )
        return f"{limit} {config.d_model} wide" + (f": {reason}" if reason else "")
    return None if spec is None else _why_not_spec(config, spec)


def _why_not_spec(config: LoopedConfig, spec: LoopSpec) -> str | None:
    if isinstance(spec.rule, Readout) and (config.readout != "scalar" or config.n_coda):
        return "the Triton kernels read scalars from the state, so the readout rule needs a scalar read-out and no coda"
    return why_not_spec(spec)


def too_long(n_tokens: int) -> str | None:
    """Why prompts of this length do not run here; None where they do."""
    most = kernels().MOST_TOKENS
    return f"the Triton kernels take prompts of up to {most} tokens and one has {n_tokens}" if n_tokens > most else None


def why_not_for_few(model: LoopedTransformer, lengths: list[int]) -> str | None:
    """Why prompts of these lengths are too few for the fused kernels, where a CUDA graph should be faster; else None."""
    weights = weights_of(model)
    first, block = next(iter(weights.values())), block_of(model.config, weights)
    row = kernels().choose(block, precision_of(first), kernels().target_of(first.device))
    processors = torch.cuda.get_device_properties(first.device).multi_processor_count
    return graph.why_better(block, row, lengths, processors)


def describe() -> str:
    """Whether it works in this installation, on which device and to which widths; else why not."""
    launch = kernels()
    if isinstance(launch, str):
        return launch
    if is_interpreted():
        return "works (in Triton's interpreter)"
    if not torch.cuda.is_available():
        return "Triton is here, but no GPU is"
    target = launch.target_of(torch.device("cuda"))
    widths: dict[str, int] = {}
    for row in launch.LAUNCHES:
        if target in row.targets:
            widths[row.precision] = max(row.width, widths.get(row.precision, 0))
    too_old: str | None = launch.why_not_compiled(target)
    if widths and too_old:
        return too_old
    if not widths:
        return f"no launch for {torch.cuda.get_device_name()} ({target})"
    return f"works ({torch.cuda.get_device_name()}, {target}); widths up to " + ", ".join(
        f"{widths[precision]} in {precision}" for precision in ("bf16", "bf16x3", "tf32") if precision in widths
    )


# The model as the kernels take it --------------------------------------------------------------------------------------


def block_of(config: LoopedConfig, weights: Weights, part: str = "core") -> Any:
    """The looped part of a model as `loopkernels` takes it; or its prelude or coda, as a loop of one pass."""
    launch = kernels()

    def pair(name: str) -> tuple[Tensor | None, Tensor | None]:
        return weights.get(f"{name}.weight"), weights.get(f"{name}.bias")

    n_layers = {"prelude": config.n_prelude, "core": config.n_core, "coda": config.n_coda}[part]
    names = ("norm_1", "attn.qkv", "attn.proj", "norm_2", "mlp.fc", "mlp.proj")
    layers = tuple(launch.Layer(*(pair(f"{part}.{i}.{name}") for name in names)) for i in range(n_layers))
    sizes = dict(layers=layers, n_heads=config.n_heads, head_dim=config.head_dim, eps=config.norm_eps, mask=config.mask_kind)
    sizes |= dict(norm=config.norm_kind, activation=config.activation)
    if part != "core":
        return launch.Block(**sizes, inject="none", loop_norm="none")
    has_positions = config.pos_kind == "learned" and config.pos_when == "each_loop"
    return launch.Block(
        **sizes,
        inject=config.inject,
        positions=weights["positions.weight"] if has_positions else None,
        loop_norm=config.loop_norm,
        final_norm=pair("final_norm"),
        read=pair("read_out") if config.readout == "scalar" and not config.n_coda else None,
        read_stride=config.prediction_stride,
    )


def packed(config: LoopedConfig, weights: Weights) -> dict[str, Any]:
    """The weights of a model's core, prelude and coda in tiles, packed again whenever one of them has changed."""
    launch, first = kernels(), next(iter(weights.values()))
    precision = precision_of(first)
    with _lock:
        marks = marks_of(weights)
        kept = _packed.setdefault(first, {})
        known = kept.get((config, precision))
        if known is None or known[0] != marks:
            parts = {}
            for part, n_layers in (("prelude", config.n_prelude), ("core", config.n_core), ("coda", config.n_coda)):
                if n_layers:
                    block = block_of(config, weights, part)
                    row = launch.choose(block, precision, launch.target_of(first.device))
                    parts[part] = launch.pack(block, row, emulate=is_interpreted())
            known = (marks, parts)
            kept.pop((config, precision), None)
            kept[config, precision] = known
            if len(kept) > KEPT:
                del kept[next(iter(kept))]
        return known[1]


def marks_of(weights: Weights) -> tuple[Any, ...]:
    """Which memory every weight is in and its version. Edits through `.data` change neither: `looped.repack` tells of them.

    Weak references, so that memory which was freed and given out again counts as other memory.
    """
    marks: list[Any] = []
    for name, weight in weights.items():
        version = -1 if weight.is_inference() else weight._version
        place = (StorageWeakRef(weight.untyped_storage()), weight.storage_offset(), weight.stride())
        marks.append((name, place, version, weight.dtype, tuple(weight.shape), weight.device))
    return tuple(marks)


def forget(model: LoopedTransformer) -> None:
    """Drop the packed weights of a model."""
    with _lock:
        _packed.pop(next(iter(weights_of(model).values())), None)


def _pass(config: LoopedConfig, weights: Weights, part: str, x: Tensor, lengths: list[int]) -> Tensor:
    """x [B, T, C] through the prelude or the coda."""
    tiles = packed(config, weights).get(part)
    if tiles is None:
        return x
    out: Tensor = kernels().run(tiles, x, x, lengths, kernels().Stop(1), groups=groups_of(lengths, tiles.launch.rows)).final
    return out


def embed(config: LoopedConfig, weights: Weights, prompts: Tensor, lengths: Tensor | None, given: list[int]) -> Tensor:
    """`LoopedTransformer.embed` in float32, with sums whose order does not depend on the batch."""
    own = own_tokens(prompts.shape[1], lengths)
    if own is not None:
        prompts = prompts.masked_fill(~own if config.input_kind == "tokens" else ~own[..., None], 0)
    if config.input_kind == "features":
        P = kernels().linear(prompts, weights["read_in.weight"], weights["read_in.bias"])
    else:
        P = (F.embedding(prompts, weights["embedding.weight"]) if config.input_kind == "tokens" else prompts).float()
    if config.pos_when == "once" and config.pos_kind == "learned":
        P = P + weights["positions.weight"][: P.shape[1]].float()
    return _pass(config, weights, "prelude", clear_padding(P, own), given)


def read(config: LoopedConfig, weights: Weights, y: Tensor, lengths: Tensor | None, given: list[int]) -> Tensor:
    """`LoopedTransformer.read` of a float32 state, likewise; in the model's dtype."""
    own, dtype = own_tokens(y.shape[1], lengths), next(iter(weights.values())).dtype
    y = _pass(config, weights, "coda", y, given)
    if config.loop_norm == "once":
        scale, shift = weights.get("final_norm.weight"), weights.get("final_norm.bias")
        y, width = y.to(dtype), (config.d_model,)
        if config.norm_kind == "rms":
            y = F.rms_norm(y, width, scale, config.norm_eps)
        else:
            y = F.layer_norm(y, width, scale, shift, config.norm_eps)
        y = y.float()
    if config.readout == "none":
        return clear_padding(y, own).to(dtype)
    y = y[:, :: config.read_stride]
    weight = weights["embedding.weight" if config.tie_readout else "read_out.weight"]
    logits = kernels().linear(y, weight, None if config.tie_readout else weights.get("read_out.bias")).to(dtype)
    predictions = logits.squeeze(-1) if config.readout == "scalar" else logits
    return clear_padding(predictions, None if own is None else own[:, :: config.read_stride])


# The run ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def run(
    model: LoopedTransformer,
    prompts: Tensor,
    lengths: Tensor | None,
    spec: LoopSpec,
    state: LoopState | Tensor | None = None,
    on_progress: Callable[[int], object] | None = None,
    weights: Weights | None = None,
) -> LoopResult:
    """`eager.run` on the Triton kernels: the same arguments and results; the same bits in any batch.

    weights: used in place of the model's own. A launch runs all loops and cannot be stopped inside, so `on_progress` is not
    called on the way. Ctrl-C on the way to it leaves the call as if it had not begun; between launches of one loop each, what
    they have done stays.
    """
    weights = weights_of(model) if weights is None else weights
    config, dtype = model.config, next(iter(weights.values())).dtype
    with torch.autocast(prompts.device.type, enabled=False), torch.cuda.device_of(prompts):
        try:
            given = _lengths_of(prompts, lengths)
            out, reads, is_interrupted = _loop(model, weights, prompts, lengths, given, spec, state)
        except KeyboardInterrupt:

            def reading(y: Tensor, own_lengths: Tensor | None) -> Tensor:
                return read(config, weights, y.float(), own_lengths, _lengths_of(y, own_lengths))

            return not_begun(config, prompts, lengths, dtype, spec, state, "triton", reading)
        first_t = state.memory["t"] if isinstance(state, LoopState) else None
        finish = functools.partial(_result, model, weights, out, reads, lengths, given, spec, first_t, dtype)
        try:
            return finish(is_interrupted)
        except KeyboardInterrupt:
            return finish(True)


def _lengths_of(prompts: Tensor, lengths: Tensor | None) -> list[int]:
    """Lengths of prompts [B, T, ...] on the host; without a copy where the batch is full."""
    return [prompts.shape[1]] * len(prompts) if lengths is None else lengths.tolist()


def _loop(
    model: LoopedTransformer, weights: Weights, prompts: Tensor, lengths: Tensor | None, given: list[int], spec: LoopSpec,
    state: LoopState | Tensor | None,
) -> tuple[Any, Tensor | None, bool]:  # fmt: skip
    """All loops: what the last launch left, the predictions of every loop, and whether an interrupt came between launches."""
    config = model.config
    tiles = packed(config, weights)["core"]
    P = embed(config, weights, prompts, lengths, given)
    own = own_tokens(P.shape[1], lengths)
    memory, final, last_read, first = None, None, None, 0
    if isinstance(state, LoopState):
        final = clear_padding(state.memory.get("F32", state.y).float(), own)
        start = clear_padding(state.memory.get("Y", final).float(), own)
        memory, last_read = memory_of(state, spec)
        first = _first_loop(state.memory["t"])
    else:
        start = clear_padding(model.initial_state(P, state), own).float()
    once = functools.partial(kernels().run, tiles, P, lengths=given, groups=groups_of(given, tiles.launch.rows))
    stop = stop_of(spec, tiles.fixed["PREC"])
    if spec.return_predictions and tiles.read_weight is None:
        reading = functools.partial(read, config, weights, lengths=lengths, given=given)
        return _one_by_one(once, reading, start, stop, memory, final, first)
    keeps = spec.return_predictions
    out = once(start, stop=stop, memory=memory, final=final, last_read=last_read, first_loop=first, keep_reads=keeps)
    return out, out.reads, False


def _first_loop(t: Tensor | None) -> int:
    """Loops that the least advanced prompt has behind it."""
    return int(t.min()) if t is not None and len(t) else 0


def _one_by_one(
    once: Callable[..., Any], reading: Callable[[Tensor], Tensor], start: Tensor, stop: Any, memory: Any, final: Tensor | None,
    first: int,
) -> tuple[Any, Tensor, bool]:  # fmt: skip
    """Predictions that the kernel cannot read: one loop a launch, read in between. The same bits, by resuming. An interrupt
    leaves the loops before it."""
    with_stop = kernels().with_stop
    out = once(start, stop=with_stop(stop, n_loops=first), memory=memory, final=final)
    last = reading(out.final)
    reads = last.new_empty(len(last), max(0, stop.n_loops - first), *last.shape[1:])
    try:
        for i in range(reads.shape[1]):
            at = out.final if out.going is None else out.going
            after = once(at, stop=with_stop(stop, n_loops=first + i + 1), memory=(out.ints, out.floats), final=out.final)
            reads[:, i] = reading(after.final)
            out = after
    except KeyboardInterrupt:
        return out, reads, True
    return out, reads, False


def _result(
    model: LoopedTransformer, weights: Weights, out: Any, reads: Tensor | None, lengths: Tensor | None,
    given: list[int], spec: LoopSpec, first_t: Tensor | None, dtype: torch.dtype, is_interrupted: bool,
) -> LoopResult:  # fmt: skip
    y = out.final.to(dtype)
    memory = remembered(out.ints, out.floats, out.last_read)
    prediction, status = read(model.config, weights, out.final, lengths, given), memory["status"]
    if is_interrupted:
        unfinished = ~memory["done"] & (memory["t"] < spec.n_loops)
        status = torch.where(unfinished, Status.INTERRUPTED, status)
        prediction = prediction.clone()
        prediction[unfinished] = torch.nan
    if out.going is not None or dtype != torch.float32:
        memory["Y"] = out.final if out.going is None else out.going
    if dtype != torch.float32:
        memory["F32"] = out.final
    predictions = None
    if spec.return_predictions:
        assert reads is not None
        first = _first_loop(first_t)
        predictions = after_every_loop(model, reads.to(dtype), prediction, memory["t"], lengths, first, first_t)
    return LoopResult(
        y=y,
        prediction=prediction,
        n_loops=memory["t"],
        status=status,
        residual=memory["residual"],
        predictions=predictions,
        n_loops_by_token=None,
        state=LoopState(y, memory, spec.stopping),
        backend="triton",
        reason="",
        interrupted=is_interrupted,
    )
