"""Prompts as callers have them, padded tensors or lists or arrays, as the backends take them: `PromptBatch`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looped.loop import LoopResult, LoopState
from looped.model import LoopedTransformer, clear_padding, own_tokens
from looped.weights import first_weight

Prompts = Tensor | np.ndarray | Sequence[Tensor | np.ndarray]


@dataclass
class PromptBatch:
    """Prompts padded, no longer than needed, checked; and how to give results back.

    tokens: [B, T, ...] on the model's device. lengths: int64 [B], None where every prompt fills all T. own_lengths: the same on
    the host. n_tokens: the T that the caller's results have. is_list: whether they are lists.
    """

    tokens: Tensor
    lengths: Tensor | None
    own_lengths: list[int]
    n_tokens: int
    is_list: bool

    @classmethod
    def of(cls, model: LoopedTransformer, prompts: Prompts, lengths: Tensor | Sequence[int] | None, state: Any) -> PromptBatch:
        """Raises ValueError or TypeError, naming the prompt, for what does not fit the model."""
        is_list = not isinstance(prompts, (Tensor, np.ndarray))
        if is_list:
            if lengths is not None:
                raise ValueError("solve: lengths go with a padded batch; prompts in a list have their own")
            tokens, own_lengths = _pad(model, [_tensor(model, prompt, f"prompt {i}") for i, prompt in enumerate(prompts)])
        else:
            tokens = _tensor(model, prompts, "prompts")
            if tokens.dim() != _dims(model) + 1:
                raise ValueError(f"solve: prompts must be {_shape(model, batched=True)}, got {list(tokens.shape)}")
            n_prompts, n_tokens = tokens.shape[:2]
            own_lengths = [n_tokens] * n_prompts
            if lengths is not None:
                own_lengths = checked_lengths(lengths, n_prompts, n_tokens, "solve").tolist()
        longest = max(own_lengths, default=0)
        config = model.config
        if config.pos_kind == "learned" and longest > config.n_positions:
            raise ValueError(
                f"solve: prompt {own_lengths.index(longest)} has {longest} tokens but the model has {config.n_positions} "
                "positions; shorten it or use a model with more positions"
            )
        n_tokens = tokens.shape[1]
        width = max(1, longest)  # at least one row of padding, so that no backend meets an empty dimension
        if isinstance(state, LoopState):
            width = max(width, state.y.shape[1])  # it may come from a batch with longer prompts
        tokens = resize(tokens, 1, width)
        is_full = all(length == tokens.shape[1] for length in own_lengths)
        # A full batch needs no copy from the host, which a CUDA graph could not capture.
        of_prompts = None if is_full else torch.tensor(own_lengths, dtype=torch.int64, device=tokens.device)
        batch = cls(tokens, of_prompts, own_lengths, n_tokens, is_list)
        if config.input_kind == "tokens":
            batch.check_ids(model, own_tokens(tokens.shape[1], of_prompts))
        return batch

    def sums(self) -> Tensor:
        """What tells a prompt from another, int64 [B]: its length, and its numbers' bits as integers of at most 32 bits, each
        times a number of its place, added modulo 2^64.

        Whole numbers add up to the same in any order, so the sums are equal on every device and in every batch. A change of one
        integer is always seen, others but for a chance of at most about 2^-32.
        """
        words, lengths = self.words(), self.tokens.shape[1] if self.lengths is None else self.lengths
        if words.device.type != "cpu":
            return sums_of_words(words, lengths)
        weights = _place_weights_here(words.shape[1] + 1)
        # NumPy's own thread: PyTorch's others would spin for a while after this, on the processors that the engine needs.
        of_length = np.full(len(words), lengths) if isinstance(lengths, int) else lengths.numpy()
        return torch.from_numpy((words.numpy() * weights[1:]).sum(axis=1) + of_length * weights[0])

    def words(self) -> Tensor:
        """The bits of each prompt's own tokens, int32 (of bfloat16 int16) [B, words], 0 in padding."""
        tokens = clear_padding(self.tokens, own_tokens(self.tokens.shape[1], self.lengths)).flatten(1).contiguous()
        return tokens.view(torch.int16 if tokens.dtype == torch.bfloat16 else torch.int32)

    def check_ids(self, model: LoopedTransformer, own: Tensor | None) -> None:
        """Raises ValueError for a token id that is none; own: bool [B, T], or None where every prompt fills all T."""
        size = model.config.vocab_size or 0
        wrong = (self.tokens < 0) | (self.tokens >= size)
        if own is not None:
            wrong &= own
        if wrong.any():
            row, column = (int(x) for x in wrong.nonzero()[0])
            raise ValueError(
                f"solve: prompt {row} holds token id {int(self.tokens[row, column])} at position {column}, "
                f"but ids must lie in 0 .. {size - 1}"
            )

    def state(self, model: LoopedTransformer, state: LoopState | Prompts | None) -> LoopState | Tensor | None:
        """The caller's state, padded like the tokens. Raises ValueError where it is of other prompts, or does not fit."""
        if state is None:
            return None
        if isinstance(state, LoopState):
            return self._resumed(model, state)
        parameter, width = first_weight(model), model.config.d_model
        if not isinstance(state, (Tensor, np.ndarray)):
            states = [from_array(y) for y in state]
            for i, (y, length) in enumerate(zip(states, self.own_lengths, strict=False)):
                if y.shape != (length, width):
                    raise ValueError(f"solve: state {i} must be {[length, width]}, got {list(y.shape)}")
            state = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if states else torch.zeros(0, 0, width)
        state, longest = from_array(state), max(self.own_lengths, default=0)
        fits = state.dim() == 3 and longest <= state.shape[1] <= self.n_tokens
        if not fits or (len(state), state.shape[2]) != (len(self.tokens), width):
            raise ValueError(f"solve: state must be [{len(self.tokens)}, {self.n_tokens}, {width}], got {list(state.shape)}")
        return resize(state, 1, self.tokens.shape[1]).to(parameter)

    def _resumed(self, model: LoopedTransformer, state: LoopState) -> LoopState | Tensor | None:
        expected = (*self.tokens.shape[:2], model.config.d_model)
        if state.y.shape != expected:
            raise ValueError(
                f"solve: state is {list(state.y.shape)} but the prompts have {list(expected)}; resume with the same ones"
            )
        if state.y.dtype != first_weight(model).dtype:
            raise ValueError(f"solve: state is {state.y.dtype}; resume with the same dtype")
        if state.prompt_sums is not None:
            same = state.prompt_sums.to(self.tokens.device) == self.sums()
            if not same.all():
                raise ValueError(f"solve: state is of another prompt {int((~same).nonzero()[0])}; resume with the same ones")
        if state.memory:
            return state
        return state.y if model.config.state_init == "given" else None  # interrupted before its first loop

    def like_input(self, model: LoopedTransformer, result: LoopResult) -> dict[str, Any]:
        """The fields of a result that are lists, or padded to as many tokens as the input."""
        stride = model.config.prediction_stride
        fields: dict[str, Any] = {}
        for name, dim, per in (("y", 1, 1), ("prediction", 1, stride), ("predictions", 2, stride), ("n_loops_by_token", 1, 1)):
            tensor = getattr(result, name)
            if tensor is None:
                continue
            if self.is_list:
                sizes = [-(-length // per) for length in self.own_lengths]
                fields[name] = [tensor[i].narrow(dim - 1, 0, size) for i, size in enumerate(sizes)]
            else:
                fields[name] = resize(tensor, dim, -(-self.n_tokens // per))
        return fields


def sums_of_words(words: Tensor, lengths: Tensor | int) -> Tensor:
    """`PromptBatch.sums` in PyTorch. The weights are made where the words are: a copy from the host could not be captured in a
    CUDA graph."""
    weights = place_weights(words.shape[1] + 1, words.device)
    return (words * weights[1:]).sum(dim=1) + lengths * weights[0]


def place_weights(n: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [n]: odd numbers, one for each place, as if drawn by chance (SplitMix64; Steele, Lea and Flood, 2014)."""
    z = torch.arange(1, n + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # shifts that bring in zeros, from those of signed numbers
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return (z ^ (z >> 31 & (1 << 33) - 1)) | 1


@functools.lru_cache(maxsize=4)
def _place_weights_here(n: int) -> np.ndarray:
    weights: np.ndarray = place_weights(n).numpy()
    return weights


def resize(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Cut or zero-extend one dimension."""
    if tensor.shape[dim] == size:
        return tensor
    out = tensor.new_zeros(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    kept = min(size, tensor.shape[dim])
    out.narrow(dim, 0, kept).copy_(tensor.narrow(dim, 0, kept))
    return out


def checked_lengths(lengths: Any, n_prompts: int, n_tokens: int, call: str) -> Tensor:
    """Tokens of each prompt of a padded batch [B, T, ...], int64 [B], contiguous, where they are.

    Raises ValueError or TypeError, beginning with `call`, for what is not a length of each prompt.
    """
    what = f"{call}: lengths must be integers [{n_prompts}], one for each prompt"
    if isinstance(lengths, Sequence) and any(isinstance(length, (bool, np.bool_)) for length in lengths):
        raise ValueError(f"{what}, got {lengths!r}")
    values = from_array(lengths) if isinstance(lengths, np.ndarray) else torch.as_tensor(lengths)
    if not values.numel():
        values = values.to(torch.int64)
    if values.shape != (n_prompts,) or values.dtype == torch.bool or values.is_floating_point() or values.is_complex():
        raise ValueError(f"{what}, got {values.dtype} {list(values.shape)}")
    values = values.long().resolve_neg().contiguous()
    for i in ((values < 0) | (values > n_tokens)).nonzero().flatten().tolist():
        raise ValueError(f"{call}: prompt {i} has length {int(values[i])}, which must lie in 0 .. {n_tokens}")
    return values


def from_array(values: Any) -> Tensor:
    """A tensor as it is, or a copy of an array in native byte order: arrays may be read-only, reversed or big-endian."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("solve: masked arrays are not taken; shorten the prompt, or fill it and give lengths")
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
    if not isinstance(values, Tensor):
        raise TypeError(f"solve: a prompt or a state must be a tensor or an array, got {type(values).__name__}")
    if values.is_complex() or values.layout != torch.strided or values.is_nested:
        raise TypeError(f"solve: prompts and states must be dense and real, got {values.dtype}, {values.layout}")
    values = values.detach().resolve_neg()
    return values.clone() if values.data_ptr() % values.element_size() else values  # of a buffer that is not aligned


def _dims(model: LoopedTransformer) -> int:
    return 1 if model.config.input_kind == "tokens" else 2


def _width(model: LoopedTransformer) -> int:
    """Numbers in one token of a feature or state prompt."""
    config = model.config
    return (config.n_dims or 0) if config.input_kind == "features" else config.d_model


def _shape(model: LoopedTransformer, batched: bool) -> str:
    width = "" if model.config.input_kind == "tokens" else f", {_width(model)}"
    return f"{model.config.input_kind} [{'B, ' if batched else ''}T{width}]"


def _tensor(model: LoopedTransformer, prompt: Any, name: str) -> Tensor:
    """A prompt or a batch as a tensor on the model's device: float prompts in its dtype, token ids int64."""
    parameter = first_weight(model)
    tensor = from_array(prompt)
    if model.config.input_kind == "tokens":
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise TypeError(f"solve: token prompts must hold integers, got {tensor.dtype}")
        return tensor.to(parameter.device, torch.int64)
    if tensor.dim() < 2 or tensor.shape[-1] != _width(model):
        raise ValueError(f"solve: {name} must be {_shape(model, batched=name == 'prompts')}, got {list(tensor.shape)}")
    return tensor.to(parameter)


def _pad(model: LoopedTransformer, prompts: list[Tensor]) -> tuple[Tensor, list[int]]:
    for i, prompt in enumerate(prompts):
        if prompt.dim() != _dims(model):
            raise ValueError(f"solve: prompt {i} must be {_shape(model, batched=False)}, got {list(prompt.shape)}")
    if prompts:
        return torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), [len(prompt) for prompt in prompts]
    config, parameter = model.config, first_weight(model)
    if config.input_kind == "tokens":
        return torch.zeros(0, 1, dtype=torch.int64, device=parameter.device), []
    return parameter.new_zeros(0, 1, _width(model)), []
