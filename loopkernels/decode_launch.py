"""From a model's layers and a cache to the decode kernels: the launch table, the cache's arrays, and the launchers.

`LAUNCHES` is data, chosen from by width, precision and device alone. Which kernel runs a row's new tokens follows from how
many they are: one goes through `decode_tile`, more go through `prefill_blocks` in blocks of 16 rows, or of `block_rows` where
16 do not hold them. So no bit of a row depends on the other rows of a call.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopkernels.decode import decode_tile
from loopkernels.launch import Stop
from loopkernels.pack import Block, Packed, pack, padded, shape_of
from loopkernels.prefill import prefill_blocks
from loopkernels.table import AMD, AMPERE, HOPPER, RESIDENT_BYTES, Launch

TILE_ROWS = 16  # the least that a matrix product takes
STATES = ("zeros", "ones", "embedding")


@dataclass(frozen=True)
class DecodeLaunch(Launch):
    """A row of the decode table. rows: of a tile of `decode_tile`.

    block_rows: rows of a block of `prefill_blocks`, for more than 16 new tokens. key_lanes: numbers of one row's keys that
    `decode_tile` holds at a time, which is two keys at least. block_keys: keys that `prefill_blocks` holds at a time.
    """

    block_rows: int = 32
    key_lanes: int = 256
    block_keys: int = 32

    def keys(self, head_lanes: int) -> int:
        """Cached keys that a row of `decode_tile` reads at a time."""
        return max(2, self.key_lanes // head_lanes)


def _rows(
    targets: tuple[str, ...],
    precision: str,
    widest: int = 256,
    chunks: tuple[int, int] = (64, 64),
    low_from: int = 512,
    **options: Any,
) -> tuple[DecodeLaunch, ...]:
    """Rows up to `widest` lanes. chunks: `chunk` up to 64 lanes, and beyond. low_from: lanes from which blocks have 16 rows."""
    return tuple(
        DecodeLaunch(
            f"D{width}", targets, width, precision, TILE_ROWS, 8, chunks[width > 64],
            widest_head=min(width, 64), key_lanes=lanes, block_rows=TILE_ROWS if width >= low_from else 32, **options,
        )
        for width, lanes in ((16, 256), (32, 256), (64, 256), (128, 128), (256, 64))
        if width <= widest
    )  # fmt: skip


def _held_rows(targets: tuple[str, ...]) -> tuple[DecodeLaunch, ...]:
    """Weights in shared memory through all loops: for matrix units that take them from there, which work on 64 rows."""
    return tuple(
        DecodeLaunch(f"R{width}", targets, width, "bf16", 64, 4, 64, widest_head=width, resident=True, key_lanes=64)
        for width in (16, 32, 64)
    )


# Chosen from compiled figures (docs/decode_kernel.md), the fewest spilled bytes first: no row has been timed on a device yet. A
# product of 16 rows of 256 lanes holds the rows in every warp, 128 registers in tf32 and bf16x3: a kilobyte is spilled there in
# every form that was compiled. On AMD two stages spill too. fp32 without a matrix unit is for checking, not for speed; at 256
# lanes it would spill 43 KB. AMD has rows of its own in bf16 too: `launch.pack` chooses tanh by the vendor of the first target.
LAUNCHES = (
    *_held_rows(HOPPER),
    *_rows(HOPPER + AMPERE, "bf16"),
    *_rows(AMD, "bf16", chunks=(64, 32), low_from=16, stages=1),
    *_rows(HOPPER + AMPERE, "bf16x3", chunks=(64, 32), low_from=128),
    *_rows(AMD, "bf16x3", widest=128, chunks=(64, 32), low_from=16, stages=1),  # 256 lanes: beyond gfx942's shared memory
    *_rows(HOPPER + AMPERE, "tf32", chunks=(64, 32), low_from=256),
    *_rows(HOPPER + AMPERE, "fp32", widest=128, chunks=(32, 16), low_from=16, stages=1),
    *_rows(AMD, "fp32", widest=64, chunks=(32, 32), low_from=16, stages=1),
)


def choose(block: Block, n_core: int, precision: str, target: str) -> DecodeLaunch | None:
    """The first row that serves the block's width and heads at this precision on this target, or None. n_core: layers of the
    loop."""
    for launch in LAUNCHES:
        is_asked = launch.width == padded(block.width) and launch.precision == precision and target in launch.targets
        fits = padded(block.head_dim) <= launch.widest_head
        if is_asked and fits and not (launch.resident and _held_bytes(block, n_core, launch) > RESIDENT_BYTES):
            return launch
    return None


def _held_bytes(block: Block, n_core: int, launch: DecodeLaunch) -> int:
    sizes = shape_of(block, launch)
    return 2 * n_core * (4 * sizes["H"] * sizes["HP"] + 2 * sizes["FP"]) * sizes["CP"]


@dataclass(frozen=True)
class Layout:
    """What of a model is repeated, and how loops share the cache.

    n_prelude, n_core, n_coda: layers before, inside and after the loop. state: Y_0, of STATES. positions: when rows of the
    position table are added, "none", "once" or "each_loop". policy: "per_loop", "last_only", "modulo" or "first_then_shared"
    (docs/decode_kernel.md); period: N of modulo(N).
    """

    n_prelude: int
    n_core: int
    n_coda: int
    state: str = "zeros"
    positions: str = "none"
    policy: str = "per_loop"
    period: int = 1

    def slots_of_core(self, n_loops: int) -> int:
        """Cache slots of a layer of the core."""
        most = {"per_loop": n_loops, "last_only": 1, "modulo": self.period, "first_then_shared": 2}
        return min(most[self.policy], n_loops)

    def slots(self, n_loops: int) -> int:
        """Cache slots of a token."""
        return self.n_prelude + self.n_core * self.slots_of_core(n_loops) + self.n_coda


@dataclass(frozen=True)
class Decoder:
    """Packed weights of prelude, core and coda, and how they are run."""

    packed: Packed
    layout: Layout
    table: Tensor | None
    head_dim: int

    @property
    def launch(self) -> DecodeLaunch:
        launch = self.packed.launch
        if not isinstance(launch, DecodeLaunch):
            raise TypeError(f"Decoder: weights packed for {launch.name}, a row of another table")
        return launch

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values: bfloat16 where the products are, but float32 in the interpreter."""
        return self.packed.w_in.dtype if self.launch.precision == "bf16" else torch.float32


def decoder(block: Block, layout: Layout, table: Tensor | None, launch: DecodeLaunch, emulate: bool = False) -> Decoder:
    """Weights in tiles for a launch row. block: the layers of prelude, core and coda one after the other."""
    if len(block.layers) != layout.n_prelude + layout.n_core + layout.n_coda:
        raise ValueError(f"decoder: {len(block.layers)} layers for {layout}")
    kept = None if table is None else table.detach().float().contiguous()
    return Decoder(pack(block, launch, emulate), layout, kept, block.head_dim)


@dataclass
class Cache:
    """What is kept of every token: keys and values [slots, rows, H, capacity, D], loops `used` int32 [rows, capacity], last
    state `rest` float32 [rows, capacity, C]. What was not written is never read."""

    keys: Tensor
    values: Tensor
    used: Tensor
    rest: Tensor

    @property
    def capacity(self) -> int:
        return self.used.shape[1]


def empty_cache(decoder: Decoder, n_rows: int, capacity: int, n_slots: int, device: torch.device) -> Cache:
    """Room for `capacity` tokens in each of n_rows rows. n_slots: `Layout.slots` of as many loops as they may run."""
    shape = (n_slots, n_rows, decoder.packed.fixed["H"], capacity, decoder.head_dim)
    return Cache(
        torch.empty(shape, dtype=decoder.cache_dtype, device=device),
        torch.empty(shape, dtype=decoder.cache_dtype, device=device),
        torch.empty(n_rows, capacity, dtype=torch.int32, device=device),
        torch.empty(n_rows, capacity, decoder.packed.fixed["C"], dtype=torch.float32, device=device),
    )


@dataclass
class Extended:
    """What a launch leaves, of every new token: hidden [N, C], what the head reads; loops int32 [N]; history
    [n_loops + 1, N, C], Y_0 .. Y_u, where it was asked for."""

    hidden: Tensor
    loops: Tensor
    history: Tensor | None


def per_tile(launch: DecodeLaunch, n_rows: int, device: torch.device) -> int:
    """Rows that share a tile: as few as keep every SM busy. A row's bits do not depend on it."""
    if device.type == "cpu":
        return launch.rows
    n_programs = torch.cuda.get_device_properties(device).multi_processor_count * launch.per_sm
    return min(launch.rows, padded(-(-n_rows // n_programs), 1))


@dataclass
class _Call:
    """One call of `extend`, with its numbers on the device: seats [N]; first, counts, lengths [rows]."""

    decoder: Decoder
    cache: Cache
    embeds: Tensor
    seats: Tensor
    first: Tensor
    counts: Tensor
    lengths: Tensor
    stop: Stop
    warm: bool
    out: Extended

    @property
    def history(self) -> Tensor:
        return self.embeds if self.out.history is None else self.out.history

    @property
    def table(self) -> Tensor:
        return self.embeds if self.decoder.table is None else self.decoder.table


@torch.no_grad()
def extend(
    decoder: Decoder,
    cache: Cache,
    embeds: Tensor,
    counts: list[int],
    lengths: list[int],
    stop: Stop,
    seats: Tensor | None = None,
    warm: list[bool] | None = None,
    keep: bool = False,
) -> Extended:
    """Run the new tokens of all rows and write them into the cache behind the lengths[b] tokens it holds of row b.

    embeds: float32 [N, C], without positions, the counts[0] tokens of row 0 first. seats: their rows of the position table, by
    default their places in their rows. warm: which rows begin with the last state of their last cached token, by default none.
    The caller has made room for them, and checked seats.
    """
    device = embeds.device
    embeds = embeds.contiguous()
    n = len(embeds)
    history = torch.empty(stop.n_loops + 1, *embeds.shape, device=device) if keep else None
    out = Extended(torch.empty_like(embeds), torch.empty(n, dtype=torch.int32, device=device), history)
    starts = [0, *itertools.accumulate(counts)][:-1]
    if seats is None:
        places = [at + i for at, count in zip(lengths, counts, strict=True) for i in range(count)]
        seats = torch.tensor(places, dtype=torch.int32)
    aligned = [0] * (-len(counts) % 4)  # 16 bytes: a pointer aligned otherwise would make a kernel of its own
    numbers = [counts + aligned, starts + aligned, lengths + aligned]
    new, first, cached = torch.tensor(numbers, dtype=torch.int32).to(device)
    begins_warm = [False] * len(counts) if warm is None else warm
    for is_warm in sorted(set(begins_warm)):  # a launch of its own for each: nearly always there is one
        call = _Call(decoder, cache, embeds, seats.to(device, torch.int32), first, new, cached, stop, is_warm, out)
        own = [count if begins == is_warm else 0 for count, begins in zip(counts, begins_warm, strict=True)]
        single = [row for row, count in enumerate(own) if count == 1]
        if single:
            _tile(call, single, per_tile(decoder.launch, len(single), device))
        for rows, members in _buckets(own, decoder.launch.block_rows).items():
            _blocks(call, members, rows, -(-max(own[row] for row in members) // rows) * rows)
    return out


def _buckets(counts: list[int], block_rows: int) -> dict[int, list[int]]:
    """Rows with several new tokens by the rows of a block, most tokens first."""
    found: dict[int, list[int]] = {}
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        if counts[row] > 1:
            found.setdefault(TILE_ROWS if counts[row] <= TILE_ROWS else block_rows, []).append(row)
    return found


def _weights(decoder: Decoder) -> list[Any]:
    packed = decoder.packed
    weights = [packed.w_in, packed.w_out, packed.w_up, packed.w_down]
    biases = [packed.b_q, packed.b_out, packed.b_up, packed.b_down, packed.norm_scale, packed.norm_shift]
    return [*weights, *(w.shape[0] // 2 for w in weights), *biases]


def _limits(stop: Stop) -> list[Any]:
    return [stop.n_loops, stop.check_every, stop.min_loops, stop.n_passes, 0.0 if math.isinf(stop.tol) else stop.tol, stop.phi]


def _constants(call: _Call) -> dict[str, Any]:
    decoder, stop = call.decoder, call.stop
    layout, fixed = decoder.layout, decoder.packed.fixed
    names = ("C", "CP", "H", "HP", "FP", "KC", "NORM", "EPS", "ACT", "INJECT", "LOOP_NORM", "PREC", "EMULATE", "FAST", "STAGES")
    return {name: fixed[name] for name in names} | dict(
        D=decoder.head_dim, N_PRELUDE=layout.n_prelude, N_CORE=layout.n_core, N_CODA=layout.n_coda,
        POLICY=layout.policy, PERIOD=layout.period, INIT=layout.state, POS=layout.positions, RULE=stop.rule,
        ENDLESS=math.isinf(stop.tol), WARM=call.warm, KEEP=call.out.history is not None,
        num_stages=decoder.launch.stages,
    )  # fmt: skip


def _tile(call: _Call, members: list[int], n_per_tile: int) -> None:
    """One new token of each of the rows."""
    launch, out, cache = call.decoder.launch, call.out, call.cache
    n_programs = -(-len(members) // n_per_tile)
    order = torch.tensor(members, dtype=torch.int32).to(call.embeds.device)
    scratch = torch.empty(n_programs, 4, launch.rows, call.decoder.packed.fixed["CP"], device=order.device)
    decode_tile[(n_programs,)](
        call.embeds, call.seats, out.hidden, out.loops, call.history, order, call.first, call.lengths, cache.keys, cache.values,
        cache.used, cache.rest, call.table, scratch, *_weights(call.decoder),
        len(members), len(call.embeds), n_per_tile, cache.capacity, len(cache.used), *_limits(call.stop),
        **_constants(call), M=launch.rows, KEYS=launch.keys(call.decoder.packed.fixed["HP"]), RESIDENT=launch.resident,
        num_warps=launch.warps,
    )  # fmt: skip


def _blocks(call: _Call, members: list[int], rows: int, n_pad: int) -> None:
    """Several new tokens of each of the rows, in blocks of `rows`."""
    launch, out, cache, device = call.decoder.launch, call.out, call.cache, call.embeds.device
    n_programs = len(members)
    if device.type != "cpu":
        n_programs = min(n_programs, torch.cuda.get_device_properties(device).multi_processor_count * launch.per_sm)
    order = torch.tensor(members, dtype=torch.int32).to(device)
    scratch = torch.empty(n_programs, 4, n_pad, call.decoder.packed.fixed["CP"], dtype=torch.float32, device=device)
    pace = torch.empty(n_programs, 2, n_pad, dtype=torch.float32, device=device)
    marks = torch.empty(n_programs, 4, n_pad, dtype=torch.int32, device=device)
    prefill_blocks[(n_programs,)](
        call.embeds, call.seats, out.hidden, out.loops, call.history, order, call.first, call.counts, call.lengths, cache.keys,
        cache.values, cache.used, cache.rest, call.table, scratch, pace, marks, *_weights(call.decoder),
        len(members), len(call.embeds), n_pad, cache.capacity, len(cache.used), *_limits(call.stop),
        **_constants(call), M=rows, KEYS=launch.block_keys, num_warps=launch.block_warps,
    )  # fmt: skip
