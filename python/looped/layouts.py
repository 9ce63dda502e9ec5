"""State dicts of GPT-2 models, whoever wrote them, made into a `LoopedTransformer`.

Four layouts store GPT-2's layers under the same names below a root, and their weights (out, in) as `nn.Linear` does or
(in, out) as Hugging Face's Conv1D does; the shape of `c_attn` tells which, square `c_proj` cannot:

    looped ICL      _backbone.transformer.h.0.attn.c_attn.weight  [3C, C]  _read_in, _read_out  Yang et al. (2024)
    Garg et al.     _backbone.h.0.attn.c_attn.weight              [C, 3C]  _read_in, _read_out  Garg et al. (2022)
    nanoGPT         transformer.h.0.attn.c_attn.weight            [3C, C]  wte, lm_head
    GPT-2           [transformer.]h.0.attn.c_attn.weight          [C, 3C]  wte, lm_head         Hugging Face
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from looped.config import CHOICES, LoopedConfig
from looped.model import LoopedTransformer

LOOPED_ICL_ROOT = "_backbone.transformer."
ROOTS = (LOOPED_ICL_ROOT, "_backbone.", "transformer.", "")
OWN_KEY = re.compile(r"(transformer\.)?core\.0\.attn\.qkv\.weight$")  # ours; with the prefix a language model's
IN_LAYER = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
}
HF_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
IN_CONTEXT = {"read_stride": 2, "pos_when": "each_loop", "loop_norm": "each"}
LANGUAGE = {"pos_when": "once", "loop_norm": "once"}
STATE_INIT = {"add": "zeros", "mul": "ones", "none": "embedding"}


def assemble(
    where: str, config: LoopedConfig, tensors: Mapping[str, Tensor], theirs: Mapping[str, str] | None = None
) -> LoopedTransformer:
    """A model on the CPU that holds copies of `tensors`, in their dtypes; the keys are the model's own parameter names.

    Draws no random numbers. Raises ValueError that lists missing or extra keys, wrong shapes or integer tensors, by the
    names in `theirs` where it has them.
    """
    try:
        with torch.device("meta"):
            model = LoopedTransformer(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}: no model can have these sizes ({error})") from error
    expected = model.state_dict()
    check_keys(where, expected, tensors)
    wrong = [
        f"{(theirs or {}).get(name, name)} is {tensor.dtype} {list(tensor.shape)} instead of float {list(expected[name].shape)}"
        for name, tensor in tensors.items()
        if tensor.shape != expected[name].shape or not tensor.is_floating_point()
    ]
    if wrong:
        raise ValueError(f"{where} has wrong tensors, shapes as (out, in): {listed(wrong)}; it does not fit its configuration")
    copies = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    model.load_state_dict(copies, assign=True)
    return model


def from_state_dict(
    where: str, state: Mapping[str, Any], fields: Mapping[str, Any], *, declared: Mapping[str, Any], allow_extra: bool
) -> LoopedTransformer:
    """The work of `looped.checkpoint.load_checkpoint`; `declared` is what a GPT-2 folder's config.json says."""
    LoopedConfig.check_names(fields)
    state, model_args = _unwrap(where, state)
    declared = {**declared, **model_args}
    tensors = _strip_prefixes(where, state)
    root = _find_root(where, tensors)
    is_icl = root.startswith("_backbone")

    places = _places(where, tensors, root, fields)
    ours = _layer_keys(root, places)
    has_bias = any(key in tensors for key in ours if key.endswith(".bias"))
    if not has_bias:
        ours = {key: name for key, name in ours.items() if not key.endswith(".bias")}
    ours |= _icl_keys() if is_icl else _language_keys(tensors, root, declared)
    unused = {key for key in tensors if re.fullmatch(re.escape(root) + r"h\.\d+\.attn\.(masked_)?bias", key)}
    unused.add(root + "wte.weight" if is_icl else "lm_head.weight")
    check_keys(where, ours, [key for key in tensors if key in ours or key not in unused], allow_extra=allow_extra)

    theirs = {name: key for key, name in ours.items()}
    found, is_transposed = _as_linear(where, {name: tensors[key] for name, key in theirs.items()}, theirs)
    sizes = _sizes(found, places, has_bias)
    _check_declared(where, declared, sizes, len(places))
    chosen = _choose(where, fields, declared, sizes, root=root, is_transposed=is_transposed)
    config = LoopedConfig.from_dict((IN_CONTEXT if is_icl else LANGUAGE) | chosen)
    if not has_bias and config.norm_kind == "layernorm":  # nanoGPT's has none then: ours always does, and zero changes nothing
        norms = [name for name in found if "norm" in name]
        found |= {name.removesuffix("weight") + "bias": torch.zeros_like(found[name]) for name in norms}
    return assemble(where, config, found, theirs)


# Keys -------------------------------------------------------------------------------------------------------------


def check_keys(where: str, expected: Collection[str], found: Collection[str], *, allow_extra: bool | None = None) -> None:
    """Raises ValueError that lists what is missing and what is extra. allow_extra None: the caller offers no such choice."""
    missing = [key for key in expected if key not in found]
    extra = [] if allow_extra else [key for key in found if key not in expected]
    faults = [f"{fault} {listed(keys)}" for fault, keys in (("lacks", missing), ("has the unknown", extra)) if keys]
    if faults:
        hint = "; allow_extra=True drops the unknown" if allow_extra is False and not missing else ""
        raise ValueError(f"{where} has other keys than its model: it {' and '.join(faults)}{hint}")


def listed(names: Collection[str], most: int = 8) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


def _unwrap(where: str, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The state dict inside {'model': ...} and the like, and the model_args beside it."""
    declared: dict[str, Any] = {}
    seen: list[int] = []
    while inner := [key for key in ("model", "model_state_dict", "state_dict") if isinstance(state.get(key), Mapping)]:
        if len(inner) > 1:
            raise ValueError(f"{where} holds several state dicts, {listed(inner)}; pass the one to load")
        if isinstance(state.get("model_args"), Mapping):
            declared |= state["model_args"]
        seen.append(id(state))
        state = state[inner[0]]
        if id(state) in seen:
            raise ValueError(f"{where} holds itself; pass the model's state dict")
    return state, declared


def _strip_prefixes(where: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors without the prefixes of torch.compile and DistributedDataParallel."""
    others = [str(key) for key, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise ValueError(f"{where} holds values that are no tensors at {listed(others)}; pass only the model's state dict")
    tensors = {re.sub(r"^((_orig_mod|module)\.)+", "", str(key)): tensor for key, tensor in state.items()}
    if len(tensors) < len(state):
        raise ValueError(f"{where} holds keys that are one without the prefixes module. and _orig_mod.; pass one model's")
    return tensors


def _find_root(where: str, keys: Collection[str]) -> str:
    for root in ROOTS:
        if any(key.startswith(root + "h.") for key in keys):
            return root
    if own := next(filter(None, (OWN_KEY.match(key) for key in keys)), None):
        name, load = ("LoopedGPT2", "LoopedGPT2.from_pretrained") if own[1] else ("LoopedTransformer", "load_model")
        raise ValueError(
            f"{where} has the weights of a {name}, which alone tell no configuration; pass the saved folder to {load}, or "
            f"make the model and load them: model = {name}(config); model.load_state_dict(...)"
        )
    raise ValueError(
        f"{where} has {listed(keys) or 'no keys'}, which is no known layout; known are looped ICL (_backbone.transformer.h.*), "
        "Garg et al. (_backbone.h.*), nanoGPT (transformer.h.*) and GPT-2 (transformer.h.* or h.*)"
    )


def _places(where: str, keys: Collection[str], root: str, fields: Mapping[str, Any]) -> list[str]:
    """Where each of the file's layers goes: core.0, core.1, ... unless a prelude or coda is asked for."""
    n_layers = len({key[len(root) :].split(".")[1] for key in keys if key.startswith(root + "h.")})
    n_prelude, n_coda = fields.get("n_prelude", 0), fields.get("n_coda", 0)
    n_core = n_layers - n_prelude - n_coda
    if n_core < 1:
        raise ValueError(f"{where} has {n_layers} layers; n_prelude={n_prelude} and n_coda={n_coda} leave none to loop")
    return [f"{part}.{i}" for part, n in (("prelude", n_prelude), ("core", n_core), ("coda", n_coda)) for i in range(n)]


def _layer_keys(root: str, places: list[str]) -> dict[str, str]:
    """Their keys of the positions, the layers and the final norm, with the names they have here."""
    modules = {f"h.{i}.{theirs}": f"{place}.{ours}" for i, place in enumerate(places) for theirs, ours in IN_LAYER.items()}
    modules["ln_f"] = "final_norm"
    keys = {f"{root}{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules.items() for kind in ("weight", "bias")}
    return {root + "wpe.weight": "positions.weight"} | keys


def _icl_keys() -> dict[str, str]:
    return {f"_{module}.{kind}": f"{module}.{kind}" for module in ("read_in", "read_out") for kind in ("weight", "bias")}


def _language_keys(tensors: Mapping[str, Tensor], root: str, declared: Mapping[str, Any]) -> dict[str, str]:
    """The embedding and, where it differs, the head. Of two tied tensors a file may hold either."""
    embedding, head = root + "wte.weight", "lm_head.weight"
    has_both = embedding in tensors and head in tensors
    if declared.get("tie_word_embeddings") is False or (has_both and not torch.equal(tensors[embedding], tensors[head])):
        return {embedding: "embedding.weight", head: "read_out.weight"}
    return {head if head in tensors and not has_both else embedding: "embedding.weight"}


def _as_linear(where: str, found: dict[str, Tensor], theirs: Mapping[str, str]) -> tuple[dict[str, Tensor], bool]:
    """The tensors with every weight (out, in), and whether the file has those of the layers (in, out)."""
    in_layers = [name for name in found if name.endswith((".qkv.weight", ".proj.weight", ".fc.weight"))]
    for name in ("positions.weight", "embedding.weight", "read_in.weight", "read_out.weight", *in_layers):
        if name in found and found[name].dim() != 2:
            raise ValueError(f"{where}: {theirs[name]} has shape {list(found[name].shape)} but must have two dimensions")
    width, name = found["positions.weight"].shape[1], next(name for name in in_layers if "qkv" in name)
    conv1d, linear = [width, 3 * width], [3 * width, width]
    if list(found[name].shape) == conv1d:
        return found | {name: found[name].T for name in in_layers}, True
    if list(found[name].shape) == linear:
        return found, False
    raise ValueError(
        f"{where}: {theirs[name]} has shape {list(found[name].shape)}, but the width {width} of {theirs['positions.weight']} "
        f"needs {linear} (nn.Linear) or {conv1d} (Conv1D)"
    )


# Configuration ----------------------------------------------------------------------------------------------------


def _sizes(found: Mapping[str, Tensor], places: list[str], has_bias: bool) -> dict[str, Any]:
    """The fields of the configuration that the tensors, all (out, in), decide."""
    n_positions, d_model = found["positions.weight"].shape
    sizes: dict[str, Any] = dict(
        d_model=d_model,
        n_positions=n_positions,
        d_ff=len(found[places[0] + ".mlp.fc.weight"]),
        n_core=sum(place.startswith("core") for place in places),
        bias=has_bias,
    )
    if "read_in.weight" in found:
        n_out = len(found["read_out.weight"])
        readout: dict[str, Any] = {"readout": "scalar"} if n_out == 1 else {"readout": "classes", "n_classes": n_out}
        return sizes | {"input_kind": "features", "n_dims": found["read_in.weight"].shape[1]} | readout
    return sizes | dict(
        input_kind="tokens",
        vocab_size=len(found["embedding.weight"]),
        readout="vocabulary",
        tie_readout="read_out.weight" not in found,
    )


def _check_declared(where: str, declared: Mapping[str, Any], sizes: Mapping[str, Any], n_layers: int) -> None:
    """What the file says of itself must agree with its tensors and be something that our block computes."""
    actual = {
        "n_layer": n_layers,
        "n_embd": sizes["d_model"],
        "n_positions": sizes["n_positions"],
        "block_size": sizes["n_positions"],
        "vocab_size": sizes.get("vocab_size"),
        "bias": sizes["bias"],
        "model_type": "gpt2",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
    for key, value in actual.items():
        if declared.get(key) not in (None, value):
            raise ValueError(f"{where} declares {key}={declared[key]!r}, but its tensors or this library allow only {value!r}")


def _choose(
    where: str,
    fields: Mapping[str, Any],
    declared: Mapping[str, Any],
    sizes: Mapping[str, Any],
    *,
    root: str,
    is_transposed: bool,
) -> dict[str, Any]:
    """The fields of the configuration: the file's, then the caller's, then what a layout's name implies."""
    facts = dict(sizes)
    if declared.get("n_head") is not None:
        facts["n_heads"] = declared["n_head"]
    chosen = dict(fields)
    for name, value in facts.items():
        if chosen.setdefault(name, value) != value:
            raise ValueError(f"{where} has {name}={value!r}, not the {chosen[name]!r} asked for; leave the argument out")

    if root.startswith("_backbone") and sizes["d_model"] == 256:
        chosen.setdefault("n_heads", 8)  # the only head count of both papers at this width
    if "n_heads" not in chosen:
        raise ValueError(f"{where} does not tell its number of heads; pass n_heads=, a divisor of {sizes['d_model']}")

    if root == LOOPED_ICL_ROOT and chosen.get("n_loops") != 1:
        unknown = [f"{name}=" for name in ("n_loops", "inject") if name not in chosen]
        if unknown:
            raise ValueError(
                f"{where} does not tell how its model loops; pass {' and '.join(unknown)}: n_loops=1 for the family gpt2, "
                'inject="add" or "mul" for gpt2_loop with z=f(x+z) or z=f(x*z), inject="none" for gpt2_tying'
            )
    chosen.setdefault("n_loops", 1)
    chosen.setdefault("inject", "none")
    chosen.setdefault("state_init", STATE_INIT.get(chosen["inject"], "zeros"))

    chosen.setdefault("norm_eps", declared.get("layer_norm_epsilon", 1e-5))
    if "activation" not in chosen:
        is_nanogpt = not is_transposed and root != LOOPED_ICL_ROOT
        theirs = declared.get("activation_function", None if is_nanogpt else "gelu_new")
        if theirs not in HF_ACTIVATIONS:
            if theirs is None:
                raise ValueError(
                    f'{where} has no record of its activation; pass activation=, which is "gelu" for a model trained with '
                    'nanoGPT since June 2023 and "gelu_tanh" for one before'
                )
            raise ValueError(
                f"{where} has the activation {theirs}, and looped offers {listed(CHOICES['activation'])}; pass activation= if "
                "one of them is right"
            )
        chosen["activation"] = HF_ACTIVATIONS[theirs]
    return chosen
