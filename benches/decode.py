"""Decoding side by side: this engine, LoopedGPT2 in plain PyTorch, and GPT-2 of transformers, each greedy from a short prompt.

    python benches/decode.py [--threads 2] [--shapes looped256B1,gpt2B1] [--new 256] [--rounds 3] [--json OUT]

Shapes: looped256 (C 256, 4 layers, 8 loops), looped768 (C 768, 2 layers, 4 loops) and gpt2 (C 768, 12 layers, 1 loop, as a
looped transformer), each with GPT-2's vocabulary of 50257 ids, random float32 weights and a batch B1 or B16. Prompts have 8
tokens. In every round each way runs once in turn; figures are medians of the rounds. Beside them stand the memory bandwidth and
the FMA peak that the same threads reach in the same round. No step can be faster than the bytes that it moves, which are the
weights of the loop for every loop and the head, both once for all rows of a batch, and the keys and values that it attends
to; nor than its multiply-adds. Where the weights of the loop fit a cache, all loops but the first are held against the
bandwidth of that cache.

    ours        the session: embedding, extend, head and argmax, a token at a time
    cpu         LoopedGPT2.generate(backend="cpu") under torch_on_one_thread, where this installation has it
    eager       LoopedGPT2.generate in PyTorch, where this installation has it
    gpt2        GPT2LMHeadModel.generate with the same weights, at the better of one and all threads (gpt2 only)

The new tokens of all ways are compared first: float32 rounding may part them where two logits are equal to six digits.

--json writes one row per (shape, way): shape, way, threads, ms_per_token (a step of the whole batch), tokens_per_second,
mb_per_token, bound, bound_fraction, gb_per_second_memory, gb_per_second_core, gflops_peak, same_tokens, rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from looped.backends import cpu
from looped.backends.decode import CpuSession, torch_on_one_thread
from looped.config import LoopedConfig, gpt2_config
from looped.exits import Fixed
from looped.model import LoopedTransformer

VOCABULARY = 50257
N_PROMPT = 8
SHAPES = "looped256B1,looped256B16,looped768B1,looped768B16,gpt2B1,gpt2B16"


@dataclass
class Way:
    """name, and what gives the new tokens [B, new] at a number of threads."""

    name: str
    call: Callable[[], np.ndarray]
    n_threads: int


def config_of(kind: str, n_positions: int) -> LoopedConfig:
    if kind == "gpt2":
        return gpt2_config(VOCABULARY, n_positions, 768, 12, 12)
    C, n_layers, n_loops = (256, 4, 8) if kind == "looped256" else (768, 2, 4)
    return gpt2_config(VOCABULARY, n_positions, C, C // 64, n_layers, n_loops=n_loops, inject="add", state_init="zeros")


def ours(model: LoopedTransformer, prompts: torch.Tensor, n_new: int) -> np.ndarray:
    """Greedy, with NumPy around the session: PyTorch's threads would spin on beside the engine's."""
    table = model.embedding.weight.detach().numpy()
    session = CpuSession(model, SimpleNamespace(kind="per_loop", period=1))
    ids = prompts.numpy()
    new = np.empty((len(ids), n_new), np.int64)
    tokens, n = ids.reshape(-1), ids.shape[1]
    for k in range(n_new):
        embeds = torch.from_numpy(table[tokens])
        hidden = session.extend(embeds, [n] * len(ids), n_loops=model.config.n_loops, rule=Fixed()).hidden
        logits = session.head(hidden[n - 1 :: n])
        tokens, n = logits.numpy().argmax(-1), 1
        new[:, k] = tokens
    return new


def generating(model: Any, prompts: torch.Tensor, n_new: int, **options: Any) -> Callable[[], np.ndarray]:
    def call() -> np.ndarray:
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        return ids[:, prompts.shape[1] :].numpy()

    return call


def ways_of(kind: str, model: LoopedTransformer, prompts: torch.Tensor, n_new: int, n_threads: int) -> list[Way]:
    ways = [Way("ours", lambda: ours(model, prompts, n_new), n_threads)]
    try:
        lm = importlib.import_module("looped.lm")
    except ImportError:
        lm = None
    if lm is not None:
        language_model = lm.LoopedGPT2.from_looped(model)
        if "cpu" in importlib.import_module("looped.lm.session").SESSIONS:
            generate = generating(language_model, prompts, n_new, backend="cpu")
            ways.append(Way("cpu", torch_on_one_thread()(generate), n_threads))
        ways.append(Way("eager", generating(language_model, prompts, n_new, backend="eager"), n_threads))
    if kind == "gpt2":
        theirs = gpt2_of(model)
        for n in sorted({1, n_threads}):
            ways.append(Way(f"gpt2, {n} thread{'s' * (n > 1)}", generating(theirs, prompts, n_new), n))
    return ways


def gpt2_of(model: LoopedTransformer) -> Any:
    """GPT2LMHeadModel with the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    own = model.config
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=own.n_positions, n_embd=own.d_model, n_layer=own.n_core, n_head=own.n_heads
    )
    theirs = GPT2LMHeadModel(config).eval()
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.fc": "mlp.c_fc"}
    names |= {"mlp.proj": "mlp.c_proj"}
    state = {"transformer.wte.weight": model.embedding.weight, "transformer.wpe.weight": model.positions.weight}
    for name, value in model.state_dict().items():
        if name.startswith("final_norm"):
            state[name.replace("final_norm", "transformer.ln_f")] = value
        elif match := re.fullmatch(r"core\.(\d+)\.(.+)\.(weight|bias)", name):
            is_linear = value.dim() == 2
            state[f"transformer.h.{match[1]}.{names[match[2]]}.{match[3]}"] = value.T if is_linear else value
    state["lm_head.weight"] = model.embedding.weight
    theirs.load_state_dict(state)
    return theirs


def bytes_of(config: LoopedConfig, n_rows: int, n_new: int) -> tuple[float, float, float]:
    """Bytes that a step of the batch moves: the weights of one loop, the head, and keys and values, on average."""
    C, A, d_ff = config.d_model, config.attention_width, config.d_ff or 0
    loop = 4.0 * config.n_core * C * (4 * A + 2 * d_ff)
    seen = N_PROMPT + n_new / 2
    kept = 4.0 * 2 * A * config.n_core * config.n_loops * seen * n_rows
    return loop, 4.0 * C * VOCABULARY, kept


def measure(kind: str, n_rows: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    n_new, n_threads = options.new, options.threads
    config = config_of(kind, N_PROMPT + n_new)
    model = LoopedTransformer(config).eval()
    prompts = torch.randint(VOCABULARY, (n_rows, N_PROMPT))
    ways = ways_of(kind, model, prompts, n_new, n_threads)
    loop, head, kept = bytes_of(config, n_rows, n_new)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    memory, core, peak, tokens = [], [], [], {}
    with torch.no_grad():
        for way in ways:
            torch.set_num_threads(way.n_threads)
            tokens[way.name] = way.call()
        for _ in range(options.rounds):
            memory.append(cpu._engine.read_bandwidth(n_threads, int(max(loop + head, 1 << 28)), 0.3))
            core.append(cpu._engine.read_bandwidth(n_threads, int(loop), 0.3))
            peak.append(cpu._engine.fma_peak(n_threads, 0.2))
            for way in ways:
                torch.set_num_threads(way.n_threads)
                time.sleep(0.05)  # threads of the way before still spin
                begin = time.perf_counter()
                way.call()
                seconds[way.name].append(time.perf_counter() - begin)
    from_memory, from_core = statistics.median(memory), statistics.median(core)
    by_memory = (loop + head + kept) / from_memory / 1e9 + (config.n_loops - 1) * loop / max(from_core, from_memory) / 1e9
    by_work = (
        (n_rows * (config.n_loops * loop + head) + kept) / 2 / (statistics.median(peak) * 1e9)
    )  # two a weight of four bytes
    bound = max(by_memory, by_work)
    rows = []
    for way in ways:
        step = statistics.median(seconds[way.name]) / n_new
        rows.append(
            {
                "shape": f"{kind}B{n_rows}",
                "way": way.name,
                "threads": way.n_threads,
                "ms_per_token": 1e3 * step,
                "tokens_per_second": n_rows / step,
                "mb_per_token": (config.n_loops * loop + head + kept) / n_rows / 1e6,
                "bound": "memory" if bound == by_memory else "multiply-adds",
                "bound_fraction": bound / step,
                "gb_per_second_memory": from_memory,
                "gb_per_second_core": from_core,
                "gflops_peak": statistics.median(peak),
                "same_tokens": float((tokens[way.name] == tokens["ours"]).mean()),
                "rounds": options.rounds,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    first = rows[0]
    title = f"{first['shape']}: {first['mb_per_token']:.1f} MB a token; memory {first['gb_per_second_memory']:.1f} GB/s, "
    title += f"weights of the loop {first['gb_per_second_core']:.1f} GB/s, {first['gflops_peak']:.0f} GFLOP/s; "
    title += f"bound by {first['bound']}"
    result = Table(title=title)
    for column in ("way", "threads", "ms a step", "tokens/s", "of the bound", "ours faster by", "same tokens"):
        result.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        result.add_row(
            row["way"],
            str(row["threads"]),
            f"{row['ms_per_token']:.3f}",
            f"{row['tokens_per_second']:.1f}",
            f"{100 * row['bound_fraction']:.0f} %",
            f"{row['ms_per_token'] / first['ms_per_token']:.2f}",
            f"{100 * row['same_tokens']:.1f} %",
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default PyTorch's")
    parser.add_argument("--shapes", default=SHAPES, help=f"a list; default {SHAPES}")
    parser.add_argument("--new", type=int, default=256, help="new tokens, default 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")
    options = parser.parse_args()
    if not cpu.is_there():
        parser.error(f"this bench needs the C++ engine: {cpu.describe()}")
    shapes = []
    for name in options.shapes.split(","):
        found = re.fullmatch(r"(looped256|looped768|gpt2)B([1-9]\d*)", name.strip())
        if not found:
            parser.error(f"--shapes takes names like looped256B1 and gpt2B16, got {name!r}")
        shapes.append((found[1], int(found[2])))
    if min(options.threads, options.new, options.rounds) < 1:
        parser.error("--threads, --new and --rounds must be at least 1")
    console, rows = Console(), []
    for kind, n_rows in shapes:
        new = measure(kind, n_rows, options)
        rows += new
        console.print(table(new))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
