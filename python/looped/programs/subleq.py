"""The SUBLEQ machine: mem[b] -= mem[a]; if the result is <= 0 go to c, else to the next command.

Nine layers and two heads (Giannou et al., 2023, section 5.1 and Lemma 4), or five layers. The weights depend on the word width,
the position bits and lambda alone: the program is the prompt. docs/programs.md follows one instruction through the layers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from looped.programs.addresses import codes, increment, least_lambda, position
from looped.programs.circuit import Layer, Layout, Terms, moved, transformer
from looped.programs.snapshot import Snapshot
from looped.programs.subleq_plain import check_registers

if TYPE_CHECKING:
    from looped.model import LoopedTransformer
    from looped.programs.subleq_text import SubleqProgram

GATE = 8.0  # above every pre-activation that it shuts off
LAMBDA = 12.0
FORMS = (9, 5)
MOST_ADDRESS_BITS = 20

# Bits of a sum that its steps tell apart at a precision: k + 1 for the sum of a chunk of k bits, and two for its quarters.
CHUNK_BITS = {torch.float64: 50, torch.float32: 21, torch.bfloat16: 5, torch.float16: 8}


def layout_of(n_bits: int, address_bits: int, n_layers: int) -> Layout:
    """The features: those of commands, memory, and positions never leave their tokens; the others are the scratchpad's."""
    N, L = n_bits, address_bits
    sizes = {"CMD": 3 * L, "MEM": N, "VA": N, "VB": N, "PA": L, "PB": L, "PJ": L, "PC": L, "POS": L}
    sizes |= {"BUF": max(3 * L, 2 * N), "FLG": 1, "CAR": 1, "IND": 1}
    if n_layers == 5:
        return Layout(sizes | {"NPC": L})
    layout = Layout(sizes)
    layout.blocks["NPC"] = layout["BUF"][:L]  # the buffer is free by then
    return layout


class SubleqMachine:
    """A SUBLEQ computer as an ordinary `LoopedTransformer`.

    Parameters
        n_bits N: word width; words are two's complement and wrap. address_bits L: programs have at most 2^L tokens.
        n_layers: 9 as in the paper, or 5.
        lam: the sharpness of attention, the paper's lambda; at least `least_lambda(L)`. It is rounded up so that scores of
            position codes are whole numbers, and ties are ties to the bit in any order of summation.
        dtype: of the weights: float64, float32, or bfloat16, which emulates that type; or float16, in which the model's own
            `step` runs but `run_programs` does not.

    Attributes
        model: the weights. layers: the same as heads and hidden units. layout: where the features stand.

    Raises ValueError for sizes that the precision does not carry, or a lambda below its bound.
    """

    kind = "subleq"

    def __init__(
        self,
        n_bits: int,
        address_bits: int,
        *,
        n_layers: int = 9,
        lam: float = LAMBDA,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not 2 <= n_bits <= 63:
            raise ValueError(f"SubleqMachine: n_bits={n_bits} must lie in 2 .. 63")
        if not 2 <= address_bits <= MOST_ADDRESS_BITS:
            raise ValueError(f"SubleqMachine: address_bits={address_bits} must lie in 2 .. {MOST_ADDRESS_BITS}")
        if n_layers not in FORMS:
            raise ValueError(f"SubleqMachine: n_layers={n_layers} is not one of {', '.join(map(str, FORMS))}")
        if dtype not in CHUNK_BITS:
            raise ValueError(f"SubleqMachine: dtype={dtype} is not one of {', '.join(map(str, CHUNK_BITS))}")
        bound = least_lambda(address_bits)
        if not lam >= bound:
            raise ValueError(
                f"SubleqMachine: lam={lam} is below {bound:.2f}, the bound for {address_bits} position bits; take {LAMBDA:g}"
            )
        if not lam * (address_bits + 1) * math.sqrt(max(3 * address_bits, n_bits)) < torch.finfo(dtype).max:
            raise ValueError(f"SubleqMachine: lam={lam} makes scores that {dtype} does not hold; take {LAMBDA:g}")
        n_chunks = 3 if n_layers == 9 else 1
        chunk = -(-n_bits // n_chunks)
        if chunk > CHUNK_BITS[dtype]:
            raise ValueError(
                f"SubleqMachine: {n_bits} bits in {n_chunks} subtracting layer{'s' * (n_chunks > 1)} are chunks of {chunk}, "
                f"and {dtype} carries {CHUNK_BITS[dtype]}; use words of at most {n_chunks * CHUNK_BITS[dtype]} bits, "
                "another dtype, or nine layers"
            )
        self.n_bits, self.address_bits, self.lam_asked, self.dtype = n_bits, address_bits, lam, dtype
        self.chunks = [(first, min(first + chunk, n_bits)) for first in range(0, n_bits, chunk)]
        while len(self.chunks) < n_chunks:  # words so narrow that a chunk is left over
            self.chunks.append((n_bits, n_bits))
        self.layout = layout_of(n_bits, address_bits, n_layers)
        self.layers = self._nine() if n_layers == 9 else self._five()
        self.model: LoopedTransformer = transformer(self.layers, self.layout.width, dtype=dtype, n_loops=10_000)
        head = self.layers[0].heads[0]
        assert self.model.config.head_dim is not None
        self.lam = head.gain(self.model.config.head_dim) / math.sqrt(self.model.config.head_dim)

    # Layers -------------------------------------------------------------------------------------------------------

    def _nine(self) -> list[Layer]:
        layers = [Layer(name) for name in ("fetch", "read")]
        self._fetch(layers[0])
        self._read(layers[1])
        for i, (first, end) in enumerate(self.chunks):
            layers.append(Layer(f"subtract bits {first} to {end - 1}" if end > first else "subtract nothing"))
            self._subtract(layers[-1], first, end)
            if i == 0:
                self._clear(layers[-1], "PA")
        layers += [Layer(name) for name in ("write and flag", "next command", "select", "correct")]
        write, following, select, correct = layers[-4:]
        self._write(write)
        self._clear(write, "VA", "CAR")
        increment(following, self.layout["PC"], self.layout.row("IND"), self.layout["NPC"])
        self._clear(following, "VB", "PB")
        self._select(select)
        self._clear(select, "NPC", "PJ", "FLG")
        self._correct(correct)
        return layers

    def _five(self) -> list[Layer]:
        fetch, read, subtract, write, select = layers = [
            Layer(name) for name in ("fetch, next command", "read", "subtract", "write and flag", "select and correct")
        ]
        self._fetch(fetch)
        increment(fetch, self.layout["PC"], self.layout.row("IND"), self.layout["NPC"])
        self._read(read)
        self._subtract(subtract, 0, self.n_bits)
        self._clear(subtract, "PA")
        self._write(write)
        self._clear(write, "VA", "PB")
        self._select(select)
        self._clear(select, "NPC", "PJ", "FLG", "VB")
        for row in self.layout["MEM"]:
            select.round(row)
        return layers

    def _attend(self, layer: Layer, pointer: str, moves: list[tuple[Terms, Terms]]) -> None:
        """Query = key = pointer + position: the scratchpad, whose position code is 0, ties with the token it points to.

        So both read half of their sum; all other tokens read themselves.
        """
        both = [{self.layout.row(pointer, i): 1.0, self.layout.row("POS", i): 1.0} for i in range(self.address_bits)]
        layer.attend(both, both, moves, lam=self.lam_asked, is_address=True)

    def _sign(self, layer: Layer, source: int, target: int) -> None:
        """In the scratchpad, target += 1 or -1 for a source of 1/2 or -1/2; elsewhere nothing."""
        one = self.layout.row("IND")
        layer.unit({source: 4.0, one: GATE + 1}, -GATE, {target: 1.0})
        layer.unit({source: 4.0, one: GATE - 1}, -GATE, {target: -1.0})
        layer.unit({one: 1.0}, 0.0, {target: -1.0})

    def _clear(self, layer: Layer, *names: str) -> None:
        for name in names:
            for row in self.layout[name]:
                layer.clear(row)

    def _fetch(self, layer: Layer) -> None:
        L, buffer = self.address_bits, self.layout["BUF"]
        self._attend(layer, "PC", moved(self.layout["CMD"], buffer[: 3 * L]))
        for k, name in enumerate(("PA", "PB", "PJ")):
            for i, row in enumerate(self.layout[name]):
                self._sign(layer, buffer[k * L + i], row)
        self._clear(layer, "BUF")

    def _read(self, layer: Layer) -> None:
        N, buffer = self.n_bits, self.layout["BUF"]
        for pointer, name, part in (("PA", "VA", buffer[:N]), ("PB", "VB", buffer[N : 2 * N])):
            self._attend(layer, pointer, moved(self.layout["MEM"], part))
            for source, target in zip(part, self.layout[name], strict=True):
                self._sign(layer, source, target)
        self._clear(layer, "BUF")

    def _subtract(self, layer: Layer, first: int, end: int) -> None:
        """Bits first .. end - 1 of b + ~a + 1, with the carry of the bits below."""
        one, carry = self.layout.row("IND"), self.layout.row("CAR")
        a, b = self.layout["VA"], self.layout["VB"]
        if end == first:
            return
        total: dict[int, float] = {one: 1.0} if first == 0 else {carry: 1.0}
        for i in range(first, end):
            weight = 2.0 ** (i - first)
            total = dict(total) | {b[i]: weight / 2, a[i]: -weight / 2}
            total[one] = total.get(one, 0.0) + weight
            for k in (1, 2, 3):
                layer.step(total, k * weight, one, {b[i]: 2.0 if k % 2 else -2.0})
            layer.clear(b[i])
            layer.unit({one: 1.0}, 0.0, {b[i]: -1.0})
        if first:
            layer.clear(carry)
        if end < self.n_bits:
            layer.step(total, 2.0 ** (end - first), one, {carry: 1.0})

    def _write(self, layer: Layer) -> None:
        N, one = self.n_bits, self.layout.row("IND")
        memory, b = self.layout["MEM"], self.layout["VB"]
        buffer = self.layout["BUF"][:N]
        self._attend(layer, "PB", [({m: 1.0, new: 1.0}, {to: 1.0}) for m, new, to in zip(memory, b, buffer, strict=True)])
        for source, target in zip(buffer, memory, strict=True):  # the buffer holds half of old and new, or the old
            layer.add({source: 2.0, target: -2.0}, {target: 1.0}, unless={one: GATE})
        for row in buffer:
            layer.clear(row)
        layer.unit({b[N - 1]: 1.0}, 0.0, {self.layout.row("FLG"): 1.0})  # negative
        all_zero = {row: -1.0 for row in b} | {one: -(N - 1.0)}
        layer.unit(all_zero, 0.0, {self.layout.row("FLG"): 1.0})

    def _select(self, layer: Layer) -> None:
        flag, one = self.layout.row("FLG"), self.layout.row("IND")
        for target, jump, following in zip(self.layout["PC"], self.layout["PJ"], self.layout["NPC"], strict=True):
            layer.clear(target)
            for sign in (1.0, -1.0):
                layer.unit({jump: sign, flag: 1.0, one: -1.0}, 0.0, {target: sign})
            # The command that follows was counted from a counter that may be off: -1 or 1 for anything nearer to it than 1/2.
            layer.unit({following: 2.0, flag: -4.0, one: 1.0}, 0.0, {target: 1.0})
            layer.unit({following: 2.0, flag: -4.0, one: -1.0}, 0.0, {target: -1.0})
            layer.unit({one: 1.0, flag: -1.0}, 0.0, {target: -1.0})

    def _correct(self, layer: Layer) -> None:
        for name in ("MEM", "PC"):
            for row in self.layout[name]:
                layer.round(row)

    # Programs -----------------------------------------------------------------------------------------------------

    def why_not(self, program: SubleqProgram) -> str | None:
        """Why this machine does not take a program, and None where it does."""
        if program.n_bits != self.n_bits:
            return f"{program.name} has words of {program.n_bits} bits, the machine of {self.n_bits}"
        if program.n_tokens > 2**self.address_bits:
            return (
                f"{program.name} needs {program.n_tokens} tokens, and {self.address_bits} position bits tell "
                f"{2**self.address_bits} apart; build the machine with more"
            )
        return None

    def why_not_backend(self, backend: str) -> str | None:
        """None: every backend carries whole numbers of a chunk."""
        return None

    def check(self, program: SubleqProgram, max_loops: int) -> None:
        """Words wrap, as the interpreter's do; only where a program has registers are those held to their range."""
        if program.registers:
            check_registers(program, max_loops)

    def encode(self, program: SubleqProgram) -> Tensor:
        """The prompt [n, d]: the scratchpad, memory and its two constant cells, the commands, and that of the end."""
        reason = self.why_not(program)
        if reason is not None:
            raise ValueError(f"SubleqMachine: {reason}")
        n, layout = program.n_tokens, self.layout
        X = np.zeros((n, layout.width))
        positions = codes(n, self.address_bits)
        X[:, layout["POS"]] = positions
        X[0, layout.row("IND")] = 1.0
        X[0, layout["PC"]] = positions[program.first_command]
        words = np.array([word % 2**self.n_bits for word in program.memory], dtype=np.uint64)
        bits = (words[:, None] >> np.arange(self.n_bits, dtype=np.uint64)) & np.uint64(1)
        X[1 : program.first_command, layout["MEM"]] = np.where(bits, 1.0, -1.0)
        pointers = np.array([program.tokens_of(command) for command in program.commands])  # [commands, 3]
        X[program.first_command :, layout["CMD"]] = positions[pointers].reshape(len(pointers), -1)
        return torch.from_numpy(X).to(self.dtype)

    def decode(self, states: Tensor, program: SubleqProgram) -> Snapshot:
        """What states [..., n, d] hold: the command next, and all words."""
        values = states[..., : program.n_tokens, :].double().cpu().numpy()
        counter = values[..., 0, self.layout["PC"]]
        memory = values[..., 1 : program.first_command, self.layout["MEM"]]
        weights = [1 << i for i in range(self.n_bits - 1)] + [-(1 << (self.n_bits - 1))]
        words = ((memory > 0) * np.array(weights, dtype=np.int64)).sum(axis=-1)
        distance = np.maximum(np.abs(np.abs(counter) - 1).max(axis=-1), np.abs(np.abs(memory) - 1).max(axis=(-1, -2)))
        return Snapshot(position(counter) - program.first_command, words, distance)
