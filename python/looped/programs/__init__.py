"""Looped transformers as programmable computers (Giannou et al., 2023): machines as weights, programs as prompts.

`assemble_subleq`, `assemble_fleq`, `translate_minsky`, `compile_formula` and `read_program` make programs; `machine_for` makes
the smallest machine that runs them; `run_programs`, `trace` and `verify` run them. docs/programs.md tells how it works.
"""

from looped.programs.blocks import MatrixProduct, SigmoidSum
from looped.programs.fleq import Blocks, FleqMachine
from looped.programs.fleq_text import assemble_fleq
from looped.programs.formula import compile_formula
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
    "machine_for",
    "read_program",
    "run_programs",
    "trace",
    "translate_minsky",
    "verify",
]
