"""The fused Triton kernels as a backend: one launch runs every loop of every prompt on the GPU.

Its memory has the eager backend's names, so that one `LoopState` serves both. Arithmetic follows the parameters: bfloat16 ones
give "bf16"; float32 ones what `torch.set_float32_matmul_precision` asks for: "highest" bf16x3 (about float32 in accuracy),
"high" tf32, "medium" bf16. The residual stream, norms, softmax and all sums are float32 in each.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from looped.exits import ROUNDING_LEVEL, RULES, Readout
from looped.loop import LoopResult, LoopSpec, LoopState, Status
from looped.model import LoopedTransformer, clear_padding, own_tokens

PRECISION_OF_SETTING = {"highest": "bf16x3", "high": "tf32", "medium": "bf16"}
IMAGES = {"t": 0, "done": 1, "status": 2, "passes": 3, "t_prev": 4, "checks_without_gain": 5, "damped": 6}
REALS = {"residual": 0, "s_prev": 1, "best_g": 2}

_packed: weakref.WeakKeyDictionary[LoopedTransformer, tuple[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@functools.cache
def _kernels() -> Any:
    """`loopkernels.launch`, or the reason why it cannot be imported."""
    try:
        return importlib.import_module("loopkernels.launch")
    except ImportError as error:
        return f"Triton is not in this installation ({error}); a CUDA build of PyTorch brings it"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def precision_of(model: LoopedTransformer) -> str | None:
    """The arithmetic for a model's parameters, or None where there is none."""
    dtype = next(model.parameters()).dtype
    if dtype == torch.bfloat16:
        return "bf16"
    return PRECISION_OF_SETTING[torch.get_float32_matmul_precision()] if dtype == torch.float32 else None


def why_not(model: LoopedTransformer, spec: LoopSpec | None = None) -> str | None:
    """Why this backend cannot run the model this way, and None where it can."""
    parameter, config = next(model.parameters()), model.config
    if parameter.device.type != "cuda" and not is_interpreted():
        return f"the Triton kernels run on a GPU and the model is on {parameter.device}"
    kernels = _kernels()
    if isinstance(kernels, str):
        return kernels
    precision = precision_of(model)
    if precision is None:
        return f"the Triton kernels compute in float32 or bfloat16 and the model is {parameter.dtype}"
    if config.norm_kind not in ("layernorm", "rms", "rmsnorm", "none"):
        return f"the Triton kernels have no {config.norm_kind} norm"
    if config.activation not in ("gelu_tanh", "relu"):
        return f"the Triton kernels have no {config.activation} activation"
    target = kernels.target_of(parameter.device)
    if kernels.choose(block_of(model), precision, target) is None:
        widths = [launch.width for launch in kernels.LAUNCHES if target in launch.targets and launch.precision == precision]
        if not widths:
            return f"the Triton kernels have no {precision} launch for {target} ({parameter.device})"
        return f"the Triton kernels on {target} take widths up to {max(widths)} and the model is {config.d_model} wide"
    return model.why_not_as_configured() or (None if spec is None else _why_not_spec(model, spec))


def _why_not_spec(model: LoopedTransformer, spec: LoopSpec) -> str | None:
    if type(spec.rule) not in RULES.values():
        return f"{type(spec.rule).__name__} is a rule of your own, which runs on the eager backend"
    if spec.accelerate is not None:
        return "the Triton kernels iterate plainly; Anderson acceleration needs a history that their registers have no room for"
    if spec.rule.scope == "prefix":
        return 'the Triton kernels judge whole prompts; scope="prefix" runs on the other backends'
    if isinstance(spec.rule, Readout) and (model.config.readout != "scalar" or model.config.n_coda):
        return "the Triton kernels read scalars from the state, so the readout rule needs a scalar read-out and no coda"
    if spec.n_loops >= 2**31:
        return f"the Triton kernels count loops in 32 bits and n_loops is {spec.n_loops}"
    return None


def describe() -> str:
    """Whether it works in this installation, and on which device; else why not."""
    kernels = _kernels()
    if isinstance(kernels, str):
        return kernels
    if is_interpreted():
        return "works (in Triton's interpreter)"
    if not torch.cuda.is_available():
        return "Triton is here, but no GPU is"
    target = kernels.target_of(torch.device("cuda"))
    known = any(target in launch.targets for launch in kernels.LAUNCHES)
    return f"works ({torch.cuda.get_device_name()}, {target})" if known else f"no launch for {target}"


def block_of(model: Any, part: str = "core") -> Any:
    """The looped part of a model as `loopkernels` takes it; or its prelude or coda, as a loop of one pass."""
    kernels, config = _kernels(), model.config

    def affine(norm: Any) -> tuple[Tensor | None, Tensor | None]:
        return getattr(norm, "weight", None), getattr(norm, "bias", None)

    layers: Any = tuple(
        kernels.Layer(
            norm_1=affine(block.norm_1),
            qkv=(block.attn.qkv.weight, block.attn.qkv.bias),
            proj=(block.attn.proj.weight, block.attn.proj.bias),
            norm_2=affine(block.norm_2),
            up=(block.mlp.fc.weight, block.mlp.fc.bias),
            down=(block.mlp.proj.weight, block.mlp.proj.bias),
        )
        for block in getattr(model, part)
    )
    sizes = dict(layers=layers, n_heads=config.n_heads, head_dim=config.head_dim, eps=config.norm_eps, mask=config.mask_kind)
    sizes |= dict(norm={"rmsnorm": "rms"}.get(config.norm_kind, config.norm_kind), activation=config.activation)
    if part != "core":
        return kernels.Block(**sizes, inject="none", loop_norm="none")
    has_positions = config.pos_kind == "learned" and config.pos_when == "each_loop"
    read = None
    if config.readout == "scalar" and not config.n_coda:
        read = (model.read_out.weight, model.read_out.bias)
    return kernels.Block(
        **sizes,
        inject=config.inject,
        positions=model.positions.weight if has_positions else None,
        loop_norm=config.loop_norm,
        final_norm=affine(model.final_norm),
        read=read,
        read_stride=config.prediction_stride,
    )


def _pass(model: LoopedTransformer, part: str, x: Tensor, lengths: list[int]) -> Tensor:
    """x [B, T, C] through the prelude or the coda."""
    weights = packed(model).get(part)
    return x if weights is None else _kernels().run(weights, x, x, lengths, _kernels().Stop(1)).final


def embed(model: LoopedTransformer, prompts: Tensor, lengths: Tensor | None, given: list[int]) -> Tensor:
    """`LoopedTransformer.embed` in float32, with sums whose order does not depend on the batch."""
    config, own = model.config, own_tokens(prompts.shape[1], lengths)
    if own is not None:
        prompts = prompts.masked_fill(~own if config.input_kind == "tokens" else ~own[..., None], 0)
    if config.input_kind == "features":
        P = _kernels().linear(prompts, model.read_in.weight, model.read_in.bias)
    else:
        P = (model.embedding(prompts) if config.input_kind == "tokens" else prompts).float()
    if config.pos_when == "once" and config.pos_kind == "learned":
        P = P + model.positions.weight[: P.shape[1]].float()
    return _pass(model, "prelude", clear_padding(P, own), given)


def read(model: LoopedTransformer, y: Tensor, lengths: Tensor | None, given: list[int]) -> Tensor:
    """`LoopedTransformer.read` of a float32 state, likewise; in the model's dtype."""
    config, own, dtype = model.config, own_tokens(y.shape[1], lengths), next(model.parameters()).dtype
    y = _pass(model, "coda", y, given)
    if config.loop_norm == "once":
        y = model.final_norm(y.to(dtype)).float()
    if config.readout == "none":
        return clear_padding(y, own).to(dtype)
    y = y[:, :: config.read_stride]
    weight, bias = (model.embedding.weight, None) if config.tie_readout else (model.read_out.weight, model.read_out.bias)
    logits = _kernels().linear(y, weight, bias).to(dtype)
    predictions = logits.squeeze(-1) if config.readout == "scalar" else logits
    return clear_padding(predictions, None if own is None else own[:, :: config.read_stride])


@torch.no_grad()
def run(
    model: LoopedTransformer,
    prompts: Tensor,
    lengths: Tensor | None,
    spec: LoopSpec,
    state: LoopState | Tensor | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> LoopResult:
    """`eager.run` on the Triton kernels: the same arguments and results; the same bits in any batch.

    A launch ends by itself: `on_progress` is not called on the way, and Ctrl-C comes out after it.
    """
    kernels, dtype = _kernels(), next(model.parameters()).dtype
    weights = packed(model)["core"]
    with torch.autocast(prompts.device.type, enabled=False):
        given = [prompts.shape[1]] * len(prompts) if lengths is None else lengths.tolist()
        P = embed(model, prompts, lengths, given)
        own = own_tokens(P.shape[1], lengths)
        memory, final, last_read, first_t = None, None, None, None
        if isinstance(state, LoopState):
            final = clear_padding(state.memory.get("F32", state.y).float(), own)
            start = clear_padding(state.memory.get("Y", final).float(), own)
            memory, last_read = _memory_of(state, spec)
            first_t = state.memory["t"]
        else:
            start = clear_padding(model.initial_state(P, state), own).float()
        first = int(first_t.min()) if first_t is not None and len(first_t) else 0
        once = functools.partial(kernels.run, weights, P, start, given)
        in_kernel = weights.read_weight is not None
        stop = stop_of(spec, weights.fixed["PREC"])
        if not spec.return_predictions or in_kernel:
            keeps = spec.return_predictions
            out = once(stop, memory=memory, final=final, last_read=last_read, first_loop=first, keep_reads=keeps)
            reads = out.reads
        else:
            out, reads = _one_by_one(model, weights, P, start, given, lengths, stop, memory, final, first)
        return _result(model, out, reads, lengths, given, spec, first, first_t, dtype)


def _one_by_one(
    model: LoopedTransformer, weights: Any, P: Tensor, start: Tensor, given: list[int], lengths: Tensor | None, stop: Any,
    memory: Any, final: Tensor | None, first: int,
) -> tuple[Any, Tensor]:  # fmt: skip
    """Predictions that the kernel cannot read: one loop a launch, read in between. The same bits, by resuming."""
    kernels = _kernels()
    out = kernels.run(weights, P, start, given, kernels.with_stop(stop, n_loops=first), memory=memory, final=final)
    last = read(model, out.final, lengths, given)
    reads = last.new_empty(len(last), max(0, stop.n_loops - first), *last.shape[1:])
    for i in range(reads.shape[1]):
        at = out.final if out.going is None else out.going
        step = kernels.with_stop(stop, n_loops=first + i + 1)
        out = kernels.run(weights, P, at, given, step, memory=(out.ints, out.floats), final=out.final)
        reads[:, i] = read(model, out.final, lengths, given)
    return out, reads


def _result(
    model: LoopedTransformer, out: Any, reads: Tensor | None, lengths: Tensor | None, given: list[int], spec: LoopSpec, first:
    int, first_t: Tensor | None, dtype: torch.dtype,
) -> LoopResult:  # fmt: skip
    y = out.final.to(dtype)
    memory: dict[str, Tensor] = {name: out.ints[:, i].long() for name, i in IMAGES.items()}
    memory |= {name: out.floats[:, i].double() for name, i in REALS.items()}
    memory["done"], memory["damped"] = memory["done"].bool(), memory["damped"].bool()
    if out.last_read is not None:
        memory |= {"rule.prediction": out.last_read.double(), "rule.has_prediction": out.ints[:, 7].bool()}
    if out.going is not None or dtype != torch.float32:
        memory["Y"] = out.final if out.going is None else out.going
    if dtype != torch.float32:
        memory["F32"] = out.final
    prediction = read(model, out.final, lengths, given)
    predictions = None
    if spec.return_predictions:
        assert reads is not None
        predictions = _after_every_loop(model, reads.to(dtype), prediction, memory["t"], lengths, first, first_t)
    return LoopResult(
        y=y,
        prediction=prediction,
        n_loops=memory["t"],
        status=memory["status"],
        residual=memory["residual"],
        predictions=predictions,
        n_loops_by_token=None,
        state=LoopState(y, memory, spec.stopping),
        backend="triton",
        reason="",
    )


def _after_every_loop(
    model: LoopedTransformer, reads: Tensor, last: Tensor, t: Tensor, lengths: Tensor | None, first: int, first_t: Tensor | None
) -> Tensor:
    """Predictions [B, loops, N, ...]: still after a prompt's exit, NaN before its first loop here, 0 in padding."""
    loops = torch.arange(first, first + reads.shape[1], device=reads.device)

    def wide(mask: Tensor) -> Tensor:
        return mask.reshape(*mask.shape, *[1] * (reads.dim() - mask.dim()))

    predictions = torch.where(wide(loops >= t[:, None]), last[:, None], reads)
    own = own_tokens(int(lengths.max()), lengths) if lengths is not None and len(lengths) else None
    if own is not None:
        is_read = torch.zeros(reads.shape[0], 1, reads.shape[2], dtype=torch.bool, device=reads.device)
        at = own[:, :: model.config.prediction_stride]
        is_read[:, 0, : at.shape[1]] = at
        predictions = predictions.masked_fill(~wide(is_read), 0)
    return predictions if first_t is None else predictions.masked_fill(wide(loops < first_t[:, None]), math.nan)


def stop_of(spec: LoopSpec, precision: str) -> Any:
    """A `LoopSpec` as the kernels take it."""
    rule = spec.rule
    return _kernels().Stop(
        n_loops=spec.n_loops,
        rule="fixed" if rule.is_fixed else type(rule).__name__.lower(),
        tol=getattr(rule, "tol", 0.0),
        phi=ROUNDING_LEVEL[precision],
        n_passes=rule.n_passes,
        check_every=rule.check_every,
        min_loops=rule.min_loops,
        window=rule.stall_window,
        on_stall=spec.on_stall if rule.can_stall and not rule.is_fixed else "ignore",
    )


def _memory_of(state: LoopState, spec: LoopSpec) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """A state's memory as the kernels keep it: all of it under the same way to stop, else with fresh counters."""
    kept = state.memory
    ints, floats = _kernels().fresh_memory(len(state.y), state.y.device)
    same = state.stopping == spec.stopping
    for name, i in IMAGES.items():
        if name in kept and (same or name in ("t", "done", "status")):
            ints[:, i] = kept[name].int()
    for name, i in REALS.items():
        if name in kept and (same or name == "residual"):
            floats[:, i] = kept[name].float()
    if not same:
        nonfinite = ints[:, 2] == Status.NONFINITE
        ints[:, 1] = nonfinite.int()
        ints[:, 2] = torch.where(nonfinite, ints[:, 2], 0)
    last_read = None
    if same and "rule.prediction" in kept:
        last_read = kept["rule.prediction"].float().contiguous()
        ints[:, 7] = kept["rule.has_prediction"].int()
    return (ints, floats), last_read


def packed(model: LoopedTransformer) -> dict[str, Any]:
    """The weights of a model's core, prelude and coda in tiles, packed again whenever a parameter has changed."""
    kernels, parameter, precision = _kernels(), next(model.parameters()), precision_of(model)
    with _lock:
        key = _fingerprint(model, precision)
        known = _packed.get(model)
        if known is None or known[0] != key:
            parts = {}
            for part in ("prelude", "core", "coda"):
                if len(getattr(model, part)):
                    block = block_of(model, part)
                    launch = kernels.choose(block, precision, kernels.target_of(parameter.device))
                    parts[part] = kernels.pack(block, launch, emulate=is_interpreted())
            known = (key, parts)
            _packed[model] = known
        return known[1]


def _fingerprint(model: LoopedTransformer, precision: str | None) -> tuple[Any, ...]:
    """Where every parameter lies and its version. Edits through `.data` change neither: `looped.repack` tells of them."""
    marks: list[Any] = [model.config, precision]
    for parameter in model.parameters():
        version = -1 if parameter.is_inference() else parameter._version
        marks.append((parameter.data_ptr(), version, parameter.dtype, tuple(parameter.shape), parameter.device))
    return tuple(marks)


def forget(model: LoopedTransformer) -> None:
    """Drop the packed weights of a model."""
    with _lock:
        _packed.pop(model, None)
