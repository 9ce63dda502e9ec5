"""The Triton kernels on a GPU: ceilings, correctness, times beside floors. Run through benches/device.sh.

Parts run as processes of their own with a time limit each, so that a crash or a hang of one costs only itself; what is known is
written after every part. Checks run many at a time (they compile), times one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import looped
from looped.backends import triton as backend
from looped.weights import weights_of
from loopkernels import launch as kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LENGTHS = [41, 17, 5, 64, 33, 1, 16, 101, 82]
CHECKED_LOOPS = 3
MATRIX_RATE = {"bf16": 790e12, "bf16x3": 790e12 / 3, "tf32": 395e12, "fp32": 60e12}  # FLOP/s that floors assume (H200)
L2_RATE = 5.5e12  # bytes/s, likewise; `ceilings` measures both


# Models and prompts ---------------------------------------------------------------------------------------------------


def icl(
    width: int, heads: int, dtype: torch.dtype = torch.float64, seed: int = 0, activation: str = "gelu_tanh"
) -> looped.LoopedTransformer:
    """A looped in-context learner with weights large enough to matter."""
    config = looped.icl_config(n_dims=20, n_points=64, d_model=width, n_heads=heads, activation=activation)
    model = looped.LoopedTransformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if name.endswith("weight") and "norm" in name:
                p.copy_(1 + 0.1 * noise)
            else:
                p.copy_(0.5 * noise * (1 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return model.to(DEVICE, dtype)


def prompts_of(model: looped.LoopedTransformer, lengths: list[int], seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Fresh prompts, P and Y_0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), max(lengths), 20, generator=generator, dtype=torch.float64).to(DEVICE)
    own = torch.tensor(lengths, device=DEVICE)
    P = model.embed(x.to(next(model.parameters())), own)
    return x, P, model.initial_state(P), own


def block_of(model: looped.LoopedTransformer) -> Any:
    return backend.block_of(model.config, weights_of(model))


def row_of(name: str, precision: str) -> kernels.Launch:
    target = kernels.target_of(DEVICE)
    return next(r for r in kernels.LAUNCHES if (r.name, r.precision) == (name, precision) and target in r.targets)


def heads_of(width: int) -> int:
    return {16: 1, 32: 2, 64: 4, 128: 4, 256: 8}[width]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def limit_of(precision: str, torch_error: float) -> float:
    """The largest error that passes: twice that of PyTorch at the same precision, and at least what one loop is known for."""
    return {"bf16": 2 * torch_error, "tf32": 2e-3}.get(precision, max(1e-5, 2 * torch_error))


def plain_states(
    model: looped.LoopedTransformer, x: torch.Tensor, own: torch.Tensor, n_loops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each prompt's state after as many loops as n_loops says, by the eager model's own step; and predictions of every loop,
    still from there on."""
    x = x.to(next(model.parameters()))
    P = model.embed(x, own)
    state = final = model.initial_state(P)
    reads = []
    for t in range(1, int(n_loops.max()) + 1):
        state = model.step(state, P, own)
        final = torch.where((t <= n_loops)[:, None, None], state, final)
        reads.append(model.read(final, own))
    return final, torch.stack(reads, dim=1)


def agreement(
    got: looped.LoopResult, want: looped.LoopResult, theirs: looped.LoopedTransformer, x: torch.Tensor, own: torch.Tensor
) -> dict[str, Any]:
    """How far a result is from eager float64: prompts with the same loop count, those whose status is another then, and over
    the prompts with the same count the errors of states and predictions beside those of PyTorch in the dtype of `theirs`."""
    same = got.n_loops == want.n_loops
    y, reads = plain_states(theirs, x, own, want.n_loops)
    found: dict[str, Any] = dict(same_loops=int(same.sum()), other_status=int((got.status != want.status)[same].sum()))
    found["error"], found["torch_error"] = (relative_error(states[same], want.y[same]) for states in (got.y, y))
    if want.predictions is not None and got.predictions is not None:
        n = reads.shape[1]
        for name, predictions in (("predictions_error", got.predictions[:, :n]), ("torch_predictions_error", reads)):
            found[name] = relative_error(predictions[same], want.predictions[:, :n][same])
    return found


def agrees(found: dict[str, Any], n_prompts: int, precision: str) -> bool:
    """Whether an `agreement` is close enough: nine counts of ten, every status, and the errors within `limit_of`."""
    close = found["error"] <= limit_of(precision, found["torch_error"])
    if "predictions_error" in found:
        close = close and found["predictions_error"] <= limit_of(precision, found["torch_predictions_error"])
    return bool(close and found["same_loops"] >= 0.9 * n_prompts and not found["other_status"])


# Checks ---------------------------------------------------------------------------------------------------------------


def check(name: str, precision: str, activation: str = "gelu_tanh") -> dict[str, Any]:
    """One launch row against float64 on random prompts, and its bits alone, reversed, among many, and resumed."""
    row = row_of(name, precision)
    lengths = LENGTHS[:4] if INTERPRETED else LENGTHS
    model = icl(row.width, heads_of(row.width), activation=activation)
    x, P, Y, own = prompts_of(model, lengths)
    packed = kernels.pack(block_of(model), row, emulate=INTERPRETED)

    def run(chosen: list[int], n: int, start: torch.Tensor | None = None) -> torch.Tensor:
        begin = Y.float() if start is None else start
        return kernels.run(packed, P[chosen].float(), begin[chosen], [lengths[i] for i in chosen], kernels.Stop(n)).final

    want = Y
    for _ in range(CHECKED_LOOPS):
        want = model.step(want, P, own)
    everyone = list(range(len(lengths)))
    began = time.perf_counter()
    got = run(everyone, CHECKED_LOOPS)
    found: dict[str, Any] = dict(row=name, precision=precision, activation=activation)
    found["first_seconds"] = time.perf_counter() - began
    found["error"] = relative_error(got, want)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    theirs = icl(row.width, heads_of(row.width), kind, activation=activation)
    state = theirs.initial_state(theirs.embed(x.to(next(theirs.parameters())), own))
    signal = theirs.embed(x.to(next(theirs.parameters())), own)
    for _ in range(CHECKED_LOOPS):
        state = theirs.step(state, signal, own)
    found["torch_error"] = relative_error(state, want)
    limit = limit_of(precision, found["torch_error"])
    alone = all(torch.equal(run([i], CHECKED_LOOPS)[0], got[i, : P.shape[1]]) for i in everyone)
    backwards = torch.equal(run(everyone[::-1], CHECKED_LOOPS).flip(0), got)
    many = [i % len(lengths) for i in range(6 if INTERPRETED else 1000)]
    among = torch.equal(run(many, CHECKED_LOOPS), got[many])
    resumed = torch.equal(run(everyone, CHECKED_LOOPS - 1, run(everyone, 1)), got)
    found |= dict(alone=alone, backwards=backwards, among_many=among, resumed=resumed)
    found["ok"] = bool(found["error"] <= limit and alone and backwards and among and resumed)
    return found


def integers(name: str, precision: str) -> dict[str, Any]:
    """Small integers through attention and MLP: every sum is exact, so any wrong number is a fault of the code, not
    rounding."""
    row = row_of(name, precision)
    width, generator = row.width, torch.Generator().manual_seed(3)
    fields = dict(norm_kind="none", loop_norm="none", pos_kind="none", activation="relu", mask_kind="full")
    config = dict(input_kind="states", readout="none", d_model=width, n_heads=heads_of(width))
    model = looped.LoopedTransformer(looped.LoopedConfig(**config, **fields)).double()

    def sparse(weight: torch.Tensor, n: int) -> None:
        for line in weight:
            signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
            line[torch.randperm(len(line), generator=generator)[:n]] = signs

    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        block = model.core[0]
        sparse(block.attn.qkv.weight[2 * width :], 2)
        for weight, n in ((block.attn.proj.weight, 2), (block.mlp.fc.weight, 3), (block.mlp.proj.weight, 3)):
            sparse(weight, n)
        block.mlp.fc.bias.copy_(torch.randint(-2, 3, (4 * width,), generator=generator))
    model, B, T = model.to(DEVICE), 2 if INTERPRETED else 300, 16 if INTERPRETED else 64
    P = torch.randint(-2, 3, (B, 1, width), generator=generator).double().expand(B, T, width).contiguous().to(DEVICE)
    Y = torch.zeros_like(P)
    want = model.step(Y, P)
    packed = kernels.pack(block_of(model), row, emulate=INTERPRETED)
    runs = 1 if INTERPRETED else 20
    wrong = 0
    for _ in range(runs):
        got = kernels.run(packed, P.float(), Y.float(), [T] * B, kernels.Stop(1)).final
        wrong += int((got.double() != want).sum())
    return dict(row=name, precision=precision, integers_wrong=wrong, largest=float(want.abs().max()), ok=wrong == 0)


def exits(precision: str) -> dict[str, Any]:
    """Loop counts, statuses, states and predictions under the contraction rule against eager float64, through `solve`."""
    settings = {"bf16": "medium", "bf16x3": "highest", "tf32": "high"}
    torch.set_float32_matmul_precision(settings[precision])
    lengths = LENGTHS[:3] if INTERPRETED else LENGTHS * 4
    truth, model = icl(64, 4), icl(64, 4, torch.float32)
    x, _, _, own = prompts_of(truth, lengths)
    options = dict(n_loops=5 if INTERPRETED else 60, exit=looped.exits.Contraction(tol=1e-2), on_stall="exit", lengths=own)
    options["return_predictions"] = True
    want = looped.solve(truth, x, backend="eager", **options)
    got = looped.solve(model, x.float(), backend="triton", **options)
    theirs = icl(64, 4, torch.bfloat16 if precision == "bf16" else torch.float32)
    found = dict(exits=precision, prompts=len(lengths), loops=got.n_loops.tolist(), want=want.n_loops.tolist())
    found |= agreement(got, want, theirs, x, own)
    return found | dict(ok=agrees(found, len(lengths), precision))


def ordinary(width: int, dtype: str) -> dict[str, Any]:
    """The CUDA graph of ordinary kernels against eager float64: numbers, loop counts, predictions, a second call on the same
    graph, another number of loops, resuming, fewer prompts as they end, and the count of graphs it made."""
    from looped.backends import graph

    truth, model = icl(width, 8), icl(width, 8, getattr(torch, dtype))
    lengths = LENGTHS[:3] if INTERPRETED else LENGTHS * 8
    x, _, _, own = prompts_of(truth, lengths)
    rule = looped.exits.Contraction(tol=2e-2)
    options = dict(n_loops=6 if INTERPRETED else 40, exit=rule, on_stall="exit", lengths=own, return_predictions=True)
    want = looped.solve(truth, x, backend="eager", **options)
    mine = x.to(next(model.parameters()))
    got = looped.solve(model, mine, backend="graph", **options)
    again = looped.solve(model, mine, backend="graph", **options)
    begun = looped.solve(model, mine, backend="graph", **(options | dict(n_loops=4)))
    resumed = looped.solve(model, mine, backend="graph", state=begun.state, **options)
    found: dict[str, Any] = dict(ordinary=width, dtype=dtype) | agreement(got, want, model, x, own)
    found["resumed_loops"] = int((resumed.n_loops == got.n_loops).sum())
    found["again"], found["graphs"] = torch.equal(got.y, again.y), sum(len(kept) for kept in graph._idle.values())
    n = len(lengths)
    is_close = agrees(found, n, "fp32" if dtype == "float32" else "bf16")
    found["ok"] = bool(is_close and found["again"] and found["resumed_loops"] >= 0.9 * n)
    return found


def forward(width: int) -> dict[str, Any]:
    """A forward pass is the operator, uncompiled and compiled, and a call can be captured in a graph of the caller's own."""
    model = icl(width, heads_of(width) if width <= 256 else 8, torch.float32)
    x = torch.randn(8, 41, 20, device=DEVICE)
    with torch.no_grad():
        want = looped.solve(model, x, n_loops=5)
        got = model(x, n_loops=5)
        plain = model(x, n_loops=5, backend="eager")
        compiled = torch.compile(model, fullgraph=True)(x, n_loops=5)
    found: dict[str, Any] = dict(forward=width, backend=want.backend, same=torch.equal(got, want.prediction))
    found |= dict(compiled=torch.equal(compiled, got), error=relative_error(got, plain))
    if want.backend == "triton":
        own = torch.cuda.CUDAGraph()
        with torch.cuda.graph(own):
            captured = looped.solve(model, x, n_loops=5).y
        own.replay()
        found["captured"] = torch.equal(captured, want.y)
    found["ok"] = bool(found["same"] and found["compiled"] and found["error"] <= 1e-4 and found.get("captured", True))
    return found


def small() -> dict[str, Any]:
    """A few loops of a few prompts through every kind of kernel: what compute-sanitizer looks at."""
    torch.set_float32_matmul_precision("medium")
    model = icl(16, 1, torch.float32)
    x, _, _, own = prompts_of(model, [41, 17, 70])
    for name in ("triton", "graph"):
        looped.solve(model, x.float(), lengths=own, n_loops=3, exit="contraction", backend=name)
    torch.cuda.synchronize()
    return dict(ok=True)


def sanitized() -> dict[str, Any]:
    """`small` under compute-sanitizer, where there is one."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        return dict(sanitizer="there is no compute-sanitizer here", ok=True)
    command = [tool, "--error-exitcode", "9", sys.executable, "-W", "ignore", __file__, "--part", "small"]
    done = subprocess.run(command, capture_output=True, text=True)
    return dict(sanitizer=done.returncode, said=done.stdout[-600:], ok=done.returncode == 0)


# Times ----------------------------------------------------------------------------------------------------------------


def median_us(f: Any, n: int = 7) -> float:
    """Median time of a call in microseconds, by events, after a warm-up."""
    f()
    torch.cuda.synchronize()
    times = []
    for _ in range(n):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[n // 2]


def ceilings() -> dict[str, float]:
    """What the chip does here: L2 reads as the kernels make them, a copy through HBM, matrix products."""
    import triton
    import triton.language as tl

    @triton.jit
    def reread(source, target, n_blocks, n_times, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.int32)
        for _ in range(n_times):
            for j in tl.range(0, n_blocks, num_stages=3):
                total += tl.load(source + j * BLOCK + place, cache_modifier=".cg")
        tl.store(target + tl.program_id(0) * BLOCK + place, total)

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    found = dict(processors=processors)
    weights = torch.randint(0, 9, (1_572_864 // 4,), dtype=torch.int32, device=DEVICE)  # a block of width 256 in bf16
    for per_sm in (1, 2):
        out = torch.empty(processors * per_sm * 4096, dtype=torch.int32, device=DEVICE)
        grid = (processors * per_sm,)
        us = median_us(lambda: reread[grid](weights, out, weights.numel() // 4096, 50, 4096, num_warps=8))  # noqa: B023
        found[f"l2_read_bytes_per_s_{per_sm}"] = grid[0] * 50 * weights.numel() * 4 / us * 1e6
    big = torch.empty(2**31, dtype=torch.int8, device=DEVICE)
    copy = torch.empty_like(big)
    found["hbm_copy_bytes_per_s"] = 2 * 2**31 / median_us(lambda: copy.copy_(big)) * 1e6
    kinds = (("bf16", torch.bfloat16, "highest"), ("tf32", torch.float32, "high"), ("fp32", torch.float32, "highest"))
    for name, dtype, setting in kinds:
        torch.set_float32_matmul_precision(setting)
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=dtype) for _ in range(2))
        found[f"{name}_flop_per_s"] = 2 * 8192**3 / median_us(lambda: a @ b, 3) * 1e6  # noqa: B023
    return found


def flop_of(width: int, tokens: int) -> int:
    """Arithmetic of one loop of one prompt, dense attention."""
    return 24 * width**2 * tokens + 4 * tokens**2 * width


def times(width: int, precision: str) -> list[dict[str, Any]]:
    """Ours: time of a loop, from the difference of two loop counts, at several numbers of prompts."""
    torch.set_float32_matmul_precision({"bf16": "medium", "tf32": "high"}.get(precision, "highest"))
    model, found = icl(width, heads_of(width), torch.float32), []
    row = kernels.choose(block_of(model), precision, kernels.target_of(DEVICE))
    if row is None:
        return [dict(width=width, precision=precision, skipped=f"no launch on {kernels.target_of(DEVICE)}")]
    packed = kernels.pack(block_of(model), row)
    for tokens in (41, 82, 101):
        for n in (1, 64, 400, 512, 4096):
            _, P, Y, _ = prompts_of(model, [tokens] * n)

            def run(loops: int) -> Any:
                return lambda: kernels.run(packed, P, Y, [tokens] * n, kernels.Stop(loops))  # noqa: B023

            few, many = median_us(run(8)), median_us(run(40))
            us = (many - few) / 32
            flop = flop_of(width, tokens) * n
            rows = kernels.slot_rows(tokens, row.rows)
            streams = 0 if row.resident and rows <= row.rows else -(-n * rows // row.rows)  # of all weights, in one loop
            floor = max(flop / MATRIX_RATE[precision], streams * packed.n_bytes / L2_RATE) * 1e6
            one = dict(width=width, tokens=tokens, prompts=n, precision=precision, row=row.name, us_per_loop=us)
            one |= dict(call_of_40_us=many, flop_per_s=flop / us * 1e6, floor_us=floor, share_of_floor=floor / us)
            found.append(one)
            print(f"ours C{width} T{tokens} B{n} {precision}: {us:.2f} us a loop, floor {floor:.2f}", flush=True)
    return found


def theirs(width: int, dtype: str) -> list[dict[str, Any]]:
    """PyTorch's own: eager, a CUDA graph of 8 loops, torch.compile, and compile with max-autotune and graphs."""
    kind, found = getattr(torch, dtype), []
    model = icl(width, heads_of(width), kind)
    for tokens, n in itertools.product((41, 82, 101), (1, 64, 400, 512, 4096)):
        _, P, Y, _ = prompts_of(model, [tokens] * n)
        one: dict[str, Any] = dict(width=width, tokens=tokens, prompts=n, dtype=dtype)
        with torch.no_grad():
            one["eager_us"] = median_us(lambda: model.step(Y, P))  # noqa: B023
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                model.step(Y, P)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                state = Y
                for _ in range(8):
                    state = model.step(state, P)
            one["graph_us"] = median_us(graph.replay) / 8
            if tokens == 41 and n in (1, 400):
                for name, mode in (("compile_us", None), ("autotuned_us", "max-autotune")):
                    fast = torch.compile(lambda y, p: model.step(y, p), mode=mode, dynamic=False)
                    try:
                        one[name] = median_us(lambda: fast(Y, P))  # noqa: B023
                    except Exception as error:
                        one[name] = repr(error)[:200]
        found.append(one)
        print(one, flush=True)
    return found


def few(width: int, dtype: str) -> list[dict[str, Any]]:
    """One prompt, and some, through `solve`: time of a loop in the fused kernels and in a CUDA graph of ordinary ones, which
    the choice for few prompts weighs against each other."""
    torch.set_float32_matmul_precision("medium" if dtype == "bfloat16" else "highest")
    model, found = icl(width, heads_of(width) if width <= 256 else 8, getattr(torch, dtype)), []
    for tokens, n in itertools.product((41, 101), (1, 8, 64)):
        x = torch.randn(n, tokens, 20, device=DEVICE, dtype=getattr(torch, dtype))
        one: dict[str, Any] = dict(width=width, tokens=tokens, prompts=n, dtype=dtype)
        one["chosen"] = looped.solve(model, x, n_loops=1, allow_batch_dependent=True).backend
        for name in ("triton", "graph", "eager") if width <= 256 else ("graph", "eager"):

            def run(loops: int) -> Any:
                return lambda: looped.solve(model, x, n_loops=loops, backend=name)  # noqa: B023

            one[f"{name}_us"] = (median_us(run(48)) - median_us(run(16))) / 32
        found.append(one)
        print(one, flush=True)
    return found


# The run --------------------------------------------------------------------------------------------------------------

PARTS = {"check": check, "integers": integers, "exits": exits, "ordinary": ordinary, "forward": forward, "small": small}
PARTS |= {"sanitized": sanitized, "ceilings": ceilings, "times": times, "theirs": theirs, "few": few}


def apart(part: str, *values: object, limit: float = 120) -> Any:
    """A part in a process of its own: its result, or what went wrong."""
    command = [sys.executable, "-W", "ignore", __file__, "--part", part, *map(str, values)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return dict(part=part, values=values, ok=False, fault=f"not done in {limit} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    return dict(part=part, values=values, ok=False, fault=(done.stderr or done.stdout)[-800:])


def main(out: Path) -> int:
    began = time.perf_counter()
    target = kernels.target_of(DEVICE)
    report: dict[str, Any] = dict(
        torch=torch.__version__, python=platform.python_version(), target=target, date=time.strftime("%Y-%m-%d"),
        device="Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name(), looped=looped.__version__,
    )  # fmt: skip
    path = out / ("interpreter.json" if INTERPRETED else "device.json")

    def note(name: str, value: Any) -> None:
        report[name] = value
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"[{time.perf_counter() - began:4.0f} s] {name}", flush=True)

    rows = [(r.name, r.precision) for r in kernels.LAUNCHES if target in r.targets]
    if INTERPRETED:
        rows = [("R16", "bf16"), ("S16", "bf16x3")]
    jobs: list[tuple[object, ...]] = [("check", *row) for row in rows]
    jobs += [("integers", *row) for row in rows if row[0] in (("R16",) if INTERPRETED else ("R64", "S128", "S256"))]
    jobs += [("exits", "bf16x3")] if INTERPRETED else [("exits", p) for p in ("bf16", "bf16x3", "tf32")]
    if INTERPRETED:
        jobs += [("check", "R16", "bf16", "silu_gated"), ("ordinary", 32, "float32")]
    else:
        jobs += [("check", name, "bf16", kind) for name in ("R64", "S128", "S256") for kind in ("gelu", "silu_gated")]
        jobs += [("ordinary", 512, "float32"), ("ordinary", 1024, "bfloat16"), ("ordinary", 64, "float32")]
        jobs += [("forward", 64), ("forward", 512), ("sanitized",)]
    with ThreadPoolExecutor(2 if INTERPRETED else max(1, (os.cpu_count() or 2) - 1)) as pool:
        checks = list(pool.map(lambda job: apart(str(job[0]), *job[1:], limit=600 if INTERPRETED else 120), jobs))
    for one in checks:
        print(json.dumps({k: v for k, v in one.items() if k not in ("loops", "want")}), flush=True)
    note("checks", checks)
    failed = sum(not one["ok"] for one in checks)
    if not INTERPRETED:
        note("ceilings", apart("ceilings", limit=40))
        for width, precision in ((64, "bf16"), (256, "bf16"), (256, "bf16x3"), (128, "bf16"), (64, "bf16x3")):
            note(f"times_{width}_{precision}", apart("times", width, precision, limit=45))
        for width, dtype in ((64, "bfloat16"), (256, "bfloat16"), (256, "float32"), (128, "bfloat16")):
            note(f"theirs_{width}_{dtype}", apart("theirs", width, dtype, limit=75))
        for width, dtype in ((256, "float32"), (256, "bfloat16"), (512, "float32")):
            note(f"few_{width}_{dtype}", apart("few", width, dtype, limit=30))
    print(f"{len(checks) - failed} of {len(checks)} checks passed; {path} written")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benches/results"))
    parser.add_argument("--part", nargs="+")
    chosen = parser.parse_args()
    if chosen.part:
        values = [int(v) if v.isdigit() else v for v in chosen.part[1:]]
        print("RESULT " + json.dumps(PARTS[chosen.part[0]](*values)), flush=True)
    else:
        sys.exit(bool(main(chosen.out)))
