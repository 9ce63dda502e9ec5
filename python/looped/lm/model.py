"""`LoopedGPT2`: a `LoopedTransformer` as a transformers language model. Whatever `generate` does comes from transformers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from looped.exits import ExitRule
from looped.lm.cache import CACHE_NAME, LoopedCache
from looped.lm.columns import Columns, check_inputs
from looped.lm.config import LoopedGPT2Config, check_exit, check_warm_start
from looped.lm.drafter import draft_fields
from looped.lm.exits import Exit, token_rule
from looped.lm.fused import threads_for
from looped.lm.policy import CachePolicy
from looped.lm.pretrained import language_config, read_gpt2, same_dtype
from looped.lm.reading import check_labels, kept_positions, next_token_loss
from looped.lm.session import head_of, make_session
from looped.lm.speculative import check_drafting, check_exactness, speculate
from looped.model import Block, LoopedTransformer, loop_count


@dataclass
class LoopedOutput(CausalLMOutputWithPast):
    """What `LoopedGPT2.forward` returns.

    loss: next-token cross entropy, when labels are given. logits: [B, T, V], or the positions of logits_to_keep.
    cache (past_key_values in older versions of transformers): a `LoopedCache`.
    hidden_states: when asked for, Y_0, Y_1, ..., Y_n and what the head reads, each [B, T, C].
    n_loops: int64 [B, T], the loops that each token ran; 0 where the attention mask is 0.
    """

    n_loops: Tensor | None = None


class LoopedGPT2(PreTrainedModel, GenerationMixin):
    """A looped language model that stands where GPT-2 stood. Its `transformer` is the `LoopedTransformer`."""

    config: LoopedGPT2Config
    config_class = LoopedGPT2Config
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: LoopedGPT2Config) -> None:
        super().__init__(config)
        self.transformer = LoopedTransformer(config.looped)
        self.exit_gate = nn.Linear(config.d_model, 1) if config.exit_gate else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's: N(0, initializer_range), projections into the residual stream smaller by sqrt(2 * layers), zero biases."""
        if isinstance(module, nn.Linear | nn.Embedding):
            projections = (
                proj for block in self.modules() if isinstance(block, Block) for proj in (block.attn.proj, block.mlp.proj)
            )
            into_residual = any(module is proj for proj in projections)
            scale = (2 * self.config.num_hidden_layers) ** -0.5 if into_residual else 1.0
            init.normal_(module.weight, mean=0.0, std=scale * self.config.initializer_range)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                init.zeros_(bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            init.ones_(module.weight)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                init.zeros_(bias)

    @classmethod
    def from_gpt2(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | PreTrainedModel, n_loops: int = 1, **changes: Any
    ) -> LoopedGPT2:
        """A GPT-2 checkpoint, looped. At one loop and without injection it is GPT-2.

        source: a folder or file of Hugging Face's GPT-2, a nanoGPT file, a state dict, or a GPT-2 model of transformers. See
            `looped.load_checkpoint` for what each must tell; nothing is downloaded.
        n_loops: loops of the core, which is the whole stack unless changes say otherwise.
        changes: fields of `LoopedGPT2Config`, such as ``n_prelude=2, n_coda=2`` to loop the middle, ``inject="add"``, or
            what the file cannot tell (``activation=`` of nanoGPT's).

        The model is on the CPU, in evaluation mode, with copies of the weights in their dtype. Special tokens and generation
        settings come along. Raises what `load_checkpoint` raises.
        """
        transformer, config, generation = read_gpt2(source, n_loops, changes)
        model = cls._around(transformer, config)
        if generation is not None:
            model.generation_config = copy.deepcopy(generation)
        return model

    @classmethod
    def from_looped(cls, transformer: LoopedTransformer, **fields: Any) -> LoopedGPT2:
        """A language model around a `LoopedTransformer`, whose weights it holds, not copies. fields: of `LoopedGPT2Config`."""
        return cls._around(transformer, language_config(transformer.config, **fields))

    @classmethod
    def _around(cls, transformer: LoopedTransformer, config: LoopedGPT2Config) -> LoopedGPT2:
        config.dtype = same_dtype(transformer)
        with torch.device("meta"):
            model = cls(config)
        model.transformer = transformer
        if config.exit_gate:
            model.exit_gate = nn.Linear(config.d_model, 1, dtype=config.dtype, device=transformer.embedding.weight.device)
            model._init_weights(model.exit_gate)
        return model.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        if not isinstance(value, nn.Embedding):
            raise TypeError(f"LoopedGPT2: the input embeddings must be a torch.nn.Embedding, got {type(value).__name__}")
        self.transformer.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The untied head; None where the head is the embedding itself."""
        return None if self.config.tie_readout else self.transformer.read_out

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        if self.config.tie_readout:
            raise ValueError("LoopedGPT2: the head is the embedding (tie_readout=True); set the input embeddings")
        self.transformer.read_out = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.transformer.config = self.config.looped
        return embedding

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Nothing to do: saved folders carry a file that imports looped, not a copy of it."""

    # The pass -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: LoopedCache | None = None,
        past_key_values: LoopedCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        n_loops: int | None = None,
        exit: Exit = None,
        warm_start: bool | None = None,
        backend: str | None = None,
    ) -> LoopedOutput | tuple[Any, ...]:
        """One pass over T tokens of B rows. `generate` takes n_loops, exit, warm_start and backend too.

        Parameters
            input_ids: int64 [B, T]; or inputs_embeds: float [B, T, C], without positions.
            attention_mask: [B, S], S being the cached columns and T: 1 at a row's own tokens. What stands elsewhere is neither
                read nor computed: it may be any id, or NaN, and the logits there are those of a zero state. None: the T new
                columns all hold tokens.
            position_ids: int64 [B, T] or [1, T]. None: each row counts its own tokens, padding left out, as `generate` does
                for GPT-2.
            cache, or past_key_values: a `LoopedCache`; the name depends on the version of transformers, both are taken.
            use_cache: return a cache. Default: `config.use_cache`, but not while training.
            labels: int64 [B, T], -100 where there is none; they are shifted inside.
            logits_to_keep: logits of the last so many positions only (0: all), or of these positions (integers [K]).
            n_loops: loops to run, default `config.n_loops`.
            exit: a rule of `looped.lm.exits`, its name or a mapping; default `config.exit`. ``"fixed"`` runs all loops.
            warm_start: default `config.warm_start`.
            backend: what computes, a name of `looped.lm.session.SESSIONS`; default ``"eager"``, or the cache's.

        Raises ValueError for more tokens than positions, naming row and limit, for masks, positions and labels of other shapes,
        and for what is not offered (attention weights); TypeError for a cache of another kind and for an unknown argument. An
        exception, Ctrl-C and a lack of memory among them, leaves the cache as it was.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("LoopedGPT2: attention weights are not kept; call it without output_attentions")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("LoopedGPT2: needs input_ids or inputs_embeds, and not both")
        plan = self._plan(n_loops, exit, warm_start)
        cache = self._the_cache(cache, past_key_values, backend)
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training
        if cache is None:  # what is not read again needs one slot a layer to be exact
            cache = self.make_cache(None if use_cache else "last_only", backend=backend)

        inputs = input_ids if inputs_embeds is None else inputs_embeds
        assert inputs is not None
        columns = Columns.of(inputs, attention_mask, cache)
        check_inputs(inputs, self.config, are_ids=inputs_embeds is None)
        to_read = kept_positions(logits_to_keep, inputs.shape[1])
        if labels is not None:
            check_labels(labels, inputs, logits_to_keep, self.config.vocab_size)
        positions = columns.positions(position_ids, self.config)
        embeds = columns.packed(inputs)
        if inputs_embeds is None:
            self._check_ids(embeds, columns)
            embeds = self.transformer.embedding(embeds)
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        how = dict(positions=positions, return_states=bool(asked), **vars(plan))
        extension = None
        try:
            extension = cache.session.extend(embeds, columns.counts, **how)
            n_used = columns.unpacked(extension.n_loops)
            hidden = columns.unpacked(extension.hidden)
            logits = head_of(cache.session, self.transformer)(hidden[:, to_read])
            states = None
            if extension.states is not None:
                states = (*(columns.unpacked(state) for state in extension.states), hidden)
            fields: dict[str, Any] = {CACHE_NAME: cache if use_cache else None}
            fields |= {"loss": None if labels is None else next_token_loss(logits, labels), "logits": logits}
            output = LoopedOutput(**fields, hidden_states=states, n_loops=n_used)
            returned = output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
            cache.append(columns.own, n_used)  # after everything that can fail
        except BaseException as error:  # a signal's or a lack of memory, maybe after the session's work
            # A session that is at work for another thread says so by a RuntimeError, and is that thread's to settle.
            if extension is not None or not isinstance(error, RuntimeError):
                cache.settle()
            raise
        return returned

    def make_cache(self, policy: str | None = None, *, backend: str | None = None) -> LoopedCache:
        """An empty cache. policy: a name of `looped.lm.policy`, default `config.cache_policy`. backend: default ``"eager"``."""
        chosen = CachePolicy.parse(self.config.cache_policy if policy is None else policy)
        return LoopedCache(make_session("eager" if backend is None else backend, self.transformer, chosen, self.exit_gate))

    def _the_cache(
        self, cache: LoopedCache | None, past_key_values: LoopedCache | None, backend: str | None
    ) -> LoopedCache | None:
        if cache is not None and past_key_values is not None:
            raise ValueError("LoopedGPT2: cache and past_key_values are two names of one argument; pass one")
        found = past_key_values if cache is None else cache
        if found is None:
            return None
        if not isinstance(found, LoopedCache):
            raise TypeError(
                f"LoopedGPT2: the cache is a {type(found).__name__} but must be a LoopedCache; make one with make_cache()"
            )
        if backend not in (None, found.session.backend):
            raise ValueError(f"LoopedGPT2: backend={backend!r}, but the cache was made for {found.session.backend!r}")
        if found.session.model is not self.transformer:
            raise ValueError(
                "LoopedGPT2: the cache holds the tokens of another model; make one with make_cache() of this model"
            )
        return found

    def _plan(self, n_loops: int | None, exit: Exit, warm_start: bool | None) -> Plan:
        """How this call loops. Raises ValueError or TypeError for what no call can do."""
        rule = token_rule(self.config.exit if exit is None else exit)
        is_warm = self.config.warm_start if warm_start is None else warm_start
        if not isinstance(is_warm, bool):
            raise TypeError(f"LoopedGPT2: warm_start must be True or False, got {is_warm!r}")
        plan = Plan(loop_count(self.config.n_loops if n_loops is None else n_loops), rule, is_warm)
        check_exit(rule, self.exit_gate is not None)
        if rule.min_loops > plan.n_loops:
            raise ValueError(f"LoopedGPT2: exit has min_loops={rule.min_loops}, which is more than n_loops={plan.n_loops}")
        if plan.warm_start:
            check_warm_start(self.transformer.config)
        return plan

    def _check_ids(self, ids: Tensor, columns: Columns) -> None:
        outside = (ids < 0) | (ids >= self.config.vocab_size)
        if outside.any():
            row = int(columns.own.nonzero()[outside.nonzero()[0, 0], 0])
            raise ValueError(
                f"LoopedGPT2: row {row} has the token id {int(ids[outside][0])}, "
                f"but ids lie in 0 .. {self.config.vocab_size - 1}"
            )

    # What generate asks -------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        draft_loops: int | None = None,
        draft_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """`generate` of transformers, and with draft_loops the same text sooner: see `looped.lm.speculative`.

        draft_loops: 1 to n_loops. Tokens are drafted with so many loops and verified with all, several in one pass.
        draft_tokens: tokens drafted before they are verified, default 4.

        The two are short for fields of `GenerationConfig`, assistant_early_exit and num_assistant_tokens, with a constant
        schedule and no confidence threshold unless the call gives others. Raises ValueError, before anything is computed, for
        several rows, beams, ``use_cache=False``, warm_start and cache policies other than per_loop.
        """
        if draft_loops is None and draft_tokens is not None:
            raise ValueError(f"generate: draft_tokens={draft_tokens} says nothing without draft_loops; give both")
        fields = {} if draft_loops is None else draft_fields(draft_loops, draft_tokens)
        if fields and generation_config is not None:
            generation_config = copy.deepcopy(generation_config)
            generation_config.update(**fields)
            fields = {}
        with threads_for(kwargs.get("backend"), kwargs.get(CACHE_NAME)):
            return super().generate(inputs, generation_config, *args, **(fields | kwargs))

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The loop of transformers for other assistants; that of `looped.lm.speculative` where the model drafts for itself."""
        settings = (logits_processor, stopping_criteria, generation_config)
        if generation_config.assistant_early_exit is not None:
            if assistant_model is not None or synced_gpus:
                raise ValueError("generate: draft_loops does not go with an assistant_model or with synced_gpus; leave one out")
            return speculate(self, input_ids, *settings, streamer, model_kwargs)
        theirs: Any = super()
        others = dict(inputs_tensor=inputs_tensor, assistant_tokenizer=assistant_tokenizer, tokenizer=tokenizer)
        return theirs._assisted_decoding(
            input_ids, *settings, synced_gpus, streamer, assistant_model=assistant_model, **others, **model_kwargs
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        """The cache that `generate` begins with; also the last look at its arguments before anything is computed."""
        if batch_size == 0:
            raise ValueError("LoopedGPT2: generate got a batch without rows; at least one row of one token is needed")
        mask, n_tokens = model_kwargs.get("attention_mask"), max_cache_length + 1
        if mask is not None:
            own = mask.sum(1)
            if not own.all():
                row = int((own == 0).nonzero()[0, 0])
                raise ValueError(f"LoopedGPT2: row {row} has no token that its attention_mask shows; drop it or mend the mask")
            n_tokens -= mask.shape[1] - int(own.max())  # padding takes no positions
        if self.config.pos_kind == "learned" and n_tokens - 1 > self.config.n_positions:
            raise ValueError(
                f"LoopedGPT2: {n_tokens} tokens were asked for, prompt and new ones together, but the model has "
                f"{self.config.n_positions} positions, enough for {self.config.n_positions + 1} (the last is never fed back); "
                "shorten the prompt or lower max_new_tokens"
            )
        self._plan(*(model_kwargs.get(name) for name in ("n_loops", "exit", "warm_start")))
        if generation_config.assistant_early_exit is not None:
            check_drafting(self, generation_config, model_kwargs, mode, batch_size)
        elif mode == GenerationMode.ASSISTED_GENERATION:
            check_exactness(self, "assisted decoding", model_kwargs)
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
                raise ValueError(
                    f"LoopedGPT2: cache_implementation={generation_config.cache_implementation!r} is not offered; "
                    "say cache_policy in the configuration, or pass make_cache(policy)"
                )
            model_kwargs[CACHE_NAME] = self.make_cache(backend=model_kwargs.get("backend"))
            return None
        of_transformers: Any = GenerationMixin
        return of_transformers._prepare_cache_for_generation(
            self, generation_config, model_kwargs, mode, batch_size, max_cache_length
        )


@dataclass(frozen=True)
class Plan:
    """How one call loops: the keyword arguments of `DecodeSession.extend` that a caller chooses."""

    n_loops: int
    rule: ExitRule
    warm_start: bool
