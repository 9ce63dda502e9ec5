"""Self-speculative decoding beside plain `generate`: tokens per second, acceptance, and whether the text is the same.

    python benches/speculative.py [--loops 16] [--tokens 64] [--rounds 5] [--threads 1] [--json OUT]

The model has random weights whose map contracts, so that few loops predict what all would say, as in trained looped models; its
own acceptance rate is printed. Every way decodes the same prompt once in each round, in turn; printed are medians over the
rounds and the ratio to plain decoding of the same round. "loops" are the token-loops that a token of the text cost. Drafts are
taken by `draft` (their loops are gone on from) and, as "again", by extending and cropping (their loops are run twice).
"""

import argparse
import json
import statistics
import time

import torch

from looped.lm import LoopedGPT2, LoopedGPT2Config
from looped.lm.eager import EagerSession
from looped.lm.session import SESSIONS


class Again(EagerSession):
    """The eager session without `draft`."""

    backend = "again"
    draft = None  # type: ignore[assignment]


def contracting(n_loops: int, d_model: int, n_layers: int, strength: float) -> LoopedGPT2:
    """A model whose blocks add little to the tokens that every loop injects."""
    torch.manual_seed(0)
    config = LoopedGPT2Config(
        vocab_size=512, n_positions=1024, d_model=d_model, n_heads=d_model // 32, n_core=n_layers, n_loops=n_loops,
        inject="add", state_init="zeros", loop_norm="each", pos_when="each_loop", tie_readout=False,
    )  # fmt: skip
    model = LoopedGPT2(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=strength / parameter.shape[1] ** 0.5 if ".proj." in name else 0.3)
        model.transformer.embedding.weight.mul_(50)  # a loop keeps a small part of the state it is given
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--strength", type=float, default=0.5, help="of what a layer adds; larger contracts less")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write one row per way to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    SESSIONS["again"] = Again
    model = contracting(options.loops, options.width, options.layers, options.strength)
    ids = torch.randint(0, 512, (1, 16))
    ways = {"plain": {}}
    for loops, tokens in ((1, 4), (2, 4), (4, 8)):
        ways |= {f"draft {loops} x {tokens}": dict(draft_loops=loops, draft_tokens=tokens)}
    ways |= {"draft 2 x 4, again": dict(draft_loops=2, draft_tokens=4, backend="again")}
    settings = dict(max_new_tokens=options.tokens, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs, loops_run = {}, {}
    for name, way in ways.items():  # warms up, and counts
        loops_run[name] = counted(lambda way=way: model.generate(ids, **settings | way)) - len(ids[0]) * options.loops
    for _ in range(options.rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            outputs[name] = model.generate(ids, **settings | way)
            seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name in ways:
        ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)]
        rows.append(
            {
                "way": name,
                "tokens_per_second": options.tokens / statistics.median(seconds[name]),
                "speedup": statistics.median(ratios),
                "speedup_range": [min(ratios), max(ratios)],
                "token_loops_per_token": loops_run[name] / (options.tokens - 1),
                "acceptance": getattr(outputs[name], "acceptance_rate", None),
                "same_text": torch.equal(outputs[name].sequences, outputs["plain"].sequences),
            }
        )
    shape = f"C{options.width}, {options.layers} layers, {options.loops} loops, {options.threads} threads, float32, eager"
    print(f"{shape}; {options.tokens} tokens, median of {options.rounds} rounds, torch {torch.__version__}")
    print(f"{'':22}{'tokens/s':>9}{'x plain':>9}{'range':>14}{'loops':>8}{'accepted':>10}  text")
    for r in rows:
        accepted = "" if r["acceptance"] is None else f"{r['acceptance']:.0%}"
        low, high = r["speedup_range"]
        print(
            f"{r['way']:22}{r['tokens_per_second']:9.1f}{r['speedup']:9.2f}{f'{low:.2f}-{high:.2f}':>14}"
            f"{r['token_loops_per_token']:8.1f}{accepted:>10}  {'same' if r['same_text'] else 'DIFFERS'}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def counted(call) -> int:
    """Token-loops run in a call."""
    n, loop = 0, EagerSession._loop

    def counting(self, t, run):
        nonlocal n
        n += run.moving.n_tokens
        return loop(self, t, run)

    EagerSession._loop = counting  # type: ignore[method-assign]
    try:
        call()
    finally:
        EagerSession._loop = loop  # type: ignore[method-assign]
    return n


if __name__ == "__main__":
    main()
