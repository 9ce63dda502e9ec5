"""`LoopedTransformer`, the eager model: the one truth that every backend is tested against.

One loop is `Y <- M(Y)`, with P the injected signal of the prompt:

    X = inject(Y, P);  pos_when="each_loop": X += positions;  X = core(X);  loop_norm="each": X = final_norm(X)

The block is GPT-2's (Radford et al., 2019), or with RMSNorm and a gated MLP LLaMA's without its rotary positions (Touvron et
al., 2023); the loop, with P added before every pass, is Yang et al. (2024).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from looped.config import LoopedConfig
from looped.integers import integer_of
from looped.weights import modules_of, weights_of

# Devices, and the dtypes on them, that the operator looped::loop has fused kernels for; looped/op.py enters them.
FUSED: dict[str, tuple[torch.dtype, ...]] = {}


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): GPT-2's form (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": gelu_tanh, "gelu": F.gelu, "relu": F.relu}


def norm_layer(config: LoopedConfig) -> nn.Module:
    """LayerNorm or RMSNorm (Zhang and Sennrich, 2019) over the width, or nothing."""
    if config.norm_kind == "none":
        return nn.Identity()
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


class Attention(nn.Module):
    """Multi-head attention with one fused projection, in q, k, v order."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.n_heads, self.is_causal = config.n_heads, config.mask_kind == "causal"
        self.qkv = nn.Linear(config.d_model, 3 * config.attention_width, bias=config.bias)
        self.proj = nn.Linear(config.attention_width, config.d_model, bias=config.bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x [..., C], each [..., H, head_dim]."""
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.n_heads, -1)).chunk(3, dim=-2)
        return q, k, v

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, T, C]; mask bool [B, 1, T, T], True where a query may look, or None."""
        q, k, v = (part.transpose(1, 2) for part in self.project(x))  # [B, H, T, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.is_causal and mask is None)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        assert config.d_ff is not None
        self.fc = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.proj = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.activation(self.fc(x)))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)), gate and up as one fused projection, in this order."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        assert config.d_ff is not None
        self.fc = nn.Linear(config.d_model, 2 * config.d_ff, bias=config.bias)
        self.proj = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.norm_1, self.attn = norm_layer(config), Attention(config)
        mlp = GatedMLP if config.activation == "silu_gated" else MLP
        self.norm_2, self.mlp = norm_layer(config), mlp(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm_1(x), mask)
        return x + self.mlp(self.norm_2(x))


class LoopedTransformer(nn.Module):
    """A looped transformer: `config` says which. Parameters are in the dtype and on the device they are moved to.

    The pieces of a forward pass are methods of their own, so that a solver can call them one by one:
    `embed` (P), `initial_state` (Y_0), `step` (M), `read` (predictions).
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config = config
        if config.input_kind == "features":
            assert config.n_dims is not None
            self.read_in = nn.Linear(config.n_dims, config.d_model)
        elif config.input_kind == "tokens":
            assert config.vocab_size is not None
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.pos_kind == "learned":
            self.positions = nn.Embedding(config.n_positions, config.d_model)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.n_prelude))
        self.core = nn.ModuleList(Block(config) for _ in range(config.n_core))
        self.coda = nn.ModuleList(Block(config) for _ in range(config.n_coda))
        self.final_norm = norm_layer(config) if config.loop_norm != "none" else nn.Identity()
        if config.readout != "none" and not config.tie_readout:
            self.read_out = nn.Linear(config.d_model, config.readout_width, bias=config.readout != "vocabulary")
        self.reset_parameters()
        self._own_names = tuple(weights_of(self))
        self._own_kinds = [type(module) for module in modules_of(self)]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), residual projections smaller by sqrt(2 * layers), zero biases.

        `read_in` and `read_out` keep PyTorch's default for linear maps, as in the authors' code.
        """
        n_layers = self.config.n_prelude + self.config.n_core + self.config.n_coda
        for name, parameter in self.named_parameters():
            if name.startswith(("read_in", "read_out")) or "norm" in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("proj.weight"):
                parameter.normal_(std=0.02 / math.sqrt(2 * n_layers))
            else:
                parameter.normal_(std=0.02)

    # The parts of one pass ----------------------------------------------------------------------------------------

    def embed(self, prompts: Tensor, lengths: Tensor | None = None) -> Tensor:
        """P [B, T, C], the injected signal of each prompt's own tokens; rows of padding are zero.

        prompts: float [B, T, n_dims], int64 [B, T] or float [B, T, C], by `config.input_kind`. lengths: int64 [B]; the
        content of padding is never used, NaN included. Raises ValueError for a wrong width or more tokens than positions.
        """
        self._check_prompts(prompts)
        own = own_tokens(prompts.shape[1], lengths)
        if own is not None:  # cleared before the first product: 0 * NaN is NaN
            outside = ~own if self.config.input_kind == "tokens" else ~own[..., None]
            prompts = prompts.masked_fill(outside, 0)
        if self.config.input_kind == "features":
            P = self.read_in(prompts)
        elif self.config.input_kind == "tokens":
            P = self.embedding(prompts)
        else:
            P = prompts
        if self.config.pos_when == "once":
            P = self._add_positions(P)
        mask = self.attention_mask(own)
        for block in self.prelude:
            P = block(P, mask)
        return clear_padding(P, own)

    def initial_state(self, P: Tensor, state: Tensor | None = None) -> Tensor:
        """Y_0 [B, T, C] by `config.state_init`; `state` is used where the configuration says "given"."""
        kind = self.config.state_init
        if (kind == "given") != (state is not None):
            raise ValueError(
                f"LoopedTransformer: state_init={kind!r} "
                + ("needs a state [B, T, C]" if kind == "given" else 'takes no state; use state_init="given"')
            )
        if kind == "given":
            assert state is not None
            if state.shape != P.shape:
                raise ValueError(f"LoopedTransformer: state has shape {list(state.shape)}, the prompts {list(P.shape)}")
            return state.to(P.dtype)
        if kind == "embedding":
            return P
        return torch.zeros_like(P) if kind == "zeros" else torch.ones_like(P)

    def inject(self, Y: Tensor, P: Tensor) -> Tensor:
        """What a loop sees of the state and the prompt, before positions."""
        if self.config.inject == "add":
            return Y + P
        return Y * P if self.config.inject == "mul" else Y

    def step(self, Y: Tensor, P: Tensor, lengths: Tensor | None = None) -> Tensor:
        """M(Y) [B, T, C]: one loop. Rows of padding come out as zero."""
        own = own_tokens(Y.shape[1], lengths)
        mask = self.attention_mask(own)
        X = self.inject(Y, P)
        if self.config.pos_when == "each_loop":
            X = self._add_positions(X)
        for block in self.core:
            X = block(X, mask)
        if self.config.loop_norm == "each":
            X = self.final_norm(X)
        return clear_padding(X, own)

    def read(self, Y: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Predictions from a state: [B, N] for a scalar, else [B, N, classes or vocabulary], N = ceil(T / read_stride).

        The coda, and the final norm where it is not part of the state, come first. Rows of padding are zero. Without a
        read-out the (closed) state [B, T, C] itself is returned.
        """
        own = own_tokens(Y.shape[1], lengths)
        mask = self.attention_mask(own)
        for block in self.coda:
            Y = block(Y, mask)
        if self.config.loop_norm == "once":
            Y = self.final_norm(Y)
        if self.config.readout == "none":
            return clear_padding(Y, own)
        stride = self.config.read_stride
        return clear_padding(self.head(Y[:, ::stride]), None if own is None else own[:, ::stride])

    def head(self, Y: Tensor) -> Tensor:
        """Predictions [...] (scalar) or [..., classes or vocabulary] from what the coda and the final norm made of a state."""
        logits = F.linear(Y, self.embedding.weight) if self.config.tie_readout else self.read_out(Y)
        return logits.squeeze(-1) if self.config.readout == "scalar" else logits

    # The pass -----------------------------------------------------------------------------------------------------

    def iterate(
        self,
        prompts: Tensor,
        n_loops: int,
        *,
        lengths: Tensor | None = None,
        state: Tensor | None = None,
        n_loop_start: int = 0,
    ) -> Iterator[Tensor]:
        """Yields the states Y_t [B, T, C] for t = n_loop_start + 1 .. n_loops; the loops before them run without gradient."""
        n_loops, n_loop_start = loop_count(n_loops), loop_count(n_loop_start, "n_loop_start")
        P = self.embed(prompts, lengths)
        Y = self.initial_state(P, state)
        with torch.no_grad():
            for _ in range(n_loop_start):
                Y = self.step(Y, P, lengths)
        for _ in range(n_loop_start, n_loops):
            Y = self.step(Y, P, lengths)
            yield Y

    def forward(
        self,
        prompts: Tensor,
        *,
        n_loops: int | None = None,
        lengths: Tensor | None = None,
        state: Tensor | None = None,
        return_predictions: bool = False,
        n_loop_start: int = 0,
        backend: str = "auto",
    ) -> Tensor:
        """Run all loops and read the predictions.

        Where no gradient is recorded (`torch.no_grad`), the loops are one operator, looped::loop, on the fused kernels of
        the device: the bits of `looped.solve`, compiled or not, where all numbers stay finite. Else they are the plain
        PyTorch of this file; so they are under autocast, where a module has hooks or was changed, for a subclass, and in an
        exported graph, which should run where looped is not.

        Parameters
            prompts: as in `embed`. lengths: int64 [B], tokens per prompt; None means that all T are.
            n_loops: loops to run, 0 or more; default `config.n_loops`.
            state: Y_0 where `config.state_init` is "given".
            return_predictions: the predictions after every loop, stacked in a new dimension 1 of n_loops - n_loop_start
                entries. States are not kept.
            n_loop_start: loops that run first, without gradient and without a prediction (truncated loss, Yang et al.
                eq. 1).
            backend: ``"auto"`` as above, ``"eager"`` for plain PyTorch, or ``"fused"`` for the operator.

        Returns what `read` returns. Raises ValueError for a negative n_loops, n_loop_start outside 0 .. n_loops - 1, or
        backend="fused" where the operator cannot run, and TypeError for loops that are no integers.
        """
        if backend not in ("auto", "eager", "fused"):
            raise ValueError(
                f"LoopedTransformer: backend={backend!r} is not one of auto, eager, fused, which a forward pass takes; "
                "auto, cpu, eager, graph and triton are those of looped.solve"
            )
        total = loop_count(self.config.n_loops if n_loops is None else n_loops)
        n_loop_start = loop_count(n_loop_start, "n_loop_start")
        if n_loop_start and n_loop_start >= total:
            raise ValueError(f"LoopedTransformer: n_loop_start={n_loop_start} must lie in 0 .. n_loops - 1 = {total - 1}")
        obstacle = "asked for" if backend == "eager" else self._why_not_fused(prompts, backend)
        if obstacle is None:
            return self._fused(prompts, total, lengths, state, return_predictions, n_loop_start)
        if backend == "fused":
            raise ValueError(f'LoopedTransformer: backend="fused" cannot run this: {obstacle}')
        predictions: list[Tensor] = []
        if total == 0:
            P = self.embed(prompts, lengths)
            last = self.read(self.initial_state(P, state), lengths)
            return last[:, None][:, :0] if return_predictions else last
        for Y in self.iterate(prompts, total, lengths=lengths, state=state, n_loop_start=n_loop_start):
            if return_predictions:
                predictions.append(self.read(Y, lengths))
        return torch.stack(predictions, dim=1) if return_predictions else self.read(Y, lengths)

    def _fused(
        self,
        prompts: Tensor,
        n_loops: int,
        lengths: Tensor | None,
        state: Tensor | None,
        return_predictions: bool,
        n_loop_start: int,
    ) -> Tensor:
        self._check_prompts(prompts)
        spec = f'{{"n_loops": {n_loops}, "return_predictions": {"true" if return_predictions else "false"}, '
        spec += f'"config": {self.config.json}}}'
        predictions: Tensor = torch.ops.looped.loop(prompts, lengths, list(weights_of(self).values()), state, spec)[4]
        return predictions[:, n_loop_start:] if return_predictions and n_loop_start else predictions

    def _why_not_fused(self, prompts: Tensor, backend: str) -> str | None:
        """What keeps a forward pass from being the operator: PyTorch's own conditions for an inference fast path."""
        if torch.is_grad_enabled():
            return "gradients are recorded; use torch.no_grad()"
        weight = next(iter(weights_of(self).values()))
        if weight.dtype not in FUSED.get(weight.device.type, ()):
            return f"there are no fused kernels for {weight.dtype} on {weight.device.type}"
        if prompts.device != weight.device or (self.config.input_kind != "tokens" and prompts.dtype != weight.dtype):
            return f"the prompts are {prompts.dtype} on {prompts.device}, the weights {weight.dtype} on {weight.device}"
        if torch.is_autocast_enabled(weight.device.type):
            return "autocast is on"
        if backend == "auto" and (torch.jit.is_tracing() or _is_exporting()):
            return "an exported graph should run where looped is not"
        return self.why_not_as_configured()

    def why_not_as_configured(self) -> str | None:
        """What of this model its config and weights do not say, so that another implementation would miss it; else None."""
        if type(self) is not LoopedTransformer:
            return f"{type(self).__name__} is a class of your own"
        modules = modules_of(self)
        if tuple(weights_of(self)) != self._own_names or [type(module) for module in modules] != self._own_kinds:
            return "a module or parameter of the model was replaced"
        if _global_forward_hooks or _global_forward_pre_hooks:
            return "there are global hooks on all modules"
        config = self.config
        activation = ACTIVATIONS.get(config.activation)
        for module in modules:
            own = module.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return "a module has hooks"
            if not (METHODS if module is self else INNER_METHODS).isdisjoint(own):
                return "a method of the model was replaced"
            if (
                own.get("eps", config.norm_eps) != config.norm_eps
                or own.get("activation", activation) is not activation
                or own.get("n_heads", config.n_heads) != config.n_heads
                or own.get("is_causal", config.mask_kind == "causal") != (config.mask_kind == "causal")
                or own.get("max_norm") is not None
            ):
                return "a setting of a module is not that of the config"
        return None

    # Masks, positions, checks -------------------------------------------------------------------------------------

    def attention_mask(self, own: Tensor | None) -> Tensor | None:
        """bool [B, 1, T, T], or None where causality alone decides. Padding stands last, so causal masks never reach it.

        With a full mask every row sees its prompt's own tokens and itself, so that rows of padding stay finite.
        """
        if own is None or self.config.mask_kind == "causal":
            return None
        return (own[:, None, :] | torch.eye(own.shape[1], dtype=torch.bool, device=own.device))[:, None]

    def _add_positions(self, X: Tensor) -> Tensor:
        if self.config.pos_kind == "none":
            return X
        return X + self.positions.weight[: X.shape[1]]

    def _check_prompts(self, prompts: Tensor) -> None:
        config, shape = self.config, list(prompts.shape)
        if config.input_kind == "tokens":
            if prompts.dim() != 2 or prompts.is_floating_point():
                raise ValueError(f"LoopedTransformer: tokens must be integers [B, T], got {prompts.dtype} {shape}")
        else:
            width = config.n_dims if config.input_kind == "features" else config.d_model
            if prompts.dim() != 3 or shape[-1] != width:
                raise ValueError(f"LoopedTransformer: {config.input_kind} must be [B, T, {width}], got {shape}")
        if config.pos_kind == "learned" and shape[1] > config.n_positions:
            raise ValueError(
                f"LoopedTransformer: a prompt has {shape[1]} tokens but the model has {config.n_positions} positions; "
                "shorten it or use a model with more positions"
            )


def unwrapped(model: nn.Module, who: str) -> LoopedTransformer:
    """The model in the wrappers of torch.compile, DataParallel and DistributedDataParallel, which compute what it computes.

    Raises TypeError, which begins with `who`, for what is no `LoopedTransformer`.
    """
    inner: Any = model
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())  # slow to import
    while isinstance(inner, (compiled, nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = inner._orig_mod if isinstance(inner, compiled) else inner.module
    if not isinstance(inner, LoopedTransformer):
        raise TypeError(
            f"{who}: model must be a looped.LoopedTransformer, got {type(inner).__name__}; pass model.transformer of a "
            "LoopedGPT2, and of any other wrapper the model inside"
        )
    return inner


# Methods that an attribute of a module would hide. The model's own `forward` is left out: no other implementation runs it.
METHODS = frozenset(name for name, value in vars(LoopedTransformer).items() if callable(value)) - {"forward", "__init__"}
INNER_METHODS = frozenset(("forward", "project", "_call_impl", "_wrapped_call_impl"))

_is_exporting = getattr(torch.compiler, "is_exporting", torch.jit.is_tracing)  # since torch 2.7


MOST_LOOPS = 2**62 - 1  # that a counter of loops holds, with room to count on


def loop_count(n_loops: SupportsIndex, name: str = "n_loops") -> int:
    """Loops as an int. Integers and 0-d integer tensors are accepted; 4.0 and True are TypeErrors, -1 and 2^62 ValueErrors."""
    count = integer_of(n_loops)
    if count is None:
        raise TypeError(f"{name} must be an integer, got {n_loops!r}")
    if count < 0:
        raise ValueError(f"{name} must be 0 or more, got {count}")
    if count > MOST_LOOPS:
        raise ValueError(f"{name}={count} is more than a loop counter holds; give at most 2^62 - 1")
    return count


def own_tokens(n_tokens: int, lengths: Tensor | None) -> Tensor | None:
    """bool [B, T], True at a prompt's own tokens; None where every prompt fills all T."""
    if lengths is None:
        return None
    return torch.arange(n_tokens, device=lengths.device) < lengths[:, None]


def clear_padding(x: Tensor, own: Tensor | None) -> Tensor:
    """x [B, T, ...] with zeros outside a prompt's own tokens."""
    if own is None:
        return x
    return x.masked_fill(~own.reshape(own.shape + (1,) * (x.dim() - 2)), 0)
