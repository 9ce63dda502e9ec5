"""The launch table: which kernel runs a block of some width at a precision on a chip, and how.

Data, chosen from by width, width of a head, precision and device alone, so that the bits of a result never depend on the
number of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])
PRECISIONS = ("bf16", "bf16x3", "tf32", "fp32")
MOST_TOKENS = 256
RESIDENT_BYTES = 98_304


@dataclass(frozen=True)
class Launch:
    """A row of the launch table: which kernel runs blocks of up to `width` padded lanes at a precision, and how.

    rows: rows of a tile. chunk: hidden units of the MLP at a time. widest_head: lanes of the widest head that passes the gates
    of `loopkernels.aot`, where a head twice as wide takes twice the shared memory. resident: weights stay in shared memory
    through all loops. tma: weights come through tensor descriptors. per_sm: programs an SM runs at a time.
    """

    name: str
    targets: tuple[str, ...]
    width: int
    precision: str
    rows: int
    warps: int
    chunk: int
    widest_head: int = 32
    stages: int = 2
    resident: bool = False
    tma: bool = False
    per_sm: int = 1

    @property
    def block_warps(self) -> int:
        """Warps of `loop_blocks`: it holds more at a time than `loop_tile`, and four warps serialise its matrix
        instructions."""
        return max(self.warps, 8)


HOPPER, AMPERE, AMD = ("sm_90", "sm_100"), ("sm_80",), ("gfx942", "gfx950")
SM_90, SM_100 = ("sm_90",), ("sm_100",)

# Chosen from compiled figures (registers, spills, shared memory; docs/kernels.md): no row has been timed on a device yet.
# Blackwell keeps accumulators in tensor memory, and two stages of wide weights beside them spill by the kilobyte: one stage
# there. On AMD two stages of bf16x3 spill as well, and take minutes to compile.
LAUNCHES = (
    Launch("R16", HOPPER, 16, "bf16", 64, 4, 64, widest_head=16, resident=True, tma=True, per_sm=2),
    Launch("R32", HOPPER, 32, "bf16", 64, 4, 64, resident=True, tma=True, per_sm=2),
    Launch("R64", HOPPER, 64, "bf16", 64, 4, 64, resident=True, tma=True, per_sm=2),
    Launch("S16", HOPPER, 16, "bf16", 64, 4, 64, widest_head=16, tma=True, per_sm=2),
    Launch("S32", HOPPER, 32, "bf16", 64, 4, 64, tma=True, per_sm=2),
    Launch("S64", HOPPER, 64, "bf16", 64, 4, 64, tma=True, per_sm=2),
    Launch("S128", SM_90, 128, "bf16", 64, 8, 64, widest_head=64, tma=True),
    Launch("S128", SM_100, 128, "bf16", 64, 8, 64, stages=1, tma=True),
    Launch("S256", SM_90, 256, "bf16", 64, 8, 32, tma=True),
    Launch("S256", SM_100, 256, "bf16", 64, 8, 32, stages=1, tma=True),
    Launch("S16", HOPPER, 16, "bf16x3", 64, 4, 64, widest_head=16, tma=True),
    Launch("S32", HOPPER, 32, "bf16x3", 64, 4, 64, tma=True),
    Launch("S64", SM_90, 64, "bf16x3", 64, 4, 64, tma=True),
    Launch("S64", SM_100, 64, "bf16x3", 64, 4, 64, stages=1, tma=True),
    Launch("S128", SM_90, 128, "bf16x3", 64, 8, 64, tma=True),
    Launch("S128", SM_100, 128, "bf16x3", 64, 8, 64, stages=1, tma=True),
    Launch("S256", HOPPER, 256, "bf16x3", 64, 8, 32, stages=1, tma=True),
    Launch("S16", HOPPER, 16, "tf32", 64, 4, 64, widest_head=16, tma=True),
    Launch("S32", HOPPER, 32, "tf32", 64, 4, 64, tma=True),
    Launch("S64", SM_90, 64, "tf32", 64, 4, 64, tma=True),
    Launch("S64", SM_100, 64, "tf32", 64, 4, 64, stages=1, tma=True),
    Launch("S128", SM_90, 128, "tf32", 64, 8, 64, tma=True),
    Launch("S128", SM_100, 128, "tf32", 64, 8, 64, stages=1, tma=True),
    Launch("S16", AMPERE + AMD, 16, "bf16", 64, 4, 64, widest_head=16),
    Launch("S32", AMPERE + AMD, 32, "bf16", 64, 4, 64),
    Launch("S64", AMPERE + AMD, 64, "bf16", 64, 4, 64),
    Launch("S128", AMPERE + AMD, 128, "bf16", 64, 8, 64),
    Launch("S256", AMPERE, 256, "bf16", 32, 8, 32),
    Launch("S256", AMD, 256, "bf16", 32, 8, 32, stages=1),
    Launch("S16", AMPERE, 16, "bf16x3", 64, 4, 64, widest_head=16),
    Launch("S32", AMPERE, 32, "bf16x3", 64, 4, 64),
    Launch("S64", AMPERE, 64, "bf16x3", 64, 4, 64),
    Launch("S16", AMD, 16, "bf16x3", 64, 4, 64, widest_head=16, stages=1),
    Launch("S32", AMD, 32, "bf16x3", 64, 4, 64, stages=1),
    Launch("S64", AMD, 64, "bf16x3", 64, 4, 64, stages=1),
    Launch("S128", AMPERE, 128, "bf16x3", 16, 8, 32),
    Launch("S128", AMD, 128, "bf16x3", 32, 8, 32, stages=1),
    Launch("S256", AMPERE, 256, "bf16x3", 16, 8, 32),
    Launch("S256", AMD, 256, "bf16x3", 16, 8, 32, stages=1),
    Launch("S16", AMPERE, 16, "tf32", 64, 4, 64, widest_head=16),
    Launch("S32", AMPERE, 32, "tf32", 64, 4, 64),
    Launch("S64", AMPERE, 64, "tf32", 64, 4, 64),
    Launch("S128", AMPERE, 128, "tf32", 32, 8, 32),
    Launch("S256", AMPERE, 256, "tf32", 16, 8, 32),
    Launch("S16", HOPPER + AMPERE + AMD, 16, "fp32", 16, 4, 32, widest_head=16, stages=1),
    Launch("S32", HOPPER + AMPERE + AMD, 32, "fp32", 16, 4, 32, widest_head=16, stages=1),
    Launch("S64", HOPPER + AMPERE + AMD, 64, "fp32", 16, 4, 32, widest_head=16, stages=1),
    Launch("S128", HOPPER + AMPERE + AMD, 128, "fp32", 16, 8, 32, stages=1),
)

# What a target does not offer, and why: (rows, precision, targets, reason).
NOT_OFFERED = (
    ("R16 R32 R64", "bf16", AMPERE + AMD, "the matrix unit takes no operands from shared memory, where R holds its weights"),
    ("S256", "tf32", SM_90, "its matrix instructions are serialised, with one stage as with two"),
    ("S256", "tf32", SM_100, "it spills a kilobyte in every form that was compiled"),
    ("S16 S32 S64 S128 S256", "tf32", AMD, "tf32 is a format of NVIDIA's matrix units; bf16x3 is float32's mode here"),
    ("S256", "fp32", HOPPER + AMPERE + AMD, "fp32 without a matrix unit is for checks, up to width 128"),
)


def why_not_offered(width: int, precision: str, target: str) -> str | None:
    """Why no row of the table serves a padded width at a precision on this target, where that is known."""
    for names, kind, targets, reason in NOT_OFFERED:
        if f"S{width}" in names.split() and kind == precision and target in targets:
            return reason
    return None


# The oldest Triton that is known to compile the kernels, and for a target where that one does not: it fails on Blackwell in a
# pass of its own.
OLDEST_TRITON, OLDEST_TRITON_FOR = (3, 6), {"sm_100": (3, 9)}


def why_not_compiled(target: str) -> str | None:
    """Why this version of Triton is not used for a target: older ones fail, or were never tried. None where it is."""
    oldest = OLDEST_TRITON_FOR.get(target, OLDEST_TRITON)
    if oldest <= VERSION:
        return None
    return f"the Triton kernels for {target} need Triton {'.'.join(map(str, oldest))} or newer and this is {triton.__version__}"


def target_of(device: torch.device) -> str:
    """The launch table's name for a device; the interpreter stands in for Hopper."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
