"""The FLEQ machine: mem[c..] = f(mem[a..], mem[b..]); if mem[flag] <= 0 go to j, else to the next command.

Eight layers with any set of function blocks (Giannou et al., 2023, section 5.2, Theorem 2, which bounds them by 9 plus those of
the deepest block). A matrix of k columns stands in k neighbouring tokens. Each of the w scratchpad tokens keeps its own copy of
the program counter and fetches for itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from looped.programs.addresses import add_small, codes, increment, position
from looped.programs.blocks import Block, MatrixProduct, Scaled, Sigmoid, SigmoidSum, Sum
from looped.programs.circuit import Layer, Layout, Terms, moved, rows_of, transformer
from looped.programs.fleq_plain import check_ranges
from looped.programs.snapshot import Snapshot

if TYPE_CHECKING:
    from looped.model import LoopedTransformer
    from looped.programs.fleq_program import FleqProgram

GATE = 8.0  # above every code
DATA_GATE = 1024.0  # above every number in memory
LAMBDA = 80.0
# The write has a margin of 1, and what leaks is multiplied by the gate: 1024 exp(-lam) lies below the rounding of data.
LEAST_LAMBDA = {torch.float64: 60.0, torch.float32: 40.0}
MOST_ADDRESS_BITS = 14
POINTERS = ("PA", "PB", "PW", "PF", "PJ")
MASKS = ("KA", "KB", "KW")
FUNCTION_NAMES = ("mm", "emul", "perc", "add", "sub", "inv", "sqrt", "sig")
PRODUCTS = frozenset(("mm", "emul", "perc"))

# Of products up to some 10 in size: the error against kappa and C is in docs/programs.md.
DEFAULT_PRODUCT = {
    (torch.float64, "single"): MatrixProduct("single", 2.0**24, 28.0),
    (torch.float64, "pair"): MatrixProduct("pair", 2.0**16, 4.0),
    (torch.float64, "richardson"): MatrixProduct("richardson", 2.0**8, 4.0),
    (torch.float32, "single"): MatrixProduct("single", 2.0**10, 12.0),
    (torch.float32, "pair"): MatrixProduct("pair", 2.0**6, 2.0),
    (torch.float32, "richardson"): MatrixProduct("richardson", 2.0**4, 4.0),
}


def default_product(dtype: torch.dtype, form: str = "pair") -> MatrixProduct:
    """A matrix product for numbers of some 10 in size, by precision and form."""
    return DEFAULT_PRODUCT[dtype, form]


def rounds_products(device: str) -> bool:
    """Whether PyTorch is set to round the factors of float32 products on a device."""
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    chosen = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if chosen is None:  # PyTorch before 2.9
        return torch.get_float32_matmul_precision() != "highest"
    return chosen in ("tf32", "bf16")


@dataclass(frozen=True)
class Blocks:
    """Which functions a FLEQ machine has, and how they are made.

    names: of `FUNCTION_NAMES`. product: of mm, emul and perc; default by precision. inv, sqrt: the sigmoid sums.
    """

    names: tuple[str, ...] = ("mm", "add", "sub")
    product: MatrixProduct | None = None
    inv: SigmoidSum = field(default_factory=lambda: SigmoidSum("inv", 32, 0.2, 20.0))
    sqrt: SigmoidSum = field(default_factory=lambda: SigmoidSum("sqrt", 32, 0.02, 40.0))

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in FUNCTION_NAMES:
                raise ValueError(f"Blocks: {name!r} is not one of {', '.join(FUNCTION_NAMES)}")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"Blocks: a name stands twice in {', '.join(self.names)}")


def least_tokens(width: int) -> int:
    """Tokens of the shortest program at a width: the machine's own, the constants 0 and 1, a command, and the end."""
    return width + 2 + 2 + 2


class FleqMachine:
    """A FLEQ computer as an ordinary `LoopedTransformer`.

    Parameters
        width w: the most rows and columns of a matrix. address_bits L: programs have at most 2^L tokens.
        blocks: its functions. lam: sharpness of the addressing heads, at least 60 in float64 and 40 in float32.
        dtype: float64 or float32; no other keeps data.

    Raises ValueError for what does not fit.
    """

    kind = "fleq"

    def __init__(
        self,
        width: int,
        address_bits: int,
        *,
        blocks: Blocks | None = None,
        lam: float = LAMBDA,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not 1 <= width <= 64:
            raise ValueError(f"FleqMachine: width={width} must lie in 1 .. 64")
        if not 2 <= address_bits <= MOST_ADDRESS_BITS:
            raise ValueError(f"FleqMachine: address_bits={address_bits} must lie in 2 .. {MOST_ADDRESS_BITS}")
        if dtype not in LEAST_LAMBDA:
            raise ValueError(f"FleqMachine: dtype={dtype} does not keep data; use torch.float64 or torch.float32")
        if not LEAST_LAMBDA[dtype] <= lam <= 1000:
            raise ValueError(f"FleqMachine: lam={lam} must lie in {LEAST_LAMBDA[dtype]:g} .. 1000 in {dtype}; take {LAMBDA:g}")
        blocks = blocks or Blocks()
        self.width, self.address_bits, self.lam_asked, self.dtype = width, address_bits, lam, dtype
        self.blocks = blocks
        self.product = blocks.product or default_product(dtype)
        self.functions: dict[str, Block] = {
            "mm": Scaled(self.product),
            "transpose": Scaled(self.product, of="numbers"),
            "emul": Scaled(self.product, most=math.inf),
            "perc": Scaled(self.product, 0.01, of="numbers"),
            "add": Sum(1.0),
            "sub": Sum(-1.0),
            "inv": blocks.inv,
            "sqrt": blocks.sqrt,
            "sig": Sigmoid(),
        }
        if (noise := self.product.bound(0.0, width, torch.finfo(dtype).eps)) >= 1:
            raise ValueError(
                f"FleqMachine: kappa={self.product.kappa:g} rounds products to +-{noise:.2g} in {dtype}; take less"
            )
        self.layout = self._layout()
        self.layers = self._build()
        self.model: LoopedTransformer = transformer(self.layers, self.layout.width, dtype=dtype, n_loops=10_000)
        assert self.model.config.head_dim is not None
        self.lam = self.layers[2].heads[0].gain(self.model.config.head_dim) / math.sqrt(self.model.config.head_dim)

    def _layout(self) -> Layout:
        L, w, names = self.address_bits, self.width, self.blocks.names
        n_functions = max(1, len(names))
        instruction = {name: L for name in POINTERS} | {"E": n_functions} | {name: w for name in MASKS}
        sizes = {"CMD": sum(instruction.values()), "MEM": w, "POS": L, "OH": w, "IND": 1, "SINK": 1, "NUL": 1, "ONE": 1}
        sizes |= {"PC": L} | instruction | {"NPC": L, "MA": 1, "MB": 1, "MW": 1, "A": w, "B": w, "FV": 1}
        if "emul" in names:
            sizes["ED"] = w
        if PRODUCTS & set(names):
            sizes["RAW"] = w
        for name in names:
            sizes[f"OUT {name}"] = 1 if name in ("inv", "sqrt", "sig") else w
        return Layout(sizes | {"BUF": w, "MISS": 1, "FLG": 1})

    # Layers -------------------------------------------------------------------------------------------------------

    def _build(self) -> list[Layer]:
        names = ("fetch", "address", "read", "function", "choose", "write and flag", "select", "correct")
        fetch, address, read, function, choose, write, select, correct = layers = [Layer(name) for name in names]
        self._address(address)
        self._read(read)
        self._function(function)
        self._choose(choose)
        self._write(write)
        self._select(select)
        for row in self.layout["PC"]:
            correct.round(row)
        self._clear(correct, "BUF", "MISS")
        self._fetch(fetch, max(len(layer.heads) for layer in layers))
        return layers

    def _clear(self, layer: Layer, *names: str) -> None:
        for name in names:
            for row in self.layout[name]:
                layer.clear(row)

    def _point(self, layer: Layer, pointer: str, moves: Sequence[tuple[Terms, Terms]]) -> None:
        query, key = rows_of(self.layout[pointer]), rows_of(self.layout["POS"])
        layer.attend(query, key, moves, lam=self.lam_asked, is_address=True)

    def _fetch(self, layer: Layer, n_heads: int) -> None:
        """The command that PC points to, over as many heads as another layer has anyway."""
        layout, one = self.layout, self.layout.row("IND")
        instruction = [row for name in (*POINTERS, "E", *MASKS) for row in layout[name]]
        moves = [({a: 1.0}, {b: 1.0}) for a, b in zip(layout["CMD"], instruction, strict=True)]
        share = max(-(-len(moves) // n_heads), self.address_bits + 1, self.width + 2)
        for first in range(0, len(moves), share):
            self._point(layer, "PC", moves[first : first + share])
        for name in POINTERS:
            for row in layout[name]:  # -1 or 1, in the scratchpad alone
                layer.clear(row)
                layer.unit({row: 2.0, one: GATE + 1}, -GATE, {row: 1.0})
                layer.unit({row: 2.0, one: GATE - 1}, -GATE, {row: -1.0})
                layer.unit({one: 1.0}, 0.0, {row: -1.0})
        for name in ("E", *MASKS):
            for row in layout[name]:  # 0 or 1
                layer.clear(row)
                layer.unit({row: 1.0, one: GATE}, -GATE - 0.25, {row: 2.0})
                layer.unit({row: 1.0, one: GATE}, -GATE - 0.75, {row: -2.0})

    def _address(self, layer: Layer) -> None:
        """Scratchpad token k works on column k of each matrix, where that is one of its columns."""
        layout, one = self.layout, self.layout.row("IND")
        offset = {row: float(k) for k, row in enumerate(layout["OH"]) if k}
        for name in ("PA", "PB", "PW"):
            self._clear(layer, name)
            add_small(layer, layout[name], offset, self.width - 1, one, layout[name])
        increment(layer, layout["PC"], one, layout["NPC"])
        for mask, name in zip(MASKS, ("MA", "MB", "MW"), strict=True):
            for k, row in enumerate(layout[mask]):
                layer.unit({row: 1.0, layout.row("OH", k): 1.0}, -1.0, {layout.row(name): 1.0})
        if "ED" in layout:
            multiplies = layout.row("E", self.blocks.names.index("emul"))
            for k, row in enumerate(layout["ED"]):
                layer.unit({multiplies: 1.0, layout.row("OH", k): 1.0}, -1.0, {row: 1.0})

    def _read(self, layer: Layer) -> None:
        layout = self.layout
        for pointer, name, mask in (("PA", "A", "MA"), ("PB", "B", "MB")):
            self._point(layer, pointer, moved(layout["MEM"], layout[name]))
            for row in layout[name]:
                layer.clear(row, unless={layout.row(mask): DATA_GATE})
        self._point(layer, "PF", [({layout.row("MEM"): 1.0}, {layout.row("FV"): 1.0})])
        layer.clear(layout.row("FV"), unless={layout.row("IND"): DATA_GATE})
        self._clear(layer, "PA", "PB", "PF", *MASKS)

    def _function(self, layer: Layer) -> None:
        layout, w = self.layout, self.width
        if "RAW" in layout:
            self.product.attend(layer, layout, w, layout["RAW"])
        for name in self.blocks.names:
            block, out = self.functions[name], layout[f"OUT {name}"]
            if isinstance(block, Scaled):
                block.add(layer, layout, w, out)
            elif isinstance(block, Sum):
                block.add(layer, layout, out)
            elif isinstance(block, (Sigmoid, SigmoidSum)):
                block.attend(layer, layout, out)

    def bounds(self) -> dict[str, Block]:
        """What each of its functions states of itself, by the name of the command."""
        names = {*self.blocks.names, *(["transpose"] if "mm" in self.blocks.names else [])}
        return {name: block for name, block in self.functions.items() if name in names}

    def _choose(self, layer: Layer) -> None:
        """Only the outputs of the command's function stay; of an element product, row k in column k."""
        layout = self.layout
        for i, name in enumerate(self.blocks.names):
            for k, row in enumerate(layout[f"OUT {name}"]):
                keep = layout.row("ED", k) if name == "emul" else layout.row("E", i)
                layer.clear(row, unless={keep: DATA_GATE})
        self._clear(layer, "A", "B", "MA", "MB")
        if "RAW" in layout:
            self._clear(layer, "RAW")

    def _write(self, layer: Layer) -> None:
        """Every token attends to itself, with score L, or to the scratchpad token that writes to it, with score L + 1."""
        layout, L = self.layout, self.address_bits
        one, own = layout.row("ONE"), layout.row("IND")
        query: list[Terms] = [*rows_of(layout["POS"]), {one: 1.0}]
        key: list[Terms] = [{p: 1.0, to: 1.0} for p, to in zip(layout["POS"], layout["PW"], strict=True)]
        key.append({layout.row("MW"): 1.0 + 4 * L, own: -4.0 * L})
        sources: list[dict[int, float]] = [{} for _ in layout["BUF"]]
        for name in self.blocks.names:
            for k, row in enumerate(layout[f"OUT {name}"]):
                sources[0 if name == "emul" else k][row] = 1.0
        moves: list[tuple[Terms, Terms]] = [
            (source, {to: 1.0}) for source, to in zip(sources, layout["BUF"], strict=True) if source
        ]
        moves.append(({one: 1.0, own: -1.0}, {layout.row("MISS"): 1.0}))
        layer.attend(query, key, moves, lam=self.lam_asked, is_address=True)
        for row in layout["MEM"]:
            layer.clear(row, unless=self._not_written())
        flag, value = layout.row("FLG"), layout.row("FV")
        layer.unit({own: 1.0, value: -1.0}, 0.0, {flag: 1.0})
        layer.unit({value: -1.0}, 0.0, {flag: -1.0})
        if "ED" in layout:
            self._clear(layer, "ED")
        self._clear(layer, "E")

    def _not_written(self) -> dict[int, float]:
        return {self.layout.row(name): DATA_GATE for name in ("MISS", "IND", "SINK", "NUL")}

    def _select(self, layer: Layer) -> None:
        layout = self.layout
        flag, one = layout.row("FLG"), layout.row("IND")
        for target, jump, following in zip(layout["PC"], layout["PJ"], layout["NPC"], strict=True):
            layer.clear(target)
            for sign in (1.0, -1.0):
                layer.unit({jump: sign, flag: 1.0, one: -1.0}, 0.0, {target: sign})
                layer.unit({following: sign, flag: -1.0}, 0.0, {target: sign})
        for source, target in zip(layout["BUF"], layout["MEM"], strict=True):
            layer.add({source: 1.0}, {target: 1.0}, unless=self._not_written())
        self._clear(layer, "PJ", "NPC", "FLG", "FV", "PW", "MW")
        for name in self.blocks.names:
            self._clear(layer, f"OUT {name}")

    # Programs -----------------------------------------------------------------------------------------------------

    @property
    def first_cell(self) -> int:
        """The token of memory column 0."""
        return self.width + 2

    def n_tokens(self, program: FleqProgram) -> int:
        """Scratchpad, sink, NUL, memory columns, commands."""
        return self.first_cell + program.memory.shape[1] + len(program.commands)

    def why_not(self, program: FleqProgram) -> str | None:
        """Why this machine does not take a program, and None where it does."""
        if program.width > self.width:
            return f"{program.name} has matrices of {program.width} rows or columns, the machine takes {self.width}"
        missing = sorted({command.function for command in program.commands if command.function} - set(self.blocks.names))
        if missing:
            return f"{program.name} uses {', '.join(missing)}, and the machine has {', '.join(self.blocks.names)}"
        n = self.n_tokens(program)
        if n > 2**self.address_bits:
            return (
                f"{program.name} needs {n} tokens, and {self.address_bits} position bits tell {2**self.address_bits} apart; "
                "build the machine with more"
            )
        return None

    def why_not_backend(self, backend: str) -> str | None:
        """The Triton kernels round operands to bfloat16 or tf32, or split them, and PyTorch may: data would not survive."""
        if backend == "triton":
            return (
                "a FLEQ machine holds data as numbers, which need float64 or full float32 and many heads; the Triton kernels "
                'multiply in bf16, tf32 or bf16x3, so use backend="cpu" or "eager"'
            )
        if (
            backend in ("eager", "graph")
            and self.dtype == torch.float32
            and rounds_products(next(self.model.parameters()).device.type)
        ):
            return (
                "a FLEQ machine holds data as numbers, which need full float32, and PyTorch is set to round factors to tf32 or "
                'bf16; call torch.set_float32_matmul_precision("highest"), or use backend="cpu" or float64'
            )
        return None

    def check(self, program: FleqProgram, max_loops: int) -> None:
        """Runs the interpreter. Raises ProgramError for a number outside the range of a block."""
        check_ranges(self, program, max_loops)

    def encode(self, program: FleqProgram) -> Tensor:
        """The prompt [n, d]."""
        reason = self.why_not(program)
        if reason is not None:
            raise ValueError(f"FleqMachine: {reason}")
        n, layout, w, L = self.n_tokens(program), self.layout, self.width, self.address_bits
        X = np.zeros((n, layout.width))
        positions = codes(n, L)
        memory = program.memory
        first_command = self.first_cell + memory.shape[1]
        X[self.first_cell :, layout["POS"]] = positions[self.first_cell :]
        X[:, layout.row("ONE")] = 1.0
        X[:w, layout.row("IND")] = 1.0
        X[:w, layout["OH"]] = np.eye(w)
        X[:w, layout["PC"]] = positions[first_command]
        X[w, layout.row("SINK")] = 1.0
        X[w + 1, layout.row("NUL")] = 1.0
        X[self.first_cell : first_command, layout["MEM"][: len(memory)]] = memory.T
        for i, command in enumerate(program.commands):
            row = np.zeros(len(layout["CMD"]))
            tokens = [self.first_cell + cell for cell in (command.a, command.b, command.c, command.flag)]
            for k, token in enumerate((*tokens, first_command + command.jump)):
                row[k * L : (k + 1) * L] = positions[token]
            if command.function:
                row[5 * L + self.blocks.names.index(command.function)] = 1.0
            masks = 5 * L + len(layout["E"])
            for k, count in enumerate((command.n_a, command.n_b, command.n_c)):
                row[masks + k * w : masks + k * w + count] = 1.0
            X[first_command + i, layout["CMD"]] = row
        return torch.from_numpy(X).to(self.dtype)

    def decode(self, states: Tensor, program: FleqProgram) -> Snapshot:
        """What states [..., n, d] hold: the command next, and memory [..., D, columns], D the program's width."""
        values = states.double().cpu().numpy()
        first_command = self.first_cell + program.memory.shape[1]
        counters = values[..., : self.width, :][..., self.layout["PC"]]
        memory = values[..., self.first_cell : first_command, :][..., self.layout["MEM"][: len(program.memory)]]
        off_grid = np.abs(np.abs(counters) - 1).max(axis=(-1, -2))
        return Snapshot(position(counters[..., 0, :]) - first_command, np.swapaxes(memory, -1, -2), off_grid)
