"""Looped transformers as programmable computers (Giannou et al., 2023): machines as weights, programs as prompts.

`assemble_subleq`, `assemble_fleq`, `translate_minsky`, `compile_formula` and `read_program` make programs; `machine_for` makes
the smallest machine that runs them; `run_programs`, `trace` and `verify` run them. Functions whose names end in `_text` write
programs for given data: `inverse_text`, `power_text`, `gauss_seidel_text`, `qr_text`, `linear_sgd_text`, `network_text` and
`formula_text` for FLEQ, `sort_text` and `search_text` for SUBLEQ. docs/programs.md tells how it works.
"""

from looped.programs.algebra import gauss_seidel_text, inverse_text, power_text, qr_text
from looped.programs.blocks import MatrixProduct, SigmoidSum
from looped.programs.fleq import Blocks, FleqMachine
from looped.programs.fleq_text import assemble_fleq
from looped.programs.formula import compile_formula, formula_text
from looped.programs.learning import linear_sgd_text, network_text
from looped.programs.lists import search_text, sort_text
from looped.programs.machines import check_program, machine_for, read_program
from looped.programs.minsky import translate_minsky
from looped.programs.run import Outcome, Run, run_programs
from looped.programs.source import ProgramError
from looped.programs.subleq import SubleqMachine
from looped.programs.subleq_text import assemble_subleq
from looped.programs.tracing import trace
from looped.programs.verification import verify

__all__ = [
    "Blocks",
    "FleqMachine",
    "MatrixProduct",
    "Outcome",
    "ProgramError",
    "Run",
    "SigmoidSum",
    "SubleqMachine",
    "assemble_fleq",
    "assemble_subleq",
    "check_program",
    "compile_formula",
    "formula_text",
    "gauss_seidel_text",
    "inverse_text",
    "linear_sgd_text",
    "machine_for",
    "network_text",
    "power_text",
    "qr_text",
    "read_program",
    "run_programs",
    "search_text",
    "sort_text",
    "trace",
    "translate_minsky",
    "verify",
]
